"""The backend of plain files: one JSON object per line, PNG images, the config."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.registry import VISBACKENDS
from jengine.visualization.files import FilesVisBackend
from jengine.visualization.histogram import Histogram


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
    return _encode(_jsonable(values)) + "\n"


def _jsonable(value: Any, name: str = "") -> Any:
    if type(value) is int or (type(value) is float and math.isfinite(value)):  # as a rule
        return value
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item, name or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item, name) for item in value]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return _jsonable(array.item() if array.size == 1 else array.tolist(), name)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{name!r} is {type(value).__name__}, which JSON cannot hold; expected a number, a string or a list"
    )
