"""Errors as a terminal should show them: the frames in the user's code, the message, and the
notes.
"""

import pathlib
import sysconfig
import traceback
from collections.abc import Iterator

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
