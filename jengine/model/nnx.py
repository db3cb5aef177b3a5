"""Model adapter for Flax NNX modules.

An NNX module is an object with state, but the engine requires pure functions. Therefore `init`
splits the module into the static structure and nested dicts with arrays, which are merged again
inside each trace. Random streams are not part of the model state: they are reseeded from each
iteration's key, so that resumed runs are exact.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.config.errors import config_path
from jengine.config.plugins import load_each, load_provided
from jengine.config.registry import MODELS, as_config
from jengine.model.adapters import (
    build_loss,
    build_module,
    call_loss,
    select_inputs,
    train_arguments,
)
from jengine.model.autocast import autocast, current_dtype
from jengine.model.linen import record_types
from jengine.model.model import (
    FROZEN,
    Batch,
    Losses,
    Model,
    ModelState,
    Params,
    PyTree,
    check_state_names,
)
from jengine.model.module_types import ModuleType
from jengine.model.nnx_state import (
    Path,
    from_dict,
    is_variable,
    list_module_types,
    list_variables,
    shapes,
    to_dict,
)
from jengine.model.padding import exclude_padding, mask_batch_norms
from jengine.model.selection import Selector
from jengine.model.sown import Sown, SownValues, prepare_observed

if TYPE_CHECKING:
    from flax import nnx


# A variable type, a predicate (path, variable) -> bool, an import path, the config of a predicate,
# or a list of these.
NnxFilter = type | Callable[..., bool] | str | Sequence[Any] | Mapping[str, Any] | None


class _Structure(NamedTuple):
    """Static part of a module."""

    graphdef: Any
    # nnx.State of jax.ShapeDtypeStructs, as the next two; trained and frozen parameters
    params: Any
    streams: Any
    rest: Any
    accepts_rngs: bool  # whether `__call__` has an argument `rngs`
    has_frozen: bool  # whether the model state is `dict(frozen=..., state=...)`


@MODELS.register_module()
class NnxModel(Model):
    """Model from a `flax.nnx` module and a loss on its outputs.

    `nnx.Param` variables, or those that `wrt` selects, are differentiated. All others except random
    streams (`nnx.BatchStat`, …) are the model state: `{'frozen': ..., 'state': ...}` if some
    parameters are not selected. Variables that a call creates (`sow`, or a new attribute) are not
    part of any state: they are read after the call. `module.train()` is called before training,
    `module.eval()` before prediction; arguments `train`, `training`, `is_train`, `is_training` or
    `deterministic` of `__call__` are set accordingly, and an argument `rngs` is an `nnx.Rngs` with
    a key for each iteration, or each batch that is predicted. Axis names (`nnx.with_partitioning`,
    `nnx.Param(..., out_sharding=)`) become `logical_axes`; they do not require a mesh. In low
    precision, the module's parameters and inputs are cast, and the outputs are cast back to
    float32; `loss` gets the batch unchanged.

    >>> from flax import nnx
    >>> from jengine.model.losses import MeanSquaredError
    >>> model = NnxModel(
    ...     lambda rngs: nnx.Linear(3, 1, rngs=rngs), loss=MeanSquaredError(target="y"), inputs="x"
    ... )

    Args:
      module: a function or class `(rngs) -> nnx.Module`, or its config, which is built with the
        argument `rngs`; or a module, whose values are the initial ones. The module itself does not
        change.
      loss: function `(outputs, batch) -> losses`, with optional arguments `hyperparams` and `sown`,
        the sown values by variable type and dotted path; or a config.
      inputs, sown_losses, sown_predictions, activation_checkpointing: see `LinenModel`; the
        collections are here the names of variable types.
      wrt: the parameters to train, as in `nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)`: any nnx
        filter, an import path, or the config of a filter; several in a list. Random streams,
        statistics and caches are never selected.

    Raises:
      TypeError: `module` is something else. ConfigError: from `init`, `wrt` selects nothing, or
        integers.
    """

    def __init__(
        self,
        module: Callable[..., Any] | Mapping[str, Any] | str | Any,
        loss: Callable[..., Any] | Mapping[str, Any],
        inputs: Selector | Sequence[Selector] | None = "image",
        sown_losses: Sequence[str] | Mapping[str, float] | None = None,
        sown_predictions: Sequence[str] = (),
        wrt: NnxFilter = None,
        activation_checkpointing: Sequence[str] = (),
    ) -> None:
        from flax import nnx

        if (
            not isinstance(module, nnx.Module)
            and not callable(module)
            and not hasattr(as_config(module), "items")
        ):
            raise TypeError(
                "NnxModel: `module` must be a module, a function or class (rngs) -> nnx.Module, "
                f"or its config, got {module!r}"
            )
        self._module = as_config(module)
        self._loss = build_loss(loss)
        self._inputs = inputs
        self._sown = SownValues("NnxModel", sown_losses, sown_predictions)
        self._wrt = wrt
        if wrt is not None:
            with config_path("wrt"):
                self._wrt = load_provided("trained_variables", "build_filter")(wrt)
        self._remat = tuple(activation_checkpointing)
        self._structure: _Structure | None = None
        self.module_types: dict[str, ModuleType] = {}
        self.logical_axes: dict[str, tuple[Any, ...]] = {}

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Create and split the module, and record the submodule types and the logical axes."""
        from flax import nnx

        module = self._build(rng)
        self.module_types = self._list_types(module, batch)
        if self._remat:
            check_patterns = load_provided("activation_checkpointing", "check_patterns")
            check_patterns(self._remat, self.module_types)
        trained = self._select_trained(module)
        graphdef, *states = _split(module, trained)  # parameters, random streams, all others
        variables = list_variables(states[0])
        # `init` may be traced several times in a run; one message is enough.
        if self._structure is None and self._wrt is None:
            for announce in load_each("training_announcements"):
                announce(variables.values())
        self.logical_axes = _logical_axes(states[0])
        accepts_rngs = "rngs" in inspect.signature(type(module).__call__).parameters
        # Without values: they are the run's, and in a trace tracers, which must not outlive it.
        all_params, streams, others = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), states
        )
        frozen = {path: x for path, x in variables.items() if path not in trained}
        self._structure = _Structure(
            graphdef, all_params, streams, others, accepts_rngs, bool(frozen)
        )
        params = to_dict({path: variables[path] for path in trained})
        rest = to_dict(list_variables(states[2]))
        if not frozen:
            check_state_names("an attribute", rest)
            return params, rest
        # which pretrained weights of the network do not have
        adapters = [path for path in trained if isinstance(variables[path], nnx.LoRAParam)]
        self.adapter_paths = frozenset(map(".".join, adapters))
        return params, {FROZEN: to_dict(frozen), "state": rest}

    def loss(
        self,
        params: Params,
        model_state: ModelState,
        batch: Batch,
        *,
        rng: jax.Array,
        hyperparams: Mapping[str, Any],
    ) -> tuple[Losses, PyTree]:
        """Return the losses in training mode, and the new model state."""
        params, state = self.base_variables(params, model_state)

        def apply(inputs: tuple[PyTree, ...], params: Params) -> tuple[PyTree, PyTree, Sown]:
            return self._call(params, state, inputs, rng, train=True)

        # Around the call: BatchNorm asks for the mask of the batch while it is traced.
        with exclude_padding(batch):
            outputs, new_state, sown = autocast(apply)(
                select_inputs(batch, self._inputs, "NnxModel"), params
            )
        losses = call_loss(self._loss, outputs, batch, hyperparams, sown)
        if self._get_structure().has_frozen:
            new_state = {FROZEN: model_state[FROZEN], "state": new_state}
        return self._sown.add_losses(losses, outputs, sown, self._loss), new_state

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the module's outputs in inference mode."""
        params, model_state = self.base_variables(params, model_state)
        key = jax.random.key(0) if rng is None else rng

        def apply(inputs: tuple[PyTree, ...], params: Params) -> PyTree:
            outputs, _, sown = self._call(params, model_state, inputs, key, train=False)
            return self._sown.add_predictions(outputs, sown)

        return autocast(apply)(select_inputs(batch, self._inputs, "NnxModel"), params)

    def merge(self, params: Params, model_state: ModelState, *, train: bool = False) -> Any:
        """Return the module with the given variables, in training or inference mode.

        The random streams start from a fixed key; `nnx.reseed` sets another.
        """
        return self._merge(
            *self.base_variables(params, model_state), jax.random.key(0), train=train
        )[0]

    def tabulate(self, batch: Batch, width: int = 160) -> str:
        """Return Flax's table of the layers, with inputs, outputs, FLOPs and variables."""
        from flax import nnx

        tables: list[str] = []

        def draw(inputs: tuple[PyTree, ...]) -> None:
            module = self._build(jax.random.key(0))
            module.eval()
            arguments: dict[str, Any] = train_arguments(type(module).__call__, train=False)
            if "rngs" in inspect.signature(type(module).__call__).parameters:
                arguments["rngs"] = nnx.Rngs(0)
            console = {"force_terminal": False, "force_jupyter": False, "width": width}
            tables.append(
                nnx.tabulate(
                    module, *inputs, compute_flops=True, console_kwargs=console, **arguments
                )
            )

        # traced: nothing is allocated or computed
        jax.eval_shape(draw, select_inputs(batch, self._inputs, "NnxModel"))
        return tables[0]

    def _select_trained(self, module: "nnx.Module") -> list[Path]:
        from flax import nnx

        if self._wrt is not None:
            return load_provided("trained_variables", "select_trained")(module, self._wrt)
        variables = nnx.to_flat_state(nnx.state(module))
        return [tuple(map(str, path)) for path, x in variables if isinstance(x, nnx.Param)]

    def _get_structure(self) -> _Structure:
        if self._structure is None:
            raise RuntimeError(
                "NnxModel: `init` must be called or traced before `loss` and `predict`"
            )
        return self._structure

    def _list_types(self, module: "nnx.Module", batch: Batch) -> dict[str, ModuleType]:
        from flax import nnx

        if not isinstance(module, nnx.bridge.ToNNX):
            return list_module_types(module)
        types: dict[str, ModuleType] = {}  # of the Linen module within

        def initialize(inputs: tuple[Any, ...]) -> Mapping[str, Any]:
            variables, found = record_types(
                lambda: module.to_nnx__module.init(jax.random.key(0), *inputs)
            )
            types.update(found)
            return variables

        jax.eval_shape(initialize, select_inputs(batch, self._inputs, "NnxModel"))
        return types

    def _build(self, rng: jax.Array) -> Any:
        """Return a new module, or a copy of the given one without the values that it sowed in
        earlier calls.
        """
        from flax import nnx

        # else named axes would require a mesh; the strategy shards the parameters
        with nnx.use_eager_sharding(False):
            if isinstance(self._module, nnx.Module):
                module = nnx.clone(self._module)
                # what earlier calls sowed is not part of the state
                nnx.pop(module, nnx.Intermediate)
                return module
            if hasattr(self._module, "items"):
                return build_module(self._module, rngs=nnx.Rngs(rng))
            return self._module(rngs=nnx.Rngs(rng))

    def _merge(
        self, params: Params, model_state: ModelState, rng: jax.Array, *, train: bool
    ) -> tuple[Any, _Structure]:
        """Return the module, in a mode, and the structure; `rng` seeds the random streams."""
        from flax import nnx

        structure = self._get_structure()
        module = nnx.merge(
            structure.graphdef,
            from_dict(params, structure.params),
            _reseed(structure.streams, rng),
            from_dict(model_state, structure.rest),
            copy=True,
        )
        if current_dtype() is not None:
            # Only in low precision: without a policy the module computes exactly as it does outside
            # the engine.
            _preserve_dtype_in_batch_norms(module)  # else all layers after one compute in float32
        module.train() if train else module.eval()
        return module, structure

    def _call(
        self,
        params: Params,
        model_state: ModelState,
        inputs: tuple[PyTree, ...],
        rng: jax.Array,
        *,
        train: bool,
    ) -> tuple[PyTree, PyTree, Sown]:
        """Return the module's outputs, the new model state and the sown values."""
        from flax import nnx

        module, structure = self._merge(params, model_state, rng, train=train)
        arguments: dict[str, Any] = train_arguments(type(module).__call__, train=train)
        mask_batch_norms(module)  # after the merge, which makes a new module for each trace
        if train and self._remat:
            load_provided("activation_checkpointing", "remat_nnx")(module, self._remat)
        prepare_observed(module)
        # Streams of the module have folded in 0, 1, ...; this is the next number.
        if structure.accepts_rngs:
            arguments["rngs"] = nnx.Rngs(
                jax.random.fold_in(rng, len(jax.tree.leaves(structure.streams)))
            )
        with warnings.catch_warnings():
            # `nnx.capture` requires the types of all variables that are sown, which are not known
            # here.
            warnings.filterwarnings("ignore", r"\s*Using 'Module.(sow|perturb)", DeprecationWarning)
            outputs = module(*inputs, **arguments)
        return outputs, *_read_variables(module, structure, self._sown.names)


