"""Nonlinearities by name."""

from collections.abc import Callable
from typing import Literal

import jax
from flax import linen as nn

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    # Flax's default is the approximation by tanh.
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": nn.gelu,
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),  # that of CLIP
    "relu": nn.relu,
}
