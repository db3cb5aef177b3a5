"""Flax NNX modules as a model.

An NNX module is an object with state; the engine wants pure functions. So the object is taken apart once, in `init`,
into its structure (static) and nested dicts of arrays, and put together again inside each trace. Random streams are
no part of the state: they are reseeded from the key of the iteration, which makes a restart exact.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.model.adapters import build_loss, build_module, call_loss, select_inputs
from jengine.model.autocast import autocast, current_dtype
from jengine.model.model import Losses, Model, PyTree
from jengine.registry import MODELS


@MODELS.register_module()
class NnxModel(Model):
    """A `flax.nnx` module with a loss on its outputs.

    `nnx.Param` variables are differentiated; all others but random streams (`nnx.BatchStat`, …) are the model state.
    Training runs after `module.train()`, prediction after `module.eval()`. Names that the module gives the axes of a
    parameter (`nnx.with_partitioning`, `nnx.Param(..., out_sharding=)`) become `logical_axes`; no mesh need be set.
    Under a low precision the module's parameters and inputs are cast and its outputs come back in float32; `loss`
    receives the batch as it is.

    Args:
      module: makes the module from `rngs`: a function or class `(rngs) -> nnx.Module`, or a config of one, which is
        built with `rngs` added.
      loss: `(outputs, batch) -> losses`, taking `hyperparams` too if it names them; or a config of one.
      inputs: the batch entries that the module is called with, in order; None passes the whole batch.
    """

    def __init__(
        self,
        module: Callable[..., Any] | Mapping[str, Any],
        loss: Callable[..., Any] | Mapping[str, Any],
        inputs: str | Sequence[str] | None = "image",
    ) -> None:
        if not callable(module) and not hasattr(module, "items"):
            raise TypeError(f"NnxModel: module makes an nnx.Module from rngs, found {module!r}")
        self._module = module
        self._loss = build_loss(loss)
        self._inputs = inputs if inputs is None or isinstance(inputs, str) else tuple(inputs)
        self._structure: tuple[Any, Any, Any, Any] | None = None
        self.module_types: dict[str, str] = {}
        self.logical_axes: dict[str, tuple[Any, ...]] = {}

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Makes the module and takes it apart; notes the type of each submodule and the logical axes."""
        from flax import nnx

        rngs = nnx.Rngs(rng)
        with nnx.use_eager_sharding(False):  # named axes would need a mesh here; the strategy places the parameters
            if hasattr(self._module, "items"):
                module = build_module(self._module, rngs=rngs)
            else:
                module = self._module(rngs=rngs)
        self.module_types = {".".join(map(str, path)): type(node).__name__ for path, node in nnx.iter_modules(module)}
        graphdef, params, streams, rest = _split(module)
        self.logical_axes = _logical_axes(params)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, streams, rest))
        self._structure = (graphdef, *shapes)
        return _to_dict(params), _to_dict(rest)

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Calls the module in training mode and its loss on the outputs."""

        def apply(inputs: tuple[PyTree, ...], params: PyTree) -> tuple[PyTree, PyTree]:
            module = self._merge(params, model_state, rng)
            module.train()
            outputs = module(*inputs)
            return outputs, _to_dict(_split(module)[3])

        outputs, new_state = autocast(apply)(select_inputs(batch, self._inputs), params)
        return call_loss(self._loss, outputs, batch, hyperparams), new_state

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Calls the module in inference mode."""

        def apply(inputs: tuple[PyTree, ...], params: PyTree) -> PyTree:
            module = self._merge(params, model_state, jax.random.key(0))
            module.eval()
            return module(*inputs)

        return autocast(apply)(select_inputs(batch, self._inputs), params)

    def _merge(self, params: PyTree, model_state: PyTree, rng: jax.Array) -> Any:
        from flax import nnx

        if self._structure is None:
            raise RuntimeError("NnxModel: call (or trace) `init` first; it makes the module's structure")
        graphdef, param_shapes, stream_shapes, rest_shapes = self._structure
        state = (_from_dict(params, param_shapes), _reseed(stream_shapes, rng), _from_dict(model_state, rest_shapes))
        module = nnx.merge(graphdef, *state, copy=True)
        if current_dtype() is not None:
            _keep_dtype_in_batch_norms(module)
        return module


def _keep_dtype_in_batch_norms(module: Any) -> None:
    """Let batch norms return the dtype of their inputs, as those of Linen do; their statistics stay in float32.

    By default the float32 statistics promote the outputs, and with them all later layers compute in float32.
    """
    from flax import nnx
    from flax.nnx.nn import dtypes

    def promote(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
        x, mean, var, scale, bias = arrays
        x, scale, bias = dtypes.promote_dtype((x, scale, bias), dtype=dtype, inexact=inexact)
        return x, mean, var, scale, bias

    for _, node in nnx.iter_modules(module):
        if isinstance(node, nnx.BatchNorm) and node.promote_dtype is dtypes.promote_dtype:
            node.promote_dtype = promote


def _split(module: Any) -> tuple[Any, Any, Any, Any]:
    """The structure, the parameters, the random streams and all other variables of a module."""
    from flax import nnx

    parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return parts


def _logical_axes(params: Any) -> dict[str, tuple[Any, ...]]:
    """The names of axes by dotted path, where a variable has them, through the `sharding_rules` of its own if any."""
    from flax import nnx

    found = {}
    for path, variable in nnx.to_flat_state(params):
        names = variable.get_metadata("out_sharding", None)
        if names is not None:
            renamed = dict(variable.get_metadata("sharding_rules", None) or ())
            names = getattr(names, "spec", names)  # a NamedSharding's
            found[".".join(map(str, path))] = tuple(renamed.get(name, name) for name in names)
    return found


def _to_dict(state: Any) -> PyTree:
    """An NNX state as nested dicts with string keys (list indices become '0', '1', …), as checkpoints need them."""
    from flax import nnx

    def rename(node: Any) -> Any:
        return {str(k): rename(v) for k, v in node.items()} if isinstance(node, Mapping) else node

    return rename(nnx.to_pure_dict(state))


def _from_dict(values: PyTree, like: Any) -> Any:
    """The state that has the structure of `like` and the arrays of `values`."""
    from flax import nnx

    def rename(node: Any, template: Any) -> Any:
        if not isinstance(template, Mapping):
            return node
        return {k: rename(node[str(k)], v) for k, v in template.items()}

    state = jax.tree.map(lambda x: x, like)  # a copy: the replacement below works in place
    nnx.replace_by_pure_dict(state, rename(values, nnx.to_pure_dict(like)))
    return state


def _reseed(like: Any, rng: jax.Array) -> Any:
    """Random streams that start anew from `rng`, each from a key of its own."""
    leaves, structure = jax.tree.flatten(like)
    fresh = [
        jax.random.fold_in(rng, i) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros(x.shape, x.dtype)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, fresh)
