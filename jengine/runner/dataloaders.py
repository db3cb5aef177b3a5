"""Dataloaders of a run, each built at the first use."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jengine.config.errors import ConfigError, config_path
from jengine.config.explain import explain
from jengine.config.plugins import load_each
from jengine.data.batch_check import Batch, BatchCheck
from jengine.data.build import build_dataloader
from jengine.data.host_entries import list_host_entries, select_arrays
from jengine.data.masking import whole_batches
from jengine.evaluation.sections import loader_path
from jengine.hooks.run import Run
from jengine.hooks.runner_protocol import Loader, TrainLoopProtocol
from jengine.logging.slow_call import report_if_slow
from jengine.model.selection import describe_tree
from jengine.parallel.processes import assert_equal_across_processes

PyTree = Any
_SLOW = 30.0  # seconds


class DataLoaders:
    """Dataloaders for training, validation and test, each built at the first use.

    Args:
      sections: '<mode>_dataloader', for evaluations by name: configs, loaders, iterables over
        batches, or None.
      run: has the seed, the processes, and the part of the data that this process reads.
    """

    def __init__(self, sections: Mapping[str, Any], run: Run) -> None:
        self._sections = {"train_dataloader": sections["train_dataloader"]}  # by path
        self._names = {}  # of the evaluations, by mode
        for mode in ("val", "test"):
            loaders = sections[f"{mode}_dataloader"] or {}
            self._names[mode] = list(loaders)
            self._sections |= {loader_path(mode, name): loader for name, loader in loaders.items()}
        self._run = run
        self._processes = run.processes
        self._shard = run.strategy.data_shard
        self._loaders: dict[str, Loader] = {}
        self._examples: dict[str, str] = {}  # descriptions of the first batches
        self._host_entries: dict[str, dict[str, str]] = {}  # in them
        self._reads_example = False  # the first training batch
        self._read_state = False  # while that batch was read

    def _build(self, path: str) -> Loader:
        """Return the loader at a path in the config, such as 'val_dataloader.robust'."""
        if path not in self._loaders:
            with config_path(path):
                self._loaders[path] = build_dataloader(
                    self._sections[path],
                    train=path == "train_dataloader",  # shuffles by default
                    seed=self._run.seed,
                    process_index=self._shard.index,
                    process_count=self._shard.count,
                )
            lengths = {path: {"batches": self._loaders[path].length}}
            assert_equal_across_processes(self._processes, lengths)
        return self._loaders[path]

    def get_all(self, mode: str) -> dict[str, Loader]:
        """Return the loaders for the evaluations in 'val' or 'test' by name.

        The name of a single one is ''.
        """
        return {name: self._build(loader_path(mode, name)) for name in self._names[mode]}

    @property
    def train(self) -> Any:
        """Loader for the training data, built at the first use; None without one."""
        path = "train_dataloader"
        return None if self._sections[path] is None else self._build(path)

    @property
    def val(self) -> Any:
        """Loader for the validation data, several by name; None without one."""
        return self._get_mode("val")

    @property
    def test(self) -> Any:
        """Loader for the test data, several by name; None without one."""
        return self._get_mode("test")

    def _get_mode(self, mode: str) -> Loader | dict[str, Loader] | None:
        loaders = self.get_all(mode)
        return loaders.get("") if set(loaders) <= {""} else loaders

    def first_path(self, mode: str) -> str:
        """Return the path of the first evaluation's loader in 'val' or 'test'."""
        return loader_path(mode, self._names[mode][0])

    @contextlib.contextmanager
    def example(self, path: str) -> Iterator[Batch]:
        """Yield the arrays of a loader's first batch, an example for their shapes."""
        loader = self._build(path)
        with config_path(path):
            batch = self._read_example(path, loader)
            BatchCheck(path, loader.batch_axis)(batch)
            if path not in self._examples:  # the first time
                for check in load_each("first_batch_checks"):
                    check(path, batch, self._shard.for_axis(loader.batch_axis), self._processes)
        self._host_entries[path] = list_host_entries(batch)
        arrays = select_arrays(batch)
        self._examples[path] = describe_tree(arrays, "batch")
        # Most errors of a first trace are about the batch
        with self.note_example(path), whole_batches(loader.batch_axis is None):
            yield arrays

    def _read_example(self, path: str, loader: Loader) -> Any:
        self._reads_example = path == "train_dataloader"
        self._read_state = False
        try:
            with report_if_slow(f"reading the first batch of {path} ({loader.kind})", after=_SLOW):
                example = loader.example()
        finally:
            self._reads_example = False
        if self._read_state and loader.resume != "lost":
            # training reads this batch again, with the parameters that do not exist yet
            loader.close()
        return example

    def check_state_access(self, loop: TrainLoopProtocol) -> None:
        """Raise ConfigError if training data access the state, and settings let batches be read
        ahead, or if any other thread than the one that trains does.
        """
        interrupts = self._run.interrupts
        if self._reads_example:
            self._read_state = True
        elif interrupts.thread not in (None, threading.get_ident()):
            raise ConfigError(
                "`train_dataloader.num_threads` must be 0 for data that read `runner.state`, which "
                "belongs to the thread that trains, got a call in another thread"
            )
        elif interrupts.wait.since is None or interrupts.wait.what.name != "train_dataloader":
            return
        ahead = self._loaders["train_dataloader"].device_prefetch
        if ahead > 0 or loop.steps_per_call > 1:
            raise ConfigError(
                "`train_dataloader.device_prefetch` must be 0 and `train_cfg.steps_per_call` 1 for "
                f"data that read `runner.state`, got {ahead} and {loop.steps_per_call}: the data "
                "are read ahead, with the parameters of an earlier iteration; an iterable or a "
                "function has device_prefetch as an attribute"
            )

    @contextlib.contextmanager
    def note_example(self, path: str, ends: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Explain an error inside, with the entries of the first batch until `ends()` is true."""
        try:
            yield
        except Exception as error:
            examples = {} if ends() else self._examples
            hosts = self._host_entries
            explain(error, cfg=self._run.cfg, loader=path, examples=examples, host_entries=hosts)
            raise
