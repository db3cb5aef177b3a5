"""`jengine train --profile FIRST:LAST`: a trace of some iterations, and a table of the operations
that took the longest, by layer.
"""

import argparse
import functools
import os
import pathlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jengine.cli.commands import build_runner
from jengine.cli.train import train
from jengine.config.frames import is_library
from jengine.extras.diagnose.profiler import ProfilerHook
from jengine.logging.tables import format_table

_MAX_OPERATIONS = 10
_MODULE = re.compile(r"^HloModule ([\w.<>-]+)", re.MULTILINE)
_NAMED = re.compile(
    r"^ *(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(.*"
    r'op_name="([^"]*)"(?: stack_frame_id=(\d+))?',
    re.MULTILINE,
)
# The tables before the operations: files, places in them, and frames with their callers
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
_TEXT = re.compile(r"^%?([\w.-]+) = ")  # of an event on a TPU
_TRANSFORM = re.compile(r"^(?:transpose|jvp|vmap|remat|checkpoint|rematted_computation)\((.*)\)$")
# parts of a path that are no layers
_NO_LAYERS = ("while", "body", "cond", "closed_call", "checkpoint", "rematted_computation")
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_CALLERS = ("while", "conditional", "call")  # their time is that of what they call


class Place(NamedTuple):
    """Where an operation is from: 'first', 'dot_general', and whether it is of the gradient.

    Without a layer in its name, it is the user's file and line: 'net.py:12'.
    """

    layer: str
    operation: str
    is_backward: bool


def train_profile(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train, trace the iterations, and print the table when the trace is written."""
    first, last = args.profile
    runner = build_runner(args, overrides, resume=args.resume)
    ready = functools.partial(_print_table, runner, last - first)
    schedule = dict(skip_first=first, active=last - first)
    runner.register_hook(ProfilerHook(schedule=schedule, on_trace_ready=ready))
    return train(runner, args.argv)


def parse_place(name: str) -> Place:
    """Return where an operation is from, by its name in a compiled program.

    >>> parse_place("jit(step)/transpose(jvp(Net))/first/dot_general")
    Place(layer='first', operation='dot_general', is_backward=True)
    >>> parse_place("jit(step)/jvp(Net)/blocks_3/attn/jit(relu)/max").layer
    'blocks_3.attn'
    """
    *path, operation = name.split(";")[0].split("/")
    layers = []
    for i, part in enumerate(path):
        is_root = i == 0
        while match := _TRANSFORM.match(part):
            part = match[1]
            is_root = True  # the network itself, or nothing
        if not is_root and part and not part.startswith("jit(") and part not in _NO_LAYERS:
            layers.append(part)
    return Place(".".join(layers), operation, "transpose(" in name)


def measure_operations(directory: str, texts: Sequence[str]) -> Counter[Place]:
    """Return the nanoseconds by place, of all devices of this process.

    Args:
      directory: of a trace.
      texts: the compiled programs, `compiled.as_text()`.
    """
    places = {
        module[1] if (module := _MODULE.search(text)) else "": find_places(text) for text in texts
    }
    total: Counter[Place] = Counter()
    for module_name, operation, duration in _events(directory):
        if module_name not in places:  # another program
            continue
        code, place = places[module_name].get(
            operation, ("", Place("", re.sub(r"[.\d]+$", "", operation), False))
        )
        if code not in _CALLERS:
            total[place] += round(duration)
    return total


def find_places(text: str) -> dict[str, tuple[str, Place]]:
    """Return the opcode and the place of the operations in a compiled program, by name."""
    lines = _find_lines(text)
    found = {}
    for operation, code, name, frame in _NAMED.findall(text):
        place = parse_place(name)
        found[operation] = code, place._replace(layer=place.layer or lines.get(frame, ""))
    return found


def list_collectives(text: str) -> list[str]:
    """Return the collectives in a compiled program, each with its layer or line.

    >>> list_collectives('  %r = f32[] all-reduce(%x), metadata={op_name="jit(f)/head/add"}')
    ['all-reduce in head']
    """
    found = []
    for code, place in find_places(text).values():
        if code.startswith(_COLLECTIVES) and not code.endswith("-done"):
            where = f" in {place.layer}" if place.layer else f" of {place.operation}"
            if ":" in place.layer:  # XLA has combined some
                where = " of several layers"
            backward = " (backward)" if place.is_backward else ""
            found.append(f"{code.removesuffix('-start')}{where}{backward}")
    return list(dict.fromkeys(found))


def _find_lines(text: str) -> dict[str, str]:
    """Return the innermost file and line of the user's code by stack frame."""
    names, _, rest = text.partition("\nFunctionNames")
    files = dict(_FILE.findall(names))
    tables = rest.partition("\n%")[0].partition("\nENTRY")[0]
    locations = {
        each: (files.get(file, ""), line) for each, file, line in _LOCATION.findall(tables)
    }
    frames = {each: (location, parent) for each, location, parent in _FRAME.findall(tables)}
    lines = {}
    for start in frames:
        frame = start
        passed = set[str]()
        while frame in frames and frame not in passed:
            passed.add(frame)
            location, parent = frames[frame]
            file, line = locations.get(location, ("", ""))
            if file and not is_library(file):
                lines[start] = f"{os.path.basename(file)}:{line}"
                break
            frame = parent
    return lines


def _events(directory: str) -> Iterator[tuple[str, str, float]]:
    """Yield the module, the operation and the nanoseconds of what devices have computed."""
    for path in pathlib.Path(directory).rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    stats: Mapping[str, Any] = dict(event.stats)
                    if "hlo_module" not in stats:
                        continue
                    text = _TEXT.match(event.name)
                    operation = stats.get("hlo_op") or (text[1] if text else event.name)
                    yield str(stats["hlo_module"]), str(operation), event.duration_ns


def format_operations(times: Counter[Place], steps: int) -> str:
    """Return a table with the operations that took the longest."""
    total = sum(times.values())
    rows = [
        [
            place.layer or "(no layer)",
            place.operation,
            "backward" if place.is_backward else "",
            f"{nanoseconds / steps / 1e6:.3f}",
            f"{nanoseconds / total:.1%}",
        ]
        for place, nanoseconds in times.most_common(_MAX_OPERATIONS)
    ]
    columns = ["layer", "operation", "pass", "ms per iteration", "share"]
    title = f"The {len(rows)} most expensive operations in {steps} iterations"
    return format_table(columns, rows, title=title)


def _print_table(runner: Any, steps: int, directory: str) -> None:
    if not runner.is_main_process:
        return
    programs = runner.programs
    texts = [
        programs.compiled[kind].trace(*shapes).lower().compile().as_text()
        for kind, shapes in programs.called().items()
    ]
    times = measure_operations(directory, texts)
    if times:
        runner.logger.info(format_operations(times, steps))
    else:
        runner.logger.warning(f"The trace in {directory} has no operations of the training step.")
