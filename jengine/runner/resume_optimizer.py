"""Compare the optimizer of a resumed run with that of its checkpoint, and restore it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jengine.errors import ConfigError
from jengine.optim.schedules import load_schedulers_state_dict, replay_schedulers, reset_initial_values
from jengine.paths import flatten
from jengine.runner.runner_protocol import Runner

PyTree = Any


class Setting(NamedTuple):
    """Describe a setting of the optimizer that differs.

    Attributes:
      line: its path and both values.
      is_restorable: False if it is part of the compiled chain, so that the checkpoint's value cannot be used.
    """

    line: str
    is_restorable: bool


def optimizer_settings(optim_wrapper: Any) -> dict[str, dict[str, Any]]:
    """Return the type of the optimizer and the settings of its groups, as JSON-compatible values.

    Args:
      optim_wrapper: the wrapper, before schedulers change it.

    Returns:
      By the name of the optimizer, '' if there is one: `type`, `param_groups`, the number of parameters in each group
      as `group_sizes` (None for a single one) and, with several groups, `base_param_settings`.
    """
    settings = {}
    for name, wrapper in _by_name(optim_wrapper).items():
        groups = wrapper.param_groups
        sizes = [len(group.paths) for group in groups] if len(groups) > 1 else [None]  # a single group may be unbound
        settings[name] = {"type": wrapper.optimizer.name, "group_sizes": sizes, **wrapper.group_state_dict()}
    return settings


def compare_optimizers(runner: Runner, saved: Mapping[str, Any]) -> list[Setting]:
    """Return the optimizer settings in which the config of a run and a checkpoint differ.

    Args:
      runner: with its optimizer.
      saved: everything of the checkpoint but its arrays.
    """
    if "optimizer_settings" not in saved:  # saved without the optimizer
        return []
    old, new = saved["optimizer_settings"], runner.optimizer_settings
    if set(old) != set(new):
        return [Setting(f"optim_wrapper: {_names(new)} in the config, {_names(old)} in the checkpoint", False)]
    differences: list[Setting] = []
    for name, wrapper in _by_name(runner.optim_wrapper).items():
        path = f"optim_wrapper.{name}.optimizer" if name else "optim_wrapper.optimizer"
        differences += _compare_groups(path, wrapper.optimizer, new[name], old[name])
    return differences


def _compare_groups(path: str, optimizer: Any, new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the differences between the settings of one optimizer; `optimizer` is that of the config."""
    if new["type"] != old["type"]:
        yield _describe(f"{path}.type", new["type"], old["type"], False)
        return  # its settings have other meanings
    if new["group_sizes"] != old["group_sizes"]:
        yield _describe(f"{path}: numbers of parameters by group", new["group_sizes"], old["group_sizes"], False)
        return
    pairs = [(f"{path}.param_groups[{i}]", *pair) for i, pair in enumerate(_zip_groups(new, old))]
    if len(new["group_sizes"]) == 1:
        pairs = [(path, *pairs[0][1:])]
    else:
        pairs.insert(0, (path, new["base_param_settings"], old["base_param_settings"]))
    is_absent = {
        key: all(group.get(key) == 0 for group in new["param_groups"]) for key in optimizer.absent_at_zero
    }  # the chain has no part for it
    for prefix, own, other in pairs:
        for key in own.keys() | other.keys():
            if own.get(key) != other.get(key):
                is_traced = key in optimizer.hyperparams or key not in optimizer.defaults
                is_restorable = is_traced and not is_absent.get(key, False)
                yield _describe(f"{prefix}.{key}", own.get(key), other.get(key), is_restorable)


