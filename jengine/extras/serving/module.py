"""Flax module of a run, with the weights that evaluation uses."""

from typing import Any

import jax
import jax.numpy as jnp

from jengine.model.model import get_model
from jengine.parallel.replica_axis import convert_replica_axis
from jengine.runner.runner import Runner


def make_module(runner: Runner, train: bool) -> Any:
    """Return a copy of the module, see `Runner.module`."""
    if runner.state is None:
        raise RuntimeError("the run has no weights yet: call train, val or test before `module`")
    params, model_state = runner.eval_variables()[""]
    merged = convert_replica_axis({"model_state": model_state}, runner.strategy.replicas, None)
    copies = jax.tree.map(jnp.copy, (params, merged["model_state"]))
    return get_model(runner.model).merge(*copies, train=train)
