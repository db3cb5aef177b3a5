"""Replaces the running statistics of batch norms by those of the weights as they are."""

import contextlib
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jengine.data import prefetch_to_device
from jengine.errors import ConfigError
from jengine.hooks.hook import Hook
from jengine.paths import flatten, map_with_path
from jengine.registry import HOOKS

if TYPE_CHECKING:
    from jengine.runner import Runner

PyTree = Any


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Recomputes the statistics of batch norms after an epoch: the mean over batches of each batch's mean and variance.

    The running ones lag behind the weights and lean towards the last batches. The weights stay frozen meanwhile (Wu &
    Johnson 2021). The batches are the first of the epoch that has ended, so that a resumed run finds the same.

    Args:
      num_samples: examples over all devices to compute them from, one epoch at most.
      interval: epochs from one time to the next.

    Raises:
      ConfigError: a setting below 1; from the hook, a training loop that counts iterations.
    """

    priority = "ABOVE_NORMAL"

    def __init__(self, num_samples: int = 8192, interval: int = 1) -> None:
        for name, value in (("num_samples", num_samples), ("interval", interval)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"PreciseBNHook: {name} is an integer of at least 1, found {value!r}")
        self.num_samples = num_samples
        self.interval = interval
        self._statistics: Any = None  # the compiled function

    def before_train(self, runner: "Runner") -> None:
        """Checks loop and model."""
        if not runner.train_loop.by_epoch:
            raise ConfigError("PreciseBNHook acts after epochs, and the training loop counts iterations")
        if not _batch_norms(runner):
            runner.logger.warning("PreciseBNHook: the model has no batch norm with running statistics")

    def after_train_epoch(self, runner: "Runner") -> None:
        """Recomputes the statistics if it is time."""
        paths = _batch_norms(runner)
        if not paths or not self.every_n_epochs(runner, self.interval):
            return
        state, loader = runner.state, runner.train_dataloader
        assert state is not None
        count = min(max(self.num_samples // loader.batch_size, 1), len(loader))
        if self._statistics is None:
            self._statistics = jax.jit(lambda *args: _statistics(runner.model, paths, *args))
        numbers = {**runner.optim_wrapper.hyperparams, **runner.hyperparams}
        total: dict[str, jax.Array] = {}
        loader.set_epoch(runner.epoch)
        with contextlib.closing(prefetch_to_device(loader, runner.strategy.put_batch)) as batches:
            for i, batch in enumerate(itertools.islice(batches, count)):
                rng = jax.random.fold_in(state.rng, i)
                found = self._statistics(state.params, state.model_state, batch, rng, numbers)
                total = jax.tree.map(jnp.add, total, found) if total else found
        loader.set_epoch(runner.epoch + 1)
        runner.state = state.replace(model_state=_replaced(state.model_state, total, count))


def _batch_norms(runner: "Runner") -> list[str]:
    """The paths, in the model state, of the running statistics."""
    modules = [path for path, kind in runner.model.module_types.items() if "BatchNorm" in kind]
    assert runner.state is not None
    return [
        path
        for path, leaf in flatten(runner.state.model_state).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        and any(f".{path}".rpartition(".")[0].endswith(f".{m}") for m in modules)
    ]


def _statistics(
    model: Any,
    paths: list[str],
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    rng: jax.Array,
    hyperparams: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """The statistics of one batch, f32 by path.

    A module hands out `m * old + (1 - m) * new` and does not say its m. From an old one of zeros and of ones both
    follow; the batch goes through the model once all the same, for training does not depend on the old ones.
    """

    def after(old: float) -> dict[str, jax.Array]:
        state = map_with_path(lambda path, x: jnp.full_like(x, old) if path in paths else x, model_state)
        return flatten(model.loss(params, state, batch, rng=rng, hyperparams=hyperparams)[1])

    zeros, ones = after(0.0), after(1.0)
    found = {}
    for path in paths:
        low, high = zeros[path].astype(jnp.float32), ones[path].astype(jnp.float32)
        momentum = jnp.round(high - low, 6)  # rounded to what was written down: 0.99, 0.9
        found[path] = low / (1 - momentum)
    return found


def _replaced(model_state: PyTree, total: Mapping[str, jax.Array], count: int) -> PyTree:
    def replace(path: str, leaf: jax.Array) -> jax.Array:
        if path not in total:
            return leaf
        return jax.device_put((total[path] / count).astype(leaf.dtype), leaf.sharding)

    return map_with_path(replace, model_state)
