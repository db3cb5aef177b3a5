"""Visualizer, which writes to every backend, on the first process only."""

import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from numpy.typing import ArrayLike

from jengine.config.containers import ConfigLike
from jengine.config.dump import dump_config
from jengine.config.errors import UnknownNameError, closest, config_path
from jengine.config.registry import VISBACKENDS, VISUALIZERS
from jengine.logging.backend import BaseVisBackend
from jengine.logging.convert import Histogram, format_graph, histogram

Backends = Sequence[Any] | Mapping[str, Any] | BaseVisBackend | None


@VISUALIZERS.register_module()
class Visualizer:
    """Writer of scalars, images, the config and the model graph to all backends.

    Only the process with index 0 writes, one thread at a time. Images are written as they are;
    `LocalVisualizer` also draws. To draw samples in another way, you can subclass either and
    implement `add_datasample`.

    Args:
      vis_backends: backend configs or instances, a list or one of them; a config may have a `name`,
        by default the type name. None: one LocalVisBackend if `save_dir` is given, otherwise no
        backend.
      save_dir: backends get `<save_dir>/vis_data` as `save_dir`, unless they set one.
      name: the name of the visualizer.

    Attributes:
      vis_backends: the backends by name.
      dataset_meta: dataset metadata (class names, palette), for subclasses that draw.

    Examples:
      >>> import tempfile
      >>> visualizer = Visualizer([dict(type="LocalVisBackend")], save_dir=tempfile.mkdtemp())
      >>> visualizer.add_scalar("lr", 0.1, step=5)
      >>> visualizer.close()
    """

    _instances: ClassVar[dict[str, "Visualizer"]] = {}  # the newest of each name, in order

    def __init__(
        self,
        vis_backends: Backends = None,
        save_dir: str | os.PathLike[str] | None = None,
        name: str = "visualizer",
    ) -> None:
        self.name = name
        Visualizer._instances.pop(name, None)
        Visualizer._instances[name] = self
        self.dataset_meta: Mapping[str, Any] | None = None
        self.vis_backends: dict[str, BaseVisBackend] = {}
        self._lock = threading.RLock()
        defaults = {}
        if save_dir is not None:
            defaults["save_dir"] = str(pathlib.Path(save_dir) / "vis_data")
        if vis_backends is None:
            vis_backends = [{"type": "LocalVisBackend"}] if defaults else []
        if hasattr(vis_backends, "items") or isinstance(vis_backends, BaseVisBackend):
            vis_backends = [vis_backends]
        for index, entry in enumerate(vis_backends):
            with config_path("vis_backends", index):
                options = dict(entry) if hasattr(entry, "items") else {}
                name = options.pop("name", None)
                is_built = isinstance(entry, BaseVisBackend)
                backend = entry if is_built else VISBACKENDS.build(options or entry, **defaults)
                # The name is also the key of the backend's position in checkpoints, hence unique.
                name = name or type(backend).__name__
                if name in self.vis_backends:
                    raise RuntimeError(
                        f"names of visualization backends must be unique, got {name!r} twice; set "
                        "another `name`"
                    )
                self.vis_backends[name] = backend

    @property
    def instance_name(self) -> str:
        """The name of the visualizer, as MMEngine calls it."""
        return self.name

    @classmethod
    def get_instance(cls, name: str, **arguments: Any) -> "Visualizer":
        """Return the newest visualizer called `name`, created with the arguments if there is
        none.
        """
        return Visualizer._instances.get(name) or cls(name=name, **arguments)

    @classmethod
    def get_current_instance(cls) -> "Visualizer":
        """Return the visualizer created last; one without backends if none exists."""
        newest = next(reversed(Visualizer._instances.values()), None)
        return newest or cls.get_instance("visualizer")

    def get_backend(self, name: str) -> BaseVisBackend:
        """Return the backend called `name`; KeyError, with a suggestion, if there is none."""
        if name not in self.vis_backends:
            raise UnknownNameError(
                f"no visualization backend is called {name!r}{closest(name, self.vis_backends)}"
            )
        return self.vis_backends[name]

    def add_config(self, config: ConfigLike | str) -> None:
        """Write the config: a ConfigDict, a dict, or the text of a config file."""
        text = config if isinstance(config, str) else dump_config(config)
        self._write(lambda backend: backend.add_config(text))

    def add_graph(self, model: Any, data_batch: Any = None) -> None:
        """Write a description of `model`; arguments as in `format_graph`."""
        if self._active_backends():  # tracing takes a while
            text = format_graph(model, data_batch)
            self._write(lambda backend: backend.add_graph(text))

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write an image, uint8[H, W, C] with C of 1, 3 (RGB) or 4 (RGBA).

        The steps of a name form a series.
        """
        self._write(lambda backend: backend.add_image(name, image, step))

    def add_histogram(
        self, name: str, values: ArrayLike | Histogram, step: int = 0, bins: int = 64
    ) -> None:
        """Write a `Histogram`, or that of array elements (see `histogram`), for which a device
        array blocks.
        """
        if self._active_backends():
            binned = values if isinstance(values, Histogram) else histogram(values, bins)
            self._write(lambda backend: backend.add_histogram(name, binned, step))

    def add_scalar(self, name: str, value: ArrayLike, step: int = 0) -> None:
        """Write one host number; a device array blocks until it is computed."""
        self._write(lambda backend: backend.add_scalar(name, value, step))

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write several numbers of one step.

        Args:
          scalar_dict: host numbers by name. `mode` ('train', 'val' or 'test') is the loop: JSON
            lines contain it, all other backends write `val/<name>` and `test/<name>` (see
            `BaseVisBackend.name_scalars`).
          step: iteration or epoch of the numbers.
          file_path: a file, relative to `save_dir`, that file backends append the numbers to as
            well.
        """
        self._write(
            lambda backend: backend.add_scalars(backend.name_scalars(scalar_dict), step, file_path)
        )

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
        """Draw a sample. This class does not: subclasses should draw on a copy of the image and
        call `add_image`.

        Args:
          image: uint8[H, W, C].
          data_sample: ground truth and predictions, of any type that the subclass supports.
          draw_gt, draw_pred: whether to draw the ground truth and the prediction.
          show: whether to open a window.
          wait_time: seconds to keep the window open; 0 keeps it open until it is closed.
          step: iteration or epoch of the sample.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot draw a {type(data_sample).__name__}: use "
            "LocalVisualizer, or a subclass with add_datasample"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the write position of each backend, by name, as a JSON-serializable dict."""
        with self._lock:
            states = {name: backend.state_dict() for name, backend in self.vis_backends.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Discard what was written after a checkpoint.

        Arguments as in `BaseVisBackend.load_state_dict`.
        """
        with self._lock:
            for name, backend in self._active_backends().items():
                backend.load_state_dict(state_dict.get(name, {}), step)

    def close(self) -> None:
        """Close all backends. Can be called twice; the next write opens them again."""
        with self._lock:
            for backend in self.vis_backends.values():
                backend.close()

    def _active_backends(self) -> Mapping[str, BaseVisBackend]:
        """Return the backends that this process writes to."""
        # Asked at each write: the index is unknown before `jax.distributed.initialize`.
        return self.vis_backends if jax.process_index() == 0 else {}

    def _write(self, write: Callable[[BaseVisBackend], None]) -> None:
        with self._lock:  # log lines are written in a background thread
            for backend in self._active_backends().values():
                write(backend)
