"""Comparison between a resumed run and the checkpoint, and the optimizer state that is restored."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jengine.description import describe, flatten_description
from jengine.errors import ConfigError
from jengine.optim.schedules import (
    check_scheduler_types,
    compare_schedulers,
    list_moved_ends,
    load_schedulers_state_dict,
    replay_schedulers,
    reset_initial_values,
)
from jengine.paths import flatten
from jengine.runner.runner_protocol import RunnerInternals

PyTree = Any

_FLAGS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
)  # fmt: skip
# Compared by kind, or different between any two runs
_NOT_COMPARED = (
    "param_scheduler", "randomness", "resume", "resume_policy", "load_from", "work_dir", "experiment_name", "cfg",
)  # fmt: skip
_OPTIMIZER_KEYS = frozenset({"optimizer", "paramwise_cfg", "constructor"})  # compared by their effect on the groups
_CHAIN = re.compile(r"optim_wrapper\.(init|update|(.*\.)?parts)\.")  # optax keeps its settings in closures
_DATA = re.compile(r"train_dataloader(\.dataset|\[)")
_CODE = ".code"
_KINDS = (".type", ".function")
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_MAX_LINES = 20

# --- All differences ---


def check_resume(runner: RunnerInternals, path: str) -> None:
    """Compare the settings of a run with a checkpoint, and log what differs and which side holds.

    Nothing is restored and nothing compiled yet, but loop, optimizer and schedulers should be built.

    Raises:
      ConfigError: the checkpoint is past the end; the policy refuses a difference; or the policy wants the
        checkpoint's value for a setting that is part of the compiled optimizer chain.
    """
    from jengine.checkpoint import read_meta

    saved = read_meta(path)
    _check_length(runner, path, saved["meta"])
    policy, messages = runner.resume_policy, list[str]()
    settings = compare_optimizers(runner, saved)
    fixed = [setting.line for setting in settings if not setting.is_restorable]
    if fixed and policy.optimizer == "checkpoint":
        raise ConfigError(
            f"these settings of the optimizer must be those of the checkpoint {path}, because they are part of its "
            f"chain, got others; to continue with those of the config, set resume_policy.optimizer='config':"
            f"{_list(fixed)}"
        )
    messages += _report("optimizer", "optimizer settings", policy.optimizer, [s.line for s in settings], path)
    if "param_schedulers" in saved:
        differences = compare_schedulers(runner.param_schedulers, saved["param_schedulers"])
        messages += _report("schedules", "schedules", policy.schedules, differences, path)
        if policy.schedules == "checkpoint":
            check_scheduler_types(runner.param_schedulers, saved["param_schedulers"])
        if moved := list_moved_ends(runner.param_schedulers, saved["param_schedulers"]):
            messages.append(f"The run has another length, and so have the schedules without `end`:{_list(moved)}")
    seed, configured = saved["meta"]["seed"], runner.configured_seed
    if configured is not None and configured != seed:
        line = f"randomness.seed: {configured} in the config, {seed} in the checkpoint"
        messages += _report("seed", "seeds", policy.seed, [line], path)
    messages += _compare_others(runner, path, saved.get("fingerprint"), skip_chains=bool(settings))
    for message in messages:
        runner.logger.warning(message)


def _check_length(runner: RunnerInternals, path: str, meta: Mapping[str, Any]) -> None:
    loop = runner.train_loop
    name, unit = ("max_epochs", "epoch") if loop.by_epoch else ("max_iters", "iter")
    end = loop.max_epochs if loop.by_epoch else loop.max_iters
    if meta[unit] > end:
        raise ConfigError(
            f"`train_cfg.{name}` must be at least {meta[unit]}, which the checkpoint {path} has completed, got {end}"
        )
    if meta[unit] == end:
        runner.logger.info(f"There is nothing left to train: {path} has completed all of train_cfg.{name}={end}.")


def _report(kind: str, name: str, choice: str, lines: Sequence[str], path: str) -> list[str]:
    """Return the message about a kind that differs; raise ConfigError if the policy is 'error'."""
    if not lines:
        return []
    if choice == "error":
        raise ConfigError(
            f"the {name} of the config must be those of the checkpoint {path} with resume_policy.{kind}='error', got "
            f"others:{_list(lines)}"
        )
    return [
        f"The {name} of the config and of the checkpoint differ. Those of the {choice} are used "
        f"(resume_policy.{kind}={choice!r}):{_list(lines)}"
    ]


def _compare_others(
    runner: RunnerInternals, path: str, saved: Mapping[str, Any] | None, *, skip_chains: bool
) -> list[str]:
    """Return the message about settings without a policy; raise ConfigError for other data."""
    if saved is None:
        return [f"{path} was written by an older version of jengine: other settings cannot be compared with it."]
    differences = dict(compare_settings(runner, saved, skip_chains=skip_chains))
    data = [line for setting, line in differences.items() if _DATA.match(setting)]
    if data and runner.resume_policy.data == "exact":
        raise ConfigError(
            f"the data must be those of the checkpoint {path} with resume_policy.data='exact', got others:{_list(data)}"
        )
    if not differences:
        return []
    return [
        "Other settings of the run and of the checkpoint differ. Those of the config are used:"
        f"{_list(list(differences.values()))}"
    ]


def _list(lines: Sequence[str]) -> str:
    more = [f"… {len(lines) - _MAX_LINES} more …"] if len(lines) > _MAX_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_MAX_LINES], *more])


# --- Settings, saved as a fingerprint ---


def describe_settings(arguments: Mapping[str, Any], cfg: Any) -> dict[str, Any]:
    """Return a description of the Runner's arguments and the config passed with them, before anything has run."""
    settings = {name: value for name, value in arguments.items() if name not in _NOT_COMPARED and value is not None}
    for name, value in (cfg or {}).items():
        if name not in _NOT_COMPARED and value is not arguments.get(name):
            settings[f"cfg.{name}" if name in arguments else name] = value
    return {**{name: describe(value) for name, value in settings.items()}, "jax.config": describe(read_flags())}


