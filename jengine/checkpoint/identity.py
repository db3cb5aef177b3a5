"""Identity of a run: name, seed, directories, initial weights and the checkpoint to continue."""

import dataclasses
import datetime
import os
import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax

from jengine.checkpoint.directories import check_directory
from jengine.checkpoint.layout import read_meta
from jengine.checkpoint.start_from import (
    LoadFrom,
    choose_seed,
    find_checkpoint_to_resume,
    parse_load_from,
)
from jengine.config.annotations import Range, check_values
from jengine.config.containers import check_keys
from jengine.config.errors import ConfigError, config_path
from jengine.config.fingerprint import read_flags
from jengine.config.storage import find_scheme, is_url, storage_path
from jengine.logging.console import escape_name
from jengine.parallel.processes import ProcessGroup, assert_equal_across_processes

# Taken from process 0: clocks and drawn seeds differ between hosts. `resume_from` is agreed on
# before: the same path, or the copy of the same iteration on each host's local disk
_SHARED_FIELDS = ("timestamp", "run_id", "experiment_name", "seed", "resume_note")
_TAKEN: set[str] = set()  # log directories of this process, which are made later
TIMESTAMP = re.compile(r"\d{8}_\d{6}(_\d+)?")


class _Randomness(NamedTuple):
    seed: Annotated[int, Range(ge=0, lt=2**32)] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Identity:
    """Identity of a run.

    A resumed run has the name, seed and log directory of the run that it continues.
    """

    work_dir: str  # an absolute path, or a URL
    local_dir: str  # the directory for small files: the work dir, or a new one if that is a URL
    timestamp: str  # the start, `20250131_235959`
    run_id: str  # distinguishes this run's checkpoints from others
    experiment_name: str
    seed: int
    configured_seed: int | None  # None if the config has none
    load_from: LoadFrom | None  # None for random weights
    resume_from: str | None  # the checkpoint to continue
    # a line for the log about where `resume` looked for it; empty if `resume` is a path
    resume_note: str

    @property
    def log_dir(self) -> str:
        """The directory `<local_dir>/<timestamp>`."""
        return os.path.join(self.local_dir, self.timestamp)

    @property
    def log_file(self) -> str:
        """The log file; in a bucket, those of several processes, which cannot append to one,
        have their own names.
        """
        index = jax.process_index() if is_url(self.work_dir) else 0
        return os.path.join(
            self.log_dir, f"{self.timestamp}{f'.process_{index}' if index else ''}.log"
        )


def agree_on_identity(
    processes: ProcessGroup,
    cfg: Mapping[str, Any],
    work_dir: str | os.PathLike[str],
    load_from: Any = None,
    resume: bool | str | os.PathLike[str] = False,
    randomness: Mapping[str, Any] | None = None,
    experiment_name: str | None = None,
) -> Identity:
    """Determine the identity that all processes share, without writing anything.

    The arguments are the Runner's.

    Raises:
      ProcessMismatchError: the processes have other configs, work dirs or versions.
      FileNotFoundError: a named checkpoint does not exist. CorruptCheckpointError: it is damaged.
      ConfigError: an unknown key in `randomness`, a work dir that cannot be written, or nothing to
        resume with 'must'.
    """
    # A loader that is not a config has data for its process
    same = {
        name: value
        for name, value in cfg.items()
        if not name.endswith("_dataloader") or hasattr(value, "items")
    }
    values = {
        "work_dir": os.fspath(work_dir),
        "jax": jax.__version__,
        "jax.config": read_flags(),
        "config": same,
    }
    assert_equal_across_processes(processes, values)
    if not os.fspath(work_dir).strip():
        raise ConfigError(
            f"`work_dir` must be the path of a directory, got {os.fspath(work_dir)!r}"
        )
    work_dir = str(storage_path("work_dir", work_dir))
    check_directory("work_dir", work_dir)
    if experiment_name is not None and not experiment_name.isprintable():
        raise ConfigError(
            f"experiment_name must be one line of printable characters, got {experiment_name!r}"
        )
    start = parse_load_from(load_from, processes)
    resume_path, note = find_checkpoint_to_resume(processes, work_dir, load_from, start, resume)
    earlier = read_meta(resume_path)["meta"] if resume_path is not None else {}

    with config_path("randomness"):
        check_keys(dict(randomness or {}), ["seed"])
        check_values("", _Randomness, dict(randomness or {}))
        seed = choose_seed(randomness, earlier.get("seed"))
    timestamp = str(earlier.get("timestamp", ""))  # a resumed run appends to its logs
    # it names a directory: from a checkpoint, any other text is refused
    if not TIMESTAMP.fullmatch(timestamp):
        timestamp = _new_timestamp(work_dir)
    fresh_name = f"{experiment_name}_{timestamp}" if experiment_name else timestamp
    scheme = find_scheme(work_dir)
    identity = Identity(
        work_dir=work_dir,
        local_dir=work_dir if scheme is None else scheme.choose_local_dir(work_dir),
        timestamp=timestamp,
        run_id=str(earlier.get("run") or uuid.uuid4().hex),
        experiment_name=escape_name(str(earlier.get("experiment_name", fresh_name))),
        seed=seed,
        configured_seed=(randomness or {}).get("seed"),
        load_from=start,
        resume_from=resume_path,
        resume_note=note,
    )
    fields = {name: getattr(identity, name) for name in _SHARED_FIELDS}
    return dataclasses.replace(identity, **processes.broadcast("the name of the run", fields))


def _new_timestamp(work_dir: str) -> str:
    """Return the local time, with a number if an earlier run in the work dir started in the same
    second.
    """
    timestamp = name = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    number = 1
    # Two runs in a second, in one process or several: the name is also that of the log file, which
    # they would mix.
    while (path := os.path.join(work_dir, name)) in _TAKEN or storage_path(
        "work_dir", path
    ).exists():
        name = f"{timestamp}_{number}"
        number = number + 1
    _TAKEN.add(path)
    return name
