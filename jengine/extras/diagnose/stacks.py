"""Lines of the user's code in the stacks of threads and worker processes."""

import linecache
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jengine
from jengine.config.frames import is_library

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_ENGINE = pathlib.Path(jengine.__file__).parent

T = TypeVar("T")


def find_own_lines(stacks: str) -> list[str]:
    """Return the innermost line of the user's code in each stack, if jengine has called it.

    That of the main thread is the first.
    """
    blocks = re.split(r"\n(?=Thread |Worker process )", stacks)
    blocks.sort(key=lambda block: not block.startswith("Thread MainThread"))
    return list(dict.fromkeys(line for block in blocks if (line := _find_own_line(block))))


def find_call(calls: Iterable[T], filename: Callable[[T], str]) -> T | None:
    """Return the innermost call in the user's code that jengine has called, so that the script
    that starts a run is none.

    Args:
      calls: from the innermost on.
      filename: returns the file of a call.
    """
    own = None
    for call in calls:
        file = filename(call)
        if pathlib.Path(file).is_relative_to(_ENGINE):
            if own is not None:
                return own
        elif own is None and not is_library(file):
            own = call
    return None


def describe_line(file: str, line: int | None, function: str) -> str:
    """Return a place in code, with the line itself: 'net.py:3 in loss: return x'."""
    code = linecache.getline(file, line or 0).strip()
    return f"{file}:{line} in {function}" + (f": {code}" if code else "")


def _find_own_line(block: str) -> str:
    call = find_call(_frames(block), lambda call: call[0])
    return "" if call is None else describe_line(call[0], int(call[1]), call[2])


def _frames(block: str) -> Iterator[tuple[str, str, str]]:
    for line in block.splitlines():
        if match := _FRAME.match(line):
            yield match[1], match[2], match[3]
