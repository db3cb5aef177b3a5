"""Choose the variables of a run that weights are loaded into: those of the model, or of the model inside an adapter."""

from collections.abc import Callable, Iterable
from typing import Any

from jengine.model import get_model
from jengine.paths import flatten
from jengine.runner.runner_protocol import Runner
from jengine.sharding import convert_replica_axis

Variables = dict[str, Any]  # `params` and `model_state`


def loadable_variables(runner: Runner, stored: Iterable[str]) -> tuple[Variables, Callable[[Variables], Variables]]:
    """Return the variables to load weights into, and a function from their new values to the variables of the run.

    They are those of the run, except if an adapter such as `LoRA` loads weights of the model inside it.

    Args:
      runner: with an initial state.
      stored: dotted paths of the parameters to load.
    """
    state, replicas = runner.state, runner.strategy.replicas
    variables = {"params": state.params, "model_state": state.model_state}
    model = get_model(runner.model)
    base_params, _ = model.base_variables(state.params, state.model_state)
    added = flatten(state.params).keys() - flatten(base_params).keys()
    if not added or not added.isdisjoint(stored):
        return variables, lambda loaded: loaded
    fresh = convert_replica_axis(variables, replicas, None)
    base = _named(*model.base_variables(fresh["params"], fresh["model_state"]))

    def restore(loaded: Variables) -> Variables:
        """Return the variables of the run with those of the inner model replaced."""
        single = convert_replica_axis(loaded, replicas, None)
        replaced = model.replace_base(fresh["params"], fresh["model_state"], single["params"], single["model_state"])
        return dict(convert_replica_axis(_named(*replaced), None, replicas))

    return dict(convert_replica_axis(base, None, replicas)), restore


def _named(params: Any, model_state: Any) -> Variables:
    return {"params": params, "model_state": model_state}
