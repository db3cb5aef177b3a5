"""Operations that a compiler must not join with those around them.

What XLA puts into one kernel decides on last bits: a product and a sum in it may become one rounding instead of two. A
training step whose inputs are taken out of larger arrays has the bits of the step by itself if the taking is set apart.
The step itself must not be: XLA's CPU compiler knows fast convolutions in the outermost computation only.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def set_apart(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of pytrees as a call of its own within what is compiled: XLA joins nothing in it with the rest."""

    def call(*args: Any) -> Any:
        return set_xla_metadata(jax.jit(fn)(*args), inlineable="false")  # marks the call that these come from

    return call