def _read_variables(
    module: "nnx.Module", structure: _Structure, sown_names: Sequence[str]
) -> tuple[PyTree, Sown]:
    """Return a module's model state after a call, and the values that it has sown.

    Those are the variables that the call created, and the constructor's variables whose type or
    name is in `sown_names`. TypeError if the call created a parameter, or changed a variable's
    structure.
    """
    _, params, _, rest = _split(module, list_variables(structure.params))
    if created := list_variables(params).keys() - list_variables(structure.params).keys():
        raise TypeError(
            f"NnxModel: a call must not create parameters, got {sorted(map('.'.join, created))}"
        )
    variables = list_variables(rest)
    initial = list_variables(structure.rest)
    for path, variable in initial.items():
        before = shapes(variable)
        after = shapes(variables[path]) if path in variables else None
        # The arrays go back into the same places of the state, which `scan` and checkpoints
        # require.
        if before != after:
            raise TypeError(
                f"NnxModel: a call must keep the arrays of the variable {'.'.join(path)}, got the "
                f"shapes {after} after {before}"
            )
    sown: Sown = {}
    for path, variable in variables.items():
        kind = type(variable).__name__
        if path not in initial or kind in sown_names or path[-1] in sown_names:
            sown.setdefault(kind, {})[".".join(path)] = (
                variable.get_value() if is_variable(variable) else variable
            )
    return to_dict({path: variables[path] for path in initial}), sown


