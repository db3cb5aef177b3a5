"""Read and write a field in the state of a chain."""

from typing import Any

import optax


def get_field(opt_state: Any, state_type: type, name: str) -> Any:
    """Return field `name` of the state of type `state_type`; None where there is no such state.

    Other than by `optax.tree.get(opt_state, name)`, a parameter of that name is not taken for it.
    """
    return optax.tree.get(opt_state, name, filtering=_is_of(state_type))


def set_fields(opt_state: Any, state_type: type, **fields: Any) -> Any:
    """Return `opt_state` with other values in the state of type `state_type`."""
    return optax.tree.set(opt_state, _is_of(state_type), **fields)


def _is_of(state_type: type) -> Any:
    return lambda path, value: getattr(path[-1], "tuple_name", None) == state_type.__name__
