"""Inferencer with MMEngine's interface: inputs of any kind, in batches, through a trained model."""

import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax

from jengine.config.annotations import Count
from jengine.config.containers import is_level, resolve
from jengine.config.errors import ArgumentError, closest
from jengine.config.load import load_config
from jengine.config.plugins import load_each
from jengine.data.collate import default_collate
from jengine.data.pipeline import Pipeline
from jengine.extras.serving.loaded_model import LoadedModel, load_model

PyTree = Any
_STEPS = ("preprocess", "forward", "visualize", "postprocess")


class BaseInferencer:
    """Predictor for raw inputs: preprocess, forward, visualize, postprocess.

    Subclasses override some of them.

    A call makes a list of the inputs, passes each through the pipeline, predicts in batches of one
    size, and returns `dict(predictions=[...], visualization=...)`.

    >>> class Doubler(BaseInferencer):
    ...     def __init__(self):
    ...         self.pipeline, self.show_progress = Pipeline(lambda x: {"x": x}), False
    ...
    ...     def forward(self, batch):
    ...         return (2 * batch["x"]).tolist()
    >>> Doubler()([1.0, 2.0, 3.0], batch_size=2)
    {'predictions': [2.0, 4.0, 6.0], 'visualization': None}

    Args:
      model: a `Model`, a config for it, or a config with `model` or the path of one; None for that
        of the checkpoint.
      weights: a checkpoint, or a work dir for the newest one.
      show_progress: whether to show a progress bar.

    Attributes:
      model: the `LoadedModel`.
      cfg: the config of the checkpoint's run.
      pipeline: the `Pipeline` for one input.
      preprocess_kwargs, forward_kwargs, visualize_kwargs, postprocess_kwargs: names of the
        arguments of a call that a step takes; a subclass sets them.
    """

    preprocess_kwargs: ClassVar[set[str]] = set()
    forward_kwargs: ClassVar[set[str]] = set()
    visualize_kwargs: ClassVar[set[str]] = set()
    postprocess_kwargs: ClassVar[set[str]] = set()

    def __init_subclass__(cls) -> None:
        """Check that no argument of a call belongs to two steps."""
        names = [name for step in _STEPS for name in getattr(cls, f"{step}_kwargs")]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ArgumentError(
                f"{cls.__name__}: an argument must belong to one step, got "
                f"{', '.join(duplicates)} twice"
            )

    def __init__(
        self, model: Any = None, weights: str | os.PathLike[str] = "", show_progress: bool = True
    ) -> None:
        if isinstance(model, str):
            model = load_config(model)
        if is_level(model) and "type" not in model and "model" in model:
            model = resolve(model)["model"]
        self.model: LoadedModel = load_model(weights, model=model)
        self.cfg = self.model.cfg
        self.pipeline = self._init_pipeline(self.cfg)
        self.show_progress = show_progress

    def __call__(
        self, inputs: Any, return_datasamples: bool = False, batch_size: Count = 1, **kwargs: Any
    ) -> dict[str, Any]:
        """Predict.

        Args:
          inputs: one input or a list; a directory stands for its files.
          return_datasamples: passed on to `postprocess`.
          batch_size: inputs in a batch.
          **kwargs: for the steps, see `preprocess_kwargs`.

        Raises:
          TypeError: an argument that no step takes.
        """
        from rich.progress import track

        chosen = self._dispatch_kwargs(kwargs)
        listed = self._inputs_to_list(inputs)
        if isinstance(getattr(self, "model", None), LoadedModel):
            self.model.batch_size = batch_size  # the last batch is padded: one program
        predictions: list[Any] = []
        batches = self.preprocess(listed, batch_size, **chosen["preprocess"])
        count = -(-len(listed) // batch_size)
        for batch in track(batches, "Inference", total=count, disable=not self.show_progress):
            predictions += self.forward(batch, **chosen["forward"])
        visualization = self.visualize(listed, predictions, **chosen["visualize"])
        return self.postprocess(
            predictions, visualization, return_datasamples, **chosen["postprocess"]
        )

    # --- The four steps ---

    def preprocess(
        self, inputs: Sequence[Any], batch_size: int = 1, **kwargs: Any
    ) -> Iterator[PyTree]:
        """Yield batches of transformed inputs."""
        for as_record in load_each("path_records"):
            inputs = [as_record(self.pipeline, each) for each in inputs]
        for start in range(0, len(inputs), batch_size):
            yield default_collate(
                [self.pipeline(each) for each in inputs[start : start + batch_size]]
            )

    def forward(self, batch: PyTree, **kwargs: Any) -> list[Any]:
        """Return one prediction for each input of a batch."""
        predictions = self.model(batch)
        count = len(jax.tree.leaves(predictions)[0])
        return [jax.tree.map(operator.itemgetter(i), predictions) for i in range(count)]

    def visualize(self, inputs: Sequence[Any], preds: Sequence[Any], **kwargs: Any) -> Any:
        """Return pictures of the predictions; here None."""
        return None

    def postprocess(
        self, preds: list[Any], visualization: Any, return_datasample: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the result of a call."""
        return {"predictions": preds, "visualization": visualization}

    # --- Parts ---

    def _init_pipeline(self, cfg: Any) -> Pipeline:
        """Return the transforms of an input; here those of the test data, or none."""
        dataset = (cfg.get("test_dataloader") or {}).get("dataset") or {}
        return Pipeline(dataset.get("pipeline") if isinstance(dataset, dict) else None)

    def _inputs_to_list(self, inputs: Any) -> list[Any]:
        if isinstance(inputs, str) and os.path.isdir(inputs):
            return sorted(entry.path for entry in os.scandir(inputs) if entry.is_file())
        return list(inputs) if isinstance(inputs, list | tuple) else [inputs]

    def _dispatch_kwargs(self, kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the arguments by step."""
        names = {step: getattr(self, f"{step}_kwargs") for step in _STEPS}
        known = set().union(*names.values())
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{type(self).__name__} has no argument {name!r}{closest(name, known)}"
                )
        return {
            step: {name: kwargs[name] for name in own if name in kwargs}
            for step, own in names.items()
        }
