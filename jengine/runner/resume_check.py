"""Compare the config of a resumed run with its checkpoint."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jengine.errors import ConfigError
from jengine.optim.schedules import check_scheduler_types, compare_schedulers, list_moved_ends
from jengine.runner.resume_optimizer import compare_optimizers
from jengine.runner.runner_protocol import Runner

_MAX_LINES = 20
_OPTIMIZER_KEYS = frozenset({"optimizer", "paramwise_cfg", "constructor"})  # compared by their effect on the groups
# What is compared by kind, and what differs between any two runs.
_NOT_COMPARED = ("param_scheduler", "randomness", "resume", "resume_policy", "load_from", "work_dir", "experiment_name")


def check_resume(runner: Runner, path: str) -> None:
    """Compare the config of a run with a checkpoint, and log what differs and which side holds.

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
    if lines := list(_compare_configs(runner.cfg_text, saved["meta"]["cfg"])):
        messages.append(
            f"Other settings of the config and of the checkpoint differ. Those of the config are used:{_list(lines)}"
        )
    for message in messages:
        runner.logger.warning(message)


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


def _compare_configs(new: str, old: str) -> Iterator[str]:
    """Yield the other differences between the texts of two configs; none if one of them is unknown."""
    if not new or not old or new == old:
        return
    own, saved = (_flatten(_read(re.sub(r" at 0x[0-9a-f]+", "", text))) for text in (new, old))  # reprs of objects
    for path in sorted(own.keys() | saved.keys()):
        is_optimizer = path.startswith("optim_wrapper.") and not _OPTIMIZER_KEYS.isdisjoint(path.split("."))
        if is_optimizer or path.split(".")[0].partition("[")[0] in _NOT_COMPARED or own.get(path) == saved.get(path):
            continue
        new_value, old_value = own.get(path, "nothing"), saved.get(path, "nothing")
        yield f"{path}: {new_value} in the config, {old_value} in the checkpoint"


def _read(text: str) -> Any:
    """Return the config that `dump_config` wrote, with the source of each value that is not a dict or a list."""

    def convert(node: ast.expr) -> Any:
        if isinstance(node, ast.Dict):
            return {str(ast.literal_eval(k)): convert(v) for k, v in zip(node.keys, node.values, strict=True) if k}
        if isinstance(node, ast.List | ast.Tuple):
            return [convert(item) for item in node.elts]
        return ast.unparse(node)

    function = ast.parse(text).body[-1]
    assert isinstance(function, ast.FunctionDef)
    result: Any = function.body[-1]
    return convert(result.value)


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        parts = [_flatten(item, f"{path}.{key}" if path else key) for key, item in value.items()]
    elif isinstance(value, list):
        parts = [_flatten(item, f"{path}[{i}]") for i, item in enumerate(value)]
    else:
        return {path: value}
    return {key: item for part in parts for key, item in part.items()}


def _list(lines: Sequence[str]) -> str:
    """Return the lines, indented; a long list is cut."""
    more = [f"… {len(lines) - _MAX_LINES} more …"] if len(lines) > _MAX_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_MAX_LINES], *more])
