"""Explain errors about the argument for the mode, which is a Python bool, where JAX traces it."""

import re
from collections.abc import Mapping
from typing import Any

import jax

from jengine.model.adapters import TRAIN_ARGUMENTS


def explain_static_modes(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Say what to write where a transformation of JAX traces the argument for the mode.

    Explainer. The engine passes a Python bool. `jax.jit` and `jax.checkpoint` make an array of it
    unless it is static, and then `if train:` fails in the network, far from the line to change; a
    static argument in turn must not get an array.
    """
    # JAX names the argument; within a transformation of Flax it only has its position, `args[2]`
    found = re.search(
        r"shape bool\[\].*value of the argument (\w+)(\[\d+\])?", str(error), re.DOTALL
    )
    if isinstance(error, jax.errors.TracerBoolConversionError) and found:
        name = found[1] if found[1] in TRAIN_ARGUMENTS else "train"
        if name == found[1] or found[2]:
            return (
                f"`{name}` must be static where the network, or a part of it, is transformed: "
                f"write `jax.jit(f, static_argnames={name!r})` or no jit at all, as the engine "
                "compiles the whole step; in Flax `nn.remat(Block, static_argnums=...)`, with the "
                "number of the argument."
            )
    if "static arguments" in str(error) and "racer" in str(error):
        return (
            "A static argument of `jax.jit` must be a Python value, got one that depends on "
            "traced arrays: pass True or False for the mode (`train`, `deterministic`), or "
            "leave it out of `static_argnames` and select with `jnp.where` or `jax.lax.cond`."
        )
    return None
