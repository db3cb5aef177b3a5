"""Table of runs: the hyperparameters that differ, final and best metrics, and means over seeds."""

import collections
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jengine.config.errors import ConfigError, closest
from jengine.config.merge import remove_delete_keys
from jengine.config.plugins import load_provided
from jengine.config.scores import sort_key, split_words
from jengine.extras.report.remote import origin
from jengine.extras.report.run_files import ReportedRun, read_runs
from jengine.extras.report.run_metrics import find_best, flatten_config, list_saved_metrics
from jengine.extras.report.table_format import Cell, Spread, format_cells, spread

# Differences that are no hyperparameters unless a sweep sets them: names, places, and what is drawn
# and logged
_NO_HYPERPARAMS = (
    "work_dir",
    "experiment_name",
    "resume",
    "log_level",
    "visualizer",
    "vars",
)
_SEED = "randomness.seed"  # has a column of its own
_KEY = re.compile(r"""\[(['"])(.+?)\1\]""")  # a key with dots, in the path of an override
_INDEX = re.compile(r"\.(-?\d+)(?=[.\[]|$)")


@dataclasses.dataclass(frozen=True)
class RunRow:
    """Row of a table: one run.

    Attributes:
      name: the work dir name, extended where two are equal.
      work_dir: the directory with its checkpoints.
      log_dir: the directory with its logs; the work dir if the run failed before it made one.
      status: 'finished', 'training', 'pruned', 'failed', 'waiting', or why it stopped; '' if
        unknown.
      error: the message of a failed trial of a sweep; '' if there is none.
      seed: the random seed; None if unknown.
      iter: iterations trained.
      hyperparams: the values at the table's `hyperparams`, without those that the run does not
        have.
      best: the best value of each validation metric whose direction is known.
      final: the last value of each metric; `test/NAME` of a test after training.
      config: all values by config path, without the seed, names and places; empty if unknown.
    """

    name: str
    work_dir: str
    log_dir: str
    status: str
    error: str
    seed: int | None
    iter: int
    hyperparams: Mapping[str, Any]
    best: Mapping[str, float]
    final: Mapping[str, float]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def setting(self) -> str:
        """What seeds of one run have in common: the whole config, not only the hyperparameters
        in the table.
        """
        if not self.hyperparams and not self.config:
            return self.name  # nothing is known, so it is like no other
        # As text: values may be lists and dicts, which cannot be keys.
        return repr((sorted(self.hyperparams.items()), sorted(self.config.items())))

    def best_checkpoint(self, metric: str | None = None) -> str:
        """Return the best checkpoint in the work dir, of a metric if `save_best` has several.

        Raises:
          FileNotFoundError, ConfigError: see `jengine.checkpoint.find_best_checkpoint`.
        """
        find_best = load_provided("jengine.checkpoint", "find_best_checkpoint")
        return str(find_best(self.work_dir, metric or True))


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in the seed, the best one first.

    Attributes:
      runs: the runs.
      hyperparams: what they share.
      best, final: mean and spread over the runs that have the metric.
    """

    runs: Sequence[RunRow]
    hyperparams: Mapping[str, Any]
    best: Mapping[str, Spread]
    final: Mapping[str, Spread]

    @property
    def status(self) -> str:
        """The status of all, or how many runs have each: 'finished 3, failed 1'."""
        counts = collections.Counter(run.status for run in self.runs)
        return (
            next(iter(counts))
            if len(counts) == 1
            else ", ".join(f"{name} {n}" for name, n in counts.items())
        )


@dataclasses.dataclass(frozen=True, repr=False)
class RunTable:
    """Table of runs, the best one first.

    Attributes:
      rows: the runs.
      hyperparams: config paths at which the runs differ; those that a sweep sets come first.
      metrics: metric names, the main one first.
      rules: 'greater' or 'less' for each metric whose direction is known, by config or by name.
      notes: what could not be read, and why.

    >>> row = RunRow(
    ...     "a",
    ...     "a",
    ...     "a",
    ...     "finished",
    ...     "",
    ...     0,
    ...     9,
    ...     {"optim_wrapper.lr": 0.1},
    ...     {"loss": 1.5},
    ...     {"loss": 2.0},
    ... )
    >>> table = RunTable([row], ["optim_wrapper.lr"], ["loss"], {"loss": "less"})
    >>> print(table)
    +-----+-----------+-----------+------+----------+-----+
    |  lr | best loss | last loss | seed | status   | run |
    +-----+-----------+-----------+------+----------+-----+
    | 0.1 |       1.5 |         2 |    0 | finished | a   |
    +-----+-----------+-----------+------+----------+-----+
    >>> table.best().name
    'a'
    """

    rows: Sequence[RunRow]
    hyperparams: Sequence[str]
    metrics: Sequence[str]
    rules: Mapping[str, str]
    notes: Sequence[str] = ()

    def best(self, metric: str | None = None) -> RunRow:
        """Return the run with the best value of a metric, by default of the main one.

        Raises:
          ConfigError: no run has this metric, or its direction is unknown.
        """
        name = self.find_metric(metric)
        found = [row for row in self.rows if name in row.best]
        return min(found, key=lambda row: _rank(row.best[name], self.rules[name]))

    def groups(self, metric: str | None = None) -> list[SeedGroup]:
        """Return the runs grouped over seeds, the group with the best mean of a metric first.

        `groups()[0].runs[0]` is the best seed of the best hyperparameters.

        Raises:
          ConfigError: no run has this metric, or its direction is unknown.
        """
        name = self.find_metric(metric) if metric or self.rules else ""
        by_settings: dict[str, list[RunRow]] = {}
        # Best first, so that a group is represented by its best run.
        for row in sorted(
            self.rows, key=lambda row: _rank(row.best.get(name), self.rules.get(name, ""))
        ):
            by_settings.setdefault(row.setting, []).append(row)
        groups = [
            SeedGroup(
                runs,
                runs[0].hyperparams,
                _average(run.best for run in runs),
                _average(run.final for run in runs),
            )
            for runs in by_settings.values()
        ]
        return sorted(
            groups, key=lambda group: _rank(group.best.get(name), self.rules.get(name, ""))
        )

    def cells(self, group: bool = False) -> tuple[list[str], list[list[Cell]]]:
        """Return the headings and the rows, one for each run, or with `group` for each group
        over seeds.
        """
        names = shorten_paths(self.hyperparams)
        columns = [(kind, metric) for metric in self.metrics for kind in ("best", "last")]
        columns = [
            (kind, metric) for kind, metric in columns if kind == "last" or metric in self.rules
        ]
        ends = ["seeds", "status"] if group else ["seed", "status", "run"]
        headings = [
            *(names[path] for path in self.hyperparams),
            *(f"{kind} {name}" for kind, name in columns),
            *ends,
        ]
        rows: list[list[Cell]] = []
        found: Sequence[RunRow | SeedGroup] = self.groups() if group else self.rows
        for row in found:
            values = [
                _as_cell(row.hyperparams[path]) if path in row.hyperparams else None
                for path in self.hyperparams
            ]
            metrics = [
                (row.best if kind == "best" else row.final).get(name) for kind, name in columns
            ]
            last = (
                [len(row.runs), row.status]
                if isinstance(row, SeedGroup)
                else [row.seed, row.status, row.name]
            )
            rows.append([*values, *metrics, *last])
        return headings, rows

    def format(self, style: str = "text", group: bool = False) -> str:
        """Return the table as 'text', 'csv', 'markdown' or 'latex', with one row for each run,
        or for each group.
        """
        return format_cells(*self.cells(group), style)

    def find_metric(self, metric: str | None) -> str:
        """Return a metric, or the main one for None.

        Raises:
          ConfigError: no run has this metric, or its direction is unknown.
        """
        known = [name for name in self.metrics if name in self.rules]
        if metric is None and known:
            return known[0]
        if metric in known:
            return str(metric)
        if metric:
            problem = f"{metric!r}{closest(metric, known)}"
        else:
            problem = (
                "no validation metric with a known direction; set save_best and rule of the "
                "CheckpointHook"
            )
        raise ConfigError(f"the metric must be one of {', '.join(known) or 'none'}, got {problem}")

    def __repr__(self) -> str:
        return self.format()  # in a console or a debugger the fields would be pages

    def _repr_markdown_(self) -> str:
        """Return the table as Jupyter shows it."""
        return self.format("markdown")


def read_table(work_dirs: Iterable[str | os.PathLike[str]]) -> RunTable:
    """Read runs and return their table.

    Args:
      work_dirs: a work dir, for its newest run; a directory of work dirs, such as a sweep; or a log
        directory.

    Raises:
      FileNotFoundError: a directory does not exist or has no runs.
    """
    return build_table(read_runs([os.fspath(path) for path in work_dirs]))


def build_table(runs: Mapping[str, ReportedRun]) -> RunTable:
    """Return the table of runs, by name."""
    values = _read_values(list(runs.values()))
    paths = _find_differing(list(runs.values()), values)
    rules: dict[str, str] = {}
    rows = [
        _describe(name, run, found, paths, rules)
        for (name, run), found in zip(runs.items(), values, strict=True)
    ]
    names = dict.fromkeys(metric for row in rows for metric in row.final)
    saved = [metric for run in runs.values() for metric in list_saved_metrics(run.config)]
    # The main metric is that of the best checkpoints, else the first that is no loss
    order = sorted(
        names,
        key=lambda name: (name not in saved, name.startswith("test/"), "loss" in split_words(name)),
    )
    main = next((name for name in order if name in rules), "")
    rows.sort(key=lambda row: _rank(row.best.get(main), rules.get(main, "")))
    notes = [f"{name}: {note}" for name, run in runs.items() for note in run.notes]
    return RunTable(rows, paths, order, rules, notes)


def shorten_paths(paths: Sequence[str]) -> dict[str, str]:
    """Return the shortest end of each path that no other path has.

    >>> shorten_paths(["optim_wrapper.optimizer.lr", "model.head.width", "model.neck.width"])
    {'optim_wrapper.optimizer.lr': 'lr', 'model.head.width': 'head.width', 'model.neck.width':
    'neck.width'}
    """
    ends = {
        path: [".".join(path.split(".")[-n:]) for n in range(1, path.count(".") + 2)]
        for path in paths
    }
    counts = collections.Counter(end for found in ends.values() for end in found)
    return {
        path: next((end for end in found if counts[end] == 1), path) for path, found in ends.items()
    }


def _as_cell(value: Any) -> Cell:
    return (
        value
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else repr(value)
    )


def _rank(value: "float | Spread | None", rule: str) -> float:
    """Return a number by which better values come first, and missing ones last."""
    number = value.mean if isinstance(value, Spread) else value
    return sort_key(rule, number) if rule else math.inf


def _average(metrics: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    values: dict[str, list[float]] = {}
    for found in metrics:
        for name, value in found.items():
            values.setdefault(name, []).append(value)
    return {name: spread(found) for name, found in values.items()}


def _overrides(run: ReportedRun) -> dict[str, Any]:
    """Return what a sweep sets, by the paths that `flatten_config` gives the same values."""
    found = flatten_config(remove_delete_keys(run.trial.get("overrides", {})))
    return {_INDEX.sub(r"[\1]", _KEY.sub(r".\2", path)): value for path, value in found.items()}


def _read_values(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return the values of each run by config path.

    A trial that failed before it wrote its config has that of another seed, else only what the
    sweep sets.
    """

    def key(run: ReportedRun) -> tuple[pathlib.Path, str]:
        shared = {path: value for path, value in _overrides(run).items() if path != _SEED}
        return run.work_dir.parent, repr(sorted(shared.items()))

    configs = [flatten_config(run.config) for run in runs]
    known = {
        key(run): {path: value for path, value in config.items() if path != _SEED}
        for run, config in zip(runs, configs, strict=True)
        if run.trial and config
    }
    return [
        {**_overrides(run), **(config or known.get(key(run), {}))}
        for run, config in zip(runs, configs, strict=True)
    ]


