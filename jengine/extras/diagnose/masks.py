"""What Optax means by errors about masks and labels."""

import traceback
from collections.abc import Mapping
from typing import Any


def explain_masks(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return what a mask or labels must be, for an error within a masked transformation of Optax.

    Explainer.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    own = [name for name in modules if name.partition(".")[0] not in ("jax", "jaxlib")]
    # an error of the transformation that is masked passes there too, with further frames
    is_about_masks = own and own[-1].endswith(("._masking", "._combining"))
    if not isinstance(error, TypeError | ValueError) or not is_about_masks:
        return None
    return (
        "A mask or labels of an optax transformation must be a function of parameters, "
        "`mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)`, or a tree with "
        "their structure: nested dicts, also for a module of Flax NNX or Equinox."
    )
