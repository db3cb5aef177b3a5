"""Errors with the frames in the user's code alone, on a terminal and in a script or notebook."""

import functools
import linecache
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

# Packages whose frames are left out. Those of any other installed package may be the user's.
_ENGINE = (
    "jax",
    "jaxlib",
    "flax",
    "equinox",
    "haiku",
    "optax",
    "orbax",
    "chex",
    "grain",
    "etils",
    "numpy",
    "ml_collections",
    "jaxtyping",
    "beartype",
    "typeguard",
)
_DIRECTORIES = [pathlib.Path(__file__).parent.parent, pathlib.Path(sysconfig.get_path("stdlib"))]
_INSTALLED = ("site-packages", "dist-packages")
JAX_NOTES = ("----", "For simplicity, JAX has removed")
_ALL = "JAX_TRACEBACK_FILTERING=off in the environment shows all"

T = TypeVar("T", bound=Callable[..., Any])


def boundary(function: T) -> T:
    """Return a function whose errors have no frames of libraries if the user's code calls it.

    A class is changed in place, as to its constructor.

    A fault of the engine keeps all frames: an error that no `raise` statement has raised, and that
    has passed no code of the user. So does every error with
    `jax.config.update("jax_traceback_filtering", "off")`.
    """
    if isinstance(function, type):
        function.__init__ = boundary(function.__init__)  # type: ignore[misc]
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            jax = sys.modules.get("jax")
            if (jax is None or jax.config.jax_traceback_filtering != "off") and not is_library(
                sys._getframe(1).f_code.co_filename
            ):
                _hide_frames(error, _ALL)
            raise

    return cast(T, call)


def own_frames(error: BaseException) -> list[types.TracebackType]:
    """Return the frames of the user's code, in which an error was raised or which called that."""
    frames = _frames(error.__traceback__)
    return [frame for frame in frames if not is_library(frame.tb_frame.f_code.co_filename)]


def format_error(error: BaseException, log_file: str | None) -> str:
    """Return an error message below the frames in the user's code.

    `log_file`, if any, has the complete traceback.
    """
    where = f"{log_file} has all, as has --traceback" if log_file else "--traceback prints all"
    _hide_frames(error, where)
    return "".join(traceback.format_exception(error))


def is_library(filename: str) -> bool:
    """Return whether a file belongs to Python, jengine, or a library that runs the step."""
    path = pathlib.Path(filename)
    for name in _INSTALLED:
        if name in path.parts[:-1]:
            package = path.parts[path.parts.index(name) + 1]
            return package in _ENGINE or package == "jengine"
    return filename.startswith("<frozen") or any(
        path.is_relative_to(directory) for directory in _DIRECTORIES
    )


def _hide_frames(error: BaseException, where: str) -> None:
    """Remove library frames from the traceback of an error and of those behind it.

    A note says `where` all are.
    """
    frames = list(_frames(error.__traceback__))
    own = own_frames(error)
    # An error that nobody has raised on purpose, such as that of a missing key, is a bug
    if not own and frames and not _is_raised(frames[-1]):
        return
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(JAX_NOTES)]
    if len(frames) > len(own):
        notes.append(f"({len(frames) - len(own)} frames of libraries are left out: {where})")
    error.__notes__ = notes
    kept = None
    for frame in reversed(own):
        kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = kept
    for behind in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        if behind is not None and behind.__traceback__ is not None:
            _hide_frames(behind, where)


def _is_raised(frame: types.TracebackType) -> bool:
    line = linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
    return line.strip().startswith("raise")


def _frames(tb: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
