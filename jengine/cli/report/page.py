"""The report as one HTML file, with data, style and scripts."""

import base64
import functools
import gzip
import importlib.resources
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.cli.report.page_data import build_page_data
from jengine.cli.report.run_files import read_runs
from jengine.errors import require_extra
from jengine.json_codec import encode

_SCRIPTS = ("compare.js", "page.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def collect_data(work_dirs: Sequence[str], images: int | None = None) -> dict[str, Any]:
    """Read the runs (see `find_runs`) and return the report data, with `images` steps of each image."""
    return {"created": time.strftime("%Y-%m-%d %H:%M:%S"), **build_page_data(read_runs(work_dirs), images)}


def render_page(data: dict[str, Any], refresh: float = 0) -> str:
    """Return the page for the result of `collect_data`, which requests new data every `refresh` seconds unless 0."""
    assets = importlib.resources.files("jengine.cli.report")
    parts = {
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "script": "".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "plotly": compressed_plotly(),
        "data": to_json({**data, "refresh": refresh}).replace("<", "\\u003c"),  # no text can close the script element
    }
    return _PLACE.sub(lambda match: parts[match[1]], (assets / "page.html").read_text(encoding="utf-8"))


def to_json(data: Mapping[str, Any]) -> str:
    """Return the data as compact JSON."""
    return encode(data, for_logs=True, separators=(",", ":"))


@functools.cache
def compressed_plotly() -> str:
    """Return plotly.js, compressed with gzip and encoded in base64: less than half the size."""
    with require_extra("report", "jengine report requires plotly"):
        from plotly.offline import get_plotlyjs
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
