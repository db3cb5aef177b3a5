"""Where a run starts: the Runner's arguments `load_from` and `resume`."""

import dataclasses
import functools
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jengine.checkpoint.layout import EARLIER, find_checkpoint, find_latest, read_meta
from jengine.checkpoint.manifest import read_manifest
from jengine.checkpoint.report import LoadReport
from jengine.checkpoint.restore import list_arrays, load_items
from jengine.config.errors import ConfigError, config_path
from jengine.config.plugins import load_each
from jengine.config.registry import check_arguments
from jengine.config.storage import list_directory, storage_path
from jengine.parallel.processes import ProcessGroup


class Weights(NamedTuple):
    """Weights that were opened to start a run, before any array is read."""

    label: str  # where they are, for messages
    names: Iterable[str]  # dotted paths of the arrays
    meta: Mapping[str, Any]  # of a checkpoint
    # takes `params` and `model_state` by item, and returns them with the weights
    load: Callable[[Mapping[str, Any]], tuple[Any, LoadReport]]
    # takes the runner, which has the weights, and the report
    finish: Callable[[Any, LoadReport], None] = lambda *_: None


@dataclasses.dataclass(frozen=True)
class LoadFrom:
    """Checkpoint whose weights a run starts from; extras read other weights, in "starts".

    Attributes:
      path: the checkpoint.
      strict: False keeps the model's own values where there are no matching ones.
      raw: True loads the raw parameters from a run that saved averages.
    """

    path: str
    strict: bool = True
    raw: bool = False

    def open(self, params: Any, *, evaluated: bool) -> Weights:
        """Open the weights, for a model with these `params`.

        With `evaluated` those that the checkpoint's run has validated.
        """
        meta = read_meta(self.path)
        moved = meta.get("exchanged" if self.raw else "evaluated" if evaluated else "", {})
        load = functools.partial(load_items, self.path, moved=moved, strict=self.strict)
        return Weights(self.path, list_arrays(self.path), meta, load)


def parse_load_from(load_from: Any, processes: ProcessGroup) -> LoadFrom | None:
    """Return the weights to start from, which all processes verify now, before anything is built.

    Raises:
      FileNotFoundError, CorruptCheckpointError: there is no checkpoint, or it is damaged.
      ConfigError, TypeError: something else, and no extra reads it.
    """
    if load_from is None:
        return None
    with config_path("load_from"):
        for parse in load_each("starts"):
            if (start := parse(load_from, processes)) is not None:
                return start
        options = dict(load_from) if hasattr(load_from, "items") else {"path": load_from}
        path = options.pop("path", None)
        if not isinstance(path, str | os.PathLike) or not options.keys() <= {"strict", "raw"}:
            raise ConfigError(
                "`load_from` must be a checkpoint or dict(path=, strict=, raw=) without an extra "
                f"for other weights, got {reprlib.repr(load_from)}"
            )
        check_arguments(LoadFrom, {"path": os.fspath(path), **options})
        try:
            path = find_checkpoint(path, checksums=True, processes=processes)
        except FileNotFoundError as error:
            error.add_note("Weights in other formats need an extra that reads them.")
            raise
        return LoadFrom(path, **options)


def find_checkpoint_to_resume(
    processes: ProcessGroup,
    work_dir: str,
    load_from: object,
    start: LoadFrom | None,
    resume: bool | str | os.PathLike[str],
) -> tuple[str | None, str]:
    """Return the checkpoint to continue from, if there is one, and a line for the log.

    As in MMEngine, `resume=True` continues from `load_from` if that is the path of a checkpoint,
    and otherwise from the newest one in the work dir. Other weights (a file, objects, a dict with
    options) cannot be continued.
    """
    verification: Any = dict(checksums=True, processes=processes)
    if not resume:
        return None, ""
    if resume is not True and resume not in ("must", "exact"):  # a path
        with config_path("resume"):
            return find_checkpoint(resume, **verification), ""
    if isinstance(load_from, str | os.PathLike) and start is not None:
        manifest = read_manifest(storage_path("load_from", start.path))
        if manifest is not None and manifest.iteration is not None:  # published weights have none
            return start.path, (
                f"resume={resume!r} continues the run of load_from={os.fspath(load_from)!r}, as "
                f"in MMEngine, and does so again at each start. resume={os.fspath(load_from)!r} "
                "does the same. load_from=dict(path=...) loads only its weights, and continues "
                f"from the newest checkpoint of {work_dir} when started again."
            )
    newest = find_latest(work_dir, **verification)
    for find_newer in load_each("newer_checkpoints"):
        if (newer := find_newer(work_dir, newest, processes)) is not None:
            return newer  # the path and a line for the log
    if newest is not None:
        return newest, ""
    names = list_directory(storage_path("work_dir", work_dir))
    earlier = ", ".join(name for name in names if name.startswith(EARLIER))
    hint = f"; checkpoints of earlier runs are in {earlier}" if earlier else ""
    if resume == "must":
        raise ConfigError(
            f"`resume` must find a checkpoint in {work_dir} with resume='must', got none{hint}"
        )
    origin = "from scratch" if load_from is None else "from the weights of load_from"
    return None, f"There is nothing to resume in {work_dir}: the run starts {origin}{hint}."


def default_resume_command(load_from: object, path: str | None) -> str:
    """Return how to continue a run.

    >>> default_resume_command(None, None)
    'Runner(..., resume=True)'

    Args:
      load_from: the Runner's argument.
      path: a checkpoint; None for the newest one in the work dir, '' to start from scratch.
    """
    # it would hold
    without = (
        ["load_from=None"] if path is None and isinstance(load_from, str | os.PathLike) else []
    )
    resume = [] if path == "" else [f"resume={path or True!r}"]
    return f"Runner({', '.join(['...', *without, *resume])})"


def choose_seed(randomness: Mapping[str, Any] | None, saved: int | None) -> int:
    """Return the seed of the checkpoint, of the config, or a new one."""
    configured = (randomness or {}).get("seed")
    if saved is not None:
        return saved
    if configured is not None:
        return int(configured)
    # Without the section all runs have seed 0; `seed=None` in it draws another for each run
    return int(np.random.SeedSequence().generate_state(1)[0]) if randomness else 0
