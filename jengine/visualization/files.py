"""Provide the backends of plain files: JSON lines and PNG images, or CSV."""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar

import numpy as np

from jengine.config import write_config
from jengine.registry import VISBACKENDS
from jengine.visualization.backend import BaseVisBackend
from jengine.visualization.convert import Histogram, encode_png, to_jsonable, to_plain


class FilesVisBackend(BaseVisBackend):
    """Writes to files below `save_dir`; how scalars and histograms are written is up to the class derived from it.

    Args:
      save_dir: the directory for its files.
      img_save_dir: directory for images below it; an image is `<name>_<step>.png`.
      config_save_file: file name of the config.
      scalar_save_file: file name of the scalars; all of them go there.

    Attributes:
      suffix: of the files that scalars and histograms are appended to.

    Raises:
      ValueError: `scalar_save_file` has another suffix.
    """

    suffix: ClassVar[str]

    def __init__(
        self, save_dir: str | os.PathLike[str], img_save_dir: str, config_save_file: str, scalar_save_file: str
    ) -> None:
        super().__init__(save_dir)
        if not scalar_save_file.endswith(self.suffix):
            raise ValueError(f"scalar_save_file is a {self.suffix} file, found {scalar_save_file!r}")
        self._images = self.save_dir / img_save_dir
        self._config = self.save_dir / config_save_file
        self._scalars = scalar_save_file
        self._histograms = f"histograms{self.suffix}"
        self._open: dict[str, BinaryIO] = {}

    def add_config(self, config: str) -> None:
        """Writes the config file; it loads with `load_config`."""
        write_config(config, self._config)

    def add_graph(self, graph: str) -> None:
        """Writes `graph.txt`."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        (self.save_dir / "graph.txt").write_text(graph, encoding="utf-8")

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Writes `<img_save_dir>/<name>_<step>.png`; see `encode_png` for what an image is."""
        png = encode_png(image)
        path = self._images / f"{name}_{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)

    def state_dict(self) -> dict[str, Any]:
        """The size of each file that is appended to, in bytes."""
        return {"sizes": {path.name: path.stat().st_size for path in sorted(self.save_dir.glob(f"*{self.suffix}"))}}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Cuts the files off where they ended when the checkpoint was written."""
        for name, size in state_dict.get("sizes", {}).items():
            path = self.save_dir / name
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)

    def append(self, name: str, text: str) -> None:
        """Appends to the file `name` below `save_dir`, complete on disk when the call returns.

        The file stays open until `close`: opening it costs more than a line.
        """
        file = self._open.get(name)
        if file is None:
            path = self.save_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._open[name] = open(path, "ab")  # noqa: SIM115 - see close
        file.write(text.encode())
        file.flush()  # not unbuffered: only a buffer goes on, or raises, where a full disk takes a part of the line

    def close(self) -> None:
        """Closes the files; writing again opens them again."""
        while self._open:
            self._open.popitem()[1].close()


@VISBACKENDS.register_module()
class LocalVisBackend(FilesVisBackend):
    """Writes to files below `save_dir`.

    Scalars are lines of JSON, each complete on disk when the call returns. JSON has no NaN and no infinity: they are
    the strings "NaN", "Infinity" and "-Infinity", which `float()` reads.

    Args:
      save_dir: the directory for its files.
      img_save_dir: directory for images below it; an image is `<name>_<step>.png`.
      config_save_file: file name of the config.
      scalar_save_file: file name of the scalars; all of them go there.

    Raises:
      ValueError: `scalar_save_file` is no `.json` file.
    """

    suffix = ".json"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        img_save_dir: str = "vis_image",
        config_save_file: str = "config.py",
        scalar_save_file: str = "scalars.json",
    ) -> None:
        super().__init__(save_dir, img_save_dir, config_save_file, scalar_save_file)

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        """Appends a line with the values and their `step` to the scalar file, and to `file_path` where given.

        Args:
          scalar_dict: numbers, strings, None, and lists and dicts of those; arrays are written as lists, those of one
            element as a number. A `step` among them wins over the argument.
          step: of the line.
          file_path: a `.json` file below `save_dir`.

        Raises:
          TypeError: a value that JSON cannot hold. ValueError: `file_path` is no `.json` file, or the scalar file.
        """
        line = _json_line({**scalar_dict, "step": scalar_dict.get("step", step)})
        files = [self._scalars] if file_path is None else [self._scalars, self._beside(file_path)]
        for file in files:
            self.append(file, line)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Appends a line with the counts and the edges of the bins to `histograms.json`."""
        line = {"name": name, "step": step, **histogram._asdict()}
        self.append(self._histograms, _json_line(line))

    def _beside(self, name: str) -> str:
        """The name of a further file for scalars, if it may be one."""
        known = name in self._open and name != self._scalars
        if not known and (not name.endswith(".json") or self.save_dir / name == self.save_dir / self._scalars):
            raise ValueError(f"file_path is a .json file other than {self._scalars}, found {name!r}")
        return name


_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps makes one for each call


def _json_line(values: Mapping[str, Any]) -> str:
    return _encode(to_jsonable(values)) + "\n"


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
