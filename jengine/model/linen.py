"""Model adapter for Flax Linen modules."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util

from jengine.config.errors import config_path
from jengine.config.paths import dotted
from jengine.config.plugins import load_provided
from jengine.config.registry import MODELS
from jengine.model.adapters import (
    build_loss,
    build_module,
    call_loss,
    select_inputs,
    train_arguments,
)
from jengine.model.autocast import autocast
from jengine.model.model import Batch, Losses, Model, ModelState, Params, PyTree, check_state_names
from jengine.model.module_types import ModuleType, find_module_type, find_stacked
from jengine.model.padding import exclude_padding
from jengine.model.selection import Selector
from jengine.model.sown import Sown, SownValues

Next = Callable[..., Any]  # with `Args` and `Kwargs`, what an interceptor of Linen gets
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_INTERMEDIATES = "intermediates"  # the collection that `init` never returns


@MODELS.register_module()
class LinenModel(Model):
    """Model from a `flax.linen` module and a loss on its outputs.

    The collection `params` is differentiated. All other collections (`batch_stats`, …) are the
    model state, which is mutable in training and fixed in prediction; except those that the module
    only sows into, which are read after each call and are not part of any state. If the module's
    `__call__` has an argument `train`, `training`, `is_train`, `is_training` or `deterministic`, it
    is set accordingly. In low precision, the module's parameters and inputs are cast, and the
    outputs are cast back to float32; `loss` gets the batch unchanged.

    >>> from jengine.model.losses import CrossEntropy
    >>> from flax import linen as nn
    >>> model = LinenModel(nn.Dense(3), loss=CrossEntropy(label="label"), inputs="features")

    Args:
      module: the module or a config (`dict(type=..., ...)`).
      loss: function `(outputs, batch) -> losses`, with optional arguments `hyperparams` and `sown`,
        the sown values by collection and dotted path; or a config.
      inputs: the batch entries to call the module with, in order, each a name, index or dotted
        path; None to pass the whole batch.
      rngs: the random number streams in training.
      predict_rngs: those that prediction requires too, such as a sampler's; their keys differ
        between batches, but not between evaluations.
      sown_losses: sown collections or values to add to the losses; or a dict from name to weight.
        () ignores losses that are sown; with None they are an error.
      sown_predictions: sown values to return with the predictions, which are then a dict with
        `outputs` and these names.
      activation_checkpointing: paths of submodules, with wildcards (`'layers_*'`), that compute
        their intermediate results again for the gradients instead of keeping them: less memory for
        more time.
    """

    def __init__(
        self,
        module: Any,
        loss: Callable[..., Any] | Mapping[str, Any],
        inputs: Selector | Sequence[Selector] | None = "image",
        rngs: Sequence[str] = ("dropout",),
        predict_rngs: Sequence[str] = (),
        sown_losses: Sequence[str] | Mapping[str, float] | None = None,
        sown_predictions: Sequence[str] = (),
        activation_checkpointing: Sequence[str] = (),
    ) -> None:
        with config_path("module"):
            self.module = build_module(module)
        if isinstance(self.module, type) or not callable(getattr(self.module, "init", None)):
            raise TypeError(
                f"LinenModel: `module` must be a Linen module or its config, got {self.module!r}"
            )
        self._loss = build_loss(loss)
        self._inputs = inputs
        self._rngs = tuple(rngs)
        self._predict_rngs = tuple(predict_rngs)
        self._remat = tuple(activation_checkpointing)
        self._sown = SownValues("LinenModel", sown_losses, sown_predictions)
        # Collections that a call makes anew: kept in the state, they would grow and change its
        # structure.
        self._sown_collections: tuple[str, ...] = (_INTERMEDIATES, *self._sown.names)
        self.module_types: dict[str, ModuleType] = {}
        self.logical_axes: dict[str, tuple[str | None, ...]] = {}

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Initialize the module in inference mode, and record the submodule types and the
        logical axes.
        """
        inputs = select_inputs(batch, self._inputs, "LinenModel")
        # A dict drops duplicates: training and prediction may use the same stream.
        rngs = _keys(dict.fromkeys(("params", *self._rngs, *self._predict_rngs)), rng)

        def initialize() -> Mapping[str, Any]:
            variables = self._initialize(rngs, inputs, train=False)
            # the values of the others stay as they are
            if self._has_more_in_training(variables, rngs, inputs):
                training = _flatten_nested(self._initialize(rngs, inputs, train=True))
                variables = traverse_util.unflatten_dict({**training, **_flatten_nested(variables)})
            return variables

        variables, self.module_types = record_types(initialize)
        if self._remat:
            check_patterns = load_provided("activation_checkpointing", "check_patterns")
            check_patterns(self._remat, self.module_types)
        # The box of `nn.with_partitioning` is the leaf here: the axis names are in it, not in the
        # array.
        leaves = jax.tree_util.tree_flatten_with_path(
            variables.get("params", {}), is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned)
        )[0]
        self.logical_axes = {
            dotted(path): tuple(x.names) for path, x in leaves if isinstance(x, nn.Partitioned)
        }
        variables = dict(nn.meta.unbox(variables))  # the axis names are in `logical_axes` now
        check_state_names("a collection", variables)
        sown = [name for name in variables if self._is_sown(name, variables, inputs)]
        self._sown_collections = tuple(dict.fromkeys((_INTERMEDIATES, *self._sown.names, *sown)))
        return variables.pop("params", {}), {
            name: x for name, x in variables.items() if name not in sown
        }

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
        with exclude_padding(batch), self._checkpoint_modules():
            outputs, updated = self._apply(
                {"params": params, **model_state},
                *select_inputs(batch, self._inputs, "LinenModel"),
                rngs=_keys(self._rngs, rng),
                # what is not mutable cannot be sown
                mutable=[*model_state, *self._sown_collections],
                **train_arguments(type(self.module).__call__, train=True),
            )
        sown = _flatten({name: x for name, x in updated.items() if name not in model_state})
        losses = call_loss(self._loss, outputs, batch, hyperparams, sown)
        # a call may skip one
        new_state = {name: updated.get(name, old) for name, old in model_state.items()}
        return self._sown.add_losses(losses, outputs, sown, self._loss), new_state

    @property
    def predicts_with_rng(self) -> bool:
        """Whether prediction requires random streams."""
        return bool(self._predict_rngs)

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the module's outputs in inference mode."""
        outputs = self._apply(
            {"params": params, **model_state},
            *select_inputs(batch, self._inputs, "LinenModel"),
            rngs=_keys(self._predict_rngs, rng),
            # With any list, even an empty one, `apply` returns a pair.
            mutable=list(self._sown_collections) if self._sown.are_predicted else False,
            **train_arguments(type(self.module).__call__, train=False),
        )
        if not self._sown.are_predicted:
            return outputs
        outputs, sown = outputs
        return self._sown.add_predictions(outputs, _flatten(sown))

    def merge(self, params: Params, model_state: ModelState, *, train: bool = False) -> Any:
        """Return the bound module: call it like a function, or `unbind()` it to `(module,
        variables)`.

        With `train` it has random streams and a mutable model state; the call's arguments still
        select the mode.
        """
        variables = {"params": params, **model_state}
        if not train:
            return self.module.bind(variables, rngs=_keys(self._predict_rngs))
        return self.module.bind(variables, rngs=_keys(self._rngs), mutable=list(model_state))

    def tabulate(self, batch: Batch, width: int = 160) -> str:
        """Return Flax's table of the layers, with inputs, outputs, FLOPs and variables."""
        rngs = _keys(dict.fromkeys(("params", *self._rngs, *self._predict_rngs)))
        console = {"force_terminal": False, "force_jupyter": False, "width": width}
        tabulate = nn.tabulate(self.module, rngs, compute_flops=True, console_kwargs=console)
        return tabulate(
            *select_inputs(batch, self._inputs, "LinenModel"),
            **train_arguments(type(self.module).__call__, train=False),
        )

    def _checkpoint_modules(self) -> Any:
        if not self._remat:
            return contextlib.nullcontext()
        return load_provided("activation_checkpointing", "remat_linen")(self._remat)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with _dense_general_without_mesh():
            return autocast(self.module.apply)(*args, **kwargs)

    def _initialize(
        self, rngs: Mapping[str, jax.Array], inputs: tuple[Any, ...], train: bool
    ) -> Mapping[str, Any]:
        modes = train_arguments(type(self.module).__call__, train=train)
        with _dense_general_without_mesh():
            variables: Mapping[str, Any] = self.module.init(rngs, *inputs, **modes)
            return variables

    def _has_more_in_training(
        self, variables: Mapping[str, Any], rngs: Mapping[str, jax.Array], inputs: tuple[Any, ...]
    ) -> bool:
        """Return whether there are parameters that exist only in training mode, such as those of
        an auxiliary head.
        """
        if not train_arguments(type(self.module).__call__, train=True):
            return False
        try:
            training = jax.eval_shape(lambda: self._initialize(rngs, inputs, train=True))
        except Exception:
            # of any type: the loss, which calls the module in training mode, explains its errors
            return False
        known, found = (_flatten_nested(tree.get("params", {})) for tree in (variables, training))
        return not found.keys() <= known.keys()

    def _is_sown(self, name: str, variables: Mapping[str, Any], inputs: tuple[Any, ...]) -> bool:
        """Return whether the module only sows into a collection: it works without, as `sow` then
        does nothing.

        Only collections that may be sown are tried: tuples, which is how `sow` collects values, and
        names with 'loss'.
        """
        if name == "params" or name in self._sown.names:
            return name != "params"
        values = traverse_util.flatten_dict(variables[name]).values()
        if "loss" not in name.lower() and not all(isinstance(value, tuple) for value in values):
            return False
        # Linen does not mark what was sown: a variable that is read would be missing now, a sown
        # one is not.
        rest = {other: value for other, value in variables.items() if other != name}
        arguments = train_arguments(type(self.module).__call__, train=False)
        rngs = _keys((*self._rngs, *self._predict_rngs))
        try:
            jax.eval_shape(
                lambda variables: self._apply(variables, *inputs, rngs=rngs, **arguments), rest
            )
        except Exception:  # of any type: the module reads a variable that is missing
            return False
        return True


