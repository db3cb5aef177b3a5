"""Build the dataloaders of a run, each at its first use."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jengine.data import BatchCheck, DataLoader, IterableLoader, build_dataloader, list_host_entries, select_arrays
from jengine.distributed import assert_equal_across_processes
from jengine.distributed.processes import Processes, SingleProcess
from jengine.errors import ConfigError, UnknownNameError, config_path
from jengine.selection import describe_tree

_CLEAR = ("in the config at ", "with the first batch of ")  # notes that say enough


class DataLoaders:
    """Hold the dataloaders for training, validation and test.

    Args:
      sections: configs, loaders, or iterables of batches under '<mode>_dataloader'; None for none.
      seed: of the samplers.
      processes: share the data.
    """

    def __init__(self, sections: Mapping[str, Any], seed: int, processes: SingleProcess | Processes) -> None:
        self._sections = sections
        self._seed = seed
        self._processes = processes
        self._loaders: dict[str, DataLoader | IterableLoader] = {}
        self._host_entries: dict[str, dict[str, str]] = {}  # of the examples
        self._examples: dict[str, str] = {}  # what they have

    def get(self, mode: str) -> DataLoader | IterableLoader | None:
        """Return the loader for 'train', 'val' or 'test'; None without one."""
        name = f"{mode}_dataloader"
        if mode not in self._loaders and self._sections[name] is not None:
            with config_path(name):
                self._loaders[mode] = build_dataloader(
                    self._sections[name],
                    train=mode == "train",
                    seed=self._seed,
                    process_index=self._processes.index,
                    process_count=self._processes.count,
                )
            assert_equal_across_processes(self._processes, {name: {"batches": self._loaders[mode].length}})
        return self._loaders.get(mode)

    def call_with_example(self, mode: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with the arrays of the first batch, an example of the structure and shapes, and with `args`.

        Raises:
          ValueError: the loader has no batch.
        """
        loader = self.get(mode)
        assert loader is not None
        with config_path(f"{mode}_dataloader"):
            batch = BatchCheck(f"{mode}_dataloader")(loader.example())
        self._host_entries[mode] = list_host_entries(batch)
        arrays = select_arrays(batch)
        self._examples[mode] = describe_tree(arrays, "batch")
        with self.note_example(mode):
            return function(arrays, *args)

    @contextlib.contextmanager
    def note_example(self, mode: str, ends: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Add the entries of the example to an error: those of the device, and those that stay on the host.

        Args:
          mode: of the loader.
          ends: whether errors are no longer about the example.
        """
        try:
            yield
        except Exception as error:
            notes = getattr(error, "__notes__", ())
            is_clear = isinstance(error, ConfigError) or any(note.startswith(_CLEAR) for note in notes)
            if mode in self._examples and not is_clear and not ends():
                error.add_note(f"with the first batch of {mode}_dataloader: {self._examples[mode]}")
            entries = self._host_entries.get(mode)
            if entries and isinstance(error, UnknownNameError):
                listed = ", ".join(f"{path} ({kind})" for path, kind in entries.items())
                error.add_note(
                    f"{mode}_dataloader yields entries that stay on the host, because a device has no form of strings, "
                    f"dates and objects: {listed}; give the model numbers, with arrays of equal shapes in all samples"
                )
            raise
