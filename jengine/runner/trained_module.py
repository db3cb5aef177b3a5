"""Flax module of a trained model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.model.model import Model, get_model
from jengine.parallel.replica_axis import convert_replica_axis

PyTree = Any


def trained_module(
    model: Model, params: optax.Params, model_state: PyTree, replicas: int | None, train: bool
) -> Any:
    """Return the Flax module with a copy of the weights, which further training neither changes nor
    donates.

    Args:
      model, params: of the run.
      model_state: what differs between the `replicas` in it is averaged; None without them.
      train: whether the module is in training or in inference mode.

    Returns:
      For an `NnxModel` the `nnx.Module`; for a `LinenModel` the bound module, whose `unbind()`
      returns `(module, variables)`.

    Raises:
      TypeError: the model is not made from a Flax module.
    """
    variables: Mapping[str, PyTree] = convert_replica_axis(
        {"model_state": model_state}, replicas, None
    )
    params, model_state = jax.tree.map(jnp.copy, (params, variables["model_state"]))
    return get_model(model).merge(params, model_state, train=train)
