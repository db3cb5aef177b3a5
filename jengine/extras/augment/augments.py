"""Image batch augmentations inside the compiled step: soft labels, MixUp, CutMix and random
erasing.

Each is a function `(batch, rng) -> batch` for a `BatchAugmentHook`, or for `batch_augments` in a
`SwitchRecipeHook`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jengine.config.annotations import Count, Decay, Fraction, Positive
from jengine.config.errors import ConfigError
from jengine.config.registry import TRANSFORMS
from jengine.data.host_entries import Batch
from jengine.data.masking import MaskedTuple
from jengine.model.selection import Selector, describe_array, select_array

_ATTEMPTS = 10  # rectangles that `RandomErasing` draws until one fits


@TRANSFORMS.register_module()
@dataclasses.dataclass(frozen=True, eq=False)
class SoftLabels:
    """Probabilities instead of class indices, as `MixUp` and `CutMix` require, optionally smoothed.

    The true class gets 1 - smoothing + smoothing / num_classes, every other class smoothing /
    num_classes.

    >>> SoftLabels(num_classes=4, smoothing=0.5)({"label": jnp.array([1])}, jax.random.key(0))[
    ...     "label"
    ... ]
    Array([[0.125, 0.625, 0.125, 0.125]], dtype=float32)

    Args:
      num_classes: class count C.
      smoothing: probability mass that is distributed over all classes, in [0, 1).
      label: batch entry by name or index, int[B], which becomes f32[B, C].
    """

    num_classes: Count
    smoothing: Decay = 0.0
    label: Selector = "label"

    def __call__(self, batch: Batch, rng: jax.Array) -> Batch:
        """Return the batch with soft labels."""
        labels = select_array(batch, self.label, "SoftLabels.label", "batch")
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            raise ConfigError(
                f"`SoftLabels.label` must be class indices, got {self.label!r}, "
                f"{describe_array(labels)}"
            )
        one_hot = jax.nn.one_hot(labels, self.num_classes, dtype=jnp.float32)
        # `one_hot` gives zeros for the others
        is_class = ((labels >= 0) & (labels < self.num_classes))[..., None]
        return replace_entries(
            batch,
            {
                self.label: jnp.where(
                    is_class, optax.smooth_labels(one_hot, self.smoothing), jnp.nan
                )
            },
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Mix:
    """Mixture between each example and its mirror image in the batch: the first with the last,
    and so on.
    """

    alpha: Positive = 1.0
    prob: Fraction = 1.0
    mode: Literal["batch", "elem"] = "batch"
    image: Selector = "image"
    label: Selector = "label"

    def __call__(self, batch: Batch, rng: jax.Array) -> Batch:
        """Return the mixed batch."""
        name = type(self).__name__
        images = select_array(batch, self.image, f"{name}.image", "batch")
        labels = select_array(batch, self.label, f"{name}.label", "batch")
        _require_images(images, f"{name}.image", self.image)
        if not jnp.issubdtype(labels.dtype, jnp.floating):
            raise ConfigError(
                f"`{name}.label` must be probabilities of classes, got {self.label!r}, "
                f"{describe_array(labels)}; put dict(type='SoftLabels', num_classes=...) before it"
            )
        share_rng, prob_rng, image_rng = jax.random.split(rng, 3)
        count = len(images) if self.mode == "elem" else 1
        share = _draw_beta(share_rng, self.alpha, (count,))
        # A share of 1 leaves an example as it is: no branch, as shapes must not depend on what is
        # drawn.
        share = jnp.where(jax.random.uniform(prob_rng, (count,)) < self.prob, share, 1.0)
        # It returns the share too: a box that is cut at the edge has another area than was drawn.
        mixed, share = self.mix(images, share, image_rng)
        weight = share.reshape(count, *(1,) * (labels.ndim - 1)).astype(labels.dtype)
        return replace_entries(
            batch, {self.image: mixed, self.label: weight * labels + (1 - weight) * labels[::-1]}
        )

    def mix(
        self, images: jax.Array, share: jax.Array, rng: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return images f[B, H, W, C] with the given share, f32[B] or f32[1], of themselves, and
        the exact share.
        """
        raise NotImplementedError


