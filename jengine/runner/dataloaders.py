"""Build the dataloaders of a run, each at its first use."""

from collections.abc import Mapping
from typing import Any

from jengine.data import BatchCheck, DataLoader, IterableLoader, build_dataloader, select_arrays
from jengine.distributed import assert_equal_across_processes
from jengine.distributed.processes import Processes, SingleProcess
from jengine.errors import config_path

PyTree = Any


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

    def example_batch(self, mode: str) -> PyTree:
        """Return the arrays of the first batch, as an example of the structure and shapes.

        Raises:
          ValueError: the loader has no batch.
        """
        loader = self.get(mode)
        assert loader is not None
        with config_path(f"{mode}_dataloader"):
            batch = loader.example()
            return select_arrays(BatchCheck(f"{mode}_dataloader")(batch))
