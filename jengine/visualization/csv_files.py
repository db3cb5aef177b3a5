"""The backend of CSV files, which a spreadsheet or a data frame reads."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jengine.registry import VISBACKENDS
from jengine.visualization.files import FilesVisBackend
from jengine.visualization.histogram import Histogram
from jengine.visualization.values import to_plain


@VISBACKENDS.register_module()
class CSVVisBackend(FilesVisBackend):
    """Writes scalars as rows `step,name,value`, one for each number, and histograms as `step,name,low,high,count`.

    One row a number, because training and validation have other names and nothing already written has to change when
    one is added. `pandas.read_csv(...).pivot_table(index='step', columns='name', values='value')` makes columns of the
    names. Images are PNG files.

    Args:
      save_dir: the directory for its files.
      img_save_dir: directory for images below it; an image is `<name>_<step>.png`.
      config_save_file: file name of the config.
      scalar_save_file: file name of the scalars.

    Raises:
      ValueError: `scalar_save_file` is no `.csv` file.
    """

    suffix = ".csv"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        img_save_dir: str = "vis_image",
        config_save_file: str = "config.py",
        scalar_save_file: str = "scalars.csv",
    ) -> None:
        super().__init__(save_dir, img_save_dir, config_save_file, scalar_save_file)

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        """Appends a row for each entry but `step`; `file_path` is for JSON and does nothing here."""
        rows = [(step, name, to_plain(value)) for name, value in scalar_dict.items() if name != "step"]
        self._append_rows(self._scalars, ("step", "name", "value"), rows)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Appends a row for each bin to `histograms.csv`."""
        bins = zip(histogram.edges[:-1].tolist(), histogram.edges[1:].tolist(), histogram.counts.tolist(), strict=True)
        rows = [(step, name, low, high, count) for low, high, count in bins]
        self._append_rows(self._histograms, ("step", "name", "low", "high", "count"), rows)

    def _append_rows(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        path = self.save_dir / name
        if not path.exists() or path.stat().st_size == 0:
            writer.writerow(columns)
        writer.writerows(rows)
        self.append(name, text.getvalue())
