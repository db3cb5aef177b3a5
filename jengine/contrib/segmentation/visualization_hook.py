"""Draws predictions of a validation or test: ground truth beside prediction."""

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine.errors import ConfigError, closest
from jengine.evaluation.metric import MASK
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class SegVisualizationHook(Hook):
    """Draws the segmentations of every `interval`-th batch of a validation or a test, through a LocalVisualizer.

    The pictures are called `val_<file>` or `test_<file>` where the dataset's metainfo has `img_path`, the file of each
    sample; these files are then read anew, so that the picture is not what preprocessing has made of it. Elsewhere the
    image of the batch is drawn, under the number of the sample. Which sample a row is says the batch's `sample_idx`,
    int[B]; without it rows are counted, which is right for data that are not shuffled and a single process. Padding is
    not drawn, and with several processes only what the first one holds is.

    Args:
      draw: whether anything is drawn at all; False leaves the hook in the config without any effect.
      interval: batches of one validation or test, counted from its start, between two that are drawn.
      show: open windows instead of writing pictures. The visualizer then has no backends any more: nothing is written,
        no scalars either.
      wait_time: seconds that a window is waited for.
      file_client_args, backend_args: files are read from file systems; None or `dict(backend='disk')`.
      image: the batch's entry with the images, [B, H, W, C], uint8 or float from 0 to 1.
      label: the batch's entry with the true classes, int[B, H, W]; a batch without it shows predictions alone.
      prediction: the entry of the predictions to use, where they are a dict. Logits float[B, H, W, C], or class
        numbers int[B, H, W].

    Raises:
      TypeError, ValueError: an interval that is no positive integer; other storage backends.
    """

    priority = "NORMAL"

    def __init__(
        self,
        draw: bool = False,
        interval: int = 50,
        show: bool = False,
        wait_time: float = 0.0,
        file_client_args: Mapping[str, Any] | None = None,
        backend_args: Mapping[str, Any] | None = None,
        image: str = "image",
        label: str = "label",
        prediction: str | None = None,
    ) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int):
            raise TypeError(f"SegVisualizationHook: interval is a number of batches, an integer; found {interval!r}")
        if interval < 1:
            raise ConfigError(f"SegVisualizationHook: interval is at least 1, found {interval}")
        for given in (file_client_args, backend_args):
            if given is not None and dict(given) != {"backend": "disk"}:
                raise ConfigError(f"SegVisualizationHook reads images from file systems; found the storage {given!r}")
        if not draw:
            warnings.warn("SegVisualizationHook has draw=False: nothing will be drawn", UserWarning, stacklevel=2)
        if show:
            text = "SegVisualizationHook has show=True: pictures are shown, and the visualizer writes nothing any more"
            warnings.warn(text, UserWarning, stacklevel=2)
        self.draw = draw
        self.interval = interval
        self.show = show
        self.wait_time = wait_time
        self.image = image
        self.label = label
        self.prediction = prediction

    def before_run(self, runner: Runner) -> None:
        """Checks that the visualizer can draw.

        Raises:
          ConfigError: it cannot.
        """
        from jengine.visualization import Visualizer

        visualizer = runner.visualizer
        if self.draw and getattr(type(visualizer), "add_datasample", None) is Visualizer.add_datasample:
            raise ConfigError(
                f"SegVisualizationHook draws through the visualizer, and {type(visualizer).__name__} cannot draw: set "
                "visualizer=dict(type='LocalVisualizer')"
            )
        if self.show:
            visualizer.vis_backends = {}

    def next_step(self, runner: Runner, step: int) -> float:
        """Return no step: nothing of the training is drawn."""
        return math.inf

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "val"
    ) -> None:
        if not self.draw or mode == "train":
            return
        if self.every_n_inner_iters(batch_idx, self.interval) and jax.process_index() == 0:
            self._draw(runner, batch_idx, data_batch, outputs, mode)

    def _draw(self, runner: Runner, batch_idx: int, data_batch: Any, outputs: Any, mode: str) -> None:
        """Draws the real rows of a batch; what is on the device comes over in one transfer."""
        wanted = {name: data_batch[name] for name in (self.image, self.label, "sample_idx", MASK) if name in data_batch}
        batch, predictions = jax.device_get(jax.tree.map(_own_rows, (wanted, self._predictions(outputs))))
        mask = batch.get(MASK, np.ones(len(predictions), bool))
        if predictions.ndim == np.ndim(batch.get(self.label, predictions[..., 0])) + 1:
            predictions = predictions.argmax(axis=-1)
        meta = getattr(getattr(runner, f"{mode}_loop").dataloader, "metainfo", None) or {}
        visualizer = runner.visualizer
        if getattr(visualizer, "dataset_meta", None) is None:
            visualizer.dataset_meta = meta
        for row in np.flatnonzero(mask).tolist():
            index = int(batch["sample_idx"][row]) if "sample_idx" in batch else batch_idx * len(mask) + row
            sample = {"pred_sem_seg": predictions[row]}
            if self.label in batch:
                sample["gt_sem_seg"] = batch[self.label][row]
            name, image = self._picture(meta, batch, row, index)
            sample = {key: _resize(labels, image.shape[:2]) for key, labels in sample.items()}
            visualizer.add_datasample(
                f"{mode}_{name}", image, data_sample=sample, show=self.show, wait_time=self.wait_time, step=runner.iter
            )

    def _predictions(self, outputs: Any) -> Any:
        if self.prediction is None and not isinstance(outputs, Mapping):
            return outputs
        names = sorted(map(str, outputs)) if isinstance(outputs, Mapping) else []
        if self.prediction not in names:
            raise KeyError(
                f"SegVisualizationHook: the predictions have no entry {self.prediction!r}"
                f"{closest(str(self.prediction), names)}"
            )
        return outputs[self.prediction]

    def _picture(self, meta: Mapping[str, Any], batch: Any, row: int, index: int) -> tuple[str, np.ndarray]:
        """The name of a sample and its image."""
        if "img_path" in meta:
            path = os.fspath(meta["img_path"][index])
            return os.path.basename(path), _read_rgb(path)
        if self.image not in batch:
            raise KeyError(
                f"SegVisualizationHook: the batch has no {self.image!r} to draw on, and the dataset's metainfo no "
                "'img_path'; name the entry with image="
            )
        return str(index), np.asarray(batch[self.image][row])


def _own_rows(leaf: Any) -> Any:
    """The rows of an array that this process holds, if others hold the rest of it."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    return join_shards(leaf)


def join_shards(array: jax.Array) -> np.ndarray:
    """The parts of an array on the devices of this process, joined along the first axis, by which it is divided."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def _read_rgb(path: str) -> np.ndarray:
    """The image in a file, uint8[H, W, 3]."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading images needs Pillow: pip install 'jengine[draw]'") from error
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _resize(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Labels int[h, w] as int[H, W], each pixel that of the nearest in `labels`."""
    labels = np.asarray(labels)
    if labels.shape == size:
        return labels
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for new, old in zip(size, labels.shape, strict=True)
    )
    return labels[rows[:, None], columns[None, :]]
