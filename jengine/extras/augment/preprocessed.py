"""Model that gets batches after some steps, in training and in prediction alike."""

from collections.abc import Sequence
from typing import Annotated, Any

from jengine.config.annotations import ConfigOf
from jengine.config.errors import config_path
from jengine.config.registry import MODELS
from jengine.data.pipeline import build_function
from jengine.model.model import Batch, ModelWrapper


@MODELS.register_module()
class PreprocessedModel(ModelWrapper):
    """Model around another one, whose batches pass through some steps first, inside the compiled
    programs.

    It is the place of MMEngine's `data_preprocessor`: what training, validation, test, prediction
    and exported functions all need, such as the normalization of images.

    >>> from jengine.model.functional import FunctionalModel
    >>> inner = FunctionalModel(dict, lambda params, batch: 0.0, lambda params, batch: batch["x"])
    >>> PreprocessedModel(inner, steps=[lambda batch: {"x": batch["x"] / 2}]).predict(
    ...     {}, {}, {"x": 3.0}
    ... )
    1.5

    Args:
      model: the model, or a config for it.
      steps: pure functions `batch -> batch`, or configs in TRANSFORMS: `dict(type="BatchNormalize",
        ...)`.
    """

    keeps_variables = True

    def __init__(self, model: Annotated[Any, ConfigOf(MODELS)], steps: Sequence[Any]) -> None:
        super().__init__(model)
        self._steps = []
        for i, step in enumerate(steps):
            with config_path("steps", i):
                self._steps.append(build_function(step, "a step must be a function batch -> batch"))

    def _prepare(self, batch: Batch) -> Batch:
        for step in self._steps:
            batch = step(batch)
        return batch
