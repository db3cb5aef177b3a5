"""Return the Flax module of a run."""

from typing import Any

import jax
import jax.numpy as jnp

from jengine.model import get_model
from jengine.runner.runner_protocol import Runner
from jengine.sharding import convert_replica_axis


def trained_module(runner: Runner, train: bool) -> Any:
    """Return the module of a run with a copy of its weights, which further training neither changes nor donates.

    The weights are those that evaluation uses, such as the averages of an `EMAHook`. Statistics that differ between
    replicas are averaged.

    Args:
      runner: the run.
      train: whether the module is in training or in inference mode.

    Returns:
      For an `NnxModel` the `nnx.Module`; for a `LinenModel` the bound module, whose `unbind()` returns
      `(module, variables)`.

    Raises:
      RuntimeError: the run has no state yet.
      TypeError: the model is not made of a Flax module.
    """
    if runner.state is None:
        raise RuntimeError("the run has no weights yet: call train, val or test before `module`")
    params, model_state = runner.eval_variables()[""]
    model_state = convert_replica_axis({"model_state": model_state}, runner.strategy.replicas, None)["model_state"]
    params, model_state = jax.tree.map(jnp.copy, (params, model_state))
    return get_model(runner.model).merge(params, model_state, train=train)
