"""The report as one HTML file, with data, style and scripts, which a notebook shows in the
output of a cell.
"""

import base64
import functools
import gzip
import html
import importlib.resources
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.config.annotations import Count
from jengine.config.errors import require_extra
from jengine.config.json_codec import encode
from jengine.config.storage import is_url, storage_path, write_bytes
from jengine.extras.report.page_data import build_page_data
from jengine.extras.report.run_files import read_runs

_SCRIPTS = ("compare.js", "page.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def collect_data(work_dirs: Sequence[str], images: int | None = None) -> dict[str, Any]:
    """Read the runs (see `find_runs`) and return the report data, with `images` steps of each
    image.
    """
    return {
        "created": time.strftime("%Y-%m-%d %H:%M:%S"),
        **build_page_data(read_runs(work_dirs), images),
    }


def render_page(data: dict[str, Any], refresh: float = 0) -> str:
    """Return the page for the result of `collect_data`, which requests new data every `refresh`
    seconds unless 0.
    """
    assets = importlib.resources.files("jengine.extras.report")
    parts = {
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "script": "".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "plotly": compressed_plotly(),
        # no text can close the script element
        "data": to_json({**data, "refresh": refresh}).replace("<", "\\u003c"),
    }
    return _PLACE.sub(
        lambda match: parts[match[1]], (assets / "page.html").read_text(encoding="utf-8")
    )


def to_json(data: Mapping[str, Any]) -> str:
    """Return the data as compact JSON."""
    return encode(data, for_logs=True, separators=(",", ":"))


@functools.cache
def compressed_plotly() -> str:
    """Return plotly.js, compressed with gzip and encoded in base64: less than half the size."""
    with require_extra("report", "jengine report requires plotly"):
        from plotly.offline import get_plotlyjs
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


class Report:
    """Report on one or several runs; as the last value of a notebook's cell it is shown there.

    Attributes:
      runs: the names of the runs.
    """

    def __init__(self, data: dict[str, Any], height: int) -> None:
        self._data = data
        self._height = height
        self.runs = [run["name"] for run in data["runs"]]

    def notes(self) -> list[tuple[str, str]]:
        """Return what could not be read or shown, with the run's name."""
        return [(run["name"], note) for run in self._data["runs"] for note in run["notes"]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a path, whose directories are created, or a URL."""
        file = storage_path("path", path)
        if not is_url(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, render_page(self._data).encode())

    def __repr__(self) -> str:
        return f"Report({', '.join(self.runs)})"

    def _repr_html_(self) -> str:
        # In a frame, where neither the styles of the notebook nor those of the page reach the
        # other.
        page = html.escape(render_page(self._data))
        style = f"width:100%;height:{self._height}px;border:0"
        return f'<iframe srcdoc="{page}" style="{style}" title="jengine report"></iframe>'


def report(
    *work_dirs: str | os.PathLike[str], images: Count | None = None, height: Count = 800
) -> Report:
    """Return the report on some runs, for a notebook; the command line has `jengine report`.

    >>> import jengine
    >>> jengine.report("work_dirs/cnn", "work_dirs/vit").save("compare.html")  # doctest: +SKIP

    Args:
      *work_dirs: work dirs, directories with several, or log directories of runs.
      images: steps to show of each image; by default 8, and 1 of more than 8 runs.
      height: of the frame in a notebook, in pixels.

    Raises:
      MissingPackageError: plotly is not installed.
    """
    compressed_plotly()  # report a missing package before anything is read
    return Report(collect_data([os.fspath(path) for path in work_dirs], images), height)