def read_flags() -> dict[str, Any]:
    """Return the jax options that change numbers."""
    return {name: getattr(jax.config, name) for name in _FLAGS}


def collect_fingerprint(runner: RunnerInternals) -> dict[str, Any]:
    """Return what a checkpoint stores for the comparison: the settings, and the hashes of the training programs."""
    programs = runner.programs.hash_jaxprs() if runner.programs is not None else {}
    return {"settings": runner.settings, "python": _PYTHON, "programs": programs}


def saved_hashes(path: str) -> dict[str, str]:
    """Return the hashes of the programs in a checkpoint's fingerprint, see `TrainPrograms.hash_jaxprs`."""
    from jengine.checkpoint import read_meta

    return dict(read_meta(path).get("fingerprint", {}).get("programs", {}))


def compare_settings(
    runner: RunnerInternals, saved: Mapping[str, Any], *, skip_chains: bool
) -> Iterator[tuple[str, str]]:
    """Yield the path and both values of each setting that differs from the fingerprint `saved`.

    With `skip_chains`, optax chains are left out, because other optimizers are reported already.
    """
    own, other = (flatten_description(settings) for settings in (runner.settings, saved["settings"]))
    replaced: list[str] = []  # objects of another kind, so that their arguments differ anyway
    for path in sorted(own.keys() | other.keys(), key=lambda path: (not path.endswith(_KINDS), path)):
        if own.get(path) == other.get(path) or (skip_chains and _CHAIN.match(path)):
            continue
        if path.startswith(tuple(replaced)):
            continue
        if path.endswith(_KINDS):
            replaced.append(f"{path.rpartition('.')[0]}.")
        if path.startswith("optim_wrapper.") and _is_compared_by_group(path, own):
            continue
        if not path.endswith(_CODE) or path not in own or path not in other:
            new, old = (repr(side[path]) if path in side else "nothing" for side in (own, other))
            yield path, f"{path}: {new} in the config, {old} in the checkpoint"
        elif saved["python"] == _PYTHON:  # another version compiles the same function to other code
            path = path.removesuffix(_CODE)
            yield path, f"{path}: the code of {own.get(f'{path}.function')} has changed since the checkpoint"


def _is_compared_by_group(path: str, settings: Mapping[str, Any]) -> bool:
    if _OPTIMIZER_KEYS.isdisjoint(path.split(".")):
        return False
    optimizer, found, _ = path.partition(".parts.")
    return not found or settings.get(f"{optimizer}.name") != "optax"


# --- The optimizer ---


class Setting(NamedTuple):
    """Optimizer setting that differs."""

    line: str  # its path and both values
    is_restorable: bool  # False in the compiled chain, where the checkpoint's value cannot be used


def optimizer_settings(optim_wrapper: Any) -> dict[str, dict[str, Any]]:
    """Return the optimizer type and group settings, before schedulers change them, as JSON-compatible values.

    Returns:
      By optimizer name, '' for a single one: `type`, `param_groups`, the number of parameters in each group as
      `group_sizes` (None for a single group) and, with several groups, `base_param_settings`.
    """
    settings = {}
    for name, wrapper in _by_name(optim_wrapper).items():
        groups = wrapper.param_groups
        sizes = [len(group.paths) for group in groups] if len(groups) > 1 else [None]  # a single group may be unbound
        settings[name] = {"type": wrapper.optimizer.name, "group_sizes": sizes, **wrapper.group_state_dict()}
    return settings


def _by_name(optim_wrapper: Any) -> Mapping[str, Any]:
    return optim_wrapper if isinstance(optim_wrapper, Mapping) else {"": optim_wrapper}


