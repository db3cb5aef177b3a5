"""Pictures of test samples, and the model graph."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine.config.annotations import Count
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.data.masking import get_mask
from jengine.extras.drawing.samples import to_entry
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.convert import import_pillow, resize_nearest
from jengine.model.selection import Selector, find, select_array
from jengine.parallel.local_batch import process_local_batch


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class NaiveVisualizationHook(Hook):
    """Pictures of every sample in every `interval`-th test batch, with label and prediction.

    The hook reverts the preprocessing of images: it computes `image * std + mean`, removes the
    padding (if the batch has `scale`, int[B, 2], width and height), and restores the original size
    (if it has `ori_width` and `ori_height`, int[B]). A sample is named by the file in `img_path` of
    the dataset metainfo, or else by its index. With several processes, only examples of the first
    one are drawn.

    Labels and predictions are classes, numbers or segmentations: int[B], float[B], logits float[B,
    C], class indices int[B, H, W], or logits float[B, H, W, C]. For others you can override
    `make_data_sample` in a subclass.

    Args:
      interval: number of test batches between two that are drawn.
      draw_gt: draw the ground truth.
      draw_pred: draw the prediction.
      img_norm_cfg: `dict(mean=..., std=...)` for images from 0 to 255; None if images were not
        normalized.
      image: name, index or dotted path of the batch entry with the images, [B, H, W, C], integers
        from 0 to 255 or floats from 0 to 1.
      label: the batch entry with the ground truth, if any.
      prediction: the entry in the predictions; None if they are an array.
    """

    extra = "draw"
    priority = "LOWEST"

    interval: Count = 1
    draw_gt: bool = True
    draw_pred: bool = True
    img_norm_cfg: Mapping[str, Any] | None = None
    image: Selector = "image"
    label: Selector = "label"
    prediction: Selector | None = None

    def __post_init__(self) -> None:
        self._num_examples = 0  # examples of the test so far

    def before_train(self, runner: RunnerProtocol) -> None:
        """Write the model graph."""
        runner.visualizer.add_graph(runner.model)

    def before_test_epoch(self, runner: RunnerProtocol) -> None:
        """Reset the count of examples."""
        self._num_examples = 0

    def after_test_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None, outputs: Any = None
    ) -> None:
        """Draw the examples in the batch if it is due, without padding."""
        images = select_array(data_batch, self.image, "NaiveVisualizationHook.image", "batch")
        first = self._num_examples
        batch_size = len(images)
        self._num_examples += batch_size  # also where nothing is drawn: names have the index
        if not self.every_n_inner_iters(batch_idx, self.interval):
            return
        batch, predictions = jax.device_get(process_local_batch((data_batch, outputs), data_batch))
        if jax.process_index() != 0:  # after the exchange, in which all take part
            return
        meta = runner.test_loop.dataloader.metainfo or {}
        files = meta.get("img_path")
        if runner.visualizer.dataset_meta is None:
            runner.visualizer.dataset_meta = meta
        mask = get_mask(batch)
        num_local = len(find(batch, self.image))
        for i in np.flatnonzero(np.ones(num_local, bool) if mask is None else mask):
            sample, prediction = (
                jax.tree.map(lambda x, i=i: x[i], tree) for tree in (batch, predictions)
            )
            index = int(find(sample, "sample_idx", first + i))
            runner.visualizer.add_datasample(
                os.path.basename(files[index]) if files is not None else f"sample_{index}",
                self._restore_image(sample),
                self.make_data_sample(sample, prediction),
                draw_gt=self.draw_gt,
                draw_pred=self.draw_pred,
                step=runner.iter,
            )

    def make_data_sample(self, sample: Any, prediction: Any) -> dict[str, Any]:
        """Return a data sample for the visualizer, from NumPy arrays: one example in the batch, and
        its prediction.

        It has `gt_label` or `gt_sem_seg`, and `pred_label` or `pred_sem_seg`.
        """
        entries = {}
        if self.draw_gt and (label := find(sample, self.label)) is not None:
            entries["gt"] = to_entry(label, "NaiveVisualizationHook.label")
        if self.draw_pred:
            argument = "NaiveVisualizationHook.prediction"
            entries["pred"] = to_entry(
                select_array(prediction, self.prediction, argument, "predictions"), argument
            )
        # Networks predict at a lower resolution: nearest, as indices of classes have no values
        # between them.
        size = find(sample, self.image).shape[:2]
        return {
            f"{side}_{kind}": value
            if kind == "label"
            else _restore_size(resize_nearest(value, size), sample)
            for side, (kind, value) in entries.items()
        }

    def _restore_image(self, sample: Any) -> np.ndarray:
        """Return the image before preprocessing, uint8[H, W, C]."""
        image = find(sample, self.image)
        if self.img_norm_cfg is not None:
            image = image * np.asarray(self.img_norm_cfg["std"]) + np.asarray(
                self.img_norm_cfg["mean"]
            )
        elif np.issubdtype(image.dtype, np.floating):
            image = image * 255
        # Rounding may leave the range, and a cast would wrap around
        return _restore_size(np.clip(np.round(image), 0, 255).astype(np.uint8), sample)


def _restore_size(array: np.ndarray, sample: Any) -> np.ndarray:
    """Remove the padding of an image [H, W, C] or of class indices [H, W], and restore the
    original size.
    """
    if (scale := find(sample, "scale")) is not None:
        width, height = scale
        array = array[:height, :width]  # images are padded at the bottom and right
    if (ori_width := find(sample, "ori_width")) is not None:
        size = int(find(sample, "ori_height")), int(ori_width)
        # Class indices have no values in between
        array = _resize_image(array, size) if array.ndim == 3 else resize_nearest(array, size)
    return array


def _resize_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    pillow = import_pillow("NaiveVisualizationHook")
    height, width = size
    # Pillow has gray images without a channel axis only
    picture = pillow.Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    resized = np.asarray(picture.resize((width, height), pillow.Image.Resampling.BILINEAR))
    return resized[..., None] if resized.ndim == 2 else resized
