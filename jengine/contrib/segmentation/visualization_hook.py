"""Draw predictions of a validation or test next to the ground truth."""

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine.annotations import Count, NonNegative
from jengine.contrib.segmentation.batch_entries import read_predictions
from jengine.errors import ConfigError, UnknownNameError
from jengine.evaluation.metric import MASK
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.visualization import Visualizer


@HOOKS.register_module()
class SegVisualizationHook(Hook):
    """Draw the segmentations of every `interval`-th batch of a validation or a test with a LocalVisualizer.

    If the dataset's metainfo has `img_path`, the file of each sample, images are called `val_<file>` or `test_<file>`
    and read from these files, without the changes of preprocessing. Otherwise the image of the batch is drawn, called
    by the index of the sample. The index is the batch's entry `sample_idx`, int[B]; without it samples are counted,
    which is correct for a single process and data that are not shuffled. Padding is not drawn. With several processes,
    only the examples of the first one are drawn.

    Args:
      draw: whether to draw at all; False disables the hook.
      interval: number of batches, from the start of each validation or test, between two drawn batches.
      show: open windows instead of writing images. This removes all backends of the visualizer: scalars are not
        written either.
      wait_time: seconds to wait after opening each window.
      file_client_args, backend_args: None or `dict(backend='disk')`: files are read from file systems only.
      image: entry of the batch with the images, [B, H, W, C], uint8 or float from 0 to 1.
      label: entry of the batch with the true classes, int[B, H, W]; without it only predictions are drawn.
      prediction: entry of the predictions, if they are a dict. Logits float[B, H, W, C], or class indices
        int[B, H, W].

    Raises:
      TypeError, ValueError: an interval that is not a positive integer; another storage backend.
    """

    priority = "NORMAL"

    def __init__(
        self,
        draw: bool = False,
        interval: Count = 50,
        show: bool = False,
        wait_time: NonNegative = 0.0,
        file_client_args: Mapping[str, Any] | None = None,
        backend_args: Mapping[str, Any] | None = None,
        image: str = "image",
        label: str = "label",
        prediction: str | None = None,
    ) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int):
            raise TypeError(f"SegVisualizationHook: `interval` must be an integer, got {interval!r}")
        if interval < 1:
            raise ConfigError(f"SegVisualizationHook: `interval` must be at least 1, got {interval}")
        for argument, value in (("file_client_args", file_client_args), ("backend_args", backend_args)):
            if value is not None and dict(value) != {"backend": "disk"}:
                raise ConfigError(f"SegVisualizationHook: `{argument}` must be dict(backend='disk'), got {value!r}")
        if not draw:
            warnings.warn("SegVisualizationHook has draw=False: nothing will be drawn", UserWarning, stacklevel=2)
        if show:
            text = "SegVisualizationHook has show=True: images are shown, and the visualizer does not write anything"
            warnings.warn(text, UserWarning, stacklevel=2)
        self.draw = draw
        self.interval = interval
        self.show = show
        self.wait_time = wait_time
        self.image = image
        self.label = label
        self.prediction = prediction

    def before_run(self, runner: Runner) -> None:
        """Check that the visualizer can draw, and remove its backends for `show`.

        Raises:
          ConfigError: the visualizer does not define `add_datasample`.
        """
        visualizer = runner.visualizer
        if self.draw and type(visualizer).add_datasample is Visualizer.add_datasample:
            raise ConfigError(
                f"SegVisualizationHook: `visualizer` must be able to draw samples, got a {type(visualizer).__name__}; "
                "set visualizer=dict(type='LocalVisualizer')"
            )
        if self.show:
            visualizer.vis_backends = {}

    def next_step(self, runner: Runner, step: int) -> float:
        """Return infinity: the hook does not act in training."""
        return math.inf

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "val"
    ) -> None:
        if not self.draw or mode == "train":
            return
        if self.every_n_inner_iters(batch_idx, self.interval) and jax.process_index() == 0:
            self._draw(runner, batch_idx, data_batch, outputs, mode)

    def _draw(self, runner: Runner, batch_idx: int, data_batch: Any, outputs: Any, mode: str) -> None:
        """Draw the examples of a batch except its padding; all arrays come to the host in one transfer."""
        names = [name for name in (self.image, self.label, "sample_idx", MASK) if name in data_batch]
        predictions = read_predictions(outputs, self.prediction, type(self).__name__)
        arrays = {name: data_batch[name] for name in names}, predictions
        batch, predictions = jax.device_get(jax.tree.map(_local_examples, arrays))
        mask = batch.get(MASK, np.ones(len(predictions), bool))
        if predictions.ndim == np.ndim(batch.get(self.label, predictions[..., 0])) + 1:
            predictions = predictions.argmax(axis=-1)
        loop = runner.val_loop if mode == "val" else runner.test_loop
        meta = loop.dataloader.metainfo or {}
        visualizer = runner.visualizer
        if visualizer.dataset_meta is None:
            visualizer.dataset_meta = meta
        for i in np.flatnonzero(mask).tolist():
            index = int(batch["sample_idx"][i]) if "sample_idx" in batch else batch_idx * len(mask) + i
            sample = {"pred_sem_seg": predictions[i]}
            if self.label in batch:
                sample["gt_sem_seg"] = batch[self.label][i]
            name, image = self._name_and_image(meta, batch, i, index)
            sample = {key: _resize(labels, image.shape[:2]) for key, labels in sample.items()}
            visualizer.add_datasample(
                f"{mode}_{name}", image, data_sample=sample, show=self.show, wait_time=self.wait_time, step=runner.iter
            )

    def _name_and_image(self, meta: Mapping[str, Any], batch: Any, i: int, index: int) -> tuple[str, np.ndarray]:
        """Return the name and image of example `i` of the batch, which is sample `index` of the dataset."""
        if "img_path" in meta:
            path = os.fspath(meta["img_path"][index])
            return os.path.basename(path), _read_rgb(path)
        if self.image not in batch:
            raise UnknownNameError(
                f"SegVisualizationHook: `image` must be an entry of the batch, got {self.image!r}; or give the "
                "dataset's metainfo the 'img_path' of each sample"
            )
        return str(index), np.asarray(batch[self.image][i])


def _local_examples(leaf: Any) -> Any:
    """Return the examples of an array that are on this process, if others are on other processes."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    return concatenate_local_shards(leaf)


def concatenate_local_shards(array: jax.Array) -> np.ndarray:
    """Concatenate the shards on this process's devices of an array that is sharded along its first axis."""
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def _read_rgb(path: str) -> np.ndarray:
    """Read an image file as uint8[H, W, 3]."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading images needs Pillow: pip install 'jengine[draw]'") from error
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _resize(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize labels int[h, w] to int[H, W] by nearest neighbors."""
    labels = np.asarray(labels)
    if labels.shape == size:
        return labels
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for new, old in zip(size, labels.shape, strict=True)
    )
    return labels[rows[:, None], columns[None, :]]
