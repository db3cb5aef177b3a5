"""Process that lists the runs of a sweep and checks their configs."""

import contextlib
import hashlib
import itertools
import os
import pathlib
import pickle
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jengine.config.containers import is_level, resolve
from jengine.config.dump import format_config
from jengine.config.errors import ConfigError, closest
from jengine.config.frames import format_error
from jengine.config.load import find_config_file, load_config
from jengine.config.modules import imported_modules
from jengine.config.overrides import apply_overrides, parse_value
from jengine.extras.report.run_metrics import ADDRESS, find_rule, flatten_config, list_saved_metrics
from jengine.extras.sweeps.check import Plan, Request, add_pruning
from jengine.extras.sweeps.space import SEED, Setting, format_override, list_settings
from jengine.runner.runner import Runner

T = TypeVar("T")

_NOT_CHECKED = ("parallel", "resume", "load_from")  # depend on devices and files of the run
_NODE_END = re.compile(r"\.|\[|$")  # after each part of a path


def make_plan(request: Request) -> Plan:
    """List the runs and check their configs.

    The errors are those of the Runner, with a note of the run.
    """
    base = load_config(request.config, request.overrides)
    config = resolve(base)
    leaves = flatten_config(config)
    grid = {path: list(values) for path, values in _complete_paths(request.grid, leaves).items()}
    ranges = _complete_paths(request.ranges, leaves)
    # a search chooses the settings itself
    given = None if request.search else _load_sweep(request.config)
    if given is not None:
        given = [_complete_paths(setting, leaves) for setting in given]
    _check_disjoint(given or [], grid, ranges, {SEED: 0} if request.seeds else {})
    if not (given or grid or ranges or request.seeds):
        raise ConfigError(
            "there is nothing to sweep: give --grid, --range, --seeds, or get_sweep() in the config"
        )
    if request.draws and not (grid or ranges):
        raise ConfigError("random draws must have ranges or a grid to draw from, got neither")
    if ranges and not request.draws and not request.search:
        raise ConfigError(
            f"a range of `{next(iter(ranges))}` must come with --random N or --search N, got "
            "neither"
        )
    settings = list_settings(
        given, grid, ranges, 2 if request.search else request.draws, request.seeds
    )
    saved = [name for name in list_saved_metrics(config) if name != "auto"]
    metric = request.metric or (saved[0] if saved else "")
    rule = find_rule(metric, config) if metric else ""
    if request.search and not rule:
        if metric:  # a name that no evaluator has is said first; the direction has no part in that
            _check_configs(apply_overrides(base, add_pruning(metric, "less")), settings)
        raise ConfigError(
            "a search must have a metric with a known direction: give --metric, or save_best and "
            f"rule of the CheckpointHook, got {metric or 'none'}"
        )
    _check_configs(
        apply_overrides(base, add_pruning(metric, rule)) if request.search else base, settings
    )
    kept = {
        name: value for name, value in config.items() if name not in ("work_dir", "experiment_name")
    }
    text = ADDRESS.sub("", format_config(kept)[0])  # in reprs of objects
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return Plan(settings, grid, ranges, metric, rule, fingerprint)


def _load_sweep(path: str | os.PathLike[str]) -> list[dict[str, Any]] | None:
    """Return the settings that `get_sweep()` of a loaded config file yields.

    None without this function.

    Raises:
      ConfigError: something else than dicts of values by config path.
    """
    file, _ = find_config_file(path)
    loaded = imported_modules().values()
    module = next(each for each in loaded if getattr(each, "__file__", None) == str(file))
    get_sweep = getattr(module, "get_sweep", None)
    if get_sweep is None:
        return None
    settings = list(get_sweep())
    # All at once, before the first run: the last of a hundred settings should not fail after a
    # week.
    for index, setting in enumerate(settings):
        if not is_level(setting) or not all(isinstance(key, str) for key in setting):
            raise ConfigError(
                f"get_sweep() of {str(file)!r} must yield dicts such as "
                f"{{'optim_wrapper.optimizer.lr': 0.1}}, got {setting!r} as number {index}"
            )
    return [dict(setting) for setting in settings]


def complete_path(name: str, paths: Iterable[str]) -> str:
    """Return the config path that a name such as `lr` means: itself if it begins like a path, else
    the end of one.

    >>> complete_path("lr", ["optim_wrapper.optimizer.lr", "model.module.depth"])
    'optim_wrapper.optimizer.lr'

    Raises:
      ConfigError: several paths end in it, or none.
    """
    paths = list(paths)
    tops = {path.partition(".")[0].partition("[")[0] for path in paths} | {"randomness"}
    if name.partition(".")[0].partition("[")[0] in tops:
        return name
    # A whole dict or list may be replaced too
    nodes = {path[: match.start()]: None for path in paths for match in _NODE_END.finditer(path)}
    found = [path for path in nodes if path.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{name!r} must be the end of one path in the config, got several: {', '.join(found)}"
        )
    ends = {path.rpartition(".")[2]: path for path in paths}
    raise ConfigError(
        f"{name!r} must be a path in the config or the end of one{closest(name, ends)}"
    )


def _complete_paths(values: Mapping[str, T], leaves: Iterable[str]) -> dict[str, T]:
    complete: dict[str, T] = {}
    for name, value in values.items():
        path = complete_path(name, leaves)
        if path in complete:
            raise ConfigError(f"`{path}` must be given once, got it by two names")
        complete[path] = value
    return complete


def _check_disjoint(given: Iterable[Setting], *others: Mapping[str, Any]) -> None:
    """Raise ConfigError if two options set the same path: one of them would have no effect."""
    sources = [{path for setting in given for path in setting}, *(set(values) for values in others)]
    names = ("get_sweep()", "a grid", "a range", "seeds")
    for (name, paths), (other, more) in itertools.combinations(zip(names, sources, strict=True), 2):
        for path in sorted(paths & more):
            raise ConfigError(f"`{path}` must be set by one of {name} and {other}, got both")


def _check_configs(base: Any, settings: Sequence[Setting]) -> None:
    checked = set()  # runs that differ only in the seed are alike
    for setting in settings:
        overrides = [format_override(path, value) for path, value in setting.items()]
        for path, value in setting.items():
            with contextlib.suppress(ConfigError):
                if repr(parse_value(repr(value))) == repr(value):
                    continue
            raise ConfigError(
                f"a value of `{path}` must be a Python literal or an import path, got {value!r}"
            )
        alike = tuple(override for override in overrides if not override.startswith(SEED))
        if alike in checked:
            continue
        checked.add(alike)
        try:
            config = resolve(apply_overrides(base, overrides))
            kept = {name: value for name, value in config.items() if name not in _NOT_CHECKED}
            Runner.from_cfg(
                {
                    **kept,
                    "work_dir": os.path.join(tempfile.gettempdir(), "unused"),
                    "log_level": "ERROR",
                }
            )
        except Exception as error:
            error.add_note(f"in the run with {', '.join(overrides)}")
            raise


def main() -> None:
    """Read a request from stdin and write the plan, or the error, to the file in the first
    argument.
    """
    try:
        plan: Plan | ConfigError = make_plan(pickle.load(sys.stdin.buffer))
    except Exception as error:
        notes = list(getattr(error, "__notes__", ()))
        in_config = isinstance(error, ConfigError | OSError) or "config at" in "".join(notes)
        plan = ConfigError(str(error) if in_config else format_error(error, None).strip())
        plan.__notes__ = notes
    pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(plan))


if __name__ == "__main__":
    main()
