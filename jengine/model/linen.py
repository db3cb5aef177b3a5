"""Flax Linen modules as a model."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jengine.model.adapters import build_loss, build_module, call_loss, select_inputs
from jengine.model.autocast import autocast
from jengine.model.model import Losses, Model, PyTree
from jengine.paths import dotted
from jengine.registry import MODELS

# How modules call the switch between training and inference, and its value in training.
_TRAIN_SWITCHES = {"train": True, "training": True, "is_training": True, "deterministic": False}


@MODELS.register_module()
class LinenModel(Model):
    """A `flax.linen` module with a loss on its outputs.

    The collection `params` is differentiated; every other collection that the module makes (`batch_stats`, …) is the
    model state, mutable in training and fixed in prediction. The switch between the two is passed when the module's
    `__call__` has a parameter `train`, `training`, `is_training` or `deterministic`. Under a low precision the module's
    parameters and inputs are cast and its outputs come back in float32; `loss` receives the batch as it is.

    Args:
      module: the module, or a config of one (`dict(type=..., ...)`).
      loss: `(outputs, batch) -> losses`, taking `hyperparams` too if it names them; or a config of one.
      inputs: the batch entries that the module is called with, in order; None passes the whole batch.
      rngs: the streams of random numbers that the module draws from in training.
    """

    def __init__(
        self,
        module: Any,
        loss: Callable[..., Any] | Mapping[str, Any],
        inputs: str | Sequence[str] | None = "image",
        rngs: Sequence[str] = ("dropout",),
    ) -> None:
        self.module = build_module(module)
        self._loss = build_loss(loss)
        self._inputs = inputs if inputs is None or isinstance(inputs, str) else tuple(inputs)
        self._rngs = tuple(rngs)
        parameters = inspect.signature(type(self.module).__call__).parameters
        self._switch = next((name for name in _TRAIN_SWITCHES if name in parameters), None)
        self.module_types: dict[str, str] = {}
        self.logical_axes: dict[str, tuple[str | None, ...]] = {}

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Initialises the module on `batch` in inference mode; notes its submodules' types and its logical axes."""
        from flax import linen as nn

        types: dict[str, str] = {}

        def note_type(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            types[".".join(context.module.path)] = type(context.module).__name__
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(note_type):
            rngs = {name: jax.random.fold_in(rng, i) for i, name in enumerate(("params", *self._rngs))}
            variables = self.module.init(rngs, *select_inputs(batch, self._inputs), **self._mode(train=False))
        self.module_types = types
        boxed = jax.tree_util.tree_flatten_with_path(
            variables.get("params", {}), is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned)
        )[0]
        self.logical_axes = {dotted(path): tuple(x.names) for path, x in boxed if isinstance(x, nn.Partitioned)}
        variables = dict(nn.meta.unbox(variables))
        return variables.pop("params", {}), variables

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Applies the module in training mode and its loss to the outputs."""
        rngs = {name: jax.random.fold_in(rng, i) for i, name in enumerate(self._rngs)}
        outputs = autocast(self.module.apply)(
            {"params": params, **model_state},
            *select_inputs(batch, self._inputs),
            rngs=rngs,
            mutable=list(model_state) if model_state else False,
            **self._mode(train=True),
        )
        if model_state:
            outputs, model_state = outputs
        return call_loss(self._loss, outputs, batch, hyperparams), dict(model_state)

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Applies the module in inference mode."""
        inputs = select_inputs(batch, self._inputs)
        return autocast(self.module.apply)({"params": params, **model_state}, *inputs, **self._mode(train=False))

    def _mode(self, *, train: bool) -> dict[str, bool]:
        if self._switch is None:
            return {}
        return {self._switch: _TRAIN_SWITCHES[self._switch] is train}
