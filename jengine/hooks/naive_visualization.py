"""Draw the samples of a test, and write the model's graph."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine.annotations import Count
from jengine.data.masking import get_mask
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.selection import Selector, find, select_array


@HOOKS.register_module()
class NaiveVisualizationHook(Hook):
    """Pass every sample of every `interval`-th test batch, as an image, to the visualizer's `add_datasample`.

    The hook reverts the preprocessing of images: it computes `image * std + mean`, removes the padding (if the batch
    has `scale`, int[B, 2], width and height), and restores the original size (if it has `ori_width` and `ori_height`,
    int[B]). A sample is named by its file in `img_path` of the dataset's metainfo, or else by its index.

    Args:
      interval: number of test batches between two that are drawn.
      draw_gt: draw the ground truth.
      draw_pred: draw the prediction.
      img_norm_cfg: `dict(mean=..., std=...)` of the normalization; None if images were not normalized.
      image: the entry of the batch that holds the images, [B, H, W, C]: its name, index or dotted path.

    Raises:
      ConfigError: an interval below 1.
      KeyError: from the hook, a batch without images.
    """

    priority = "LOWEST"

    def __init__(
        self,
        interval: Count = 1,
        draw_gt: bool = True,
        draw_pred: bool = True,
        img_norm_cfg: Mapping[str, Any] | None = None,
        image: Selector = "image",
    ) -> None:
        self.interval = interval
        self.draw_gt = draw_gt
        self.draw_pred = draw_pred
        self.img_norm_cfg = None if img_norm_cfg is None else dict(img_norm_cfg)
        self.image = image
        self._num_examples = 0  # examples of the test so far

    def before_train(self, runner: Runner) -> None:
        """Write the model's graph."""
        runner.visualizer.add_graph(runner.model)

    def before_test_epoch(self, runner: Runner) -> None:
        """Reset the count of examples."""
        self._num_examples = 0

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Draw the examples of the batch if it is due, without its padding."""
        images = select_array(data_batch, self.image, "NaiveVisualizationHook.image", "batch")
        first, batch_size = self._num_examples, len(images)
        self._num_examples += batch_size
        if not self.every_n_inner_iters(batch_idx, self.interval):
            return
        batch, predictions = jax.device_get((data_batch, outputs))
        files = (runner.test_dataloader.metainfo or {}).get("img_path")
        mask = get_mask(batch)
        for i in np.flatnonzero(np.ones(batch_size, bool) if mask is None else mask):
            sample, prediction = (jax.tree.map(lambda x, i=i: x[i], tree) for tree in (batch, predictions))
            index = int(find(sample, "sample_idx", first + i))
            name = os.path.basename(files[index]) if files is not None else f"sample_{index}"
            runner.visualizer.add_datasample(
                name,
                self._restore_image(sample),
                dict(gt=sample, pred=prediction),
                draw_gt=self.draw_gt,
                draw_pred=self.draw_pred,
                step=runner.iter,
            )

    def _restore_image(self, sample: Any) -> np.ndarray:
        """Return the image before preprocessing, uint8[H, W, C]."""
        image = find(sample, self.image)
        if self.img_norm_cfg is not None:
            image = image * np.asarray(self.img_norm_cfg["std"]) + np.asarray(self.img_norm_cfg["mean"])
        image = np.clip(np.round(image), 0, 255).astype(np.uint8)
        if (scale := find(sample, "scale")) is not None:
            width, height = scale
            image = image[:height, :width]
        if (ori_width := find(sample, "ori_width")) is not None:
            image = _resize(image, int(ori_width), int(find(sample, "ori_height")))
        return image


def _resize(image: np.ndarray, width: int, height: int) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("NaiveVisualizationHook resizes images with Pillow: pip install 'jengine[draw]'") from error
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    resized = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    return resized[..., None] if resized.ndim == 2 else resized
