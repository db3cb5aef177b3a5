"""What JAX and Optax mean by errors about static arguments and about masks."""

import re
import traceback
from collections.abc import Mapping
from typing import Any

import jax

_MODES = ("train", "training", "is_train", "is_training", "deterministic")


def explain_static_modes(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return what to write where a transformation of JAX traces the argument for the mode.

    The engine passes a Python bool. `jax.jit` and `jax.checkpoint` make an array of it unless it is
    static, and then `if train:` fails in the network, far from the line to change; a static
    argument in turn must not get an array. Explainer.
    """
    if isinstance(error, jax.errors.TracerBoolConversionError):
        # JAX names the argument; within a transformation of Flax it only has its position,
        # `args[2]`
        pattern = r"shape bool\[\].*value of the argument (\w+)(\[\d+\])?"
        found = re.search(pattern, str(error), re.DOTALL)
        calls = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
        names = [found[1]] if found else []
        if found and found[2]:
            names = [name for code in calls for name in code.co_varnames[: code.co_argcount]]
        mode = next((name for name in names if name in _MODES), None)
        if mode is not None:
            return (
                f"`{mode}` must be static where the network, or a part of it, is transformed: "
                f"write `jax.jit(f, static_argnames={mode!r})` or no jit at all, as the "
                "engine compiles the whole step; in Flax `nn.remat(Block, static_argnums=...)`, "
                "with the number of the argument."
            )
    elif "static arguments" in str(error) and "racer" in str(error):
        return (
            "A static argument of `jax.jit` must be a Python value, got one that depends on "
            "traced arrays: pass True or False for the mode (`train`, `deterministic`), or "
            "leave it out of `static_argnames` and select with `jnp.where` or `jax.lax.cond`."
        )
    return None


def explain_masks(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return what a mask or labels must be, for an error within a masked transformation of Optax.

    Explainer.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = {frame.f_globals.get("__name__", "").rpartition(".")[2] for frame in frames}
    if not isinstance(error, TypeError | ValueError) or not names & {"_masking", "_combining"}:
        return None
    return (
        "A mask or labels of an optax transformation must be a function of parameters, "
        "`mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)`, or a tree with "
        "their structure: nested dicts, also for a module of Flax NNX or Equinox."
    )
