"""Base of the trackers: a backend that writes to a run, such as one on a server."""

import abc
import contextlib
import importlib
import os
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jengine.config.errors import require_extra
from jengine.logging.backend import BaseVisBackend
from jengine.logging.history import to_float


class RunVisBackend(BaseVisBackend):
    """Backend that writes to a run, such as one on a server, which the first value opens.

    The config and the graph wait for it: a checkpoint that is loaded before may have the run to
    continue.

    Attributes:
      extra: the extra of jengine that installs the client.
      package: the module of the client to import.
      text_names: the names of the config and the graph in the run.
    """

    extra: ClassVar[str]
    package: ClassVar[str]
    text_names: ClassVar[tuple[str, str]] = ("config", "graph")

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        super().__init__(save_dir)
        self._experiment: Any = None  # None while no run is open
        self._pending_texts: dict[str, str] = {}
        # of the run on the server, which stays the same when it is opened again
        self._run_id: str | None = None

    @property
    def experiment(self) -> Any:
        """The open run; the first use opens it, with an error that names the extra if the
        package is missing.
        """
        if self._experiment is None:
            self._experiment = self._open_run()
            self._write_texts()
        return self._experiment

    def _import_package(self) -> types.ModuleType:
        """Import and return the client package, or raise an error that names the extra."""
        name = self.package.partition(".")[0].replace("_", "-")
        with require_extra(self.extra, f"{type(self).__name__} requires {name}"):
            return importlib.import_module(self.package)

    @abc.abstractmethod
    def _open_run(self) -> Any:
        """Start a run, or continue that in the checkpoint, and return the client's object for
        it.
        """

    @abc.abstractmethod
    def _write_text(self, name: str, text: str) -> None:
        """Write a text to the open run."""

    @abc.abstractmethod
    def _end_run(self) -> None:
        """End the open run."""

    def add_config(self, config: str) -> None:
        """Write the config as text, together with the first value: only then the run to resume
        is known.
        """
        self._add_text(self.text_names[0], config)

    def add_graph(self, graph: str) -> None:
        """Write the model description as text, together with the first value."""
        self._add_text(self.text_names[1], graph)

    def state_dict(self) -> dict[str, Any]:
        """Return the run id."""
        return {} if self._run_id is None else {"run_id": self._run_id}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Continue the run in the checkpoint, unless a run is open."""
        if "run_id" in state_dict and self._experiment is None:
            self._run_id = state_dict["run_id"]

    def close(self) -> None:
        """End the run; the next write continues it."""
        if self._pending_texts or self._experiment is not None:
            _ = self.experiment  # opened for the texts
            self._end_run()
            self._experiment = None

    def _add_text(self, name: str, text: str) -> None:
        self._import_package()  # report a missing package now instead of at the end of the run
        self._pending_texts[name] = text
        if self._experiment is not None:
            self._write_texts()

    def _write_texts(self) -> None:
        for name, text in self._pending_texts.items():
            self._write_text(name, text)
        self._pending_texts = {}


def to_numbers(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values of one step, without the step itself.

    >>> to_numbers({"loss": np.float32(0.5), "note": "text", "step": 3})
    {'loss': 0.5}
    """
    numbers = {}
    for name, value in scalars.items():
        with contextlib.suppress(TypeError, ValueError):  # no number
            numbers[name] = to_float(value)
    numbers.pop("step", None)
    return numbers


def array_to_list(value: Any) -> Any:
    """Convert an array to a list, or to a Python number if it has one element.

    Return anything else unchanged.
    """
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array.item() if array.size == 1 else array.tolist()
