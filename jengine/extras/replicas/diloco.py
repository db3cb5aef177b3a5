"""Strategy that lets each replica train alone for many iterations between two exchanges.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105): each replica has its own parameters and its own
optimizer. Every `inner_steps` iterations the replicas exchange how far they have moved, and the
outer parameters, which all share, take a step of SGD with Nesterov's momentum in the mean
direction. With `parts` the parameters take turns (Streaming DiLoCo, Douillard et al. 2025,
arXiv:2501.18512), so that an exchange is smaller.

In the training state, `params` are the outer parameters, which evaluations, checkpoints and exports
read. The optimizer state has an entry per replica. The hook's state has the parameters of the
replicas, under the name `model_state` as all that differs between them, and the outer momentum.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jengine.config import paths
from jengine.config.annotations import Count, Index, Range
from jengine.config.errors import ConfigError
from jengine.config.registry import STRATEGIES
from jengine.extras.replicas.data_parallel import DataParallel
from jengine.hooks.hook import Hook
from jengine.hooks.priority import Priority
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import ArrayTree, Batch, Model, Params, Scalars
from jengine.parallel.mesh import MeshSizes
from jengine.parallel.placement import Axis, Rules
from jengine.parallel.replica_axis import replicas_along
from jengine.train.state import TrainState

PyTree = Any

_HOOK = "DiLoCoHook"  # the name of its state
_INNER = f"{_HOOK}.model_state."
_UNMAPPED = ""  # no axis has this name


@STRATEGIES.register_module()
class DiLoCo(DataParallel):
    """Strategy whose replicas train alone, and exchange parameters every `inner_steps` iterations.

    A step has no collectives. The outer step is a program of its own, which a hook of the strategy
    calls.

    Args:
      inner_steps: iterations between two outer steps on a parameter.
      outer_lr: learning rate of the outer step; 1 with `outer_momentum=0` averages the parameters.
      outer_momentum: Nesterov's momentum of the outer step.
      parts: how many parts of about equal size the parameters are divided into, which take their
        outer steps in turn, one every `inner_steps / parts` iterations.
      mean_metrics: exchange the metrics of each step, or once for a chunk, for the log; otherwise
        they are those of the first replica that a process has.
      mesh, rules, logical_axes, fsdp_min_size, strict, devices, batch_axes: see `DataParallel`.

    Raises:
      ConfigError: `inner_steps` is no multiple of `parts`, or see `DataParallel`.
    """

    def __init__(
        self,
        inner_steps: Count,
        outer_lr: Annotated[float, Range(gt=0)] = 0.7,
        outer_momentum: Annotated[float, Range(ge=0, lt=1)] = 0.9,
        parts: Count = 1,
        mean_metrics: bool = False,
        mesh: Mesh | MeshSizes | None = None,
        rules: Rules = (),
        logical_axes: Mapping[str, Axis] | None = None,
        fsdp_min_size: Index = 2**18,
        strict: bool = False,
        devices: Count | None = None,
        batch_axes: Sequence[str] | None = None,
    ) -> None:
        if inner_steps % parts:
            raise ConfigError(
                f"`parallel.inner_steps` must be a multiple of `parts`, {parts}, got {inner_steps}"
            )
        super().__init__(
            "shard_map", mesh, rules, logical_axes, fsdp_min_size, strict, devices, batch_axes
        )
        # Optimizers and hooks in the step must not exchange anything.
        self.axis_name = None
        self.inner_steps = inner_steps
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.parts = parts
        self.mean_metrics = mean_metrics
        self.hooks = (DiLoCoHook(self),)
        self._outer_steps: dict[int, Any] = {}  # compiled, by part

    def compile_init(
        self, make: Callable[..., PyTree], *args: Any, model: Model | None = None
    ) -> Any:
        """Compile `make`; see `Strategy`.

        Raises:
          ConfigError: a hook whose state in the step would differ between replicas, or parameters
            that have no `parts`.
        """
        shapes = jax.eval_shape(make, *args)
        if not hasattr(shapes, "params"):  # hook states for weights that have been loaded

            def make_states(*args: Any) -> PyTree:
                return paths.map_with_path(
                    lambda path, leaf: (
                        self._copy_to_replicas(leaf) if path.startswith(_INNER) else leaf
                    ),
                    make(*args),
                )

            return super().compile_init(make_states, *args, model=model)
        for path in paths.flatten(shapes.hook_state):
            name = path.split(".")[0]
            if name != _HOOK and not self._is_per_replica(f"hook_state.{path}"):
                raise ConfigError(
                    "DiLoCo: hooks must have no state in the step, since the parameters of the "
                    f"replicas differ, got {name}; use DataParallel, or leave the hook out"
                )
        found = len({*_assign_parts(shapes.params, self.parts)})
        if found < self.parts:
            raise ConfigError(
                f"`parallel.parts` must be at most {found} for these parameters, got {self.parts}: "
                "each part must have an array"
            )
        return super().compile_init(make, *args, model=model)

    def outer_step(self, state: TrainState, part: int = 0) -> tuple[TrainState, jax.Array]:
        """Take the outer step on a part of the parameters; the state is donated.

        Returns:
          The state, in which the replicas continue from the outer parameters, and the norm of the
          mean movement since the last outer step, f32[].
        """
        new_state, norm = self.compile_outer_step(part)(state)
        return new_state, norm

    def compile_outer_step(self, part: int = 0) -> Any:
        """Return the compiled outer step on a part, `state -> (state, norm)`."""
        if part not in self._outer_steps:
            step = functools.partial(self._take_outer_step, part)

            def run(state: TrainState) -> Any:
                specs = self._replica_specs(state)
                return self._map(step, (specs,), (specs, PartitionSpec()))(state)

            self._outer_steps[part] = jax.jit(
                run,
                donate_argnums=0,
                in_shardings=(self._state,),
                out_shardings=(self._state, self.sharding()),
            )
        return self._outer_steps[part]

    def rare_programs(self, state: TrainState) -> dict[str, tuple[jax.stages.Traced, int]]:
        """Return the programs that a run calls between steps, by name, with the number of
        iterations between two calls.
        """
        return {
            f"outer step {part + 1} of {self.parts}" if self.parts > 1 else "outer step": (
                self.compile_outer_step(part).trace(state),
                self.inner_steps,
            )
            for part in range(self.parts)
        }

    def _take_outer_step(self, part: int, state: TrainState) -> tuple[TrainState, jax.Array]:
        """Take the outer step on one replica, within the mapped program."""
        own = state.hook_state[_HOOK]
        treedef: Any = jax.tree.structure(state.params)
        outer = jax.tree.leaves(state.params)
        inner = jax.tree.leaves(own["model_state"])
        momentum = jax.tree.leaves(own["momentum"])
        assigned = _assign_parts(state.params, self.parts)
        selected = [i for i, of in enumerate(assigned) if of == part]
        moved = [
            outer[i].astype(momentum[i].dtype) - inner[i][0].astype(momentum[i].dtype)
            for i in selected
        ]
        moved = jax.lax.pmean(moved, self._axis)
        for i, gradient in zip(selected, moved, strict=True):
            momentum[i] = self.outer_momentum * momentum[i] + gradient
            step = gradient + self.outer_momentum * momentum[i]
            outer[i] = (outer[i].astype(step.dtype) - self.outer_lr * step).astype(outer[i].dtype)
            inner[i] = outer[i][None]
        hook_state = {
            "model_state": treedef.unflatten(inner),
            "momentum": treedef.unflatten(momentum),
        }
        new_state = state.replace(
            params=treedef.unflatten(outer), hook_state={**state.hook_state, _HOOK: hook_state}
        )
        return new_state, optax.tree.norm(moved).astype(jnp.float32)

    def _run_step(
        self, step: Callable[..., Any], state: TrainState, batch: Batch, hyperparams: Scalars
    ) -> Any:
        others = dict(state.hook_state)
        own = others.pop(_HOOK)
        # without a key of their own, replicas would drop out the same units
        key = jax.random.fold_in(state.key, jax.lax.axis_index(self._axis))
        inner = state.replace(
            params=own["model_state"], hook_state=others, rng=jax.random.key_data(key)
        )
        with replicas_along(_UNMAPPED):  # a loss sees the examples of its replica alone
            new, metrics = step(inner, batch, hyperparams)
        if self.mean_metrics:
            metrics = self._mean_metrics(metrics)
        hook_state = {**new.hook_state, _HOOK: {**own, "model_state": new.params}}
        return new.replace(params=state.params, hook_state=hook_state, rng=state.rng), metrics

    def _mean_metrics(self, metrics: PyTree) -> PyTree:
        treedef: Any = jax.tree.structure(metrics)
        leaves = jax.tree.leaves(metrics)
        floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        means = jax.lax.pmean([leaves[i] for i in floats], self._axis)
        for i, mean in zip(floats, means, strict=True):  # a mean of counters would not be one
            leaves[i] = mean
        return treedef.unflatten(leaves)

    def _is_per_replica(self, path: str) -> bool:
        return path.startswith("opt_state.") or super()._is_per_replica(path)


class DiLoCoHook(Hook):
    """Hook that calls the outer steps of a `DiLoCo` strategy, which brings it with it."""

    is_single = True
    priority = Priority.HIGHEST  # what others read and save then has the outer step

    def __init__(self, strategy: DiLoCo) -> None:
        self._strategy = strategy
        self.every: int = strategy.inner_steps // strategy.parts

    def init_traced_state(self, params: Params, model_state: PyTree) -> dict[str, PyTree]:
        """Return the parameters of a replica, and the outer momentum, at least float32."""
        return {
            "model_state": jax.tree.map(functools.partial(jnp.array, copy=True), params),
            "momentum": jax.tree.map(
                lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params
            ),
        }

    def before_train(self, runner: RunnerProtocol) -> None:
        """Check that an accumulation window has no outer step within it, and warn of iterations
        at the end that have no effect on the outer parameters.

        Raises:
          ConfigError: an outer step within a window.
        """
        wrapper = runner.optim_wrapper
        counts = () if isinstance(wrapper, Mapping) else wrapper.counts.values
        if wrong := [count for count in counts if self.every % count]:
            of = " / parts" if self._strategy.parts > 1 else ""
            raise ConfigError(
                f"`parallel.inner_steps`{of} must be a multiple of `accumulative_counts`, "
                f"{wrong[0]}, got {self.every}"
            )
        rounds = self._strategy.inner_steps
        if math.isfinite(runner.max_iters) and (rest := int(runner.max_iters) % rounds):
            runner.logger.warning(
                f"DiLoCo: the last {rest} of {runner.max_iters} iterations come after the last "
                f"outer step: a multiple of inner_steps={rounds} would use them"
            )

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Any = None,
    ) -> None:
        """Take the outer step, and log the norm of the mean movement."""
        part = ((runner.iter + 1) // self.every - 1) % self._strategy.parts
        limiter = runner.run.limiter
        limiter.wait()
        runner.state, norm = self._strategy.outer_step(runner.state, part)
        limiter.add(norm)
        runner.message_hub.update_scalar("train/outer_grad_norm", norm)


def _assign_parts(params: ArrayTree, parts: int) -> list[int]:
    """Return the index of the part of each array: neighbours, of about equal size together.

    >>> _assign_parts([jnp.zeros(4), jnp.zeros(2), jnp.zeros(2)], 2)
    [0, 1, 1]
    """
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    total = max(sum(sizes), 1)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    # by its middle, so that an array larger than a part is in one
    return [
        min(int((end - size / 2) * parts / total), parts - 1)
        for end, size in zip(ends, sizes, strict=True)
    ]
