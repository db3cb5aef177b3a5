"""Progress of runs, read from their files, and a live table of it."""

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jengine.extras.report.foreign_files import ForeignFiles
from jengine.extras.sweeps.trials import DONE, Trial, find_run
from jengine.logging.console import in_notebook

_INTERVAL = 1.0  # seconds between two readings of the files
_FINISHED_ROWS = 5  # the newest ones; the table of all is printed at the end
_STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "pruned": "yellow",
    "stopped": "yellow",
}
_ENDED = (*DONE, "failed")
_NO_METRICS = ("step", "iter", "epoch", "mode", "time", "data_time")


class RunProgress:
    """Reader for how far a run is; each call of `update` reads only what is new."""

    def __init__(self, work_dir: pathlib.Path) -> None:
        self.iter = 0
        self.max_iters: int | None = None
        self.validation: dict[str, Any] = {}  # the newest one
        self._work_dir = work_dir
        self._scalars: pathlib.Path | None = None
        self._position = 0

    def update(self) -> None:
        """Read the newest lines."""
        newest = find_run(self._work_dir)
        if newest is None:
            return
        scalars = newest.parent / "vis_data" / "scalars.json"
        if scalars != self._scalars:
            self._scalars = scalars
            self._position = 0
            self.max_iters = ForeignFiles(self._work_dir).read_json(newest).get("max_iters")
        if not scalars.exists():
            return
        with open(scalars, encoding="utf-8", errors="replace") as file:
            file.seek(self._position)
            while (line := file.readline()).endswith("\n"):  # the last line may be incomplete
                self._position = file.tell()
                try:
                    row = dict(json.loads(line))
                except (ValueError, TypeError, RecursionError):
                    continue
                if row.get("mode") == "val":
                    self.validation = {
                        name: x for name, x in row.items() if name not in _NO_METRICS
                    }
                if isinstance(row.get("iter"), int):
                    self.iter = max(self.iter, row["iter"])


class LiveTable:
    """Table of a sweep of `total` runs in a terminal; elsewhere, one line for each run that ends.

    It shows one metric of the validations, or all if `metric` is ''.
    """

    def __init__(self, name: str, metric: str, total: int) -> None:
        self._console = Console(force_jupyter=False)  # lines of text in a notebook too
        self._name = name
        self._metric = metric
        self._total = total
        self._readers: dict[pathlib.Path, RunProgress] = {}
        self._due = 0.0
        self._start = time.monotonic()
        live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live = live if self._console.is_terminal and not in_notebook() else None

    def __enter__(self) -> "LiveTable":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, trials: Sequence[Trial], note: str = "") -> None:
        """Redraw the table if it is due."""
        if self._live is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _INTERVAL
        self._live.update(self._render(trials, note), refresh=True)

    def end(self, trial: Trial, trials: Sequence[Trial]) -> None:
        """Show that a run ended."""
        done = sum(other.status in _ENDED for other in trials)
        if self._live is None or trial.status == "failed":
            reader = self._read(trial)
            what = trial.error or self._describe(reader)
            self._console.print(
                Text(
                    f"[{done}/{self._total}] {trial.name}: {trial.status} after "
                    f"{trial.seconds:.0f} s  {what}"
                ),
                soft_wrap=True,
            )

    def _read(self, trial: Trial) -> RunProgress:
        reader = self._readers.setdefault(trial.work_dir, RunProgress(trial.work_dir))
        reader.update()
        return reader

    def _describe(self, reader: RunProgress) -> str:
        names = [self._metric] if self._metric in reader.validation else reader.validation
        values = {name: reader.validation[name] for name in names}
        return ", ".join(
            f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}"
            for name, x in values.items()
        )

    def _render(self, trials: Sequence[Trial], note: str) -> Group:
        counts = {status: sum(trial.status == status for trial in trials) for status in _STYLES}
        texts = [f"{count} {status}" for status, count in counts.items() if count]
        title = (
            f"{self._name}: {self._total} runs"
            + "".join(f", {text}" for text in texts)
            + self._remaining(trials)
        )
        running = [trial for trial in trials if trial.status == "running"]
        ended = [
            trial
            for trial in trials
            if trial.status in _STYLES and trial.started and trial.status != "running"
        ]
        ended.sort(key=lambda trial: trial.started + trial.seconds)
        table = Table(
            "run", "status", "iteration", "last validation", title=title, title_justify="left"
        )
        height = max(self._console.height - 8, 3)
        for trial in [*ended[-_FINISHED_ROWS:], *running][-height:]:
            reader = self._read(trial)
            status = Text(trial.status, style=_STYLES[trial.status])
            total = f"/{reader.max_iters}" if reader.max_iters else ""
            table.add_row(
                Text(trial.name), status, f"{reader.iter}{total}", Text(self._describe(reader))
            )
        return Group(table, Text(note or "Ctrl-C saves the runs and ends."))

    def _remaining(self, trials: Sequence[Trial]) -> str:
        ended = sum(trial.started > 0 and trial.status in _ENDED for trial in trials)
        left = self._total - sum(trial.status in _ENDED for trial in trials)
        if not ended or not left:
            return ""
        minutes = (time.monotonic() - self._start) / ended * left / 60
        return f"; about {minutes:.0f} min left" if minutes >= 1 else "; less than a minute left"
