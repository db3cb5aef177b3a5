"""BatchNorm statistics that are recomputed from the data."""

import contextlib
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jengine.config.annotations import Count
from jengine.config.paths import flatten, map_with_path
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.data.batch_stream import prefetch_to_device
from jengine.data.host_entries import select_arrays
from jengine.data.masking import on_whole_batches
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import ArrayTree
from jengine.model.module_types import is_batch_norm
from jengine.parallel.processes import put_whole
from jengine.parallel.replica_axis import map_per_replica
from jengine.train.traced_hooks import StepContext, TracedHooks

PyTree = Any


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Precise batch norm statistics: the mean over batches of the batch mean and variance.

    Running averages lag behind the weights and are biased towards the last batches (Wu & Johnson
    2021). The weights are frozen during the computation. The batches are the first ones in the
    epoch, or pass over the data, of the last iteration, so that a resumed run uses the same.

    Args:
      num_samples: number of examples to use over all devices, at most one epoch.
      interval: epochs or iterations, as the training loop counts, between two computations.
    """

    priority = "ABOVE_NORMAL"

    def __init__(self, num_samples: Count = 8192, interval: Count = 1) -> None:
        self.num_samples = num_samples
        self.interval = interval
        self._compiled: Any = None  # the compiled `_batch_statistics`

    def before_train(self, runner: RunnerProtocol) -> None:
        """Warn if the model has no batch norm."""
        if not _find_statistics(runner):
            runner.logger.warning(
                "PreciseBNHook: the model has no batch norm with running statistics"
            )

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Recompute the statistics if it is due, in an epoch loop."""
        if runner.train_loop.by_epoch and self.every_n_epochs(runner, self.interval):
            self._recompute(runner, runner.epoch)

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next step after which to compute statistics; never in an epoch loop."""
        return math.inf if runner.train_loop.by_epoch else self.next_multiple(self.interval, step)

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Recompute the statistics if it is due, in an iteration loop."""
        if not runner.train_loop.by_epoch and self.every_n_train_iters(runner, self.interval):
            self._recompute(runner, runner.iter // (runner.train_loop.epoch_length or 1))

    def _recompute(self, runner: RunnerProtocol, epoch: int) -> None:
        paths = _find_statistics(runner)
        if not paths:
            return
        # Replicas have equal parameters, so one is enough
        state = (
            runner.state if runner.strategy.replicas is None else _take_first_replica(runner.state)
        )
        loader = runner.train_dataloader.copy_at_epoch(epoch)  # the training data must not move on
        # A batch that is passed on whole has no size, and counts as 1
        num_batches = max(self.num_samples // (loader.batch_size or 1), 1)
        if loader.length is not None:
            num_batches = min(num_batches, loader.length)
        if self._compiled is None:
            hooks = TracedHooks(runner.hooks)
            batch_statistics = on_whole_batches(_batch_statistics, loader.batch_axis is None)
            compute = functools.partial(batch_statistics, runner.model, hooks, paths)
            self._compiled = jax.jit(runner.strategy.with_explicit_mesh(compute))
        hyperparams = runner.step_hyperparams()
        total: dict[str, jax.Array] = {}

        def put(batch: Batch) -> Any:
            return runner.strategy.put_batch(select_arrays(batch), rules=loader.batch_rules)

        with contextlib.closing(prefetch_to_device(loader, put)) as batches:
            for i, batch in enumerate(itertools.islice(batches, num_batches)):
                ctx = StepContext(
                    step=state.step,
                    rng=jax.random.fold_in(state.key, i),
                    batch=batch,
                    hyperparams=hyperparams,
                    params=state.params,
                    model_state=state.model_state,
                    opt_state=None,
                )
                statistics = self._compiled(ctx, state.hook_state)
                total = jax.tree.map(jnp.add, total, statistics) if total else statistics
        if hasattr(loader, "close"):
            loader.close()
        mean = {path: value / num_batches for path, value in total.items()}
        runner.state = runner.state.replace(
            model_state=_replace_statistics(runner.state.model_state, mean)
        )


def _find_statistics(runner: RunnerProtocol) -> list[str]:
    """Return the paths in the model state that hold running statistics."""
    modules = [path for path, kind in runner.model.module_types.items() if is_batch_norm(kind)]
    return [
        path
        for path, leaf in flatten(runner.state.model_state).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        and any(f".{path}".rpartition(".")[0].endswith(f".{m}") for m in modules)
    ]


def _batch_statistics(
    model: Any,
    hooks: TracedHooks,
    paths: list[str],
    ctx: StepContext,
    hook_state: Mapping[str, PyTree],
) -> dict[str, jax.Array]:
    """Return the statistics of one batch, as the traced hooks change it for training, f32 by
    path.
    """
    # A module returns `m * old + (1 - m) * new` and does not expose m. Both follow from the results
    # for an old value of zeros and of ones. XLA merges the two passes: training does not depend on
    # the old statistics.
    augmented, _ = hooks.run("traced_batch", ctx, hook_state)

    def update_from(old: float) -> dict[str, jax.Array]:
        state = map_with_path(
            lambda path, x: jnp.full_like(x, old) if path in paths else x, ctx.model_state
        )
        _, new_state = model.loss(
            ctx.params, state, augmented.batch, rng=ctx.rng, hyperparams=augmented.hyperparams
        )
        return flatten(new_state)

    from_zeros = update_from(0.0)
    from_ones = update_from(1.0)
    statistics = {}
    for path in paths:
        low = from_zeros[path].astype(jnp.float32)
        high = from_ones[path].astype(jnp.float32)
        momentum = jnp.round(high - low, 6)  # rounded to the configured value: 0.99, 0.9
        statistics[path] = low / (1 - momentum)
    return statistics


def _replace_statistics(model_state: PyTree, statistics: Mapping[str, jax.Array]) -> PyTree:
    def replace(path: str, leaf: jax.Array) -> jax.Array:
        if path not in statistics:
            return leaf
        # every replica gets those of the whole batches
        value = jnp.broadcast_to(statistics[path], leaf.shape)
        return put_whole(value.astype(leaf.dtype), leaf.sharding)

    return map_with_path(replace, model_state)


def _take_first_replica(state: ArrayTree) -> Any:
    """Return a training state with the first replica's values."""

    def first(leaf: jax.Array) -> jax.Array:
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            # else it has no index
            leaf = jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
        return leaf[0]

    return map_per_replica(first, state)
