"""Predict with test-time augmentation: merge the predictions for several views of each batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jengine.model.model import Losses, Model, PyTree
from jengine.model.precision import CastModel
from jengine.registry import MODELS


@MODELS.register_module()
class BaseTTAModel(Model):
    """Predict several views of a batch and merge the predictions; subclasses define `augment` and `merge_preds`.

    Examples:
      >>> @MODELS.register_module()
      ... class FlipTTA(BaseTTAModel):
      ...     def augment(self, batch):
      ...         return [batch, {**batch, 'image': batch['image'][:, :, ::-1]}]
      ...
      ...     def merge_preds(self, predictions):
      ...         return sum(predictions) / len(predictions)

    Args:
      module: the model; all methods but `predict` are delegated to it.
    """

    def __init__(self, module: Model) -> None:
        self.module = module

    @property
    def module_types(self) -> Mapping[str, str]:  # type: ignore[override]
        """The module types of the inner model."""
        return self.module.module_types

    @property
    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:  # type: ignore[override]
        """The logical axes of the inner model."""
        return self.module.logical_axes

    def augment(self, batch: PyTree) -> Sequence[PyTree]:
        """Return the views of a batch to predict. Pure; part of the compiled step."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `augment(batch)`, which returns the views of a batch"
        )

    def merge_preds(self, predictions: Sequence[PyTree]) -> PyTree:
        """Return one prediction from the predictions of the views, in order. Pure; part of the compiled step."""
        raise NotImplementedError(f"{type(self).__name__} must define `merge_preds(predictions)`")

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Return the merged predictions of all views."""
        return self.merge_preds([self.module.predict(params, model_state, view) for view in self.augment(batch)])

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Initialize the inner model."""
        return self.module.init(rng, batch)

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Return the loss of the inner model, without augmentation."""
        return self.module.loss(params, model_state, batch, rng=rng, hyperparams=hyperparams)


def get_model(model: Model) -> Model:
    """Return the model without its wrappers: precision policy and test-time augmentation."""
    while isinstance(model, CastModel | BaseTTAModel):
        model = model.model if isinstance(model, CastModel) else model.module
    return model
