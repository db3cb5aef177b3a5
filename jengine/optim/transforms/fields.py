"""Read and write a field in the state of a chain."""

from typing import Any

import optax


def get_field(opt_state: Any, kind: type, name: str) -> Any:
    """Return field `name` of the state of type `kind` in a state; None where there is no such state.

    Other than by `optax.tree.get(opt_state, name)`, a parameter of that name is not taken for it.
    """
    return optax.tree.get(opt_state, name, filtering=_is_of(kind))


def set_fields(opt_state: Any, kind: type, **fields: Any) -> Any:
    """Return `opt_state` with other values in the state of type `kind`."""
    return optax.tree.set(opt_state, _is_of(kind), **fields)


def _is_of(kind: type) -> Any:
    return lambda path, value: getattr(path[-1], "tuple_name", None) == kind.__name__
