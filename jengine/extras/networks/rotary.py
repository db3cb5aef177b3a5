"""Rotary position embedding, and its scaling to contexts longer than in pretraining."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from jengine.config.annotations import Count, Positive
from jengine.config.errors import ConfigError, config_path, did_you_mean
from jengine.config.registry import check_arguments
from jengine.extras.networks.mesh_axes import get_platform

# ratio of the longest to the shortest wavelength of the rotary position embedding
ROTARY_BASE = 10_000.0


class RotaryScaling(Protocol):
    """Frequency scaling for a longer context."""

    @property
    def amplitude(self) -> float:
        """The factor for queries and keys."""

    def scale(self, frequencies: jax.Array, base: float) -> jax.Array:
        """Return the new frequencies, f32[K / 2], in radians per position."""


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`, the new context length over the original one (Chen et al.
    2023).
    """

    factor: Positive
    amplitude = 1.0

    def scale(self, frequencies: jax.Array, base: float) -> jax.Array:
        """Return the new frequencies, f32[K / 2]."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Longer wavelengths, as in Llama 3.1.

    Waves that pass fewer than `low_freq_factor` times over the original context are slowed down by
    `factor`, those that pass more than `high_freq_factor` times are kept, and the ones between are
    interpolated.

    Attributes:
      factor: the new context length over the original one.
      low_freq_factor, high_freq_factor: the period counts.
      original_length: the context in tokens for which the model was trained first.
    """

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_length: Count
    amplitude = 1.0

    def __post_init__(self) -> None:
        low = self.low_freq_factor
        high = self.high_freq_factor
        if high <= low:
            raise ConfigError(
                f"`high_freq_factor` must be above low_freq_factor = {low}, got {high}"
            )

    def scale(self, frequencies: jax.Array, base: float) -> jax.Array:
        """Return the new frequencies, f32[K / 2]."""
        # Angles are frequency * position, so this is how often a wave fits into the original
        # context.
        periods = frequencies * (self.original_length / (2 * math.pi))
        kept = jnp.clip(
            (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1
        )
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): waves between the two limits are interpolated by channel, and logits
    grow.

    Attributes:
      factor: the new context length over the original one.
      original_length: the context in tokens for which the model was trained first.
      beta_fast, beta_slow: waves with more periods over the original context are kept, those with
        fewer slowed down.
      attention_factor: factor for queries and keys; None for `0.1 * log(factor) + 1`.
      truncate: whether the limits are rounded to whole channels.
    """

    factor: Positive
    original_length: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """The factor for queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def scale(self, frequencies: jax.Array, base: float) -> jax.Array:
        """Return the new frequencies, f32[K / 2]."""
        half = frequencies.size

        def find_channel(periods: float) -> float:
            return half * math.log(self.original_length / (periods * 2 * math.pi)) / math.log(base)

        # YaRN: channels that turn often within the original length keep their frequency, slow ones
        # are stretched, with a ramp between.
        first = find_channel(self.beta_fast)
        last = find_channel(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, 2 * half - 1)
        slowed = jnp.clip((jnp.arange(half) - first) / ((last - first) or 1e-3), 0, 1)
        return frequencies * (slowed / self.factor + 1 - slowed)


_SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def make_scaling(config: Mapping[str, object] | None) -> RotaryScaling | None:
    """Return the scaling for a config with the `kind` 'linear', 'llama3' or 'yarn', and its
    attributes.

    >>> make_scaling(dict(kind="linear", factor=2.0))
    LinearScaling(factor=2.0)

    Raises:
      ConfigError: another kind or attribute, or a missing one.
    """
    if config is None:
        return None
    kind = config.get("kind")
    if kind not in _SCALINGS:
        hint = did_you_mean(str(kind), _SCALINGS)
        raise ConfigError(
            f"`rotary_scaling.kind` must be one of {', '.join(_SCALINGS)}, got {kind!r}{hint}"
        )
    arguments = {name: value for name, value in config.items() if name != "kind"}
    with config_path("rotary_scaling"):
        check_arguments(_SCALINGS[str(kind)], arguments)
        return _SCALINGS[str(kind)](**arguments)


def rotate(
    x: jax.Array,
    base: float = ROTARY_BASE,
    scaling: RotaryScaling | None = None,
    positions: jax.Array | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """Return queries or keys, f[B, T, H, K], rotated by angles proportional to the positions,
    int[B, T] or 0, 1, ...

    Channel i in the first half and channel i in the second half are two coordinates in a plane. The
    result is multiplied by `scale` and has `x`'s dtype; angles and products are computed in
    float32.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    amplitude = scale
    if scaling is not None:
        frequencies = scaling.scale(frequencies, base)
        amplitude = scale * scaling.amplitude
    # bfloat16 has 8 bits, so it cannot tell neighbouring positions above 256 apart.
    steps = (
        jnp.arange(x.shape[1], dtype=jnp.float32)
        if positions is None
        else positions.astype(jnp.float32)
    )
    angles = steps[..., None, None] * frequencies
    cos = amplitude * jnp.cos(angles)
    sin = amplitude * jnp.sin(angles)
    turn = _turn_for_splash if get_platform() == "tpu" else _turn
    return turn(x, jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1))


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    # Halves as in Hugging Face's weights; the paper pairs neighbouring channels.
    half = x.shape[-1] // 2
    swapped = jnp.concatenate([x[..., half:], x[..., :half]], axis=-1)
    return (x * cos + swapped * sin).astype(x.dtype)


# XLA merges the gathers of a kernel for the forward and the backward pass only if few operations
# lie between them: with the gradient that JAX derives, which has more operations than this one, and
# 8,192 tokens on each chip, a TPU gathers the kernels of queries and keys twice. Splash attention
# has no forward-mode derivatives either.
_turn_for_splash = jax.custom_vjp(_turn)
_turn_for_splash.defvjp(
    lambda x, cos, sin: (_turn(x, cos, sin), (cos, sin)),
    # The transpose of a rotation is the rotation back. Angles are not trained.
    lambda angles, y: (_turn(y, angles[0], -angles[1]), *map(jnp.zeros_like, angles)),
)
