"""Draws the samples of a test, and writes the model's graph."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine.annotations import Count
from jengine.errors import ConfigError
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class NaiveVisualizationHook(Hook):
    """Hands every sample of every `interval`-th test batch to the visualizer's `add_datasample`, as an image again.

    The image is brought back from what preprocessing made of it: `image * std + mean`, without its padding (where the
    batch has `scale`, int[B, 2], width and height), in its first size (where it has `ori_width` and `ori_height`,
    int[B]). Samples are called by the file in `img_path` of the dataset's metainfo, or by their number.

    Args:
      interval: test batches from one that is drawn to the next.
      draw_gt: passed on: draw the ground truth.
      draw_pred: passed on: draw the prediction.
      img_norm_cfg: `dict(mean=..., std=...)` that images were normalised with; None: they were not.
      image: the batch's entry with the images, [B, H, W, C].

    Raises:
      ConfigError: an interval below 1; from the hook, a batch without images.
    """

    priority = "LOWEST"

    def __init__(
        self,
        interval: Count = 1,
        draw_gt: bool = True,
        draw_pred: bool = True,
        img_norm_cfg: Mapping[str, Any] | None = None,
        image: str = "image",
    ) -> None:
        self.interval = interval
        self.draw_gt = draw_gt
        self.draw_pred = draw_pred
        self.img_norm_cfg = None if img_norm_cfg is None else dict(img_norm_cfg)
        self.image = image
        self._drawn = 0

    def before_train(self, runner: Runner) -> None:
        """Writes the model's graph."""
        runner.visualizer.add_graph(runner.model)

    def before_test_epoch(self, runner: Runner) -> None:
        """Begins to count samples."""
        self._drawn = 0

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Draws the samples of a batch if it is one's turn; padding is not drawn."""
        if not isinstance(data_batch, Mapping) or self.image not in data_batch:
            found = sorted(data_batch) if isinstance(data_batch, Mapping) else type(data_batch).__name__
            raise ConfigError(f"NaiveVisualizationHook draws the batch entry {self.image!r}, found {found}")
        first, rows = self._drawn, len(data_batch[self.image])
        self._drawn += rows
        if not self.every_n_inner_iters(batch_idx, self.interval):
            return
        batch, predictions = jax.device_get((data_batch, outputs))
        files = (getattr(runner.test_dataloader, "metainfo", None) or {}).get("img_path")
        for row in np.flatnonzero(batch.get("mask", np.ones(rows, bool))):
            sample, prediction = (jax.tree.map(lambda x, row=row: x[row], tree) for tree in (batch, predictions))
            number = int(sample.get("sample_idx", first + row))
            name = os.path.basename(files[number]) if files is not None else f"sample_{number}"
            runner.visualizer.add_datasample(
                name,
                self._restored(sample),
                dict(gt=sample, pred=prediction),
                draw_gt=self.draw_gt,
                draw_pred=self.draw_pred,
                step=runner.iter,
            )

    def _restored(self, sample: Mapping[str, np.ndarray]) -> np.ndarray:
        """The image as it was before preprocessing, uint8[H, W, C]."""
        image = sample[self.image]
        if self.img_norm_cfg is not None:
            image = image * np.asarray(self.img_norm_cfg["std"]) + np.asarray(self.img_norm_cfg["mean"])
        image = np.clip(np.round(image), 0, 255).astype(np.uint8)
        if "scale" in sample:
            width, height = sample["scale"]
            image = image[:height, :width]
        if "ori_width" in sample:
            image = _resized(image, int(sample["ori_width"]), int(sample["ori_height"]))
        return image


def _resized(image: np.ndarray, width: int, height: int) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("NaiveVisualizationHook resizes images with Pillow: pip install 'jengine[draw]'") from error
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    resized = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    return resized[..., None] if resized.ndim == 2 else resized
