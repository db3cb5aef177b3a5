"""Drawing on an image with matplotlib, with the methods that users of MMEngine know."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self

import jax
import numpy as np
from numpy.typing import ArrayLike

from jengine.config.errors import require_extra
from jengine.extras.drawing import draw
from jengine.logging.console import current_logger

Colors = str | tuple[int, int, int] | Sequence[str | tuple[int, int, int]]
"""A name that matplotlib knows, RGB from 0 to 255, or a list of either with one for each shape."""

_DPI = 100


class Canvas:
    """Image with shapes and texts drawn over it.

    `set_image` starts a picture, the methods `draw_*` draw on it and return the canvas, so that
    calls can be chained, and `get_image` returns it. Coordinates are (x, y) in pixels, from the
    upper left corner. Colors are names that matplotlib knows or RGB from 0 to 255, line styles and
    markers are matplotlib's; lists have one for each shape.

    >>> canvas = Canvas()
    >>> canvas.set_image(np.zeros((20, 30, 3), np.uint8))
    >>> canvas.draw_bboxes([5, 5, 15, 15], edge_colors="r").draw_texts(
    ...     "cat", [5, 5]
    ... ).get_image().shape
    (20, 30, 3)
    """

    _axes: Any = None

    def set_image(self, image: ArrayLike) -> None:
        """Start a picture from an image, [H, W] or [H, W, C]; see `draw.to_rgb` for dtypes."""
        self._set(draw.to_rgb(image))

    def _set(self, rgb: np.ndarray) -> None:
        with require_extra("plot", "drawing on images requires matplotlib"):
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        height, width = rgb.shape[:2]
        # Without pyplot, which would keep the figure; matplotlib rounds sizes down
        figure = Figure(((width + 1e-2) / _DPI, (height + 1e-2) / _DPI), dpi=_DPI, frameon=False)
        FigureCanvasAgg(figure)
        self._axes = figure.add_axes((0, 0, 1, 1))
        self._axes.axis("off")
        self._axes.imshow(rgb, extent=(0, width, height, 0), interpolation="none", aspect="auto")
        self._axes.set(xlim=(0, width), ylim=(height, 0), autoscale_on=False)
        self._size = height, width

    def get_image(self) -> np.ndarray:
        """Return the picture, uint8[H, W, 3]."""
        canvas = self._require_image().figure.canvas
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    def show(
        self, drawn_img: np.ndarray | None = None, win_name: str = "image", wait_time: float = 0.0
    ) -> None:
        """Show a picture, by default that of `get_image`, in a window for `wait_time` seconds.

        0 keeps it open.
        """
        from jengine.extras.drawing.display import show_image

        image = self.get_image() if drawn_img is None else drawn_img
        if not show_image(image, win_name, wait_time):
            current_logger().info(f"There is no display to show {win_name} on.")

    def draw_points(
        self,
        positions: ArrayLike,
        colors: Colors = "g",
        marker: str | None = None,
        sizes: float | Sequence[float] | None = None,
    ) -> Self:
        """Draw points, float[N, 2]; `sizes` are areas in square points."""
        points = _check("positions", positions, 2)
        self._require_image().scatter(
            points[:, 0], points[:, 1], c=_to_colors(colors), s=sizes, marker=marker
        )
        return self

    def draw_texts(
        self,
        texts: str | Sequence[str],
        positions: ArrayLike,
        font_sizes: float | Sequence[float] | None = None,
        colors: Colors = "g",
        vertical_alignments: str | Sequence[str] = "top",
        horizontal_alignments: str | Sequence[str] = "left",
        font_families: str | Sequence[str] = "sans-serif",
        bboxes: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        font_properties: Any = None,
    ) -> Self:
        """Draw texts at positions, float[N, 2].

        The other arguments are matplotlib's, `bboxes` are backgrounds.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        points = _check("positions", positions, 2)
        self._warn_outside("positions", points)
        axes = self._require_image()
        settings = {
            "size": font_sizes or max(math.sqrt(math.prod(self._size)) // 90, 10),
            "color": _to_colors(colors),
            "bbox": bboxes,
            "verticalalignment": vertical_alignments,
            "horizontalalignment": horizontal_alignments,
            "family": font_families,
            "fontproperties": font_properties,
        }
        for i, (text, (x, y)) in enumerate(zip(texts, points.tolist(), strict=True)):
            own = {name: _pick(name, values, i, len(texts)) for name, values in settings.items()}
            axes.text(x, y, text, clip_on=True, **own)
        return self

    def draw_lines(
        self,
        x_datas: ArrayLike,
        y_datas: ArrayLike,
        colors: Colors = "g",
        line_styles: str | Sequence[str] = "-",
        line_widths: float | Sequence[float] = 2,
    ) -> Self:
        """Draw lines from (x[0], y[0]) to (x[1], y[1]), with x and y float[N, 2]."""
        x = _check("x_datas", x_datas, 2)
        y = _check("y_datas", y_datas, 2)
        if x.shape != y.shape:
            raise ValueError(f"`y_datas` must have the shape of x_datas, {x.shape}, got {y.shape}")
        self._warn_outside("x_datas, y_datas", np.stack([x, y], -1))
        return self._add("LineCollection", np.stack([x, y], -1), colors, line_styles, line_widths)

    def draw_circles(
        self,
        center: ArrayLike,
        radius: ArrayLike,
        edge_colors: Colors = "g",
        line_styles: str | Sequence[str] = "-",
        line_widths: float | Sequence[float] = 2,
        face_colors: Colors = "none",
        alpha: float | Sequence[float] = 0.8,
    ) -> Self:
        """Draw circles with centers float[N, 2] and radii float[N]."""
        from matplotlib.patches import Circle

        centers = _check("center", center, 2)
        radii = np.atleast_1d(np.asarray(radius, float))
        if radii.shape != (len(centers),):
            raise ValueError(
                f"`radius` must have one entry per circle, {len(centers)}, got shape {radii.shape}"
            )
        self._warn_outside("center", np.stack([centers - radii[:, None], centers + radii[:, None]]))
        circles = [Circle(xy, r) for xy, r in zip(centers.tolist(), radii.tolist(), strict=True)]
        return self._add(
            "PatchCollection", circles, edge_colors, line_styles, line_widths, face_colors, alpha
        )

    def draw_bboxes(
        self,
        bboxes: ArrayLike,
        edge_colors: Colors = "g",
        line_styles: str | Sequence[str] = "-",
        line_widths: float | Sequence[float] = 2,
        face_colors: Colors = "none",
        alpha: float | Sequence[float] = 0.8,
    ) -> Self:
        """Draw boxes, float[N, 4] with left, top, right and bottom."""
        boxes = _check("bboxes", bboxes, 4)
        if not (boxes[:, :2] <= boxes[:, 2:]).all():
            raise ValueError("`bboxes` must have left <= right and top <= bottom")
        return self.draw_polygons(
            list(boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)),
            edge_colors,
            line_styles,
            line_widths,
            face_colors,
            alpha,
        )

    def draw_polygons(
        self,
        polygons: ArrayLike | Sequence[ArrayLike],
        edge_colors: Colors = "g",
        line_styles: str | Sequence[str] = "-",
        line_widths: float | Sequence[float] = 2,
        face_colors: Colors = "none",
        alpha: float | Sequence[float] = 0.8,
    ) -> Self:
        """Draw polygons: a list of float[M, 2] with the corners of each, or one of them."""
        several: list[Any] = list(polygons) if isinstance(polygons, list | tuple) else [polygons]
        corners = [_check("polygons", polygon, 2) for polygon in several]
        self._warn_outside("polygons", np.concatenate(corners))
        return self._add(
            "PolyCollection", corners, edge_colors, line_styles, line_widths, face_colors, alpha
        )

    def draw_binary_masks(
        self,
        binary_masks: ArrayLike,
        colors: Colors = (0, 255, 0),
        alphas: float | Sequence[float] = 0.8,
    ) -> Self:
        """Draw masks, bool[N, H, W] or bool[H, W], over everything drawn before."""
        masks = np.asarray(binary_masks)
        masks = masks[None] if masks.ndim == 2 else masks
        image = self.get_image()
        if masks.dtype != bool or masks.shape[1:] != self._size:
            raise ValueError(
                f"`binary_masks` must be bool with the size of the image, {self._size}, got "
                f"{masks.dtype}{masks.shape}"
            )
        from matplotlib.colors import to_rgb

        for i, mask in enumerate(masks):
            r, g, b = to_rgb(_pick("colors", _to_colors(colors), i, len(masks)))
            color = round(255 * r), round(255 * g), round(255 * b)
            image = draw.draw_masks(
                image, mask[None], [color], _pick("alphas", alphas, i, len(masks))
            )
        self._set(image)
        return self

    @staticmethod
    def draw_featmap(
        featmap: ArrayLike,
        overlaid_image: np.ndarray | None = None,
        channel_reduction: Literal["squeeze_mean", "select_max"] | None = "squeeze_mean",
        topk: int = 20,
        arrangement: tuple[int, int] = (4, 5),
        resize_shape: tuple[int, int] | None = None,
        alpha: float = 0.5,
    ) -> np.ndarray:
        """Return a heat map of features as a picture, uint8[H, W, 3].

        Args:
          featmap: float[C, H, W], channels first as in MMEngine: `np.moveaxis(features, -1, 0)` of
            Flax's.
          overlaid_image: uint8[H, W, 3], to draw the features over.
          channel_reduction: 'squeeze_mean' draws the mean of all channels, 'select_max' the channel
            with the largest sum, None the `topk` channels with the largest sums.
          topk: number of channels, with `channel_reduction=None`; -1 draws a map with 1 or 3
            channels as it is.
          arrangement: rows and columns for the channels, at least `topk` in all.
          resize_shape: height and width of the map; that of the image by default.
          alpha: weight of the features over the image.

        Examples:
          >>> Canvas.draw_featmap(
          ...     np.random.rand(6, 4, 4), channel_reduction=None, topk=6, arrangement=(2, 3)
          ... ).shape
          (8, 12, 3)
        """
        features = np.asarray(featmap, np.float32)
        if features.ndim != 3:
            raise ValueError(f"`featmap` must have the shape [C, H, W], got {features.shape}")
        if channel_reduction not in ("squeeze_mean", "select_max", None):
            raise ValueError(
                "`channel_reduction` must be 'squeeze_mean', 'select_max' or None, got "
                f"{channel_reduction!r}"
            )
        image = None if overlaid_image is None else draw.to_rgb(overlaid_image)
        size = resize_shape or (features.shape[1:] if image is None else image.shape[:2])
        features = _resize(features, size)
        image = (
            None if image is None else _resize(image.transpose(2, 0, 1), size).transpose(1, 2, 0)
        )
        # By activation, in a stable order: equal channels would otherwise change places between
        # steps.
        order = np.argsort(-features.sum((1, 2)), kind="stable")
        if channel_reduction == "squeeze_mean":
            return _heat_map(features.mean(0), image, alpha)
        if channel_reduction == "select_max":
            return _heat_map(features[order[0]], image, alpha)
        if topk <= 0:
            if len(features) not in (1, 3):
                raise ValueError(
                    f"`topk` must be at least 1 for a map with {len(features)} channels, got "
                    f"{topk}; only maps with 1 or 3 channels are drawn as they are"
                )
            return _heat_map(
                features[0] if len(features) == 1 else features.transpose(1, 2, 0), image, alpha
            )
        rows, columns = arrangement
        if rows * columns < topk:
            raise ValueError(
                f"`arrangement` must have room for topk={topk} channels, got {rows} x {columns}"
            )
        maps = [_heat_map(features[i], image, alpha) for i in order[:topk]]
        maps += [np.full_like(maps[0], 255)] * (rows * columns - len(maps))
        return np.concatenate(
            [np.concatenate(maps[i * columns : (i + 1) * columns], 1) for i in range(rows)]
        )

    def _add(
        self,
        kind: str,
        shapes: Any,
        edge_colors: Colors,
        line_styles: str | Sequence[str],
        line_widths: float | Sequence[float],
        face_colors: Colors = "none",
        alpha: float | Sequence[float] | None = None,
    ) -> Self:
        """Add a collection of matplotlib, whose settings may have one entry per shape."""
        axes = self._require_image()
        from matplotlib import collections

        axes.add_collection(
            getattr(collections, kind)(
                shapes,
                edgecolors=_to_colors(edge_colors),
                facecolors=_to_colors(face_colors),
                linestyles=line_styles,
                linewidths=line_widths,
                alpha=alpha,
            )
        )
        return self

    def _warn_outside(self, name: str, points: np.ndarray) -> None:
        """Warn of points, real[..., 2], that are not on the image."""
        self._require_image()
        height, width = self._size
        if ((points < 0) | (points > (width, height))).any():
            text = (
                f"`{name}` reaches beyond the image of {width} x {height} pixels: that part is "
                "not drawn"
            )
            warnings.warn(text, stacklevel=3)

    def _require_image(self) -> Any:
        if self._axes is None:
            raise RuntimeError("there is no image to draw on: call `set_image` first")
        return self._axes


