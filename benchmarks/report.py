"""Format and store the output of benchmarks: tables, ratios, and the machine."""

import importlib.metadata
import json
import os
import pathlib
import platform


def table(columns, rows):
    """Return a table as text: the first column aligned left, numbers right."""
    cells = [list(columns), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    numeric = [all(_is_number(row[i]) for row in cells[1:]) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def write_ratios(path, ratios):
    """Write ratios, name -> number, as JSON; do nothing if `path` is None."""
    if path is not None:
        pathlib.Path(path).write_text(json.dumps({name: round(value, 4) for name, value in ratios.items()}))


def has_accelerator():
    """Return whether JAX has found devices other than CPUs."""
    import jax

    return jax.default_backend() != "cpu"


def machine():
    """Return the machine in one line: processor, cores, accelerator."""
    import jax

    device = jax.devices()[0]
    accelerator = "" if device.platform == "cpu" else f", {len(jax.devices())} x {device.device_kind}"
    return f"{_processor()}, {os.cpu_count()} cores{accelerator}"


def versions(*packages):
    """Return Python and packages with their versions, in one line."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return ", ".join([f"Python {platform.python_version()}", *found])


def _is_number(text):
    return text == "" or text.lstrip("+-")[:1].isdigit()


def _processor():
    """Return the processor's name, or its architecture if the system has no name."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
