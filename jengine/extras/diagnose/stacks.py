"""Stacks of threads and worker processes, and the lines of the user's code in them."""

import linecache
import pathlib
import re
import threading
from collections.abc import Iterator

import jengine
from jengine.config.frames import is_library
from jengine.logging.watchdog import all_stacks

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_ENGINE = pathlib.Path(jengine.__file__).parent


def name_stacks(*, with_workers: bool = True) -> str:
    """Return the stacks of all threads by name, and of worker processes, innermost frame first."""
    names = {f"0x{thread.ident or 0:016x}": thread.name for thread in threading.enumerate()}
    return re.sub(
        r"^(?:Current thread|Thread) (0x[0-9a-f]+)",
        lambda match: f"Thread {names.get(match[1], match[1])}",
        all_stacks(with_workers=with_workers),
        flags=re.MULTILINE,
    )


def find_own_lines(stacks: str) -> list[str]:
    """Return the innermost line of the user's code in each stack, if jengine has called it.

    That of the main thread is the first.
    """
    blocks = re.split(r"\n(?=Thread |Worker process |Current thread )", stacks)
    blocks.sort(key=lambda block: not block.startswith("Thread MainThread"))
    return list(dict.fromkeys(line for block in blocks if (line := _find_own_line(block))))


def _find_own_line(block: str) -> str:
    own = ""
    for file, line, function in _frames(block):
        if pathlib.Path(file).is_relative_to(_ENGINE):
            return own
        if not own and not is_library(file):
            code = linecache.getline(file, int(line)).strip()
            own = f"{file}:{line} in {function}" + (f": {code}" if code else "")
    return ""


def _frames(block: str) -> Iterator[tuple[str, str, str]]:
    for line in block.splitlines():
        if match := _FRAME.match(line):
            yield match[1], match[2], match[3]
