"""Garbage collection, and log lines with the memory use."""

import dataclasses
import gc
import resource
import sys
from typing import Any

import jax

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol

_MB = 2**20


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class EmptyCacheHook(Hook):
    """Garbage collection before epochs, after epochs or after iterations, in all loops.

    This frees device arrays that only reference cycles keep alive. XLA keeps the memory that it has
    allocated on the device; to return it, set `XLA_PYTHON_CLIENT_ALLOCATOR=platform` in the
    environment.

    Args:
      before_epoch: collect before each epoch.
      after_epoch: collect after each epoch.
      after_iter: collect after each iteration.
      clear_caches: also drop compiled functions and the memory they use; each will be compiled
        again.
    """

    before_epoch: bool = False
    after_epoch: bool = True
    after_iter: bool = False
    clear_caches: bool = False

    def __post_init__(self) -> None:
        self.every = None if self.after_iter else -1
        # Clearing drops compiled programs too; the next call would compile the step.
        if self.clear_caches and self.after_iter:
            raise ConfigError(
                "EmptyCacheHook: clear_caches needs after_iter=False; together they recompile the "
                "step each time"
            )

    def _before_epoch(self, runner: RunnerProtocol, mode: str = "train") -> None:
        if self.before_epoch:
            self._collect_garbage()

    def _after_epoch(self, runner: RunnerProtocol, mode: str = "train") -> None:
        if self.after_epoch:
            self._collect_garbage()

    def _after_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        if self.after_iter:
            self._collect_garbage()

    def _collect_garbage(self) -> None:
        gc.collect()
        if self.clear_caches:
            jax.clear_caches()


@HOOKS.register_module()
class MemoryProfilerHook(Hook):
    """Log line with the memory use every `interval` iterations, in all loops.

    For the host: the memory available, used and swapped (with psutil installed), and used by the
    process. For each device that reports it: the memory in use, and the peak.

    Args:
      interval: iterations between two log lines.
    """

    def __init__(self, interval: Count = 50) -> None:
        self.interval = interval
        self.every = interval

    def _after_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        if mode == "train" or self.every_n_inner_iters(batch_idx, self.interval):
            entries = _host_memory()
            for device in jax.local_devices():
                if stats := device.memory_stats():  # some devices do not report it
                    use = stats["bytes_in_use"] // _MB
                    peak = stats.get("peak_bytes_in_use", 0) // _MB
                    entries.append(f"{device.platform}:{device.id}: {use} MB (peak {peak} MB)")
            runner.logger.info("Memory " + ", ".join(entries))


def _host_memory() -> list[str]:
    """Return the memory use of the host in MB."""
    try:
        import psutil
    except ImportError:
        # bytes on macOS, kilobytes elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return [f"process_peak: {peak // (_MB if sys.platform == 'darwin' else 1024)} MB"]
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    sizes = dict(
        available=memory.available,
        used=memory.used,
        swap=swap.used,
        process=psutil.Process().memory_info().rss,
    )
    return [f"{name}: {size // _MB} MB" for name, size in sizes.items()]
