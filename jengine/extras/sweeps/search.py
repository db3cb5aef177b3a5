"""Search for good settings with Optuna."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jengine.config.errors import ConfigError, require_extra
from jengine.extras.sweeps.space import Setting, ValueRange, round_number
from jengine.extras.sweeps.study import named_errors, open_journal
from jengine.extras.sweeps.trials import Trial, relative

STUDY = "optuna.log"
_STATES = {"finished": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}


class Search:
    """Study of Optuna in a sweep's directory; a restart continues it.

    It looks for 'greater' or 'less' (`rule`) values of a metric, over lists of values and ranges by
    config path.

    Raises:
      ConfigError: the directory has a search for another metric or over other values.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        metric: str,
        rule: str,
        grid: Mapping[str, Sequence[Any]],
        ranges: Mapping[str, ValueRange],
    ) -> None:
        with require_extra("sweep", "`--search` requires optuna"):
            import optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._grid = grid
        self._ranges = ranges
        self.record = {"path": str(directory / STUDY), "name": directory.name}
        self._study = open_study(self.record, "maximize" if rule == "greater" else "minimize")
        self._check_study(directory, metric)

    def _check_study(self, directory: pathlib.Path, metric: str) -> None:
        """Check what Optuna cannot change: the metric, the choices, and the kind of a range.

        Limits may move.
        """
        kept: dict[str, Any] = {"metric": metric}
        kept |= {path: [repr(value) for value in values] for path, values in self._grid.items()}
        kept |= {
            path: {"log": limits.log, "int": limits.is_int} for path, limits in self._ranges.items()
        }
        known = self._study.user_attrs.get("kept", {})
        for name, value in kept.items():
            if known.get(name, value) != value:
                raise ConfigError(
                    f"`{name}` of a search must stay the same, {known[name]}, got {value}: give "
                    f"another --work-dir than {relative(directory)}"
                )
        with named_errors(self.record["path"]):
            self._study.set_user_attr("kept", {**known, **kept})

    def count(self) -> int:
        """Return the number of trials that are done; one that failed is replaced by another."""
        done = {self._optuna.trial.TrialState[state] for state in ("COMPLETE", "PRUNED")}
        return sum(trial.state in done for trial in self._trials())

    def unfinished(self) -> list[tuple[int, Setting]]:
        """Return the trials of an earlier start that did not end: number and setting."""
        running = self._optuna.trial.TrialState.RUNNING
        trials = [trial for trial in self._trials() if trial.state == running]
        paths = {*self._grid, *self._ranges}  # a kill may leave a trial without them
        return [
            (trial.number, self._setting(trial.params))
            for trial in trials
            if set(trial.params) == paths
        ]

    def ask(self) -> tuple[int, Setting]:
        """Return the number and the setting of the next trial."""
        with named_errors(self.record["path"]):
            trial = self._study.ask()
            for path, limits in self._ranges.items():
                if limits.is_int:
                    trial.suggest_int(path, round(limits.low), round(limits.high), log=limits.log)
                else:
                    trial.suggest_float(path, limits.low, limits.high, log=limits.log)
            for path, values in self._grid.items():
                trial.suggest_categorical(path, [repr(value) for value in values])
        return trial.number, self._setting(trial.params)

    def tell(self, trial: Trial, value: float | None) -> None:
        """Record the end of a trial with the best value of the metric.

        One that stopped stays unfinished.
        """
        if trial.status not in _STATES:
            return
        is_complete = trial.status == "finished" and value is not None
        state = "FAIL" if trial.status == "finished" and not is_complete else _STATES[trial.status]
        with named_errors(self.record["path"]):
            self._study.tell(
                trial.number,
                value if is_complete else None,
                state=self._optuna.trial.TrialState[state],
            )

    def _trials(self) -> list[Any]:
        with named_errors(self.record["path"]):
            return list(self._study.get_trials(deepcopy=False))

    def _setting(self, params: Mapping[str, Any]) -> Setting:
        known = {
            path: {repr(value): value for value in values} for path, values in self._grid.items()
        }
        # Short numbers for the names of directories
        numbers = {
            path: round_number(x) if isinstance(x, float) else x for path, x in params.items()
        }
        return {path: known[path][str(x)] if path in known else x for path, x in numbers.items()}


def open_study(record: Mapping[str, str], direction: Literal["maximize", "minimize"]) -> Any:
    """Return the study of a sweep, which is created if it does not exist."""
    import optuna

    storage = open_journal(record["path"])
    with named_errors(record["path"]):
        return optuna.create_study(
            study_name=record["name"],
            storage=storage,
            direction=direction,
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(constant_liar=True),  # several runs at once
            pruner=optuna.pruners.MedianPruner(),
        )