def _preserve_dtype_in_batch_norms(module: "nnx.Module") -> None:
    """Make batch norms return the input dtype, as in Linen; statistics stay in float32.

    By default, the float32 statistics promote the outputs, so all later layers would compute in
    float32.
    """
    from flax import nnx
    from flax.nnx.nn import dtypes

    def promote(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
        x, mean, var, scale, bias = arrays
        x, scale, bias = dtypes.promote_dtype((x, scale, bias), dtype=dtype, inexact=inexact)
        return x, mean, var, scale, bias

    for _, node in nnx.iter_modules(module):
        # A function that the user has set stays.
        if isinstance(node, nnx.BatchNorm) and node.promote_dtype is dtypes.promote_dtype:
            node.promote_dtype = promote


def _split(module: "nnx.Module", selected: Collection[Path]) -> tuple[Any, Any, Any, Any]:
    """Split a module into structure, parameters (each `nnx.Param`, and `selected`), random
    streams and the rest.
    """
    from flax import nnx

    def is_parameter(path: Sequence[Any], variable: object) -> bool:
        return isinstance(variable, nnx.Param) or tuple(map(str, path)) in selected

    parts: Any = nnx.split(module, is_parameter, nnx.RngState, ...)
    return parts


def _logical_axes(params: "nnx.State") -> dict[str, tuple[Any, ...]]:
    """Return the parameters' axis names by dotted path, renamed by the variable's
    `sharding_rules`, if any.
    """
    from flax import nnx

    logical_axes = {}
    for path, variable in nnx.to_flat_state(params):
        names = variable.get_metadata("out_sharding", None)
        if names is not None:
            rules = dict(variable.get_metadata("sharding_rules", None) or ())
            names = getattr(names, "spec", names)  # `names` may be a NamedSharding
            logical_axes[".".join(map(str, path))] = tuple(rules.get(name, name) for name in names)
    return logical_axes


def _reseed(like: "nnx.State", rng: jax.Array) -> Any:
    """Return random streams like `like`, each seeded with a different key derived from `rng`.

    The streams in stacked layers have an array with one key for each layer.
    """
    leaves, structure = jax.tree.flatten(like)

    def reseed(i: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            # the count of keys that a stream has given out
            return jnp.zeros(leaf.shape, leaf.dtype)
        # One key per leaf: streams that start from one key would repeat each other's numbers.
        key = jax.random.fold_in(rng, i)
        return jax.random.split(key, leaf.shape) if leaf.shape else key

    return jax.tree.unflatten(structure, [reseed(i, leaf) for i, leaf in enumerate(leaves)])
