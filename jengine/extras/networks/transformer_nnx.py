"""`TransformerLM` as an NNX module: the same functions, with parameters of the same names."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jengine.config.errors import ConfigError
from jengine.config.registry import MODELS
from jengine.extras.networks.transformer import TransformerLM
from jengine.model.model import Params

if TYPE_CHECKING:
    from flax import nnx


@MODELS.register_module("NnxTransformerLM")
def nnx_transformer(rngs: "nnx.Rngs", **settings: Any) -> "nnx.Module":
    """Return a `TransformerLM` as an NNX module, by Flax's bridge between Linen and NNX.

    Weights, sharding rules, `LoRA` and checkpoints are those of the Linen module. Its blocks are no
    NNX modules, so nnx cannot replace parts of them, and rules for norms must name them:
    `custom_keys=dict(norm=...)`.

    >>> from flax import nnx
    >>> module = nnx_transformer(nnx.Rngs(0), vocab_size=32, width=8, heads=2, mlp_width=16)
    >>> module(jnp.zeros((1, 4), int)).shape, module.layers["attn"]["query"]["kernel"].shape
    ((1, 4, 32), (2, 8, 2, 4))

    Args:
      rngs: random streams for the initial values.
      **settings: attributes of `TransformerLM`, without `experts` and `logits_chunk`.

    Raises:
      ConfigError: experts, or chunks of logits.
    """
    from flax import nnx

    if settings.get("logits_chunk") is not None:
        raise ConfigError(
            f"NnxTransformerLM: `logits_chunk` must be None, got {settings['logits_chunk']}; use "
            "TransformerLM"
        )
    # the bridge keeps the balance loss as a state, where it has no effect
    if settings.get("experts") is not None:
        raise ConfigError(
            f"NnxTransformerLM: `experts` must be None, got {settings['experts']}; use "
            "TransformerLM"
        )
    return nnx.bridge.lazy_init(
        nnx.bridge.ToNNX(TransformerLM(**settings), rngs=rngs), jnp.zeros((1, 1), int)
    )


NnxTransformerLM = nnx_transformer


def split_transformer(module: "nnx.Module") -> tuple[TransformerLM, Params]:
    """Return the Linen module and the parameters of an `nnx_transformer`.

    Raises:
      TypeError: another module.
    """
    from flax import nnx

    linen = getattr(module, "to_nnx__module", None)
    if not isinstance(linen, TransformerLM):
        raise TypeError(
            "an NNX module that generates must be from `nnx_transformer`, got "
            f"{type(module).__name__}"
        )
    return linen, nnx.to_pure_dict(nnx.state(module, nnx.Param))
