"""Random views of small images, made inside the step: pure functions of a key."""

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
    """One random view of each image: moved, turned and stretched, its contrast changed, with noise.

    All is done by one resampling with bilinear interpolation; what comes from outside is 0. With all strengths 0 the
    view is the image.

    Args:
      rng: key<fry>[].
      image: float[B, H, W, C].
      shift: largest move along each axis, in pixels.
      rotate: largest turn, in radians.
      scale: largest change of size along each axis and of the slant, as a fraction.
      contrast: largest change of the factor on all pixels.
      noise: standard deviation of the noise on each pixel.

    Returns:
      float[B, H, W, C].
    """
    keys = jax.random.split(rng, 6)
    batch = image.shape[0]
    angle = _spread(keys[0], (batch,), rotate)
    stretch = 1 + _spread(keys[1], (batch, 2), scale)
    slant = _spread(keys[2], (batch,), scale)
    move = _spread(keys[3], (batch, 2), shift)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turn = jnp.stack([jnp.stack([cos, -sin], -1), jnp.stack([sin, cos], -1)], -2)
    one, zero = jnp.ones_like(slant), jnp.zeros_like(slant)
    shear = jnp.stack([jnp.stack([one, slant], -1), jnp.stack([zero, one], -1)], -2)
    view = jax.vmap(_resample)(image, turn @ shear * stretch[:, None, :], move)
    factor = 1 + _spread(keys[4], (batch, 1, 1, 1), contrast)
    return view * factor + noise * jax.random.normal(keys[5], view.shape)


def _spread(rng: jax.Array, shape: tuple[int, ...], width: float) -> jax.Array:
    return jax.random.uniform(rng, shape, minval=-width, maxval=width)


def _resample(image: jax.Array, matrix: jax.Array, move: jax.Array) -> jax.Array:
    """The image f[H, W, C] at `matrix @ place + move`, places counted from its centre."""
    height, width, _ = image.shape
    centre = jnp.array([(height - 1) / 2, (width - 1) / 2])
    places = jnp.stack(jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij"), -1) - centre
    rows, columns = jnp.moveaxis(places @ matrix.T + centre + move, -1, 0)
    sample = functools.partial(jax.scipy.ndimage.map_coordinates, coordinates=[rows, columns], order=1, mode="constant")
    return jax.vmap(sample, in_axes=-1, out_axes=-1)(image)
