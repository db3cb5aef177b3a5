"""Backend that writes plain files: JSON lines and PNG."""

import os
from collections.abc import Mapping
from typing import Any, BinaryIO, ClassVar

import numpy as np

from jengine.config.dump import write_config
from jengine.config.json_codec import encode
from jengine.config.registry import VISBACKENDS
from jengine.logging.backend import BaseVisBackend
from jengine.logging.convert import Histogram, write_png


class FilesVisBackend(BaseVisBackend):
    """Images, config and graph in files below `save_dir`; subclasses write scalars and histograms.

    Args:
      img_save_dir: directory for images, relative to `save_dir`; an image is saved as
        `<name>_<step>.png`.
      config_save_file: name of the config file, `.py`.
      scalar_save_file: file name of all scalars; `scalars` with the suffix by default.

    Attributes:
      suffix: the suffix of the scalar and histogram files.
    """

    suffix: ClassVar[str]

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        img_save_dir: str = "vis_image",
        config_save_file: str = "config.py",
        scalar_save_file: str | None = None,
    ) -> None:
        super().__init__(save_dir)
        scalar_save_file = scalar_save_file or f"scalars{self.suffix}"
        if not scalar_save_file.endswith(self.suffix):
            raise ValueError(
                f"`scalar_save_file` must be a {self.suffix} file, got {scalar_save_file!r}"
            )
        if not config_save_file.endswith(".py"):
            raise ValueError(f"`config_save_file` must be a .py file, got {config_save_file!r}")
        self._image_dir = self.save_dir / img_save_dir
        self._config_file = self.save_dir / config_save_file
        self._scalar_file = scalar_save_file
        self._histogram_file = f"histograms{self.suffix}"
        self._open_files: dict[str, BinaryIO] = {}

    @property
    def experiment(self) -> "FilesVisBackend":
        """The backend itself: there is no client of a server."""
        return self

    def add_config(self, config: str) -> None:
        """Write the config file."""
        write_config(config, self._config_file)

    def add_graph(self, graph: str) -> None:
        """Write `graph.txt`."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        (self.save_dir / "graph.txt").write_text(graph, encoding="utf-8")

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `<img_save_dir>/<name>_<step>.png`; arguments and errors as in `encode_png`."""
        write_png(self._image_dir / f"{name}_{step}.png", image)

    def append(self, name: str, text: str) -> None:
        """Append to the file `name` below `save_dir`, complete on disk when the call returns.

        The file stays open until `close`, because opening it costs more than writing a line.
        """
        file = self._open_files.get(name)
        if file is None:
            path = self.save_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._open_files[name] = open(path, "ab")  # noqa: SIM115 - see close
        file.write(text.encode())
        # on a full disk a buffered file completes the line or raises; an unbuffered one truncates
        # it
        file.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the size of each appended file in bytes."""
        return {
            "sizes": {
                path.name: path.stat().st_size
                for path in sorted(self.save_dir.glob(f"*{self.suffix}"))
            }
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Truncate the files to the sizes at the checkpoint.

        A file that did not exist then becomes empty.
        """
        if (sizes := state_dict.get("sizes")) is None:  # the backend is new
            return
        for path in self.save_dir.glob(f"*{self.suffix}"):  # a stored name is data: never a path
            if path.stat().st_size > (size := sizes.get(path.name, 0)):
                os.truncate(path, size)

    def close(self) -> None:
        """Close the files; the next write opens them again."""
        while self._open_files:
            self._open_files.popitem()[1].close()


@VISBACKENDS.register_module()
class LocalVisBackend(FilesVisBackend):
    """Scalars and histograms as JSON lines in `scalars.json` and `histograms.json`, and images as
    PNG.

    Each line is complete on disk when the call returns. JSON has no NaN or infinity: they are
    written as the strings "NaN", "Infinity" and "-Infinity", which `float()` reads. The arguments
    are those of `FilesVisBackend`.

    Examples:
      >>> import tempfile
      >>> backend = LocalVisBackend(tempfile.mkdtemp())
      >>> backend.add_scalars({"loss": 0.5, "mode": "train"}, step=10)
      >>> (backend.save_dir / "scalars.json").read_text()
      '{"loss": 0.5, "mode": "train", "step": 10}\\n'
    """

    suffix = ".json"

    def name_scalars(self, scalar_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values unchanged: each line has a `mode`, and MMEngine's names."""
        return scalar_dict

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Append a line with the values and their `step` to the scalar file, and to `file_path` if
        given.

        Args:
          scalar_dict: values that `jengine.config.json_codec.to_plain` accepts. A `step` in the
            dict overrides the argument.
          file_path: a `.json` file below `save_dir`, other than the scalar file.

        Raises:
          TypeError: a value is not JSON-serializable. ValueError: an illegal `file_path`.
        """
        line = _json_line({**scalar_dict, "step": scalar_dict.get("step", step)})
        if file_path is not None:
            if not file_path.endswith(".json") or file_path == self._scalar_file:
                raise ValueError(
                    f"`file_path` must be a .json file other than {self._scalar_file}, got "
                    f"{file_path!r}"
                )
            self.append(file_path, line)
        self.append(self._scalar_file, line)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Append a line with the counts and the bin edges to `histograms.json`."""
        self.append(
            self._histogram_file, _json_line({"name": name, "step": step, **histogram._asdict()})
        )


def _json_line(values: Mapping[str, Any]) -> str:
    return encode(values, for_logs=True) + "\n"
