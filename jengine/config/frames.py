"""Errors with the frames in the user's code alone, on a terminal and in a script or notebook."""

import functools
import itertools
import linecache
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

# Packages whose frames are left out. Those of any other installed package may be the user's.
_ENGINE = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax",
    "chex",
    "grain",
    "etils",
    "numpy",
    "ml_collections",
)
_DIRECTORIES = [pathlib.Path(__file__).parent.parent, pathlib.Path(sysconfig.get_path("stdlib"))]
_INSTALLED = ("site-packages", "dist-packages")
JAX_NOTES = ("----", "For simplicity, JAX has removed")
_ALL = "JAX_TRACEBACK_FILTERING=off in the environment shows all"

P = ParamSpec("P")
R = TypeVar("R")


def boundary(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose errors have no frames of libraries if the user's code calls it.

    A class is changed in place, as to its constructor.

    An error that is no message, raised in a library far from any code of the user, keeps them all,
    and so do all errors with `jax.config.update("jax_traceback_filtering", "off")`.
    """
    if isinstance(function, type):
        function.__init__ = boundary(function.__init__)  # type: ignore[misc]
        return function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            config = getattr(sys.modules.get("jax"), "config", None)
            if getattr(config, "jax_traceback_filtering", "") != "off" and not _is_library(
                sys._getframe(1).f_code.co_filename
            ):
                _hide_frames(error)
            raise

    return call


def has_own_frames(error: BaseException) -> bool:
    """Return whether an error was raised in the user's code, or in what that code has called."""
    return bool(list_own_frames(error.__traceback__))


def list_own_frames(
    tb: types.TracebackType | None, *, inside: bool = False
) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback in the user's code, the innermost at the end.

    `inside` leaves out those outside of all libraries, of the script that starts the run.
    """
    frames = [(frame, _is_library(frame.filename)) for frame in traceback.extract_tb(tb)]
    if inside:
        frames = list(itertools.dropwhile(lambda found: not found[1], frames))
    return [frame for frame, is_library in frames if not is_library]


def format_error(error: BaseException, log_file: str | None) -> str:
    """Return an error message below the frames in the user's code.

    `log_file`, if any, has the complete traceback.
    """
    report = traceback.TracebackException.from_exception(error)
    left_out = sum([_keep_own_frames(part) for part in _chain(report)])
    where = f"{log_file} has all, as has --traceback" if log_file else "--traceback prints all"
    hint = (
        f"jengine: {left_out} frames of jengine, jax and other libraries are left out; {where}\n"
        if left_out
        else ""
    )
    return hint + "".join(report.format())


def _chain(report: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    if report is not None:
        yield report
        for part in (report.__cause__, report.__context__, *(report.exceptions or ())):
            yield from _chain(part)


def _keep_own_frames(report: traceback.TracebackException) -> int:
    """Remove library frames, and JAX's notes about frames; return the number of removed frames."""
    own = [frame for frame in report.stack if not _is_library(frame.filename)]
    left_out = len(report.stack) - len(own)
    report.stack = traceback.StackSummary.from_list(own)
    notes = [note for note in report.__notes__ or () if not note.startswith(JAX_NOTES)]
    report.__notes__ = notes or None
    return left_out


def _is_library(filename: str) -> bool:
    """Return whether a file belongs to Python, jengine, or a library that runs the step."""
    path = pathlib.Path(filename)
    for name in _INSTALLED:
        if name in path.parts[:-1]:
            package = path.parts[path.parts.index(name) + 1]
            return package in _ENGINE or package == "jengine"
    return filename.startswith("<frozen") or any(
        path.is_relative_to(directory) for directory in _DIRECTORIES
    )


def _hide_frames(error: BaseException) -> None:
    """Remove library frames from the traceback of an error and of those behind it."""
    frames = list(_frames(error.__traceback__))
    own = [frame for frame in frames if not _is_library(frame.tb_frame.f_code.co_filename)]
    last = frames[-1]
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
    # An error that nobody has raised on purpose, such as that of a missing key, is a bug
    if not own and not line.strip().startswith("raise"):
        return
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(JAX_NOTES)]
    if len(frames) > len(own):
        notes.append(f"({len(frames) - len(own)} frames of libraries are left out: {_ALL})")
    error.__notes__ = notes
    kept = None
    for frame in reversed(own):
        kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = kept
    for behind in (error.__cause__, error.__context__):
        if behind is not None and behind.__traceback__ is not None:
            _hide_frames(behind)


def _frames(tb: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
