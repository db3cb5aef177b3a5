"""Mask for the real examples in a padded batch: an entry `mask` in a dict, or the attribute of a
`MaskedTuple`.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jengine.data.host_entries import Batch

MASK = "mask"
_IS_WHOLE: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jengine_whole_batches", default=False
)


@jax.tree_util.register_pytree_with_keys_class
class MaskedTuple(tuple[Any, ...]):
    """Tuple with a mask: the entries in a batch that is a tuple or list.

    It has the length and items of the tuple without a mask, so `x, y = batch` works for padded
    batches too. As a pytree it has the leaves in the items and the mask.

    >>> x, y = batch = MaskedTuple((np.zeros(2), np.ones(2)), mask=np.array([True, False]))
    >>> batch.mask
    array([ True, False])

    Args:
      items: the entries, pytrees with leading axis B.
      mask: bool[B], True for a real example.
    """

    mask: Any

    def __new__(cls, items: Iterable[Any], mask: "np.ndarray | jax.Array") -> "MaskedTuple":
        """Return a tuple with `items`."""
        self = super().__new__(cls, items)
        self.mask = mask
        return self

    def __repr__(self) -> str:
        return f"MaskedTuple({tuple(self)!r}, mask={self.mask!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskedTuple, (tuple(self), self.mask)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Return the pytree node's children with keys."""
        items = [(jax.tree_util.SequenceKey(i), item) for i, item in enumerate(self)]
        return [*items, (jax.tree_util.GetAttrKey(MASK), self.mask)], None

    @classmethod
    def tree_unflatten(cls, aux_data: None, children: Iterable[Any]) -> "MaskedTuple":
        """Return a node with other children."""
        *items, mask = children
        return cls(items, mask)


def with_mask(batch: Batch, mask: np.ndarray) -> Batch:
    """Add a mask for the real examples, bool[B]: as the entry `mask` in a dict.

    A tuple or list becomes a `MaskedTuple`.

    Raises:
      TypeError: the batch has another type. ValueError: it already has an entry with that name.
    """
    if type(batch) in (tuple, list):
        return MaskedTuple(batch, mask)
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a batch that may be padded must be a dict, to which {MASK!r} (bool[B], True = a "
            f"real example) is added, or a tuple or list, got {type(batch).__name__}; return one "
            "of these, or use drop_last=True"
        )
    if MASK in batch:
        raise ValueError(
            f"a batch must not have an entry {MASK!r}, which marks the real examples with "
            "drop_last=False; rename the entry"
        )
    return {**batch, MASK: mask}  # a new dict: the dataset may own the other one


@contextlib.contextmanager
def whole_batches(is_whole: bool = True) -> Iterator[None]:
    """Take batches in the body as they are (`batch_axis=None`): none has a mask, an entry `mask` is
    the user's own.

    The kind of a batch is not part of it, since it may be any pytree, so it is read while tracing,
    as the dtype in `autocast` is.
    """
    token = _IS_WHOLE.set(is_whole)
    try:
        yield
    finally:
        _IS_WHOLE.reset(token)


def on_whole_batches(step: Callable[..., Any], is_whole: bool = True) -> Callable[..., Any]:
    """Return a step, a function to compile, that is traced within `whole_batches`."""

    @functools.wraps(step)
    def run(*args: Any) -> Any:
        with whole_batches(is_whole):
            return step(*args)

    return run if is_whole else step


def are_whole() -> bool:
    """Return whether the call is within `whole_batches`."""
    return _IS_WHOLE.get()


def get_mask(batch: Batch) -> Any:
    """Return the mask for the real examples, bool[B].

    None if the batch has none, as without padding.
    """
    if _IS_WHOLE.get():
        return None
    if isinstance(batch, MaskedTuple):
        return batch.mask
    return batch.get(MASK) if isinstance(batch, Mapping) else None


def without_mask(batch: Batch) -> Batch:
    """Return the batch as it was before `with_mask`; a list becomes a tuple."""
    if isinstance(batch, MaskedTuple):
        return tuple(batch)
    return (
        {key: value for key, value in batch.items() if key != MASK}
        if isinstance(batch, Mapping)
        else batch
    )
