"""Runs of a sweep: their directories, commands, and states."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.json_codec import decode, encode
from jengine.config.storage import read_bytes, write_bytes
from jengine.config.work_dir import RECORD
from jengine.extras.report.foreign_files import ForeignFiles
from jengine.extras.report.run_files import TRIAL
from jengine.extras.sweeps.space import Setting, format_override

OUTPUT = "output.log"
STOP = "stop"  # exists if the run should end
DONE = ("finished", "pruned")
_MAX_NAME = 100  # characters; file systems allow 255 bytes
_ERROR = re.compile(r"(?:jengine: )?(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*")


@dataclasses.dataclass
class Trial:
    """One run of a sweep."""

    setting: Setting  # the values that distinguish it
    work_dir: pathlib.Path  # in the directory of the sweep
    status: str = "waiting"  # or 'running', 'finished', 'pruned', 'stopped', 'failed'
    error: str = ""  # why it failed
    number: int | None = None  # in the study of a search
    seconds: float = 0.0  # how long it ran in this session
    started: float = 0.0  # by `time.monotonic`
    max_time: str = ""  # the limit that it has reached

    @property
    def name(self) -> str:
        """The name of the work dir."""
        return self.work_dir.name

    def command(self, config: str, overrides: Iterable[str]) -> list[str]:
        """Return the command that trains this run, or continues it."""
        own = [f"--config.{format_override(path, value)}" for path, value in self.setting.items()]
        python = [sys.executable, "-m", "jengine.extras.sweeps"]
        run = [*python, "train", config, "--work-dir", str(self.work_dir)]
        shared = [f"--config.{text.removeprefix('--config.')}" for text in overrides]
        # last: it would take a value with a space for a path
        return [*run, *shared, *own, "--resume"]

    def write(self, study: Mapping[str, Any] | None = None) -> None:
        """Write the record, which `jengine table` and the pruning hook read."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {"overrides": self.setting}
        if self.error:
            record["error"] = self.error
        if study is not None:
            record["study"] = {**study, "number": self.number}
        if self.status == "pruned":
            record["pruned"] = True
        write_bytes(self.work_dir / TRIAL, encode(record).encode())

    def start(self) -> None:
        """Note the start."""
        self.status = "running"
        self.error = ""
        self.max_time = ""
        self.started = time.monotonic()

    def finish(self, code: int, is_stopping: bool) -> None:
        """Note the end, with the exit code of the process."""
        self.seconds = time.monotonic() - self.started
        if code == 0:
            self.status = "pruned" if read_record(self.work_dir).get("pruned") else "finished"
        elif is_stopping:
            self.status = "stopped"
        else:
            self.status = "failed"
            self.error = (
                f"ended after max_time={self.max_time!r}"
                if self.max_time
                else _explain(self.work_dir / OUTPUT, code)
            )


def make_trials(directory: pathlib.Path, settings: Sequence[Setting]) -> list[Trial]:
    """Return the runs for settings.

    Those with a record of an earlier start have its directory and state.
    """
    known = {
        _key(record.get("overrides", {})): path for path, record in list_records(directory).items()
    }
    names = _shorten({path for setting in settings for path in setting})
    taken = {path.name for path in known.values()}
    for setting in settings:
        if (key := _key(setting)) not in known:
            known[key] = directory / _name(setting, names, taken)
            taken.add(known[key].name)
    work_dirs = [known[_key(setting)] for setting in settings]
    pairs = zip(settings, work_dirs, strict=True)
    return [Trial(setting, path, status=read_status(path)) for setting, path in pairs]


def list_records(directory: pathlib.Path) -> dict[pathlib.Path, dict[str, Any]]:
    """Return the records in a sweep's directory by work dir."""
    return {path.parent: read_record(path.parent) for path in sorted(directory.glob(f"*/{TRIAL}"))}


def read_record(work_dir: pathlib.Path) -> dict[str, Any]:
    """Return the record of a run; {} if there is none."""
    return read_object(work_dir / TRIAL)


def read_status(work_dir: pathlib.Path) -> str:
    """Return 'finished' or 'pruned' for a run that is done, else 'waiting'."""
    if read_record(work_dir).get("pruned"):
        return "pruned"
    newest = find_run(work_dir)
    record = ForeignFiles(work_dir).read_json(newest) if newest else {}
    sessions = record.get("sessions")
    return "finished" if sessions and sessions[-1].get("status") == "finished" else "waiting"


def find_run(work_dir: pathlib.Path) -> pathlib.Path | None:
    """Return `run.json` of the newest start in a work dir, whose directories are named by time.

    None without one.
    """
    return max(work_dir.glob(f"*/{RECORD}"), default=None)


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Return the object in a file that a sweep has written; {} if there is none.

    Raises:
      ConfigError: the file is damaged. It is not taken for a missing one, or its run would be
        repeated.
    """
    try:
        return dict(decode(read_bytes(path)))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{relative(path)} must be as the sweep has written it, got {error}; remove it"
        ) from error


def _key(setting: Mapping[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)  # tuples are lists in a record


def _name(setting: Setting, names: Mapping[str, str], taken: Iterable[str]) -> str:
    """Return a directory name such as 'lr=0.1,seed=0', with a hash if it would be too long or is
    taken.
    """
    words = {
        names[path]: "-".join(re.findall(r"[\w.+-]+", str(value)))
        for path, value in setting.items()
    }
    text = re.sub(r"[^\w.,=+-]", "", ",".join(f"{name}={value}" for name, value in words.items()))
    if len(text) <= _MAX_NAME and text not in taken:
        return text
    return f"{text[:_MAX_NAME]}-{hashlib.sha256(_key(setting).encode()).hexdigest()[:8]}"


def _shorten(paths: Iterable[str]) -> dict[str, str]:
    """Return the last key of each path, or the path if two have the same."""
    ends = [path.rpartition(".")[2] for path in paths]
    return {
        path: end if ends.count(end := path.rpartition(".")[2]) == 1 else path for path in paths
    }


def _explain(output: pathlib.Path, code: int) -> str:
    """Return why a process failed: the error at the end of its output, or the signal."""
    if code < 0:
        hint = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        named = {int(number): number.name for number in signal.Signals}
        return f"ended by {named.get(-code, f'signal {-code}')}{hint}; see {output}"
    try:
        lines = output.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    errors = [line for line in lines if _ERROR.match(line)]
    text = (errors or [line for line in lines if line.strip()] or [f"exit code {code}"])[-1]
    return text.removeprefix("jengine: ")


def relative(path: str | os.PathLike[str]) -> str:
    """Return a path as short as a user would write it."""
    short = os.path.relpath(path)
    return os.fspath(path) if short.startswith(os.pardir) else short