def _zip_groups(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return zip(new["param_groups"], old["param_groups"], strict=True)


def _describe(path: str, new: Any, old: Any, is_restorable: bool) -> Setting:
    return Setting(f"{path}: {new} in the config, {old} in the checkpoint", is_restorable)


class StateMatch(NamedTuple):
    """Describe which part of an optimizer state is restored.

    Attributes:
      target: the structure to restore; None if the state is new.
      ignore: stored prefixes that are not restored.
    """

    target: PyTree | None
    ignore: list[str]


def match_optimizer_state(
    runner: Runner, path: str, saved: Mapping[str, Any], opt_state: PyTree, stored: Mapping[str, Any]
) -> StateMatch:
    """Match the state of the optimizer to a checkpoint.

    If settings differ, hyperparameters in the state are not restored: each update receives them. If the rest does not
    fit either, the state is new, as `resume_policy` allows.

    Args:
      runner: with its optimizer.
      path: the checkpoint.
      saved: everything of the checkpoint but its arrays.
      opt_state: the state of this run, in the form of the checkpoint.
      stored: the arrays of the checkpoint by dotted path.

    Raises:
      ConfigError: the state does not fit, and the policy requires that of the checkpoint.
    """
    differences = compare_optimizers(runner, saved)
    if not differences:
        return StateMatch(opt_state, [])
    ignore = [
        f"opt_state.{name}.hyperparams" if name else "opt_state.hyperparams" for name in runner.optimizer_settings
    ]
    target = _strip_hyperparams(opt_state)
    shapes = {f"opt_state.{path}": leaf.shape for path, leaf in flatten(target).items()}
    prefixes = tuple(f"{prefix}." for prefix in ignore)
    saved_shapes = {path: leaf.shape for path, leaf in stored.items() if path.startswith("opt_state.")}
    if shapes == {path: shape for path, shape in saved_shapes.items() if not path.startswith(prefixes)}:
        return StateMatch(target, ignore)
    if runner.resume_policy.optimizer == "checkpoint":
        lines = "".join(f"\n  {setting.line}" for setting in differences)
        raise ConfigError(
            f"the optimizer must have the state of the checkpoint {path}, got another one; to start with a new state, "
            f"set resume_policy.optimizer='config':{lines}"
        )
    runner.logger.warning(f"The state of the optimizer in {path} does not fit that of the config: it is new.")
    return StateMatch(None, ["opt_state"])


def _strip_hyperparams(opt_state: PyTree) -> PyTree:
    """Return the state of one or several optimizers without the hyperparameters."""
    if isinstance(opt_state, Mapping):
        return {name: _strip_hyperparams(state) for name, state in opt_state.items()}
    return opt_state._replace(hyperparams={})


def complete_optimizer_state(restored: PyTree | None, initial: PyTree) -> PyTree:
    """Return the restored state of one or several optimizers with the hyperparameters of the initial state.

    Args:
      restored: a state without hyperparameters; None for a new state.
      initial: the initial state of this run.
    """
    if restored is None:
        return initial
    if isinstance(restored, Mapping):
        return {name: complete_optimizer_state(state, initial[name]) for name, state in restored.items()}
    return restored._replace(hyperparams=initial.hyperparams)


def restore_hyperparams(runner: Runner, bundle: Mapping[str, Any]) -> None:
    """Restore the parameter groups and the schedules; replay the schedules if they or their initial values differ."""
    loop, wrapper, schedulers = runner.train_loop, runner.optim_wrapper, runner.param_schedulers
    is_new = runner.resume_policy.optimizer == "config" and bool(compare_optimizers(runner, bundle))
    if "optimizer" in bundle and not is_new:
        wrapper.load_group_state_dict(bundle["optimizer"])
        runner.optimizer_settings = bundle.get("optimizer_settings", runner.optimizer_settings)
    if "param_schedulers" not in bundle:
        return
    converted = loop.iter  # schedules that are converted from epochs keep their place in the epoch
    if loop.by_epoch and loop.epoch_length is not None:
        converted = loop.epoch * loop.epoch_length + loop.iter - loop.epoch_start
    choice = "config" if runner.resume_policy.schedules == "config" else "checkpoint"
    if load_schedulers_state_dict(schedulers, bundle["param_schedulers"], settings=choice) or is_new:
        settings = runner.optimizer_settings
        wrapper.load_group_state_dict(settings.get("", settings))
        reset_initial_values(schedulers)
        replay_schedulers(
            schedulers, iters=loop.iter, epochs=loop.epoch, epoch_length=loop.epoch_length, converted_iters=converted
        )


def _by_name(optim_wrapper: Any) -> Mapping[str, Any]:
    return optim_wrapper if isinstance(optim_wrapper, Mapping) else {"": optim_wrapper}


def _names(settings: Mapping[str, Any]) -> str:
    return "one optimizer" if "" in settings else f"the optimizers {sorted(settings)}"
