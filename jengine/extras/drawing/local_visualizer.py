"""Visualizer that draws samples with classes, masks and boxes, ground truth next to prediction."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from numpy.typing import ArrayLike

from jengine.config.annotations import Count, Fraction
from jengine.config.errors import UnknownNameError, closest
from jengine.config.registry import VISUALIZERS
from jengine.extras.drawing import draw
from jengine.extras.drawing.canvas import Canvas
from jengine.extras.drawing.draw import Color
from jengine.logging.console import current_logger
from jengine.logging.convert import write_png
from jengine.logging.visualizer import Backends, Visualizer

_SIDES = ("gt", "pred")
_INSTANCE_KEYS = ("boxes", "labels", "scores", "masks")


@VISUALIZERS.register_module()
class LocalVisualizer(Canvas, Visualizer):
    """Visualizer that draws samples with Pillow and writes the pictures to the backends.

    The methods of `Canvas` draw shapes and texts on an image.

    A sample is a dict with any of `gt_label` and `pred_label`, the image class or a real number,
    which is written above the image; `gt_sem_seg` and `pred_sem_seg`, int[H, W]; and `gt_instances`
    and `pred_instances`, dicts with at least one of `boxes` float[N, 4] (left, top, right, bottom
    in pixels), `labels` int[N], `scores` float[N] and `masks` bool[N, H, W]. Class names that do
    not fit into the picture are cut; `zoom` makes room for them.

    Args:
      vis_backends, save_dir, name: as in Visualizer.
      classes: class names; by default `classes` in `dataset_meta`, otherwise the class indices.
      palette: class colors, RGB from 0 to 255; by default `palette` in `dataset_meta`, otherwise
        the VOC color map.
      alpha: weight of pixel class colors over the image, in [0, 1]; masks have 0.5.
      zoom: integer factor by which pictures are enlarged, so that labels are readable on small
        images.
      image: an image to draw on, see `set_image`.

    Attributes:
      kinds: the entries in a sample, each after `gt_` or `pred_`; subclasses may add entries that
        `draw_side` draws.

    Examples:
      >>> visualizer = LocalVisualizer(classes=["cat", "dog"], zoom=4)
      >>> picture = visualizer.draw(
      ...     np.zeros((8, 8, 3), np.uint8), {"gt_sem_seg": np.ones((8, 8), int)}
      ... )
      >>> picture.shape
      (32, 32, 3)
    """

    extra = "draw"
    kinds: ClassVar[tuple[str, ...]] = ("label", "sem_seg", "instances")

    def __init__(
        self,
        vis_backends: Backends = None,
        save_dir: str | os.PathLike[str] | None = None,
        name: str = "visualizer",
        classes: Sequence[str] | None = None,
        palette: Sequence[Color] | None = None,
        alpha: Fraction = 0.8,
        zoom: Count = 1,
        image: ArrayLike | None = None,
    ) -> None:
        super().__init__(vis_backends, save_dir, name)
        if image is not None:
            self.set_image(image)
        self.alpha = alpha
        self.zoom = zoom
        self._classes = classes
        self._palette = palette
        # without a display
        self._fallback_dir = pathlib.Path(save_dir or ".") / "vis_data" / "vis_image"

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
        """Draw a sample, ground truth on the left and prediction on the right if the sample has
        both.

        The arguments are those of `Visualizer.add_datasample`, except:

        Args:
          image: [H, W, C], see `draw.to_rgb`.
          data_sample: a dict of NumPy arrays as described for the class.
          show: open a window instead of writing; without a display, write a file.
          out_file: a PNG file to write instead of writing to the backends.
          with_labels: whether to draw class names.
        """
        from jengine.extras.drawing.display import show_image

        if jax.process_index() != 0:  # before drawing, which takes longer than writing
            return
        picture = self.draw(
            image, data_sample or {}, draw_gt=draw_gt, draw_pred=draw_pred, with_labels=with_labels
        )
        if show and not show_image(picture, name, wait_time):
            write_png(self._fallback_dir / f"{name}_{step}.png", picture)
            text = f"There is no display: pictures are written to {self._fallback_dir}."
            current_logger().warning(text)  # of equal ones, the first
        if out_file is not None:
            write_png(pathlib.Path(out_file), picture)
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
        """Return the picture of a sample, uint8[H, W, 3].

        Arguments and errors as in `add_datasample`.
        """
        self._check_keys(
            "a sample has",
            data_sample,
            [f"{side}_{kind}" for side in _SIDES for kind in self.kinds],
        )
        canvas = draw.enlarge(draw.to_rgb(image), self.zoom)
        pictures = []
        captions = []
        for side, is_drawn in zip(_SIDES, (draw_gt, draw_pred), strict=True):
            found = {kind: data_sample.get(f"{side}_{kind}") for kind in self.kinds if is_drawn}
            entries = {kind: entry for kind, entry in found.items() if entry is not None}
            label = entries.pop("label", None)
            if label is not None and with_labels:
                value = np.asarray(label).item()  # a real number or a class
                text = (
                    f"{value:.4g}"
                    if isinstance(value, float)
                    else self._names_and_colors([value])[0][value]
                )
                captions.append(f"{side}: {text}")
            if entries:
                pictures.append(self.draw_side(canvas, entries, with_labels))
        return draw.add_captions(draw.place_side_by_side(pictures or [canvas]), captions)

    def draw_side(
        self, picture: np.ndarray, entries: Mapping[str, Any], with_labels: bool
    ) -> np.ndarray:
        """Draw the entries of one side by kind, without the label, on a picture, uint8[H, W, 3],
        enlarged by `zoom`.
        """
        if "sem_seg" in entries:
            picture = self._draw_sem_seg(picture, np.asarray(entries["sem_seg"]), with_labels)
        if "instances" in entries:
            picture = self._draw_instances(picture, entries["instances"], with_labels)
        return picture

    def _draw_sem_seg(
        self, picture: np.ndarray, labels: np.ndarray, with_labels: bool
    ) -> np.ndarray:
        classes = [int(label) for label in np.unique(labels) if label >= 0]
        names, palette = self._names_and_colors(classes)
        labels = draw.enlarge(labels, self.zoom)
        picture = draw.draw_sem_seg(picture, labels, palette, self.alpha)
        if not with_labels:
            return picture
        colored = [label for label in classes if label < len(palette)]
        positions = [_central_pixel(labels == label) for label in colored]
        texts = [names[label] for label in colored]
        return draw.draw_texts(picture, positions, texts, [palette[label] for label in colored])

    def _draw_instances(
        self, picture: np.ndarray, instances: Mapping[str, Any], with_labels: bool
    ) -> np.ndarray:
        self._check_keys("instances have", instances, _INSTANCE_KEYS)
        count = len(next(iter(instances.values()), ()))
        labels = [int(label) for label in instances.get("labels", np.zeros(count, int))]
        names, palette = self._names_and_colors(labels)
        # A palette may have fewer colors than there are classes.
        colors = [palette[label % len(palette)] for label in labels]
        if "masks" in instances:
            masks = np.asarray(
                [draw.enlarge(mask, self.zoom) for mask in np.asarray(instances["masks"], bool)]
            )
            picture = draw.draw_masks(picture, masks.reshape(-1, *picture.shape[:2]), colors)
        if "boxes" in instances:
            texts = (
                [names[label] for label in labels] if with_labels and "labels" in instances else []
            )
            if texts and "scores" in instances:
                texts = [
                    f"{text}: {100 * float(s):.1f}"
                    for text, s in zip(texts, instances["scores"], strict=True)
                ]
            picture = draw.draw_boxes(
                picture, np.asarray(instances["boxes"]) * self.zoom, colors, texts
            )
        return picture

    def _check_keys(self, what: str, entries: Mapping[str, Any], legal: Sequence[str]) -> None:
        for key in entries:
            if key not in legal:
                raise UnknownNameError(
                    f"{type(self).__name__}: {what} no entry {key!r}{closest(str(key), legal)}"
                )

    def _names_and_colors(self, labels: Sequence[int]) -> tuple[Mapping[int, str], Sequence[Color]]:
        """Return the label names and the palette, sized by the labels if the classes are unknown.

        Labels beyond the number of classes (such as the ignored label 255) have a name but no
        color.
        """
        meta = self.dataset_meta or {}
        classes = self._classes or meta.get("classes")
        count = len(classes) if classes else max(labels, default=0) + 1
        palette = self._palette or meta.get("palette") or draw.default_palette(count)
        class_names = dict(enumerate(classes or ()))
        names = {label: str(class_names.get(label, label)) for label in labels}
        return names, [(int(c[0]), int(c[1]), int(c[2])) for c in palette]


def _central_pixel(mask: np.ndarray) -> tuple[float, float]:
    """Return the pixel (x, y) in the mask that is closest to the centroid."""
    rows, columns = np.nonzero(mask)
    nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
    return float(columns[nearest]), float(rows[nearest])
