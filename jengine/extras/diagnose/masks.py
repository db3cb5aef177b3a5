"""What Optax means by errors about masks and labels."""

import traceback
from collections.abc import Mapping
from typing import Any


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
