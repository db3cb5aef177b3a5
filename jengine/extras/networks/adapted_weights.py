"""Weights of a model inside an adapter, such as `LoRA`, which start a run with the adapter."""

from collections.abc import Callable, Iterable
from typing import Any

from jengine.config.paths import flatten, nest
from jengine.model.model import FROZEN, Model
from jengine.parallel.replica_axis import convert_replica_axis

Variables = dict[str, Any]  # by item


def split_adapters(
    model: Model, variables: Variables, replicas: int | None, stored: Iterable[str]
) -> tuple[Variables, Callable[[Variables], Variables]]:
    """Return the variables to load into, and a function from the loaded values to the run's
    variables.

    They are the run's own, unless an adapter such as `LoRA` loads the weights at the dotted paths
    `stored` for the model inside.

    Args:
      model: of the run.
      variables: its parameters and model state, by item.
      replicas: see `convert_replica_axis`.
      stored: dotted paths of the parameters that are loaded.
    """
    params = variables["params"]
    names = set(stored)
    base_params, _ = model.base_variables(params, variables["model_state"])
    has_own_names = any(name.startswith(f"model_state.{FROZEN}.") for name in names)
    added = flatten(params).keys() - flatten(base_params).keys()
    if (
        has_own_names
        or not added.isdisjoint(names)
        or flatten(params).keys() == flatten(base_params).keys()
    ):
        return variables, dict  # with adapters, or the model has none
    fresh = convert_replica_axis(variables, replicas, None)  # adapters know no replicas
    base: Variables = dict(
        zip(variables, model.base_variables(fresh["params"], fresh["model_state"]), strict=True)
    )
    missing = set(model.adapter_paths) - names
    if missing:  # the weights are the network's own, without adapters
        base["params"] = nest(
            {path: leaf for path, leaf in flatten(base["params"]).items() if path not in missing}
        )

    def restore(loaded: Variables) -> Variables:
        single = convert_replica_axis(loaded, replicas, None)
        replaced = model.replace_base(
            fresh["params"], fresh["model_state"], single["params"], single["model_state"]
        )
        return dict(
            convert_replica_axis(dict(zip(variables, replaced, strict=True)), None, replicas)
        )

    return dict(convert_replica_axis(base, None, replicas)), restore
