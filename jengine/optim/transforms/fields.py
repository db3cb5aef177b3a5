"""Fields in a chain's state."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.tree_util import KeyPath
from optax import OptState


def get_field(opt_state: OptState, state_type: type, name: str) -> Any:
    """Return field `name` in the state of type `state_type`; None if there is no such state.

    Unlike `optax.tree.get(opt_state, name)`, this never returns a parameter with that name.

    >>> import jax.numpy as jnp
    >>> state = optax.adam(0.1).init({"count": jnp.ones(3)})
    >>> get_field(state, optax.ScaleByAdamState, "count").item()
    0
    """
    return optax.tree.get(opt_state, name, filtering=_is_field_of(state_type))


def set_fields(opt_state: OptState, state_type: type, **fields: jax.Array) -> OptState:
    """Return `opt_state` with new field values in the state of type `state_type`."""
    return optax.tree.set(opt_state, _is_field_of(state_type), **fields)


def _is_field_of(state_type: type) -> Callable[[KeyPath, object], bool]:
    def is_field(path: KeyPath, value: object) -> bool:
        # optax passes the name of the tuple in the path; a parameter's path ends in a dict key.
        return (
            isinstance(path[-1], optax.tree_utils.NamedTupleKey)
            and path[-1].tuple_name == state_type.__name__
        )

    return is_field
