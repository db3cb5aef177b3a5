"""Recompute the statistics of BatchNorm, and average them over replicas."""

import contextlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jengine.annotations import Count
from jengine.data import prefetch_to_device
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.paths import flatten, map_with_path
from jengine.registry import HOOKS
from jengine.sharding.replica_axis import per_replica
from jengine.train import StepContext
from jengine.train.traced_hooks import TracedHooks

PyTree = Any


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Recompute the statistics of batch norms: the mean over batches of each batch's own mean and variance.

    The running ones lag behind the weights and are biased to the last batches. The weights stay frozen meanwhile (Wu &
    Johnson 2021). The batches are the first of the epoch, or pass over the data, of the iteration before,
    so that a resumed run uses the same.

    Args:
      num_samples: examples over all devices to compute them from, one epoch at most.
      interval: epochs or iterations, as the training loop counts, between two computations.

    Raises:
      ConfigError: a setting below 1. ValueError: from the hook, a foreign loader that cannot be copied.
    """

    priority = "ABOVE_NORMAL"

    def __init__(self, num_samples: Count = 8192, interval: Count = 1) -> None:
        self.num_samples = num_samples
        self.interval = interval
        self._statistics: Any = None  # the compiled function

    def before_train(self, runner: Runner) -> None:
        """Find the batch norms."""
        if not _batch_norms(runner):
            runner.logger.warning("PreciseBNHook: the model has no batch norm with running statistics")

    def after_train_epoch(self, runner: Runner) -> None:
        """Recompute the statistics if it is due, in a training by epochs."""
        if runner.train_loop.by_epoch and self.every_n_epochs(runner, self.interval):
            self._recompute(runner, runner.epoch)

    def next_step(self, runner: Runner, step: int) -> float:
        """Return the next step after which statistics are computed; none where epochs are counted."""
        return math.inf if runner.train_loop.by_epoch else self.next_multiple(self.interval, step)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Recompute the statistics if it is due, in a training by iterations."""
        if not runner.train_loop.by_epoch and self.every_n_train_iters(runner, self.interval):
            self._recompute(runner, runner.iter // len(runner.train_dataloader))

    def _recompute(self, runner: Runner, epoch: int) -> None:
        paths = _batch_norms(runner)
        if not paths:
            return
        assert runner.state is not None
        state = runner.state if runner.strategy.replicas is None else per_replica(lambda x: x[0], runner.state)
        loader = runner.train_dataloader.copy_at_epoch(epoch)
        assert loader.batch_size is not None  # known after the first batch of an iterable loader
        count = min(max(self.num_samples // loader.batch_size, 1), len(loader))
        if self._statistics is None:
            hooks = TracedHooks(runner.hooks)
            self._statistics = jax.jit(lambda *args: _statistics(runner.model, hooks, paths, *args))
        numbers = {**runner.optim_wrapper.hyperparams, **runner.hyperparams}
        total: dict[str, jax.Array] = {}
        with contextlib.closing(prefetch_to_device(loader, runner.strategy.put_batch)) as batches:
            for i, batch in enumerate(itertools.islice(batches, count)):
                rng = jax.random.fold_in(state.key, i)
                ctx = StepContext(
                    step=state.step,
                    rng=rng,
                    batch=batch,
                    hyperparams=numbers,
                    params=state.params,
                    model_state=state.model_state,
                    opt_state=None,
                )
                found = self._statistics(ctx, state.hook_state)
                total = jax.tree.map(jnp.add, total, found) if total else found
        if hasattr(loader, "close"):
            loader.close()
        runner.state = runner.state.replace(model_state=_replaced(runner.state.model_state, total, count))


def _batch_norms(runner: Runner) -> list[str]:
    """Return the paths, in the model state, of the running statistics."""
    modules = [path for path, kind in runner.model.module_types.items() if "BatchNorm" in kind]
    assert runner.state is not None
    return [
        path
        for path, leaf in flatten(runner.state.model_state).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        and any(f".{path}".rpartition(".")[0].endswith(f".{m}") for m in modules)
    ]


def _statistics(
    model: Any, hooks: TracedHooks, paths: list[str], ctx: StepContext, hook_state: Mapping[str, PyTree]
) -> dict[str, jax.Array]:
    """Return the statistics of one batch as the model is trained on it, f32 by path.

    A module returns `m * old + (1 - m) * new` and does not expose its m. Both follow from the results for an old of
    zeros and of ones; the batch passes through the model only once, because training does not depend on the old ones.
    """
    seen, _ = hooks.run("traced_batch", ctx, hook_state)

    def after(old: float) -> dict[str, jax.Array]:
        state = map_with_path(lambda path, x: jnp.full_like(x, old) if path in paths else x, ctx.model_state)
        return flatten(model.loss(ctx.params, state, seen.batch, rng=ctx.rng, hyperparams=seen.hyperparams)[1])

    zeros, ones = after(0.0), after(1.0)
    found = {}
    for path in paths:
        low, high = zeros[path].astype(jnp.float32), ones[path].astype(jnp.float32)
        momentum = jnp.round(high - low, 6)  # rounded to the configured value: 0.99, 0.9
        found[path] = low / (1 - momentum)
    return found


def _replaced(model_state: PyTree, total: Mapping[str, jax.Array], count: int) -> PyTree:
    def replace(path: str, leaf: jax.Array) -> jax.Array:
        if path not in total:
            return leaf
        mean = jnp.broadcast_to(total[path] / count, leaf.shape)  # every replica gets those of the whole batches
        return jax.device_put(mean.astype(leaf.dtype), leaf.sharding)

    return map_with_path(replace, model_state)


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Puts the mean over replicas in the place of the model's running statistics, as MMEngine does.

    At the end of each training epoch, and before a validation that no such end came before (as in an iteration loop).
    It matters under `parallel=dict(type='DataParallel')`, where each replica keeps its own; otherwise statistics are
    those of the whole batch, and nothing happens. Integers stay as they are.
    """

    priority = "NORMAL"

    def __init__(self) -> None:
        self._done = False

    def after_train_epoch(self, runner: Runner) -> None:
        """Averages."""
        self._average(runner)
        self._done = True

    def before_val_epoch(self, runner: Runner) -> None:
        """Averages, unless the end of an epoch has just done so."""
        if not self._done:
            self._average(runner)
        self._done = False

    def _average(self, runner: Runner) -> None:
        assert runner.state is not None
        averaged = runner.strategy.mean_over_replicas(runner.state.model_state)
        if averaged is not runner.state.model_state:
            runner.state = runner.state.replace(model_state=averaged)
