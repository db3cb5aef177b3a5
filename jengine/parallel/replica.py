"""A program for each device: every replica sees its rows of the batch alone, and gradients are averaged.

It is the way of PyTorch's DistributedDataParallel: statistics such as those of BatchNorm belong to a replica, and
nothing is exchanged but gradients (and losses, for the log), once an update. Parameters and the optimizer's state are
the same on all replicas; what differs has a leading axis, one entry a replica: the model state, the summed gradients,
and whatever a hook keeps under `model_state` in its own state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jengine import paths
from jengine.errors import ConfigError, closest
from jengine.parallel.mesh import choose_devices
from jengine.parallel.on_mesh import OnMesh
from jengine.parallel.replica_form import differs, per_replica
from jengine.registry import STRATEGIES

PyTree = Any

AXIS = "data"
_EACH = PartitionSpec(AXIS)
_IMPLS = ("shard_map", "pmap")


@STRATEGIES.register_module()
class Replica(OnMesh):
    """The step on every device by itself, under the mapped axis `data`.

    Accumulating iterations exchange nothing; their logged losses are those of the first replica.

    Args:
      impl: 'shard_map', or 'pmap', which JAX keeps for old code.
      devices: how many devices to take; None takes all.

    Raises:
      ConfigError: another `impl`, or a number of devices that are not there.
    """

    axis_name = AXIS

    def __init__(self, impl: str = "shard_map", devices: int | None = None) -> None:
        if impl not in _IMPLS:
            raise ConfigError(f"Replica: impl is 'shard_map' or 'pmap', found {impl!r}{closest(str(impl), _IMPLS)}")
        self.impl = impl
        chosen = choose_devices(devices)
        super().__init__(jax.make_mesh((len(chosen),), (AXIS,), axis_types=(AxisType.Auto,), devices=chosen))
        self.replicas = self.mesh.size

    def init_state(self, make: Callable[..., PyTree], *args: Any, model: Any = None) -> PyTree:
        """Runs `make(*args)`, compiled: all replicas start alike.

        Args:
          make: gives a TrainState; or, from the parameters and the model state of one, the states of hooks.
          *args: arrays for it.
          model: does not matter here.

        Raises:
          ValueError: an example batch among `args` that does not divide.
        """
        for arg in args:
            if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arg)):  # the example batch
                self.check_batch(arg)
        whole = hasattr(jax.eval_shape(make, *args), "params")
        prefix = "" if whole else "hook_state."

        def made(*args: Any) -> PyTree:
            state = make(*args)
            return per_replica(self._spread, state) if whole else state  # a hook's copies are spread already

        def sharding(path: str, leaf: Any) -> Any:
            return self.sharding(AXIS) if differs(prefix + path) else self.sharding()

        return jax.jit(made, out_shardings=paths.map_with_path(sharding, jax.eval_shape(made, *args)))(*args)

    def compile_train_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a training step; the state, its first argument, is donated."""

        def replica(state: PyTree, batch: PyTree, hyperparams: PyTree) -> Any:
            new, outputs = step(state.replace(rng=self._own_key(state.rng)), batch, hyperparams)
            return new.replace(rng=state.rng), outputs

        return self._pmap(replica) if self.impl == "pmap" else self._shard_map(replica)

    def adapt_for_eval(self, model: Any) -> Any:
        """The model as an evaluation step takes it: each replica predicts its rows with its own model state."""
        return _EachReplica(model, self.mesh)

    def mean_over_replicas(self, model_state: PyTree) -> PyTree:
        """The model state with the mean over replicas in the place of each floating leaf; others stay."""
        if self.mesh.size == 1 or not jax.tree.leaves(model_state):
            return model_state
        return jax.jit(_means, out_shardings=self.sharding(AXIS))(model_state)

    def _shard_map(self, replica: Callable[..., Any]) -> Callable[..., Any]:
        def one(state: PyTree, batch: PyTree, hyperparams: PyTree) -> Any:
            new, outputs = replica(per_replica(lambda x: x[0], state), batch, hyperparams)
            return per_replica(lambda x: x[None], new), outputs

        def run(state: PyTree, batch: PyTree, hyperparams: PyTree) -> Any:
            specs = paths.map_with_path(lambda path, _: _EACH if differs(path) else PartitionSpec(), state)
            # Without the check: it would refuse loops in a model whose carry starts as a constant.
            mapped = jax.shard_map(
                one,
                mesh=self.mesh,
                in_specs=(specs, _EACH, PartitionSpec()),
                out_specs=(specs, PartitionSpec()),
                check_vma=False,
            )
            return mapped(state, batch, hyperparams)

        return jax.jit(run, donate_argnums=0)

    def _pmap(self, replica: Callable[..., Any]) -> Callable[..., Any]:
        """A pmap is told by axes, not by paths, what differs, so it is made when the state is known."""
        compiled: list[Callable[..., Any]] = []
        parts = self.mesh.size

        @jax.jit
        def split(batch: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)

        def run(state: PyTree, batch: PyTree, hyperparams: PyTree) -> Any:
            if not compiled:
                axes = paths.map_with_path(lambda path, _: 0 if differs(path) else None, state)
                compiled.append(
                    jax.pmap(
                        replica,
                        axis_name=AXIS,
                        in_axes=(axes, 0, None),
                        out_axes=(axes, None),
                        devices=list(self.mesh.devices.flat),
                        donate_argnums=0,
                    )
                )
            return compiled[0](state, split(batch), hyperparams)

        return run

    def _spread(self, leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (self.mesh.size, *leaf.shape))

    def _own_key(self, rng: jax.Array) -> jax.Array:
        """Replicas draw different numbers; a single one those of a single device."""
        return rng if self.mesh.size == 1 else jax.random.fold_in(rng, jax.lax.axis_index(AXIS))


class _EachReplica:
    """A model whose predictions every replica makes for its own rows."""

    def __init__(self, model: Any, mesh: Any) -> None:
        self._model = model
        self._mesh = mesh

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """The predictions for a batch divided over replicas; `model_state` has an entry for each."""

        def one(params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
            return self._model.predict(params, jax.tree.map(lambda x: x[0], model_state), batch)

        specs = (PartitionSpec(), _EACH, _EACH)
        mapped = jax.shard_map(one, mesh=self._mesh, in_specs=specs, out_specs=_EACH, check_vma=False)
        return mapped(params, model_state, batch)


def _means(tree: PyTree) -> PyTree:
    def mean(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.broadcast_to(leaf.mean(axis=0, keepdims=True), leaf.shape)

    return jax.tree.map(mean, tree)
