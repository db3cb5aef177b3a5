"""Format tables, describe the machine, and write ratios."""

import importlib.metadata
import json
import os
import pathlib
import platform


def table(columns, rows):
    """Format a table as text; columns of numbers are aligned right, all others left."""
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
    """Write ratios (name -> number) as JSON; do nothing if `path` is None."""
    if path is not None:
        pathlib.Path(path).write_text(
            json.dumps({name: round(value, 4) for name, value in ratios.items()})
        )


def machine():
    """Describe the machine in one line: processor, cores, accelerator."""
    import jax

    device = jax.devices()[0]
    accelerator = (
        "" if device.platform == "cpu" else f", {len(jax.devices())} x {device.device_kind}"
    )
    return f"{_processor()}, {os.cpu_count()} cores{accelerator}"


def versions(*packages):
    """Return the versions of Python and the packages in one line."""
    pins = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return ", ".join([f"Python {platform.python_version()}", *pins])


def _is_number(text):
    return text == "" or text.lstrip("+-")[:1].isdigit()


def _processor():
    """Return the name of the processor, or its architecture if the name is unknown."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
