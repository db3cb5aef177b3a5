"""Image normalization and padding: for samples on the host, and for batches on the device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.annotations import Count, Positive
from jengine.config.errors import ConfigError
from jengine.config.registry import TRANSFORMS
from jengine.data.host_entries import Batch, Sample
from jengine.extras.augment.augments import replace_entries
from jengine.model.selection import Selector, select_array


@TRANSFORMS.register_module()
@dataclasses.dataclass(frozen=True, eq=False)
class Normalize:
    """Sample image as `(image - mean) / std` in float32, maybe with the channels in the opposite
    order.

    >>> Normalize(mean=[1, 0], std=[2, 1], bgr_to_rgb=True)(
    ...     {"image": np.array([[[4, 5]]], np.uint8)}
    ... )["image"]
    array([[[2., 4.]]], dtype=float32)

    Args:
      mean, std: one number for each channel, or one for all; for images from 0 to 255, in the
        output order.
      bgr_to_rgb: reverse the channels first, as images that OpenCV has read need it; the same turns
        RGB to BGR.
      image: image entry by name or index, [H, W, C].
    """

    mean: Sequence[float] | float
    std: Sequence[Positive] | Positive
    bgr_to_rgb: bool = False
    image: Selector = "image"

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the normalized image."""
        image = np.asarray(select_array(sample, self.image, "Normalize.image", "sample"))
        return replace_entries(
            sample, {self.image: normalize(image, self.mean, self.std, self.bgr_to_rgb)}
        )


@TRANSFORMS.register_module()
@dataclasses.dataclass(frozen=True, eq=False)
class Pad:
    """Sample image padded at the bottom and on the right.

    >>> Pad(size_divisor=4)({"image": np.ones((3, 5, 1))})["image"].shape
    (4, 8, 1)

    Args:
      size: (height, width) after padding; larger images are an error.
      size_divisor: a number that divides the resulting height and width; one of the two must be
        given.
      pad_val: value for added pixels.
      image: image entry by name or index, [H, W, C] or [H, W].

    Raises:
      ConfigError: both `size` and `size_divisor`, or none. ValueError: an image larger than `size`.
    """

    size: tuple[Count, Count] | None = None
    size_divisor: Count | None = None
    pad_val: float = 0
    image: Selector = "image"

    def __post_init__(self) -> None:
        if (self.size is None) == (self.size_divisor is None):
            raise ConfigError(
                f"Pad: one of size and size_divisor must be given, got {self.size} and "
                f"{self.size_divisor}"
            )

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the padded image."""
        image = np.asarray(select_array(sample, self.image, "Pad.image", "sample"))
        divisor = self.size_divisor or 1
        height, width = self.size or tuple(
            -(-length // divisor) * divisor for length in image.shape[:2]
        )
        added = (height - image.shape[0], width - image.shape[1])
        if min(added) < 0:
            raise ValueError(
                f"`Pad.size` must be at least that of each image, {image.shape[:2]}, got "
                f"{self.size}"
            )
        # At the bottom and the right, as in MMCV: boxes and points keep their coordinates.
        pads = [(0, added[0]), (0, added[1]), *[(0, 0)] * (image.ndim - 2)]
        return replace_entries(
            sample, {self.image: np.pad(image, pads, constant_values=self.pad_val)}
        )


@TRANSFORMS.register_module()
@dataclasses.dataclass(frozen=True, eq=False)
class BatchNormalize(Normalize):
    """Batch images as `(images - mean) / std` in float32, in the compiled step.

    The host then sends bytes, a quarter of the floats. As a step of a `PreprocessedModel` it holds
    in training, evaluation and prediction; in a `BatchAugmentHook` in training alone.

    >>> BatchNormalize(mean=1, std=2)({"image": jnp.full((1, 1, 1, 3), 5, jnp.uint8)})["image"]
    Array([[[[2., 2., 2.]]]], dtype=float32)

    Args:
      mean, std, bgr_to_rgb: see `Normalize`.
      image: image entry by name or index, [B, H, W, C].
    """

    def __call__(self, batch: Batch, rng: jax.Array | None = None) -> Batch:
        """Return the batch with normalized images."""
        images = jnp.asarray(select_array(batch, self.image, "BatchNormalize.image", "batch"))
        return replace_entries(
            batch, {self.image: normalize(images, self.mean, self.std, self.bgr_to_rgb)}
        )


def normalize(
    image: Any, mean: Sequence[float] | float, std: Sequence[float] | float, bgr_to_rgb: bool
) -> Any:
    """Return a normalized array [..., C] in float32; NumPy or JAX like the argument."""
    numbers = [np.atleast_1d(np.asarray(value, np.float32)) for value in (mean, std)]
    if any(number.shape not in ((1,), image.shape[-1:]) for number in numbers):
        raise ConfigError(
            f"`mean` and `std` must have one number for each of the {image.shape[-1]} channels, "
            f"got {mean} and {std}"
        )
    # First: mean and std are those of the channels after the exchange, as in MMEngine.
    image = image[..., ::-1] if bgr_to_rgb else image
    return (image.astype(np.float32) - numbers[0]) / numbers[1]
