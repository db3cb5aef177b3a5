"""Build a model from a Flax NNX module.

An NNX module is an object with state, but the engine requires pure functions. Therefore `init` splits the module into
its static structure and nested dicts of arrays, which are merged again inside each trace. Random streams are not part
of the model state: they are reseeded from the key of the iteration, so that resumed runs are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.model.adapters import build_loss, build_module, call_loss, select_inputs
from jengine.model.autocast import autocast, current_dtype
from jengine.model.model import Losses, Model, PyTree
from jengine.registry import MODELS
from jengine.selection import Selector


@MODELS.register_module()
class NnxModel(Model):
    """Adapt a `flax.nnx` module and a loss of its outputs.

    `nnx.Param` variables are differentiated. All others except random streams (`nnx.BatchStat`, …) are the model state.
    `module.train()` is called before training, `module.eval()` before prediction. The axis names of parameters
    (`nnx.with_partitioning`, `nnx.Param(..., out_sharding=)`) become `logical_axes`; they do not require a mesh. In low
    precision, the module's parameters and inputs are cast, and its outputs are cast back to float32; the batch is
    passed to `loss` unchanged.

    Args:
      module: a function or class `(rngs) -> nnx.Module`, or its config, which is built with the argument `rngs`.
      loss: function `(outputs, batch) -> losses`, with an optional argument `hyperparams`; or its config.
      inputs: the batch entries to call the module with, in order, each a name, index or dotted path; None to pass the
        whole batch.
    """

    def __init__(
        self,
        module: Callable[..., Any] | Mapping[str, Any],
        loss: Callable[..., Any] | Mapping[str, Any],
        inputs: Selector | Sequence[Selector] | None = "image",
    ) -> None:
        if not callable(module) and not hasattr(module, "items"):
            raise TypeError(
                f"NnxModel: `module` must be a function or class (rngs) -> nnx.Module or its config, got {module!r}"
            )
        self._module = module
        self._loss = build_loss(loss)
        self._inputs = inputs
        self._structure: tuple[Any, Any, Any, Any] | None = None
        self.module_types: dict[str, str] = {}
        self.logical_axes: dict[str, tuple[Any, ...]] = {}

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Create and split the module, and record the types of its submodules and its logical axes."""
        from flax import nnx

        rngs = nnx.Rngs(rng)
        with nnx.use_eager_sharding(False):  # else named axes would require a mesh; the strategy shards the parameters
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
        """Return the losses of the module's outputs in training mode, and the new model state."""

        def apply(inputs: tuple[PyTree, ...], params: PyTree) -> tuple[PyTree, PyTree]:
            module = self._merge(params, model_state, rng)
            module.train()
            outputs = module(*inputs)
            return outputs, _to_dict(_split(module)[3])

        outputs, new_state = autocast(apply)(select_inputs(batch, self._inputs), params)
        return call_loss(self._loss, outputs, batch, hyperparams), new_state

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Return the module's outputs in inference mode."""

        def apply(inputs: tuple[PyTree, ...], params: PyTree) -> PyTree:
            module = self._merge(params, model_state, jax.random.key(0))
            module.eval()
            return module(*inputs)

        return autocast(apply)(select_inputs(batch, self._inputs), params)

    def _merge(self, params: PyTree, model_state: PyTree, rng: jax.Array) -> Any:
        """Return the module with the given variables and random streams seeded from `rng`."""
        from flax import nnx

        if self._structure is None:
            raise RuntimeError("NnxModel: `init` must be called or traced before `loss` and `predict`")
        graphdef, param_shapes, stream_shapes, rest_shapes = self._structure
        state = (_from_dict(params, param_shapes), _reseed(stream_shapes, rng), _from_dict(model_state, rest_shapes))
        module = nnx.merge(graphdef, *state, copy=True)
        if current_dtype() is not None:
            _preserve_dtype_in_batch_norms(module)
        return module


def _preserve_dtype_in_batch_norms(module: Any) -> None:
    """Make batch norms return the dtype of their inputs, as in Linen; their statistics stay in float32.

    By default, the float32 statistics promote the outputs, so all later layers would compute in float32.
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
    """Split a module into its structure, parameters, random streams and other variables."""
    from flax import nnx

    parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return parts


def _logical_axes(params: Any) -> dict[str, tuple[Any, ...]]:
    """Return the axis names of parameters by dotted path, renamed by the variable's `sharding_rules`, if any."""
    from flax import nnx

    logical_axes = {}
    for path, variable in nnx.to_flat_state(params):
        names = variable.get_metadata("out_sharding", None)
        if names is not None:
            rules = dict(variable.get_metadata("sharding_rules", None) or ())
            names = getattr(names, "spec", names)  # `names` may be a NamedSharding
            logical_axes[".".join(map(str, path))] = tuple(rules.get(name, name) for name in names)
    return logical_axes


def _to_dict(state: Any) -> PyTree:
    """Return an NNX state as nested dicts with string keys (list indices become '0', '1', …), as in checkpoints."""
    from flax import nnx

    def convert_keys(node: Any) -> Any:
        return {str(k): convert_keys(v) for k, v in node.items()} if isinstance(node, Mapping) else node

    return convert_keys(nnx.to_pure_dict(state))


def _from_dict(values: PyTree, like: Any) -> Any:
    """Return an NNX state with the structure of `like` and the arrays of `values`."""
    from flax import nnx

    def restore_keys(node: Any, template: Any) -> Any:
        if not isinstance(template, Mapping):
            return node
        return {k: restore_keys(node[str(k)], v) for k, v in template.items()}

    state = jax.tree.map(lambda x: x, like)  # a copy, as the next line replaces values in place
    nnx.replace_by_pure_dict(state, restore_keys(values, nnx.to_pure_dict(like)))
    return state


def _reseed(like: Any, rng: jax.Array) -> Any:
    """Return random streams like `like`, each seeded with a different key derived from `rng`."""
    leaves, structure = jax.tree.flatten(like)
    reseeded = [
        jax.random.fold_in(rng, i) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros(x.shape, x.dtype)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, reseeded)
