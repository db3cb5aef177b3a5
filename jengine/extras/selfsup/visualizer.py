"""Drawing of masks and patches from self-supervised learning."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.config.annotations import Count, Fraction
from jengine.config.registry import VISUALIZERS
from jengine.extras.drawing.draw import (
    Color,
    draw_boxes,
    draw_sem_seg,
    enlarge,
    to_rgb,
)
from jengine.extras.drawing.local_visualizer import LocalVisualizer
from jengine.logging.convert import resize_nearest
from jengine.logging.visualizer import Backends

_RED = (255, 0, 0)
_BLACK = (0, 0, 0)


@VISUALIZERS.register_module()
class SelfSupVisualizer(LocalVisualizer):
    """Visualizer for MMSelfSup's masks and patches, ground truth on the left and prediction on the
    right.

    Besides `LocalVisualizer`'s entries, a sample has any of these, each after `gt_` or `pred_`:

    * `mask`, [h, w], is drawn in black over the image where it is not 0. It may have a value for
      each patch: it is enlarged to the image size.
    * `unpatched_img`, [H, W, C], is drawn in place of the image, which may be a patch or an input
      to reconstruct.
    * `patch_box`, float[N, 4] (left, top, right, bottom in pixels), is drawn as red lines.

    >>> sorted(set(SelfSupVisualizer.kinds) - set(LocalVisualizer.kinds))
    ['mask', 'patch_box', 'unpatched_img']

    Args:
      vis_backends, save_dir, name, classes, palette, zoom: as in LocalVisualizer.
      line_width: line width for boxes, in pixels.
      alpha: opacity for masks and lines, and for pixel class colors.
    """

    kinds = (*LocalVisualizer.kinds, "mask", "unpatched_img", "patch_box")

    def __init__(
        self,
        vis_backends: Backends = None,
        save_dir: str | os.PathLike[str] | None = None,
        name: str = "visualizer",
        line_width: Count = 3,
        alpha: Fraction = 0.8,
        classes: Sequence[str] | None = None,
        palette: Sequence[Color] | None = None,
        zoom: Count = 1,
    ) -> None:
        super().__init__(vis_backends, save_dir, name, classes, palette, alpha, zoom)
        self.line_width = line_width

    def draw_side(
        self, picture: np.ndarray, entries: Mapping[str, Any], with_labels: bool
    ) -> np.ndarray:
        """Return the picture for the ground truth or the prediction.

        Arguments as in LocalVisualizer.
        """
        if "unpatched_img" in entries:
            picture = enlarge(to_rgb(entries["unpatched_img"]), self.zoom)
        picture = super().draw_side(picture, entries, with_labels)
        if "patch_box" in entries:
            boxes = np.asarray(entries["patch_box"]).reshape(-1, 4) * self.zoom
            lines = draw_boxes(picture, boxes, [_RED] * len(boxes), width=self.line_width)
            picture = (picture * (1 - self.alpha) + lines * self.alpha).astype(np.uint8)
        if "mask" in entries:
            mask = resize_nearest(np.asarray(entries["mask"]) != 0, picture.shape[:2])
            picture = draw_sem_seg(picture, np.where(mask, 0, -1), [_BLACK], self.alpha)
        return picture
