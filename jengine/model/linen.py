"""Build a model from a Flax Linen module."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jengine.model.adapters import build_loss, build_module, call_loss, select_inputs
from jengine.model.autocast import autocast
from jengine.model.model import Losses, Model, PyTree
from jengine.paths import dotted
from jengine.registry import MODELS
from jengine.selection import Selector

# Usual names of the argument that selects training or inference, and its value in training.
_TRAIN_ARGUMENTS = {"train": True, "training": True, "is_training": True, "deterministic": False}


@MODELS.register_module()
class LinenModel(Model):
    """Adapt a `flax.linen` module and a loss of its outputs.

    The collection `params` is differentiated. All other collections of the module (`batch_stats`, …) are the model
    state, which is mutable in training and fixed in prediction. If the module's `__call__` has an argument `train`,
    `training`, `is_training` or `deterministic`, it is set accordingly. In low precision, the module's parameters and
    inputs are cast, and its outputs are cast back to float32; the batch is passed to `loss` unchanged.

    Args:
      module: the module or its config (`dict(type=..., ...)`).
      loss: function `(outputs, batch) -> losses`, with an optional argument `hyperparams`; or its config.
      inputs: the batch entries to call the module with, in order, each a name, index or dotted path; None to pass the
        whole batch.
      rngs: names of the module's random number streams in training.
    """

    def __init__(
        self,
        module: Any,
        loss: Callable[..., Any] | Mapping[str, Any],
        inputs: Selector | Sequence[Selector] | None = "image",
        rngs: Sequence[str] = ("dropout",),
    ) -> None:
        self.module = build_module(module)
        self._loss = build_loss(loss)
        self._inputs = inputs
        self._rngs = tuple(rngs)
        parameters = inspect.signature(type(self.module).__call__).parameters
        self._train_argument = next((name for name in _TRAIN_ARGUMENTS if name in parameters), None)
        self.module_types: dict[str, str] = {}
        self.logical_axes: dict[str, tuple[str | None, ...]] = {}

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Initialize the module in inference mode, and record the types of its submodules and its logical axes."""
        from flax import linen as nn

        types: dict[str, str] = {}

        def record_type(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            types[".".join(context.module.path)] = type(context.module).__name__
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(record_type):
            rngs = {name: jax.random.fold_in(rng, i) for i, name in enumerate(("params", *self._rngs))}
            variables = self.module.init(rngs, *select_inputs(batch, self._inputs), **self._train_kwargs(train=False))
        self.module_types = types
        leaves = jax.tree_util.tree_flatten_with_path(
            variables.get("params", {}), is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned)
        )[0]
        self.logical_axes = {dotted(path): tuple(x.names) for path, x in leaves if isinstance(x, nn.Partitioned)}
        variables = dict(nn.meta.unbox(variables))
        return variables.pop("params", {}), variables

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Return the losses of the module's outputs in training mode, and the new model state."""
        rngs = {name: jax.random.fold_in(rng, i) for i, name in enumerate(self._rngs)}
        outputs = autocast(self.module.apply)(
            {"params": params, **model_state},
            *select_inputs(batch, self._inputs),
            rngs=rngs,
            mutable=list(model_state) if model_state else False,
            **self._train_kwargs(train=True),
        )
        if model_state:
            outputs, model_state = outputs
        return call_loss(self._loss, outputs, batch, hyperparams), dict(model_state)

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Return the module's outputs in inference mode."""
        inputs = select_inputs(batch, self._inputs)
        return autocast(self.module.apply)(
            {"params": params, **model_state}, *inputs, **self._train_kwargs(train=False)
        )

    def _train_kwargs(self, *, train: bool) -> dict[str, bool]:
        """Return the argument that selects training or inference, if the module has one."""
        if self._train_argument is None:
            return {}
        return {self._train_argument: _TRAIN_ARGUMENTS[self._train_argument] is train}
