"""`jengine train --check` and `Runner(check=True)`: training that checks all that a step computes.

The step is functionalized by checkify, so that each operation that makes a NaN, divides by zero or
reads out of bounds, and each `checkify.check` of the user, is an error. Its arguments are kept, to
find the operation and the examples that fail.
"""

import argparse
import contextlib
import functools
import importlib.util
import math
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from jengine.cli.commands import build_runner
from jengine.cli.train import train
from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.config.frames import own_frames
from jengine.data.batch_check import Batch
from jengine.extras.diagnose.failing_examples import describe_examples, fetch, find_examples
from jengine.extras.diagnose.first_failure import (
    Failure,
    describe_error,
    find_failure,
    find_line,
    named_nnx_layers,
)
from jengine.extras.diagnose.leaked_tracers import checked_leaks
from jengine.extras.diagnose.wrong_labels import describe_bad_values
from jengine.optim.wrapper_dict import AnyWrapper, wrappers_by_name
from jengine.train.state import TrainState

PyTree = Any
_STAGES = ("before_train_iter", "after_train_iter")
# Conversions of an array on the device, each of which waits for it. JAX's guard does not see
# them on a CPU, where they copy nothing.
_READS: tuple[str, ...] = (
    "__array__",
    "__bool__",
    "__complex__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
)
_READS += ("item", "tolist")
_TYPE_CHECKERS = {"beartype": "beartype", "typeguard": "typechecked"}
_EXPLICIT = "_device_get"  # JAX's function behind `jax.device_get`


class CheckError(FloatingPointError):
    """Error for a check that failed: in the step, or what a hook does between two steps.

    Attributes:
      examples: indices in the batch of the examples with which alone the step fails.
      batch: the batch, on the devices.
    """

    examples: Sequence[int] = ()
    batch: Batch = None


class StepChecks:
    """Checks of a run with `check=True`.

    Args:
      strategy: places the arrays and compiles the steps.

    Raises:
      ConfigError: replicas of several devices.
    """

    def __init__(self, strategy: Any) -> None:
        sizes = strategy.mesh_shape
        if strategy.replicas is not None and math.prod(sizes.values()) > strategy.replicas:
            raise ConfigError(
                "`check` must be used with replicas of one device or with `Pjit`, got "
                f"{type(strategy).__name__} with the mesh {dict(sizes)}: JAX cannot check what "
                "is mapped over one axis and partitioned over another"
            )
        self._is_single = not strategy.mesh_shape and jax.process_count() == 1

    def prepare_loop(self, loop: Any) -> None:
        """Let a training loop run single steps, which compile once."""
        loop.steps_per_call = 1
        loop.on_recompile = "raise"

    def check_program(
        self,
        program: Callable[..., Any],
        step: Callable[..., Any],
        optim_wrapper: AnyWrapper,
        has_examples: bool,
    ) -> "CheckedProgram":
        """Return a program that checks what it computes.

        Args:
          program: the compiled step.
          step: the same, not compiled.
          optim_wrapper: with a loss scale, gradients may overflow.
          has_examples: whether the arrays of a batch have the axis of examples.
        """
        has_scale = any(
            getattr(wrapper, "loss_scale", None) is not None
            for wrapper in wrappers_by_name(optim_wrapper).values()
        )
        return CheckedProgram(
            program,
            _describe_step,
            batch_at=1,
            eager=step if self._is_single else None,
            has_examples=has_examples,
            may_overflow=has_scale,
        )

    def check_evaluation(
        self, program: Callable[..., Any], phase: str, has_examples: bool, may_overflow: bool
    ) -> "CheckedProgram":
        """Return a program that checks what it computes.

        Args:
          program: the compiled step of the evaluation.
          phase: 'validation' or 'test'.
          has_examples: see `check_program`.
          may_overflow: of a prediction in float16.
        """
        return CheckedProgram(
            program,
            lambda *_: f"the {phase}",
            batch_at=3,
            has_examples=has_examples,
            may_overflow=may_overflow,
        )

    def wrap_stage(self, hook: Any, stage: str, method: Callable[..., None]) -> Any:
        """Return the method of a hook of the user such that it may not wait for the device."""
        if stage not in _STAGES or type(hook).__module__.startswith("jengine."):
            return method

        @functools.wraps(method)
        def call(runner: Any, **arguments: Any) -> None:
            try:
                with jax.transfer_guard("disallow"), _forbidden_reads():
                    method(runner, **arguments)
            except (jax.errors.JaxRuntimeError, _ReadError) as error:
                if isinstance(error, jax.errors.JaxRuntimeError) and "Disallowed" not in str(error):
                    raise
                line = find_line(error)
                place = f", at {line}" if line else ""
                raise CheckError(
                    f"{type(hook).__name__}.{stage} moves values between host and device in "
                    f"iteration {runner.iter}{place}. Let jengine log metrics, or "
                    "use `jax.device_get` and `jax.device_put` every n iterations"
                ) from None

        return call


