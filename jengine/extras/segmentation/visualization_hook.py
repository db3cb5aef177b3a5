"""Drawing of validation and test predictions next to the ground truth."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.annotations import Count, NonNegative
from jengine.config.registry import HOOKS, TRANSFORMS
from jengine.config.storage import apply_backend_args
from jengine.data.masking import get_mask
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.convert import resize_nearest
from jengine.model.selection import Selector, find, select, select_array
from jengine.parallel.local_batch import process_local_batch


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class SegVisualizationHook(Hook):
    """Hook that draws the segmentations in every `interval`-th validation or test batch with a
    LocalVisualizer.

    If the dataset's metainfo has `img_path`, one file per sample, images are called `val_<file>` or
    `test_<file>` and read from these files, without the preprocessing. Otherwise the batch image is
    drawn, called by the sample index. The index is the batch entry `sample_idx`, int[B]; without it
    samples are counted, which is correct for a single process and data that are not shuffled.
    Padding is not drawn. With several processes, only the first one's examples are drawn.

    >>> hook = SegVisualizationHook(draw=True, interval=10)

    Args:
      draw: whether to draw at all; False disables the hook.
      interval: number of batches, from the start of each validation or test, between two drawn
        batches.
      show: open windows instead of writing images. This removes all visualizer backends: scalars
        are not written either.
      wait_time: seconds to wait after opening each window.
      file_client_args, backend_args: storage of these files in MMEngine's terms, see
        `apply_backend_args`.
      image: batch entry with the images, [B, H, W, C], uint8 or float from 0 to 1: a name, index or
        dotted path.
      label: batch entry with the true classes, int[B, H, W]; without it only predictions are drawn.
      prediction: prediction entry, logits float[B, H, W, C] or class indices int[B, H, W]; None if
        the predictions are an array.
    """

    extra = "draw"
    priority = "NORMAL"
    every = -1  # it acts in no training iteration

    draw: bool = False
    interval: Count = 50
    show: bool = False
    wait_time: NonNegative = 0.0
    file_client_args: Mapping[str, Any] | None = None
    backend_args: Mapping[str, Any] | None = None
    image: Selector = "image"
    label: Selector = "label"
    prediction: Selector | None = None

    def __post_init__(self) -> None:
        apply_backend_args("backend_args", None, self.backend_args, self.file_client_args)
        if not self.draw:
            warnings.warn(
                "SegVisualizationHook has draw=False: nothing will be drawn",
                UserWarning,
                stacklevel=2,
            )
        if self.show:
            text = (
                "SegVisualizationHook has show=True: images are shown, and the visualizer does "
                "not write anything"
            )
            warnings.warn(text, UserWarning, stacklevel=2)

    def before_run(self, runner: RunnerProtocol) -> None:
        """Remove the visualizer's backends for `show`."""
        if self.show:
            runner.visualizer.vis_backends = {}

    def _after_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "val",
    ) -> None:
        """Draw the examples in a batch except the padding.

        All arrays come to the host in one transfer.
        """
        if not self.draw or not self.every_n_inner_iters(batch_idx, self.interval):
            return
        predictions = select_array(
            outputs, self.prediction, "SegVisualizationHook.prediction", "predictions"
        )
        loop = runner.val_loop if mode == "val" else runner.test_loop
        meta = loop.dataloader.metainfo or {}
        images = None  # those of the files are drawn
        if "img_path" not in meta:
            images = select(data_batch, self.image, "SegVisualizationHook.image", "batch")
        arrays = (
            images,
            find(data_batch, self.label),
            find(data_batch, "sample_idx"),
            get_mask(data_batch),
            predictions,
        )
        images, labels, indices, mask, predictions = jax.device_get(
            process_local_batch(arrays, data_batch)
        )
        if jax.process_index() != 0:  # after the collective transfer, in which all must take part
            return
        if jnp.issubdtype(predictions.dtype, jnp.floating):
            predictions = predictions.argmax(axis=-1)
        mask = np.ones(len(predictions), bool) if mask is None else mask
        visualizer = runner.visualizer
        if visualizer.dataset_meta is None:
            visualizer.dataset_meta = meta
        for i in np.flatnonzero(mask).tolist():
            index = batch_idx * len(mask) + i if indices is None else int(indices[i])
            sample = {"pred_sem_seg": predictions[i]}
            if labels is not None:
                sample["gt_sem_seg"] = labels[i]
            if images is None:
                path = self._find_path(meta["img_path"][index])
                name = os.path.basename(path)
                image = TRANSFORMS.build({"type": "LoadImage"})({"img_path": path})["image"]
            else:
                name = str(index)
                image = images[i]
            sample = {
                key: resize_nearest(labels, image.shape[:2]) for key, labels in sample.items()
            }
            visualizer.add_datasample(
                f"{mode}_{name}",
                image,
                data_sample=sample,
                show=self.show,
                wait_time=self.wait_time,
                step=runner.iter,
            )

    def _find_path(self, path: str | os.PathLike[str]) -> str:
        return (
            apply_backend_args(
                "img_path", os.fspath(path), self.backend_args, self.file_client_args
            )
            or ""
        )