def record_types(
    initialize: Callable[[], Mapping[str, Any]],
) -> tuple[Mapping[str, Any], dict[str, ModuleType]]:
    """Return the variables that a Linen module's `init` returns, and the submodule types by
    dotted path.
    """
    classes: dict[str, type] = {}
    # shapes of the modules' own parameters, within `nn.scan` and `nn.vmap`
    layers: dict[str, dict[str, Any]] = {}

    def record(
        next_fun: Next, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
    ) -> Any:
        module = context.module
        path = ".".join(context.module.path)
        classes.setdefault(path, type(module))  # in the order of the definition
        outputs = next_fun(*args, **kwargs)
        # classes of transformations, such as that of `nn.remat`, have other paths
        classes[path] = type(module)
        own = module.variables.get("params", {})
        layers.setdefault(path, {}).update(
            {
                name: jax.tree.leaves(x)[0].shape
                for name, x in own.items()
                if not isinstance(x, Mapping)
            }
        )
        return outputs

    with nn.intercept_methods(record):
        variables = initialize()
    params = variables.get("params", {})
    return variables, {
        path: _describe(path, cls, params, layers.get(path, {})) for path, cls in classes.items()
    }


def _describe(path: str, cls: type, params: Any, layers: Mapping[str, Any]) -> ModuleType:
    """Return the type of a module, with the axes that its own parameters have and those of a
    single layer have not.
    """
    for name in filter(None, path.split(".")):
        params = params.get(name, {}) if isinstance(params, Mapping) else {}
    shapes = [
        (jax.tree.leaves(params[name])[0].shape, layer)
        for name, layer in layers.items()
        if name in params
    ]
    if not shapes:
        return find_module_type(cls)
    # A module whose own parameters have axes for experts says how many
    experts = getattr(cls, "expert_axes", 0)
    return find_module_type(
        cls, find_stacked([(shape, layer[experts:]) for shape, layer in shapes])
    )


