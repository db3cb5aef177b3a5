"""Reports as Python objects, which a notebook shows in the output of a cell."""

import html
import os
from typing import Any

from jengine.annotations import Count
from jengine.cli.report.page import collect_data, compressed_plotly, render_page
from jengine.storage import is_url, storage_path, write_bytes


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
        # In a frame, where neither the styles of the notebook nor those of the page reach the other.
        page = html.escape(render_page(self._data))
        style = f"width:100%;height:{self._height}px;border:0"
        return f'<iframe srcdoc="{page}" style="{style}" title="jengine report"></iframe>'


def report(*work_dirs: str | os.PathLike[str], images: Count | None = None, height: Count = 800) -> Report:
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
