"""Test-time augmentation: predict several views of each batch and merge the predictions."""

from collections.abc import Sequence
from typing import Any

import jax

from jengine.config.annotations import is_mapping
from jengine.config.errors import config_path
from jengine.config.registry import MODELS
from jengine.model.model import Batch, ModelState, ModelWrapper, Params, PyTree, predict_with_key


@MODELS.register_module()
class BaseTTAModel(ModelWrapper):
    """Model that predicts several views of a batch; subclasses define `augment` and `merge_preds`.

    >>> class FlipTTA(BaseTTAModel):
    ...     def augment(self, batch):
    ...         return [batch, {**batch, "image": batch["image"][:, :, ::-1]}]
    ...
    ...     def merge_preds(self, predictions):
    ...         return sum(predictions) / len(predictions)

    Args:
      module: the model, or a config for it; it receives all calls but `predict`, and computes
        losses without augmentation.
    """

    keeps_variables = True

    def __init__(self, module: Any) -> None:
        if is_mapping(module):
            with config_path("module"):
                module = MODELS.build(module)
        super().__init__(module)
        self.module = module

    def augment(self, batch: Batch) -> Sequence[PyTree]:
        """Return the views to predict. Pure; part of the compiled step."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `augment(batch)`, which returns the views of a "
            "batch"
        )

    def merge_preds(self, predictions: Sequence[PyTree]) -> PyTree:
        """Return one prediction for those of all views, in order. Pure.

        Part of the compiled step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `merge_preds(predictions)`")

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the merged predictions."""
        views = self.augment(batch)
        # With one key for all, the views would share the noise of a model that samples.
        keys = [None if rng is None else jax.random.fold_in(rng, i) for i in range(len(views))]
        return self.merge_preds(
            [
                predict_with_key(self.module, params, model_state, *pair)
                for pair in zip(views, keys, strict=True)
            ]
        )
