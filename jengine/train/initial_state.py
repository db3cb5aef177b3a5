"""Initial training state on the devices."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jengine.config.explain import explain
from jengine.logging.slow_call import report_if_slow
from jengine.model.model import Batch, Model
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict
from jengine.parallel.strategy import Strategy
from jengine.train.state import TrainState, create_train_state

PyTree = Any


class StateInitializer:
    """Creator of the initial `TrainState`, which the strategy places on devices.

    `get_cfg` returns the run's config, for errors.
    """

    def __init__(
        self, model: Model, strategy: Strategy, seed: int, get_cfg: Callable[[], Any] = dict
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._get_cfg = get_cfg
        self._seed = np.int64(seed)  # seeds reach 2**32 - 1

    def shapes(self, batch: Batch) -> tuple[PyTree, PyTree]:
        """Return the parameters and the model state for a batch like `batch` as
        `jax.ShapeDtypeStruct`s.
        """
        params, model_state = self._init_model.eval_shape(self._seed, batch)
        return params, model_state

    def trace(
        self,
        batch: Batch,
        optim_wrapper: OptimWrapper | OptimWrapperDict | None = None,
        hooks: Sequence[Any] = (),
    ) -> tuple[jax.stages.Traced, Callable[[], TrainState]]:
        """Return the program for the initial state, traced and not compiled, and a function that
        runs it.

        A run that does not train passes only a batch, an example for the structure and shapes.
        """
        wrapper: Any = (
            types.SimpleNamespace(init=lambda params: None)
            if optim_wrapper is None
            else optim_wrapper
        )

        def init_state(seed: jax.Array, batch: Batch) -> TrainState:
            # `_init_model` is jitted, so its trace for `shapes` is reused here.
            params, model_state = self._init_model(seed, batch)
            return create_train_state(params, model_state, wrapper, hooks, rng=_make_key(seed, 1))

        program: Any = self._strategy.compile_init(init_state, self._seed, batch, model=self._model)

        def init() -> TrainState:  # compiles the program, for which the trace is reused
            args = self._seed, batch
            called = "the creation of the state", program, args
            try:
                # the seed and the example are on the host: a user's guard is about other transfers
                with (
                    report_if_slow("creating the state"),
                    jax.transfer_guard_host_to_device("allow"),
                ):
                    return program(*args)
            except Exception as error:
                explain(error, program=called, cfg=self._get_cfg())
                raise

        # the shapes are checked before memory is used
        return program.trace(self._seed, batch), init

    @functools.cached_property
    def _init_model(self) -> Any:
        """`(seed, batch) -> (params, model_state)`, traced once for the shapes and for the
        state.
        """
        init = self._strategy.with_explicit_mesh(self._model.init)
        # Outside, the key's operations would be separate programs, which take a while to compile
        return jax.jit(lambda seed, batch: init(_make_key(seed, 0), batch))


def _make_key(seed: Any, purpose: int) -> jax.Array:
    """Return the key for the parameters (0) or for the steps (1)."""
    return jax.random.fold_in(jax.random.key(seed), purpose)
