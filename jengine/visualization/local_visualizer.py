"""A visualizer that draws: classes of pixels, masks, boxes and labels, ground truth beside prediction."""

import logging
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.annotations import Count, Fraction
from jengine.errors import closest
from jengine.logging import print_log
from jengine.registry import VISUALIZERS
from jengine.visualization import draw
from jengine.visualization.convert import encode_png
from jengine.visualization.draw import Color
from jengine.visualization.visualizer import Visualizer

_ENTRIES = tuple(f"{side}_{what}" for side in ("gt", "pred") for what in ("sem_seg", "instances"))
_INSTANCE_ENTRIES = ("boxes", "labels", "scores", "masks")


@VISUALIZERS.register_module()
class LocalVisualizer(Visualizer):
    """Draws samples with Pillow and hands the pictures to its backends.

    A sample is a dict with any of `gt_sem_seg` and `pred_sem_seg`, int[H, W], and `gt_instances` and `pred_instances`,
    dicts of `boxes` float[N, 4] (left, top, right, bottom in pixels), `labels` int[N], `scores` float[N] and `masks`
    bool[N, H, W], all but one of which may be missing.

    Args:
      vis_backends, save_dir, name: as in Visualizer.
      classes: names of the classes; by default `classes` of `dataset_meta`, else their numbers.
      palette: colours of the classes, RGB from 0 to 255; by default `palette` of `dataset_meta`, else the VOC map.
      alpha: weight of the colours of pixel classes over the image; masks have 0.5.
      zoom: each pixel is drawn as a square of this many pixels, so that labels can be read on small images.

    Raises:
      ValueError: alpha outside [0, 1], or a zoom below 1.
    """

    def __init__(
        self,
        vis_backends: Sequence[Any] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        name: str = "visualizer",
        classes: Sequence[str] | None = None,
        palette: Sequence[Color] | None = None,
        alpha: Fraction = 0.8,
        zoom: Count = 1,
    ) -> None:
        super().__init__(vis_backends, save_dir, name)
        self.alpha = alpha
        self.zoom = zoom
        self._classes = classes
        self._palette = palette
        self._unseen = pathlib.Path(save_dir or ".") / "vis_data" / "vis_image"
        self._told = False

    def add_datasample(
        self,
        name: str,
        image: np.ndarray,
        data_sample: Any = None,
        draw_gt: bool = True,
        draw_pred: bool = True,
        show: bool = False,
        wait_time: float = 0,
        step: int = 0,
        out_file: str | os.PathLike[str] | None = None,
        with_labels: bool = True,
    ) -> None:
        """Draws a sample; where both are there, the ground truth on the left and the prediction on the right.

        Args:
          name: what the picture is called.
          image: [H, W, C], see `draw.as_rgb`.
          data_sample: a dict of numpy arrays as the class describes.
          draw_gt: whether the ground truth is drawn.
          draw_pred: whether the prediction is drawn.
          show: open a window instead of writing; without a display the picture goes to a file, and the log says so.
          wait_time: seconds to wait after a window was opened.
          step: the iteration it belongs to.
          out_file: a PNG file to write in the place of the backends.
          with_labels: whether names of classes are written too.

        Raises:
          KeyError: an entry of the sample that is not known.
        """
        import jax

        if jax.process_index() != 0:
            return
        picture = self.draw(image, data_sample or {}, draw_gt=draw_gt, draw_pred=draw_pred, with_labels=with_labels)
        if show and not show_image(picture, name, wait_time):
            self._write_unseen(name, picture, step)
        if out_file is not None:
            _write(pathlib.Path(out_file), picture)
        elif not show:
            self.add_image(name, picture, step)

    def draw(
        self,
        image: np.ndarray,
        data_sample: Mapping[str, Any],
        *,
        draw_gt: bool = True,
        draw_pred: bool = True,
        with_labels: bool = True,
    ) -> np.ndarray:
        """The picture of a sample, uint8[H, W, 3]; arguments as those of `add_datasample`."""
        for key in data_sample:
            if key not in _ENTRIES:
                raise KeyError(f"LocalVisualizer: a sample has no entry {key!r}{closest(str(key), _ENTRIES)}")
        pictures = []
        for side, wanted in (("gt", draw_gt), ("pred", draw_pred)):
            labels, instances = data_sample.get(f"{side}_sem_seg"), data_sample.get(f"{side}_instances")
            if wanted and (labels is not None or instances is not None):
                picture = draw.enlarge(draw.as_rgb(image), self.zoom)
                if labels is not None:
                    picture = self._draw_sem_seg(picture, np.asarray(labels), with_labels)
                if instances is not None:
                    picture = self._draw_instances(picture, instances, with_labels)
                pictures.append(picture)
        return np.concatenate(pictures or [draw.enlarge(draw.as_rgb(image), self.zoom)], axis=1)

    def _draw_sem_seg(self, picture: np.ndarray, labels: np.ndarray, with_labels: bool) -> np.ndarray:
        numbers = [int(number) for number in np.unique(labels) if number >= 0]
        names, palette = self._meta(numbers)
        labels = draw.enlarge(labels, self.zoom)
        picture = draw.draw_sem_seg(picture, labels, palette, self.alpha)
        if not with_labels:
            return picture
        shown = [number for number in numbers if number < len(palette)]
        places = [_middle(labels == number) for number in shown]
        return draw.draw_texts(picture, places, [names[n] for n in shown], [palette[n] for n in shown])

    def _draw_instances(self, picture: np.ndarray, instances: Mapping[str, Any], with_labels: bool) -> np.ndarray:
        for key in instances:
            if key not in _INSTANCE_ENTRIES:
                raise KeyError(f"LocalVisualizer: instances have no {key!r}{closest(str(key), _INSTANCE_ENTRIES)}")
        count = len(next(iter(instances.values()), ()))
        labels = [int(label) for label in instances.get("labels", np.zeros(count, int))]
        names, palette = self._meta(labels)
        colors = [palette[label % len(palette)] for label in labels]
        if "masks" in instances:
            masks = np.asarray([draw.enlarge(mask, self.zoom) for mask in np.asarray(instances["masks"], bool)])
            picture = draw.draw_masks(picture, masks.reshape(-1, *picture.shape[:2]), colors)
        if "boxes" in instances:
            texts = [names[label] for label in labels] if with_labels and "labels" in instances else []
            if texts and "scores" in instances:
                texts = [f"{text}: {100 * float(s):.1f}" for text, s in zip(texts, instances["scores"], strict=True)]
            picture = draw.draw_boxes(picture, np.asarray(instances["boxes"]) * self.zoom, colors, texts)
        return picture

    def _meta(self, labels: Sequence[int]) -> tuple[Mapping[int, str], Sequence[Color]]:
        """The names by class number, and the colours; where the dataset names no classes, as many as the labels need.

        Numbers from the count of classes on (an ignored label of 255) have a name but no colour.
        """
        meta = self.dataset_meta or {}
        classes = self._classes or meta.get("classes")
        count = len(classes) if classes else max(labels, default=0) + 1
        palette = self._palette or meta.get("palette") or draw.default_palette(count)
        given = dict(enumerate(classes or ()))
        names = {label: str(given.get(label, label)) for label in labels}
        return names, [(int(c[0]), int(c[1]), int(c[2])) for c in palette]

    def _write_unseen(self, name: str, picture: np.ndarray, step: int) -> None:
        path = self._unseen / f"{name}_{step}.png"
        _write(path, picture)
        if not self._told:
            self._told = True
            text = f"There is no display to show {name} on: it was written to {path}, and others go there too."
            print_log(text, logger="current", level=logging.WARNING)


def _middle(mask: np.ndarray) -> tuple[float, float]:
    """The pixel (x, y) of the mask that comes nearest to the middle of all its pixels."""
    rows, columns = np.nonzero(mask)
    nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
    return float(columns[nearest]), float(rows[nearest])


def _write(path: pathlib.Path, picture: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(picture))


def has_display() -> bool:
    """Whether a window could be seen: on Linux, whether a display server is named."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def show_image(image: np.ndarray, title: str, wait_time: float = 0.0) -> bool:
    """Opens the system's image viewer.

    Args:
      image: uint8[H, W, 3].
      title: what the window is called, where the viewer has titles.
      wait_time: seconds to wait afterwards.

    Returns:
      Whether that was possible.
    """
    if not has_display():
        return False
    try:
        from PIL import Image, ImageShow
    except ImportError as error:
        raise ImportError("showing images needs Pillow: pip install 'jengine[draw]'") from error
    if not ImageShow.show(Image.fromarray(image), title):
        return False
    time.sleep(wait_time)
    return True
