"""Programs that run once, as the one that makes the training state."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any

_QUICK = {"xla_backend_optimization_level": 1}  # LLVM's; 3 by default


def jit_once(make: Callable[..., Any], platform: str, out_shardings: Any) -> Callable[..., Any]:
    """`jax.jit` for a function that is called once, where to compile it takes longer than it runs.

    On a CPU LLVM then does without what takes it long: to initialize a small CNN takes 0.9 s to compile, not 5.7, and
    gives the same bits as fast. What others' compilers make of a level was not tried; they compile as always.

    Args:
      make: what is to be compiled.
      platform: of the devices that it runs on.
      out_shardings: where its results lie.
    """
    options = _QUICK if platform == "cpu" else None
    return jax.jit(make, out_shardings=out_shardings, compiler_options=options)


class Coming:
    """What a program makes that runs once, while it is compiled in the background.

    Args:
      make: as `jit_once` compiles it.
      *args: for it.

    Attributes:
      shapes: of what it makes, `jax.ShapeDtypeStruct`s with the place where it will lie.
    """

    def __init__(self, make: Any, *args: PyTree) -> None:
        traced = make.trace(*args)
        lowered = traced.lower()  # as tracing, Python's work, which a thread would only take turns with
        self.shapes: PyTree = traced.out_info
        self._args = args
        thread = concurrent.futures.ThreadPoolExecutor(1, "jengine-once")
        self._compiled = thread.submit(lowered.compile)
        thread.shutdown(wait=False)

    def whole(self) -> PyTree:
        """What is made; once it is compiled it runs, in the caller's thread, whose settings of JAX then count.

        Raises:
          Exception: what compiling or running it has raised.
        """
        return self._compiled.result()(*self._args)


def begin(make: Any, *args: PyTree) -> Any:
    """What `jit_once` compiles, in the making; or made, under `jax.disable_jit`, which compiles nothing."""
    config: Any = jax.config  # not every version of JAX declares the flags
    return make(*args) if config.jax_disable_jit else Coming(make, *args)