def compare_optimizers(runner: RunnerInternals, saved: Mapping[str, Any]) -> list[Setting]:
    """Return the optimizer settings that differ between a config and a checkpoint's metadata."""
    if "optimizer_settings" not in saved:  # saved without the optimizer
        return []
    old, new = saved["optimizer_settings"], runner.optimizer_settings
    if set(old) != set(new):
        own, other = ("one optimizer" if "" in side else f"the optimizers {sorted(side)}" for side in (new, old))
        return [Setting(f"optim_wrapper: {own} in the config, {other} in the checkpoint", False)]
    differences: list[Setting] = []
    for name, wrapper in _by_name(runner.optim_wrapper).items():
        path = f"optim_wrapper.{name}.optimizer" if name else "optim_wrapper.optimizer"
        differences += _compare_groups(path, wrapper.optimizer, new[name], old[name])
    return differences


def _compare_groups(path: str, optimizer: Any, new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the differences between the settings of one optimizer; `optimizer` is the config's."""

    def setting(name: str, own: Any, other: Any, is_restorable: bool = False) -> Setting:
        return Setting(f"{path}{name}: {own} in the config, {other} in the checkpoint", is_restorable)

    for key, name in (("type", ".type"), ("group_sizes", ": numbers of parameters by group")):
        if new[key] != old[key]:
            yield setting(name, new[key], old[key])
            return  # the other settings have other meanings
    groups = list(zip(new["param_groups"], old["param_groups"], strict=True))
    if len(groups) == 1:
        pairs = [("", *groups[0])]
    else:
        pairs = [("", new["base_param_settings"], old["base_param_settings"])]
        pairs += [(f".param_groups[{i}]", *pair) for i, pair in enumerate(groups)]
    # The chain has no part for a setting that is 0 in all groups
    is_absent = {key: all(group.get(key) == 0 for group in new["param_groups"]) for key in optimizer.absent_at_zero}
    for prefix, own, other in pairs:
        for key in own.keys() | other.keys():
            if own.get(key) != other.get(key):
                is_traced = key in optimizer.hyperparams or key not in optimizer.defaults
                is_restorable = is_traced and not is_absent.get(key, False)
                yield setting(f"{prefix}.{key}", own.get(key), other.get(key), is_restorable)


def match_optimizer_state(
    runner: RunnerInternals, path: str, saved: Mapping[str, Any], opt_state: PyTree, stored: Mapping[str, Any]
) -> tuple[PyTree | None, list[str]]:
    """Match the optimizer state to a checkpoint.

    If settings differ, hyperparameters in the state are not restored: each update receives them. If the rest does not
    fit either, the state will be new, as `resume_policy` allows.

    Args:
      runner: the run.
      path, saved, stored: the checkpoint, the metadata in it, and the arrays by dotted path.
      opt_state: this run's state, in the form that the checkpoint has.

    Returns:
      The structure to restore, None for a new state; and the stored prefixes that are not restored.

    Raises:
      ConfigError: the state does not fit, and the policy requires the checkpoint's.
    """
    differences = compare_optimizers(runner, saved)
    if not differences:
        return opt_state, []
    ignore = [
        f"opt_state.{name}.hyperparams" if name else "opt_state.hyperparams" for name in runner.optimizer_settings
    ]
    target = _strip_hyperparams(opt_state)
    shapes = {f"opt_state.{path}": leaf.shape for path, leaf in flatten(target).items()}
    prefixes = tuple(f"{prefix}." for prefix in ignore)
    saved_shapes = {path: leaf.shape for path, leaf in stored.items() if path.startswith("opt_state.")}
    if shapes == {path: shape for path, shape in saved_shapes.items() if not path.startswith(prefixes)}:
        return target, ignore
    if runner.resume_policy.optimizer == "checkpoint":
        lines = "".join(f"\n  {setting.line}" for setting in differences)
        raise ConfigError(
            f"the optimizer must have the state of the checkpoint {path}, got another one; to start with a new state, "
            f"set resume_policy.optimizer='config':{lines}"
        )
    runner.logger.warning(f"The state of the optimizer in {path} does not fit that of the config: it is new.")
    return None, ["opt_state"]


def _strip_hyperparams(opt_state: PyTree) -> PyTree:
    if isinstance(opt_state, Mapping):
        return {name: _strip_hyperparams(state) for name, state in opt_state.items()}
    return opt_state._replace(hyperparams={})


def complete_optimizer_state(restored: PyTree | None, initial: PyTree) -> PyTree:
    """Return a restored state, None for a new one, with the hyperparameters that this run's initial state has."""
    if restored is None:
        return initial
    if isinstance(restored, Mapping):
        return {name: complete_optimizer_state(state, initial[name]) for name, state in restored.items()}
    return restored._replace(hyperparams=initial.hyperparams)


def restore_hyperparams(runner: RunnerInternals, bundle: Mapping[str, Any]) -> None:
    """Restore parameter groups and schedules; replay the schedules if they or the initial values differ."""
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
