"""One check while a step is traced: its new state has the structure, shapes and dtypes of the
state that it got.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jengine.config import paths

PyTree = Any
_KINDS = (jnp.floating, jnp.integer)


def keep_types(before: PyTree, after: PyTree, under: str) -> PyTree:
    """Return a part of a step's new state with the dtypes of the old one.

    A leaf is cast if the old dtype holds all values of the new one, or if it is weakly typed, like
    a Python number. A state that changed in the first step would compile twice, could not pass
    through a chunk, and would not fit its own checkpoints.

    >>> keep_types({"mean": jnp.zeros(2)}, {"mean": jnp.ones(2, jnp.bfloat16)}, "model_state.")[
    ...     "mean"
    ... ].dtype.name
    'float32'

    Args:
      before: the part that the step got.
      after: the part that it returns; arrays, tracers or numbers.
      under: the path of the part with a final dot, for messages.

    Raises:
      ValueError: another structure, shape, or dtype that cannot be cast exactly.
    """
    old = paths.flatten(before)
    new = paths.flatten(after)
    # other paths before other dtypes
    for path in sorted({**old, **new}, key=lambda path: path in old and path in new):
        if (
            path not in old
            or path not in new
            or not _fits(jax.typeof(new[path]), jax.typeof(old[path]))
        ):
            was, now = (_describe(leaves.get(path)) for leaves in (old, new))
            raise ValueError(
                f"`{under}{path}` must stay {was} in a training step, got {now}: a step returns "
                "the state with the arrays, shapes and dtypes that it got"
            )
    structure = str(jax.tree.structure(before))
    new_structure = str(jax.tree.structure(after))
    if structure != new_structure:  # as with a list in the place of a tuple
        raise ValueError(
            f"`{under[:-1]}` must stay {structure} in a training step, got {new_structure}"
        )
    return jax.tree.map(_cast, before, after)


def _fits(new: Any, old: Any) -> bool:
    if new.dtype == old.dtype:
        return new.shape == old.shape
    is_one_kind = any(
        jnp.issubdtype(new.dtype, kind) and jnp.issubdtype(old.dtype, kind) for kind in _KINDS
    )
    holds_all = jnp.promote_types(new.dtype, old.dtype) == old.dtype
    return new.shape == old.shape and is_one_kind and (holds_all or new.weak_type)


def _cast(old: Any, new: Any) -> Any:
    # A weak type of the same dtype is made strong too: otherwise the next call would trace again.
    kind = jax.typeof(new)
    return (
        new
        if kind.dtype == jax.typeof(old).dtype and not kind.weak_type
        else jnp.asarray(new, old.dtype)
    )


def _describe(leaf: Any) -> str:
    return "absent" if leaf is None else jax.typeof(leaf).str_short()