@TRANSFORMS.register_module()
@dataclasses.dataclass(frozen=True, eq=False)
class MixUp(_Mix):
    """Weighted mean of each image with another one, and of their soft labels.

    >>> batch = {"image": jnp.ones((2, 4, 4, 1)), "label": jnp.eye(2)}
    >>> MixUp(alpha=0.2)(batch, jax.random.key(0))["label"].sum(axis=1)
    Array([1., 1.], dtype=float32)

    Args:
      alpha: the weight is drawn from Beta(alpha, alpha): small values mix little, 1 is uniform.
      prob: mixing probability.
      mode: one weight for the 'batch', or one for each example, 'elem'.
      image: name or index of the entry with the images, f[B, H, W, C].
      label: the soft label entry, f[B, C]: see `SoftLabels`.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, arXiv:1710.09412. Pairs and
    modes are timm's.
    """

    alpha: Positive = 0.8

    def mix(
        self, images: jax.Array, share: jax.Array, rng: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the weighted means; see the base class."""
        weight = share[:, None, None, None].astype(images.dtype)
        return weight * images + (1 - weight) * images[::-1], share


@TRANSFORMS.register_module()
@dataclasses.dataclass(frozen=True, eq=False)
class CutMix(_Mix):
    """Rectangle from another image in each image, and soft labels in proportion to the areas.

    >>> batch = {"image": jnp.zeros((2, 4, 4, 1)).at[0].set(1), "label": jnp.eye(2)}
    >>> mixed = CutMix(alpha=1.0)(batch, jax.random.key(0))
    >>> bool(jnp.allclose(mixed["image"].mean(axis=(1, 2, 3)), mixed["label"][:, 0]))
    True

    Args:
      alpha: the image share that is kept is drawn from Beta(alpha, alpha); a rectangle that the
        border cuts off is smaller, and the labels count the remaining part.
      mode: one rectangle for the 'batch', or one for each example, 'elem'.
      prob, image, label: see `MixUp`.

    Source: Yun et al., CutMix, arXiv:1905.04899. Pairs, modes and the share correction are timm's.
    """

    def mix(
        self, images: jax.Array, share: jax.Array, rng: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the images with rectangles; see the base class."""
        height, width = images.shape[1:3]
        center = jax.random.randint(rng, (2, len(share)), 0, np.array([[height], [width]]))
        is_cut = cut_mask(share, center, height, width)
        return jnp.where(is_cut[..., None], images[::-1], images), 1 - is_cut.mean(
            axis=(1, 2), dtype=jnp.float32
        )


@TRANSFORMS.register_module()
@dataclasses.dataclass(frozen=True, eq=False)
class RandomErasing:
    """Rectangle with zeros or noise in some images.

    Area and aspect ratio are drawn, up to ten times, until the rectangle is smaller than the image.

    >>> erase = RandomErasing(prob=1.0, area=(0.25, 0.25), aspect_ratio=(1.0, 1.0))
    >>> int(
    ...     erase({"image": jnp.ones((1, 8, 8, 1))}, jax.random.key(0))["image"].sum()
    ... )  # without 4 x 4 pixels
    48

    Args:
      prob: probability that an image gets a rectangle.
      area: least and greatest area, as a fraction of the image.
      aspect_ratio: least and greatest ratio, height over width.
      fill: what replaces the pixels: zeros, one normal number for each channel in the rectangle, or
        one for each pixel and channel. All suit normalized images.
      image: name or index of the entry with the images, f[B, H, W, C].

    Raises:
      ConfigError: bounds that do not increase.

    Source: Zhong et al., Random Erasing Data Augmentation, arXiv:1708.04896, with timm's settings.
    """

    prob: Fraction = 0.25
    area: tuple[Fraction, Fraction] = (0.02, 1 / 3)
    aspect_ratio: tuple[Positive, Positive] = (0.3, 1 / 0.3)
    fill: Literal["zeros", "color", "pixels"] = "zeros"
    image: Selector = "image"

    def __post_init__(self) -> None:
        for name, (low, high) in (("area", self.area), ("aspect_ratio", self.aspect_ratio)):
            if low > high:
                raise ConfigError(
                    f"`RandomErasing.{name}` must be (least, greatest), got ({low}, {high})"
                )

    def __call__(self, batch: Batch, rng: jax.Array) -> Batch:
        """Return the batch with rectangles erased."""
        images = select_array(batch, self.image, "RandomErasing.image", "batch")
        _require_images(images, "RandomErasing.image", self.image)
        count, height, width, channels = images.shape
        prob_rng, size_rng, place_rng, fill_rng = jax.random.split(rng, 4)
        sizes, fits = self._draw_sizes(size_rng, count, height, width)
        place = jax.random.uniform(place_rng, (2, count))
        # from 0 to the last place that fits
        starts = jnp.floor(place * (jnp.array([[height], [width]]) - sizes + 1))
        is_erased = _rectangle(starts, starts + sizes, height, width)
        is_erased &= (fits & (jax.random.uniform(prob_rng, (count,)) < self.prob))[:, None, None]
        shape = {"zeros": (), "color": (count, 1, 1, channels), "pixels": images.shape}[self.fill]
        fill = (
            jax.random.normal(fill_rng, shape, images.dtype)
            if shape
            else jnp.zeros((), images.dtype)
        )
        return replace_entries(batch, {self.image: jnp.where(is_erased[..., None], fill, images)})

    def _draw_sizes(
        self, rng: jax.Array, count: int, height: int, width: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return rectangle heights and widths, f32[2, B], and whether they fit, bool[B]."""
        area_rng, ratio_rng = jax.random.split(rng)
        # All attempts at once and the first that fits: a loop until one fits has no fixed length,
        # which a compiled step needs.
        drawn = (_ATTEMPTS, count)
        area = (
            jax.random.uniform(area_rng, drawn, minval=self.area[0], maxval=self.area[1])
            * height
            * width
        )
        low, high = map(math.log, self.aspect_ratio)
        ratio = jnp.exp(jax.random.uniform(ratio_rng, drawn, minval=low, maxval=high))
        sizes = jnp.round(jnp.sqrt(jnp.stack([area * ratio, area / ratio])))
        fits = (sizes[0] < height) & (sizes[1] < width)
        first = jnp.argmax(fits, axis=0)
        return sizes[:, first, jnp.arange(count)], fits.any(axis=0)


def cut_mask(share: jax.Array, center: jax.Array, height: int, width: int) -> jax.Array:
    """Return where rectangles are, bool[N, height, width]; parts beyond the border are cut off.

    Args:
      share: f32[N], the image fraction outside the rectangle if the border cut nothing off.
      center: int32[2, N], center row and column.
      height, width: image size.
    """
    size = jnp.array([[height], [width]])
    # 1e-4: a square root that float32 rounds below the exact integer
    extent = jnp.floor(size * jnp.sqrt(1.0 - share) + 1e-4).astype(jnp.int32)
    start = center - extent // 2
    end = center + extent // 2
    return _rectangle(jnp.clip(start, 0, size), jnp.clip(end, 0, size), height, width)


def _rectangle(start: jax.Array, end: jax.Array, height: int, width: int) -> jax.Array:
    """Return where the pixels from `start` to below `end` are, each [2, N]: bool[N, height,
    width].
    """
    rows = jnp.arange(height)[None, :, None]
    columns = jnp.arange(width)[None, None, :]
    (top, left) = start[:, :, None, None]
    (bottom, right) = end[:, :, None, None]
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)


def _draw_beta(rng: jax.Array, alpha: float, shape: tuple[int, ...]) -> jax.Array:
    # Beta(1, 1) is uniform, and compiles in a fraction of the time
    return (
        jax.random.uniform(rng, shape) if alpha == 1 else jax.random.beta(rng, alpha, alpha, shape)
    )


def _require_images(images: jax.Array, argument: str, selector: Selector) -> None:
    if images.ndim != 4 or not jnp.issubdtype(images.dtype, jnp.floating):
        advice = "; make floats of integers first, with Normalize or BatchNormalize"
        raise ConfigError(
            f"`{argument}` must be images f[B, H, W, C], got {selector!r}, "
            f"{describe_array(images)}{advice if images.ndim == 4 else ''}"
        )


def replace_entries(batch: Batch, entries: Mapping[Selector, Any]) -> Batch:
    """Return a dict, tuple or NamedTuple with some entries replaced."""
    if isinstance(batch, Mapping):
        return {**batch, **{str(name): value for name, value in entries.items()}}
    if isinstance(batch, tuple) and all(isinstance(name, int) for name in entries):
        items = list(batch)
        for name, value in entries.items():
            items[int(name)] = value
        # A tuple with the mask of padded examples beside it, which a plain tuple would lose.
        if isinstance(batch, MaskedTuple):
            return MaskedTuple(items, batch.mask)
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    raise ConfigError(
        "a transform needs a dict, or a tuple and the indices of its entries, got a "
        f"{type(batch).__name__} and {list(entries)}"
    )
