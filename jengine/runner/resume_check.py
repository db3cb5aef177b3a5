"""Comparison between a resumed run and the checkpoint, and the optimizer state that is restored."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jengine.checkpoint import read_meta
from jengine.checkpoint.fingerprint import PYTHON, compare_settings
from jengine.errors import ConfigError
from jengine.optim.compared_settings import Setting, compare_optimizers
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

_DATA = re.compile(r"train_dataloader(\.dataset|\[)")  # what `resume_policy.data` decides
_MAX_LINES = 20


def check_resume(runner: RunnerInternals, path: str) -> None:
    """Compare the settings of a run with a checkpoint, and log what differs and which side holds.

    Nothing is restored and nothing compiled yet, but loop, optimizer and schedulers should be built.

    Raises:
      ConfigError: the checkpoint is past the end; the policy refuses a difference; or the policy wants the
        checkpoint's value for a setting that is part of the compiled optimizer chain.
    """
    saved = read_meta(path)
    check_length(runner, path, saved["meta"])
    policy, messages = runner.resume_policy, list[str]()
    settings = _compare_optimizers(runner, saved)
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
            check_scheduler_types(runner.param_schedulers, saved["param_schedulers"])  # others cannot take the state
        if moved := list_moved_ends(runner.param_schedulers, saved["param_schedulers"]):
            messages.append(f"The run has another length, and so have the schedules without `end`:{_list(moved)}")
    seed, configured = saved["meta"]["seed"], runner.configured_seed
    if configured is not None and configured != seed:  # a seed that was drawn gives way silently
        line = f"randomness.seed: {configured} in the config, {seed} in the checkpoint"
        messages += _report("seed", "seeds", policy.seed, [line], path)
    messages += _compare_others(runner, path, saved.get("fingerprint"), skip_chains=bool(settings))
    for message in messages:
        runner.logger.warning(message)


def check_length(runner: RunnerInternals, path: str, meta: Mapping[str, Any]) -> None:
    """Raise ConfigError if a checkpoint with the `iter` and `epoch` in `meta` is past the end of a run."""
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
    differences = dict(compare_settings(runner.settings, saved, skip_chains=skip_chains))
    data = [line for setting, line in differences.items() if _DATA.match(setting)]
    if data and runner.resume_policy.data == "exact":
        raise ConfigError(
            f"the data must be those of the checkpoint {path} with resume_policy.data='exact', got others:{_list(data)}"
        )
    if not differences:
        return []
    return [
        "Other settings of the run and of the checkpoint differ; those of the config are used if the arrays fit:"
        f"{_list(list(differences.values()))}"
    ]


def _list(lines: Sequence[str]) -> str:
    more = [f"… {len(lines) - _MAX_LINES} more …"] if len(lines) > _MAX_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_MAX_LINES], *more])


def collect_fingerprint(runner: RunnerInternals) -> dict[str, Any]:
    """Return what a checkpoint stores for the comparison: the settings, and the hashes of the training programs."""
    programs = runner.programs.hash_jaxprs() if runner.programs is not None else {}
    return {"settings": runner.settings, "python": PYTHON, "programs": programs}


def saved_hashes(path: str) -> dict[str, str]:
    """Return the hashes of the programs in a checkpoint's fingerprint, see `TrainPrograms.hash_jaxprs`."""
    return dict(read_meta(path).get("fingerprint", {}).get("programs", {}))


def _compare_optimizers(runner: RunnerInternals, saved: Mapping[str, Any]) -> list[Setting]:
    return compare_optimizers(runner.optim_wrapper, runner.optimizer_settings, saved.get("optimizer_settings"))


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
    differences = _compare_optimizers(runner, saved)
    if not differences and runner.resume_policy.optimizer != "config":  # else a loss scale may have been added
        return opt_state, []
    ignore = [
        f"opt_state.{name}.hyperparams" if name else "opt_state.hyperparams" for name in runner.optimizer_settings
    ]
    target = _strip_hyperparams(opt_state)
    shapes = {f"opt_state.{path}": leaf.shape for path, leaf in flatten(target).items()}
    prefixes = tuple(f"{prefix}." for prefix in ignore)
    saved_shapes = {path: leaf.shape for path, leaf in stored.items() if path.startswith("opt_state.")}
    if shapes == {path: shape for path, shape in saved_shapes.items() if not path.startswith(prefixes)}:
        return target, ignore  # only hyperparameters differ
    if runner.resume_policy.optimizer == "checkpoint":
        lines = "".join(f"\n  {setting.line}" for setting in differences)
        raise ConfigError(
            f"the optimizer must have the state of the checkpoint {path}, got another one; to start with a new state, "
            f"set resume_policy.optimizer='config':{lines}"
        )
    runner.logger.warning(f"The state of the optimizer in {path} does not fit that of the config: it is new.")
    return None, ["opt_state"]


def _strip_hyperparams(opt_state: PyTree) -> PyTree:
    if isinstance(opt_state, Mapping):  # several optimizers
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
    is_new = runner.resume_policy.optimizer == "config" and bool(_compare_optimizers(runner, bundle))
    if "optimizer" in bundle and not is_new:
        wrapper.load_group_state_dict(bundle["optimizer"])
        runner.optimizer_settings = bundle.get("optimizer_settings", runner.optimizer_settings)
    if "param_schedulers" not in bundle:
        return
    converted = loop.iter  # schedules that are converted from epochs keep their place in the epoch
    if loop.by_epoch and loop.epoch_length is not None:
        converted = loop.epoch * loop.epoch_length + loop.iter - loop.epoch_start
    choice: Literal["checkpoint", "config"] = "config" if runner.resume_policy.schedules == "config" else "checkpoint"
    if load_schedulers_state_dict(schedulers, bundle["param_schedulers"], settings=choice) or is_new:
        settings = runner.optimizer_settings
        wrapper.load_group_state_dict(settings.get("", settings))  # '' for a single optimizer
        reset_initial_values(schedulers)
        replay_schedulers(
            schedulers, iters=loop.iter, epochs=loop.epoch, epoch_length=loop.epoch_length, converted_iters=converted
        )
