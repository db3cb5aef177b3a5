"""The visualizer: hands what it gets to every backend, on the first process alone."""

import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.config import dump_config
from jengine.errors import UnknownNameError, closest, config_path
from jengine.registry import VISBACKENDS, VISUALIZERS
from jengine.visualization.backend import BaseVisBackend
from jengine.visualization.convert import graph_text, histogram


@VISUALIZERS.register_module()
class Visualizer:
    """Sends scalars, images, the config and the model's graph to its backends.

    Only the process with index 0 writes, one of its threads at a time. To draw predictions, subclass it and implement
    `add_datasample`.

    Args:
      vis_backends: a config or a built backend each; a config may carry a `name`, its type's name by default. None
        stands for one LocalVisBackend (for none at all when there is no `save_dir`).
      save_dir: backends get `<save_dir>/vis_data` as their `save_dir`, unless they have their own.
      name: what the visualizer is called.

    Attributes:
      vis_backends: the backends by name.
      dataset_meta: what the dataset says of itself (class names, palette), for subclasses that draw.

    Raises:
      RuntimeError: two backends of one name.
    """

    def __init__(
        self,
        vis_backends: Sequence[Any] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        name: str = "visualizer",
    ) -> None:
        self.name = name
        self.dataset_meta: Mapping[str, Any] | None = None
        self.vis_backends: dict[str, BaseVisBackend] = {}
        self._lock = threading.RLock()  # the log of a run is written in a thread of its own
        if vis_backends is None:
            vis_backends = [] if save_dir is None else [{"type": "LocalVisBackend"}]
        defaults = {} if save_dir is None else {"save_dir": str(pathlib.Path(save_dir) / "vis_data")}
        for index, cfg in enumerate(vis_backends):
            with config_path("vis_backends", index):
                self._add_backend(cfg, defaults)

    def _add_backend(self, cfg: Any, defaults: dict[str, str]) -> None:
        name = None
        backend = cfg
        if not isinstance(cfg, BaseVisBackend):
            if hasattr(cfg, "items"):
                name, cfg = cfg.get("name"), {key: value for key, value in cfg.items() if key != "name"}
            backend = VISBACKENDS.build(cfg, **defaults)
        name = name or type(backend).__name__
        if name in self.vis_backends:
            raise RuntimeError(f"there are two visualization backends called {name!r}; give one another `name`")
        self.vis_backends[name] = backend

    def get_backend(self, name: str) -> BaseVisBackend:
        """The backend called `name`.

        Raises:
          KeyError: there is none; the message names those that there are.
        """
        if name not in self.vis_backends:
            raise UnknownNameError(f"no visualization backend is called {name!r}{closest(name, self.vis_backends)}")
        return self.vis_backends[name]

    def add_config(self, config: Any) -> None:
        """Writes the config: a ConfigDict, a dict, or the text of a config file."""
        with self._lock:
            for backend in self._writers():
                backend.add_config(config if isinstance(config, str) else dump_config(config))

    def add_graph(self, model: Any, data_batch: Any = None) -> None:
        """Writes a description of `model`; see `graph_text` for what it may be."""
        with self._lock:
            writers = self._writers()
            text = graph_text(model, data_batch) if writers else ""
            for backend in writers:
                backend.add_graph(text)

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Writes an image.

        Args:
          name: what the image is called; images of one name form a series over `step`.
          image: uint8[H, W, C] with C of 1, 3 (RGB) or 4 (RGBA).
          step: the iteration or epoch it belongs to.
        """
        with self._lock:
            for backend in self._writers():
                backend.add_image(name, image, step)

    def add_histogram(self, name: str, values: Any, step: int = 0, bins: int = 64) -> None:
        """Writes how the elements of an array are distributed.

        Args:
          name: what the array is called.
          values: array of numbers of any shape, the host's: one on a device would make the host wait for it.
          step: the iteration or epoch it belongs to.
          bins: number of bins between the least and the greatest element.
        """
        with self._lock:
            if writers := self._writers():
                binned = histogram(values, bins)
                for backend in writers:
                    backend.add_histogram(name, binned, step)

    def add_scalar(self, name: str, value: Any, step: int = 0) -> None:
        """Writes one number of the host; a value on a device would make the host wait for it."""
        with self._lock:
            for backend in self._writers():
                backend.add_scalar(name, value, step)

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        """Writes several numbers of one step.

        Args:
          scalar_dict: numbers of the host by name.
          step: the iteration or epoch they belong to.
          file_path: a file that backends of files append them to as well, relative to their `save_dir`.
        """
        with self._lock:
            for backend in self._writers():
                backend.add_scalars(scalar_dict, step, file_path)

    def add_datasample(
        self,
        name: str,
        image: np.ndarray,
        data_sample: Any = None,
        draw_gt: bool = True,
        draw_pred: bool = True,
        show: bool = False,
        wait_time: float = 0,
        step: int = 0,
    ) -> None:
        """Draws a sample; for subclasses, which draw onto a copy of the image and hand it to `add_image`.

        Args:
          name: what the image is called.
          image: uint8[H, W, C].
          data_sample: ground truth and predictions, of whatever type the subclass draws.
          draw_gt: whether the ground truth is drawn.
          draw_pred: whether the prediction is drawn.
          show: whether a window opens.
          wait_time: how long the window stays, in seconds; 0 is for ever.
          step: the iteration or epoch it belongs to.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not know how to draw a {type(data_sample).__name__}: subclass Visualizer, "
            "implement add_datasample, register it in VISUALIZERS and name it in visualizer=dict(type=...)"
        )

    def state_dict(self) -> dict[str, Any]:
        """How far each backend has written, by its name. Fits JSON."""
        with self._lock:
            return {name: state for name, backend in self.vis_backends.items() if (state := backend.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Takes back what was written after the checkpoint that a run is resumed from.

        Args:
          state_dict: what `state_dict` gave when the checkpoint was written.
          step: iterations done by then.
        """
        with self._lock:
            writers = self._writers()
            for name, backend in self.vis_backends.items():
                if backend in writers:
                    backend.load_state_dict(state_dict.get(name, {}), step)

    def close(self) -> None:
        """Closes all backends. Closing twice is fine, and so is writing again afterwards."""
        with self._lock:
            for backend in self.vis_backends.values():
                backend.close()

    def _writers(self) -> list[BaseVisBackend]:
        """Return the backends that this process writes to."""
        return list(self.vis_backends.values()) if jax.process_index() == 0 else []
