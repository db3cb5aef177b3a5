"""Random views of small images inside the compiled step: pure functions of a key."""

import functools

import jax
import jax.numpy as jnp


def random_view(
    rng: jax.Array,
    image: jax.Array,
    *,
    shift: float = 1.0,
    rotate: float = 0.2,
    scale: float = 0.15,
    contrast: float = 0.3,
    noise: float = 0.05,
) -> jax.Array:
    """Return a random view of each image: shifted, rotated, scaled and sheared, with another
    contrast and noise.

    The geometric changes are one resampling with bilinear interpolation, which fills with 0. With
    all strengths 0 the view is the image.

    >>> random_view(jax.random.key(0), jnp.ones((2, 8, 8, 1))).shape
    (2, 8, 8, 1)

    Args:
      rng: key<fry>[].
      image: float[B, H, W, C].
      shift: maximum shift along each axis, in pixels.
      rotate: maximum rotation, in radians.
      scale: maximum change in the scale along each axis, and in the shear, as a fraction.
      contrast: maximum change in the factor on all pixels.
      noise: standard deviation of the noise on each pixel.
    """
    keys = jax.random.split(rng, 6)
    batch_size = image.shape[0]
    angles = _uniform(keys[0], (batch_size,), rotate)
    scales = 1 + _uniform(keys[1], (batch_size, 2), scale)
    shears = _uniform(keys[2], (batch_size,), scale)
    shifts = _uniform(keys[3], (batch_size, 2), shift)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    rotation = jnp.stack([jnp.stack([cos, -sin], -1), jnp.stack([sin, cos], -1)], -2)
    one = jnp.ones_like(shears)
    zero = jnp.zeros_like(shears)
    shear = jnp.stack([jnp.stack([one, shears], -1), jnp.stack([zero, one], -1)], -2)
    view = jax.vmap(_resample)(image, rotation @ shear * scales[:, None, :], shifts)
    factor = 1 + _uniform(keys[4], (batch_size, 1, 1, 1), contrast)
    return view * factor + noise * jax.random.normal(keys[5], view.shape)


def _uniform(rng: jax.Array, shape: tuple[int, ...], limit: float) -> jax.Array:
    return jax.random.uniform(rng, shape, minval=-limit, maxval=limit)


def _resample(image: jax.Array, matrix: jax.Array, shift: jax.Array) -> jax.Array:
    """Sample the image f[H, W, C] at `matrix @ position + shift`, with positions relative to the
    center.
    """
    height, width, _ = image.shape
    center = jnp.array([(height - 1) / 2, (width - 1) / 2])
    positions = (
        jnp.stack(jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij"), -1) - center
    )
    coordinates = jnp.moveaxis(positions @ matrix.T + center + shift, -1, 0)
    sample = functools.partial(
        jax.scipy.ndimage.map_coordinates, coordinates=list(coordinates), order=1, mode="constant"
    )
    return jax.vmap(sample, in_axes=-1, out_axes=-1)(image)