class CheckedProgram:
    """Compiled step of a training or an evaluation that raises `CheckError` where a check fails.

    Args:
      program: the compiled step.
      describe: returns what the step is of, for its arguments.
      batch_at: the index of the batch among the arguments.
      has_examples: see `StepChecks.check_program`.
      may_overflow: whether NaN and infinite values are no errors.
      eager: the step that is not compiled, which runs once without compilation; or None.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        describe: Callable[..., str],
        batch_at: int,
        *,
        has_examples: bool,
        may_overflow: bool = False,
        eager: Callable[..., Any] | None = None,
    ) -> None:
        self._program = program
        self._describe = describe
        self._batch_at = batch_at
        self._has_examples = has_examples
        self._may_overflow = may_overflow
        self._eager = eager
        self._errors: Any = checkify.user_checks | checkify.index_checks
        if not may_overflow:
            self._errors |= checkify.float_checks
        self._is_first = True
        # not donated: what failed can be computed again
        self._checked = jax.jit(checkify.checkify(self._run, errors=self._errors))

    def __call__(self, *args: Any) -> Any:
        """Run one step.

        Raises:
          CheckError: a check failed. LeakedTracerError: a tracer is left behind.
        """
        with named_nnx_layers(), _corrected_rules():
            if self._is_first:
                with checked_leaks():
                    jax.eval_shape(self._program, *args)
            error, (result, is_finite) = self._checked(*args)
            error, is_finite = fetch((error, is_finite))
            text = describe_error(error)
            if text is not None or not is_finite:
                self._fail(Failure(text or "a value is not finite"), *args)
            if self._is_first and self._eager is not None:
                self._run_eagerly(self._eager, *args)
        self._is_first = False
        return result

    def trace(self, *shapes: Any) -> Any:
        """Trace the step without the checks."""
        return self._program.trace(*shapes)  # type: ignore[attr-defined]

    def _run(self, *args: Any) -> tuple[Any, jax.Array]:
        result = self._program(*args)
        checked: list[Any] = []
        if isinstance(result[0], TrainState) and not self._may_overflow:
            losses = dict(zip(result[1].names, result[1].values, strict=True))
            checked = [losses.get("loss", 0.0), *jax.tree.leaves(result[0].params)]
        floats = [x for x in checked if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        return result, jnp.all(jnp.array([True, *(jnp.isfinite(x).all() for x in floats)]))

    def _run_eagerly(self, step: Callable[..., Any], *args: Any) -> None:
        """Run the step once without compilation, with all traced points of hooks."""
        try:
            with jax.disable_jit():
                step(*jax.tree.map(jnp.asarray, args))
        except Exception as error:
            error.add_note("in the step without compilation, which `check` runs once")
            raise

    def _fail(self, failure: Failure, *args: Any) -> None:
        program = jax.make_jaxpr(self._program)(*args)
        failure = find_failure(program, args, self._errors) or failure
        at = self._batch_at
        batch = args[at]
        examples = []
        size = 0
        if self._has_examples and not isinstance(batch, tuple):
            examples = find_examples(
                lambda batch: self._fails(*args[:at], batch, *args[at + 1 :]), batch
            )
            size = max((len(x) for x in jax.tree.leaves(batch) if jnp.ndim(x)), default=0)
        found = describe_examples(examples, size)
        where = f", {found}" if found else ""
        error = CheckError(f"{failure.text} in {self._describe(*args)}{where}{failure.describe()}")
        error.examples = examples if found else ()
        error.batch = batch
        if bad := describe_bad_values(fetch(batch)):
            error.add_note(f"before the step, {bad}")
        state = args[0]
        params = state.params if isinstance(state, TrainState) else state
        if bad := ", ".join(_list_non_finite(params)):
            error.add_note(f"before the step, not finite in the parameters: {bad}")
        raise error

    def _fails(self, *args: Any) -> bool:
        error, (_, is_finite) = self._checked(*args)
        error, is_finite = fetch((error, is_finite))
        return error.get() is not None or not is_finite


def _describe_step(state: TrainState, *_: Any) -> str:
    return f"the step of iteration {int(fetch(state.step))}"


@contextlib.contextmanager
def _corrected_rules() -> Iterator[None]:
    """Within the body, let JAX check scatters with batch dimensions, and mapped programs within a
    mesh, where its own rules fail.

    The gradient of `take_along_axis` has such a scatter, and with it many a cross entropy.
    """
    rules: Any = sys.modules.get(checkify.checkify.__module__)
    check = getattr(rules, "scatter_oob", None)
    checks = getattr(rules, "error_checks", {})
    mapped = next((each for each in checks if each.name == "shard_map"), None)
    if check is None or mapped is None:  # another version of JAX has other rules
        yield
        return
    check_mapped = checks[mapped]

    def corrected(operand: Any, indices: Any, updates: Any, numbers: Any) -> Any:
        axes = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        return check(operand, indices, updates, numbers._replace(inserted_window_dims=axes))

    def corrected_mapped(*args: Any, **params: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            error, outputs = check_mapped(*args, **params)
        # that of the first device with one: what follows takes the error of one program
        if failed := list(error._pred.values()):
            first = jnp.argmax(jnp.stack(failed).any(0))
            error = jax.tree.map(lambda x: x[first], error)
        return error, outputs

    rules.scatter_oob = corrected
    checks[mapped] = corrected_mapped
    try:
        yield
    finally:
        rules.scatter_oob = check
        checks[mapped] = check_mapped


def _list_non_finite(tree: PyTree) -> list[str]:
    return [
        path
        for path, leaf in paths.flatten(tree).items()
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        if not jnp.isfinite(leaf).all()
    ]


# --- What hooks may not do ---


class _ReadError(Exception):
    """An array on the device was read."""


@contextlib.contextmanager
def _forbidden_reads() -> Iterator[None]:
    """Raise `_ReadError` where this thread converts an array other than by `jax.device_get`."""
    kind = type(jax.device_put(0.0))
    methods = {name: getattr(kind, name) for name in _READS}
    thread = threading.get_ident()

    def forbid(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(array: Any, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_name
            if threading.get_ident() == thread and caller != _EXPLICIT:
                raise _ReadError(name)
            return method(array, *args, **kwargs)

        return read

    try:
        for name, method in methods.items():
            setattr(kind, name, forbid(name, method))
        yield
    finally:
        for name, method in methods.items():
            setattr(kind, name, method)


# --- The command ---


def train_check(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train with `check=True`, and with checks of the shapes that jaxtyping's annotations name in
    modules beside the config.
    """
    with _checked_annotations(pathlib.Path(args.config.partition(".py:")[0]).parent):
        try:
            return train(build_runner(args, overrides, resume=args.resume, check=True), args.argv)
        except Exception as error:
            # its message names the function, whose frames jaxtyping has removed
            if type(error).__module__ == "jaxtyping" and not own_frames(error):
                raise error.with_traceback(None) from None
            raise


def _checked_annotations(directory: pathlib.Path) -> contextlib.AbstractContextManager[Any]:
    """Return jaxtyping's import hook for the modules in a directory, if it and a type checker are
    installed.
    """
    found = [f"{name}.{check}" for name, check in _TYPE_CHECKERS.items() if _is_installed(name)]
    if not found or not _is_installed("jaxtyping"):
        return contextlib.nullcontext()
    files = [*directory.glob("*.py"), *(path.parent for path in directory.glob("*/__init__.py"))]
    install: Any = importlib.import_module("jaxtyping").install_import_hook
    return install(sorted(path.stem for path in files), found[0])


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
