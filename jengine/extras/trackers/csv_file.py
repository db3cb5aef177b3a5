"""Backend that writes scalars as CSV, for a spreadsheet or pandas."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jengine.config.registry import VISBACKENDS
from jengine.extras.trackers.run_backend import array_to_list
from jengine.logging.convert import Histogram
from jengine.logging.files import FilesVisBackend


@VISBACKENDS.register_module()
class CSVVisBackend(FilesVisBackend):
    """Scalars as rows `step,name,value` and histograms as rows `step,name,low,high,count`.

    Images as PNG.

    Every number is a row, because training and validation log different names: a new name does not
    change the rows already written. `pandas.read_csv(...).pivot_table(index='step', columns='name',
    values='value')` turns the names into columns. The arguments are those of `FilesVisBackend`.
    """

    suffix = ".csv"

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Append a row for each entry except `step`; `file_path` is ignored."""
        rows = [
            (step, name, array_to_list(value))
            for name, value in scalar_dict.items()
            if name != "step"
        ]
        self._append_rows(self._scalar_file, ("step", "name", "value"), rows)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Append a row for each bin to `histograms.csv`."""
        bins = zip(
            histogram.edges[:-1].tolist(),
            histogram.edges[1:].tolist(),
            histogram.counts.tolist(),
            strict=True,
        )
        rows = [(step, name, low, high, count) for low, high, count in bins]
        self._append_rows(self._histogram_file, ("step", "name", "low", "high", "count"), rows)

    def _append_rows(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
    ) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        path = self.save_dir / name
        if not path.exists() or path.stat().st_size == 0:
            writer.writerow(columns)
        writer.writerows(rows)
        self.append(name, text.getvalue())