def _dense_general_without_mesh() -> Any:
    """Return a context in which each `nn.DenseGeneral` is called without the step's mesh.

    DenseGeneral initializes a matrix and reshapes it, also in `apply`, which compares the shapes.
    On a mesh, the axis names from `nn.with_partitioning` constrain that matrix, although they name
    the axes after reshaping.
    """

    def call(
        next_fun: Next, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
    ) -> Any:
        if not isinstance(context.module, nn.DenseGeneral):
            return next_fun(*args, **kwargs)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return next_fun(*args, **kwargs)

    return nn.intercept_methods(call)


def _flatten_nested(tree: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    flat: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(dict(tree), keep_empty_nodes=True)
    return flat


def _flatten(collections: Mapping[str, Any]) -> Sown:
    return {
        name: traverse_util.flatten_dict(variables, sep=".")
        for name, variables in collections.items()
    }


def _keys(names: Iterable[str], rng: jax.Array | None = None) -> dict[str, jax.Array]:
    """Return a key for each random stream, derived from `rng`; fixed ones without."""
    root = jax.random.key(0) if rng is None else rng
    # `fold_in`, unlike `split`, leaves the other keys as they are if a stream is added at the end.
    return {name: jax.random.fold_in(root, i) for i, name in enumerate(names)}
