"""Fields in a chain's state."""

from typing import Any

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

    def is_field(path: KeyPath, value: object) -> bool:
        # optax passes the name of the tuple in the path; a parameter's path ends in a dict key.
        key = path[-1]
        is_named = isinstance(key, optax.tree_utils.NamedTupleKey)
        return is_named and key.tuple_name == state_type.__name__

    return optax.tree.get(opt_state, name, filtering=is_field)