def _check(name: str, values: ArrayLike, width: int) -> np.ndarray:
    """Return float[N, width], from that or one entry of it."""
    array = np.asarray(values, np.float64)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(
            f"`{name}` must have the shape (N, {width}) or ({width},), got {np.shape(values)}"
        )
    return array


def _to_colors(colors: Any) -> Any:
    """Return colors as matplotlib takes them: names as they are, RGB from 0 to 1."""
    if isinstance(colors, str):
        return colors
    if len(colors) == 3 and all(isinstance(x, int | np.integer) for x in colors):
        return tuple(int(x) / 255 for x in colors)
    if np.ndim(colors[0]) == 0 and not isinstance(colors[0], str):
        raise ValueError(f"a color must be a name or three integers from 0 to 255, got {colors!r}")
    return [_to_colors(color) for color in colors]


def _pick(name: str, values: Any, index: int, count: int) -> Any:
    """Return the entry for one of `count` shapes, from a list or one value for all."""
    if not isinstance(values, list):
        return values
    if len(values) != count:
        raise ValueError(f"`{name}` must have one entry per shape, {count}, got {len(values)}")
    return values[index]


def _resize(channels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize [C, h, w] bilinearly to [C, H, W]."""
    if channels.shape[1:] == tuple(size):
        return channels
    return np.asarray(
        jax.image.resize(
            channels.astype(np.float32), (len(channels), *size), "linear", antialias=False
        )
    )


def _heat_map(features: np.ndarray, image: np.ndarray | None, alpha: float) -> np.ndarray:
    """Return features, [H, W] as colors or [H, W, 3] as RGB, scaled to their range, over an
    image if there is one.
    """
    from matplotlib import colormaps

    low = features.min()
    high = features.max()
    scaled = (features - low) / max(high - low, 1e-12)
    colors = 255 * (colormaps["jet"](scaled)[..., :3] if features.ndim == 2 else scaled)
    return (
        (colors if image is None else (1 - alpha) * image + alpha * colors).round().astype(np.uint8)
    )
