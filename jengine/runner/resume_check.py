"""Compare the settings of a resumed run with its checkpoint."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.errors import ConfigError
from jengine.optim.schedules import check_scheduler_types, compare_schedulers, list_moved_ends
from jengine.runner.fingerprint import compare_settings
from jengine.runner.resume_optimizer import compare_optimizers
from jengine.runner.runner_protocol import Runner

_MAX_LINES = 20
_DATA = re.compile(r"train_dataloader(\.dataset|\[)")


def check_resume(runner: Runner, path: str) -> None:
    """Compare the settings of a run with a checkpoint, and log what differs and which side holds.

    Nothing is restored and nothing compiled yet.

    Args:
      runner: with its training loop, optimizer and schedulers.
      path: the checkpoint.

    Raises:
      ConfigError: the checkpoint is past the end of the run; or a difference is refused by the policy, or has to be
        because the setting is part of the chain of the optimizer.
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
    messages += _compare_others(runner, path, saved.get("fingerprint"), is_other_optimizer=bool(settings))
    for message in messages:
        runner.logger.warning(message)


def _compare_others(
    runner: Runner, path: str, saved: Mapping[str, Any] | None, *, is_other_optimizer: bool
) -> list[str]:
    """Return the message about the settings that have no policy of their own; raise ConfigError for other data."""
    if saved is None:
        return [f"{path} was written by an older version of jengine: other settings cannot be compared with it."]
    differences = dict(compare_settings(runner, saved, skip_chains=is_other_optimizer))
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


def _report(kind: str, name: str, choice: str, lines: Sequence[str], path: str) -> list[str]:
    """Return the message about a kind that differs; raise ConfigError if its policy is 'error'."""
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


def _check_length(runner: Runner, path: str, meta: Mapping[str, Any]) -> None:
    """Raise ConfigError if the checkpoint is past the end of the run."""
    loop = runner.train_loop
    name, unit = ("max_epochs", "epoch") if loop.by_epoch else ("max_iters", "iter")
    end = loop.max_epochs if loop.by_epoch else loop.max_iters
    if meta[unit] > end:
        raise ConfigError(
            f"`train_cfg.{name}` must be at least {meta[unit]}, which the checkpoint {path} has completed, got {end}"
        )
    if meta[unit] == end:
        runner.logger.info(f"There is nothing left to train: {path} has completed all of train_cfg.{name}={end}.")


def _list(lines: Sequence[str]) -> str:
    """Return the lines, indented; a long list is cut."""
    more = [f"… {len(lines) - _MAX_LINES} more …"] if len(lines) > _MAX_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_MAX_LINES], *more])