def _find_differing(runs: Sequence[ReportedRun], values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the config paths at which runs differ.

    In a single sweep those are the ones that it sets, because others follow; all of them, if those
    do not tell every setting apart.
    """
    swept = list(dict.fromkeys(path for run in runs for path in _overrides(run)))
    others = list(dict.fromkeys(path for found in values for path in found if _is_hyperparam(path)))

    def differ(path: str) -> bool:
        # A trial without a config has only what the sweep sets: nothing is known about its other
        # values.
        known = [
            found
            for run, found in zip(runs, values, strict=True)
            if path in found or set(found) - set(swept)
        ]
        return path != _SEED and len({repr(found.get(path)) for found in known}) > 1

    found = [path for path in swept if differ(path)]
    is_sweep = all(run.trial for run in runs) and len({run.work_dir.parent for run in runs}) == 1
    shown = {repr([row.get(path) for path in found]) for row in values}
    if not is_sweep or len(shown) < len({repr(_setting(row)) for row in values}):
        found += [path for path in others if path not in swept and differ(path)]
    return found


def _is_hyperparam(path: str) -> bool:
    return path != _SEED and path.partition(".")[0].partition("[")[0] not in _NO_HYPERPARAMS


def _setting(values: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in values.items() if _is_hyperparam(path)}


def _describe(
    name: str,
    run: ReportedRun,
    values: Mapping[str, Any],
    paths: Sequence[str],
    rules: dict[str, str],
) -> RunRow:
    """Return the row of a run; the directions of its metrics are added to `rules`."""
    curves, _ = run.curves
    best: dict[str, float] = {}
    final = {}
    for metric in find_best(curves, run.config):
        final[metric["metric"]] = curves["val", metric["metric"]][1][-1]
        if metric["rule"]:
            rules.setdefault(metric["metric"], metric["rule"])
        if metric["best"]:
            best[metric["metric"]] = metric["best"]["value"]
    final |= {f"test/{key}": float(x) for key, x in run.test.items()}
    if not final and ("train", "loss") in curves:  # a run without a validation
        losses = [value for value in curves["train", "loss"][1] if math.isfinite(value)]
        final["train/loss"] = curves["train", "loss"][1][-1]
        rules["train/loss"] = "less"
        best |= {"train/loss": min(losses)} if losses else {}
    return RunRow(
        name=name,
        work_dir=origin(run.work_dir),
        log_dir=origin(run.log_dir),
        status=run.status,
        error=str(run.trial.get("error", "")),
        seed=run.record.get("seed", values.get(_SEED)),
        iter=run.iter,
        hyperparams={path: values[path] for path in paths if path in values},
        best=best,
        final=final,
        config=_setting(values),
    )
