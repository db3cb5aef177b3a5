"""What benchmarks print and keep: tables, ratios, and the machine they were measured on."""

import importlib.metadata
import json
import os
import pathlib
import platform


def table(columns, rows):
    """A table of text: the first columns to the left, numbers to the right."""
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
    """Writes ratios, name -> number, as JSON; `path` None writes nothing."""
    if path is not None:
        pathlib.Path(path).write_text(json.dumps({name: round(value, 4) for name, value in ratios.items()}))


def has_accelerator():
    """Whether JAX has found something else than CPUs."""
    import jax

    return jax.default_backend() != "cpu"


def machine():
    """What the numbers were measured on, in a line: processor, cores, accelerator."""
    import jax

    device = jax.devices()[0]
    accelerator = "" if device.platform == "cpu" else f", {len(jax.devices())} x {device.device_kind}"
    return f"{_processor()}, {os.cpu_count()} cores{accelerator}"


def versions(*packages):
    """Python and packages with their versions, in a line."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return ", ".join([f"Python {platform.python_version()}", *found])


def _is_number(text):
    return text == "" or text.lstrip("+-")[:1].isdigit()


def _processor():
    """The processor's name; its architecture where the system does not tell."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
