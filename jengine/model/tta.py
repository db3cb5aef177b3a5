"""Prediction over several views of each batch, merged."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jengine.model.model import Losses, Model, PyTree
from jengine.model.precision import CastModel
from jengine.registry import MODELS


@MODELS.register_module()
class BaseTTAModel(Model):
    """A model that predicts several views of a batch and merges what comes out. Derive from it and define both parts.

    Example:
      >>> @MODELS.register_module()
      ... class FlipTTA(BaseTTAModel):
      ...     def augment(self, batch):
      ...         return [batch, {**batch, 'image': batch['image'][:, :, ::-1]}]
      ...
      ...     def merge_preds(self, predictions):
      ...         return sum(predictions) / len(predictions)

    Args:
      module: the model; everything but `predict` is left to it.
    """

    def __init__(self, module: Model) -> None:
        self.module = module

    @property
    def module_types(self) -> Mapping[str, str]:  # type: ignore[override]
        """Those of the model inside."""
        return self.module.module_types

    @property
    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:  # type: ignore[override]
        """Those of the model inside."""
        return self.module.logical_axes

    def augment(self, batch: PyTree) -> Sequence[PyTree]:
        """The views of a batch, each of which the model predicts. Pure; part of the compiled step."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `augment(batch)`, which gives the views of a batch"
        )

    def merge_preds(self, predictions: Sequence[PyTree]) -> PyTree:
        """One prediction from those of the views, in their order. Pure; part of the compiled step."""
        raise NotImplementedError(f"{type(self).__name__} must define `merge_preds(predictions)`, which makes them one")

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Predicts every view and merges."""
        return self.merge_preds([self.module.predict(params, model_state, view) for view in self.augment(batch)])

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Initialises the model inside."""
        return self.module.init(rng, batch)

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """The loss of the model inside, of the batch as it is."""
        return self.module.loss(params, model_state, batch, rng=rng, hyperparams=hyperparams)


def get_model(model: Model) -> Model:
    """The model itself, taken out of what wraps it: a precision policy, test time augmentation."""
    while isinstance(model, CastModel | BaseTTAModel):
        model = model.model if isinstance(model, CastModel) else model.module
    return model
