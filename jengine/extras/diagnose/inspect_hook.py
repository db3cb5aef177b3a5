"""Hooks that record the values inside the step."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jengine.config import paths
from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.extras.diagnose.histogram import to_histogram
from jengine.extras.diagnose.inspection import (
    STATISTICS,
    Origin,
    RecordedValue,
    Statistic,
    compile_inspection,
    put_batch,
    read_statistics,
    split_layers,
)
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.visualizer import Visualizer


class _Recorder(Hook):
    """Hook that records values inside the step that follows, with a program of its own."""

    priority = "LOWEST"  # hooks before it set hyperparameters of the step

    interval: int
    bins: int | None
    arrays = False
    statistics: Sequence[Statistic] = ()
    _ahead = 0  # iterations by which a record comes before a multiple of the interval

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next iteration that is due: the record is of the step that follows."""
        return -(-(step + self._ahead) // self.interval) * self.interval - self._ahead

    def before_train(self, runner: RunnerProtocol) -> None:
        """Forget the programs of an earlier run."""
        self._programs: dict[bool, tuple[Callable[..., Any], dict[str, Origin]]] = {}

    def before_train_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None
    ) -> None:
        """Compute the values of the step that follows, and let them be written."""
        wrapper: Any = runner.optim_wrapper
        update = wrapper.start_step(runner.iter)  # as the step itself does next
        if update not in self._programs:
            self._programs[update] = compile_inspection(
                runner,
                self._select(runner),
                update=update,
                arrays=self.arrays,
                bins=self.bins,
            )
        program, kinds = self._programs[update]
        batch = put_batch(runner, data_batch)
        runner.state, values = program(runner.state, batch, runner.step_hyperparams())
        file = os.path.join(runner.local_dir, "inspect", f"iter_{runner.iter + 1}.npz")
        write = functools.partial(_write, names=self.statistics, file=file if self.arrays else None)
        runner.log_writer.submit(
            write, runner.visualizer, values, dict(kinds), runner.iter + 1, self._name
        )

    def _select(self, runner: RunnerProtocol) -> Sequence[str]:
        """Return the patterns of the values."""
        raise NotImplementedError

    @staticmethod
    def _name(path: str) -> str:
        """Return the name of a value for the visualizer."""
        raise NotImplementedError


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class InspectHook(_Recorder):
    """Statistics of the values inside the step by dotted path, every `interval` iterations: outputs
    of layers, what they `sow`, gradients, updates and parameters.

    A program of its own computes the step that follows, with the same random keys: the training
    program does not change, and other iterations cost nothing. It is compiled at the first
    iteration, where a path that matches nothing is an error. The numbers are written to the
    visualizer in the background as `inspect/<path>/<statistic>`; a layer of a stack has its number
    at the end of the path.

    Args:
      paths: patterns with wildcards: paths of layers (`'blocks.3.attn.*'`), of parameters below
        `grads`, `updates` or `params` (`'grads.*.kernel'`), or below `batch` and `loss`;
        'activations' for all layers; `'gradient of *'` for the gradients of layers' outputs.
        A pattern also means everything below what it matches.
      interval: iterations between two records; the first iteration is recorded.
      statistics: the mean, the root of the mean square and the maximum of the finite elements, and
        the shares of zeros and of elements that are not finite.
      arrays: whether to write the arrays too, to `inspect/iter_<n>.npz` in the work dir; not with
        `DataParallel`, micro-batches or several processes.
      bins: the bins of a histogram of each value, `inspect/<path>`; None for none.

    Raises:
      ConfigError: in the first iteration, a pattern that matches nothing.

    Examples:
      >>> InspectHook(paths=["grads.*.kernel", "updates"], interval=100).statistics
      ('mean', 'rms', 'max', 'zeros', 'nonfinite')
    """

    paths: Sequence[str]
    interval: Count = 500
    statistics: Sequence[Statistic] = STATISTICS
    arrays: bool = False
    bins: Count | None = None

    def __post_init__(self) -> None:
        if isinstance(self.paths, str) or not self.paths:
            raise ConfigError(
                "`inspect`, or `paths` of InspectHook, must be a list of patterns, got "
                f"{self.paths!r}"
            )

    def before_train(self, runner: RunnerProtocol) -> None:
        """Refuse arrays where they are not whole."""
        super().before_train(runner)
        loop: Any = runner.train_loop
        if self.arrays and (
            runner.strategy.axis_name or loop.micro_batches > 1 or jax.process_count() > 1
        ):
            raise ConfigError(
                "InspectHook: `arrays` must be False with DataParallel, micro-batches or several "
                "processes, got True"
            )

    def _select(self, runner: RunnerProtocol) -> Sequence[str]:
        return self.paths

    @staticmethod
    def _name(path: str) -> str:
        return f"inspect/{path}"


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class HistogramHook(_Recorder):
    """Histograms of the gradients and the weights of each parameter, every `interval` iterations.

    They are computed as by `InspectHook`, and written to the visualizer in the background as
    `gradients/<path>` and `weights/<path>`, with the layer's number at the end for stacked layers:
    TensorBoard and W&B draw them, other backends get the mean, the standard deviation and the
    range. With gradient accumulation the gradients are those of one iteration.

    Args:
      interval: iterations between two records.
      bins: number of bins.
      gradients: whether to record gradients, before clipping.
      weights: whether to record weights, after the update.
      patterns: regular expressions, one of which must be found in the dotted path of a parameter;
        None for all.

    Raises:
      ConfigError: nothing to record, or, before training, patterns that match no parameter.

    Examples:
      >>> HistogramHook(interval=1000, patterns=["kernel$"]).bins
      64
    """

    is_single = True
    _ahead = 1

    interval: Count = 500
    bins: Count = 64
    gradients: bool = True
    weights: bool = True
    patterns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not self.gradients and not self.weights:
            raise ConfigError(
                "HistogramHook: one of gradients and weights must be True, got False and False"
            )

    def before_train(self, runner: RunnerProtocol) -> None:
        """Refuse patterns that match no parameter."""
        super().before_train(runner)
        if not self._select(runner):
            raise ConfigError(
                f"HistogramHook: patterns must match a parameter, got {self.patterns}"
            )

    def _select(self, runner: RunnerProtocol) -> Sequence[str]:
        patterns = [""] if self.patterns is None else self.patterns
        known = paths.flatten(runner.state.params)
        found = [path for path in known if any(re.search(each, path) for each in patterns)]
        trees = ["grads"] * self.gradients + ["params"] * self.weights
        return [f"{tree}.{path}" for tree in trees for path in found]

    @staticmethod
    def _name(path: str) -> str:
        tree, _, name = path.partition(".")
        return f"{'gradients' if tree == 'grads' else 'weights'}/{name}"


def _write(
    visualizer: Visualizer,
    values: dict[str, RecordedValue],
    kinds: dict[str, Origin],
    step: int,
    rename: Callable[[str], str],
    names: Sequence[Statistic],
    file: str | None,
) -> None:
    """Fetch the values and write them."""
    split = split_layers(jax.device_get(values), kinds)
    scalars = {
        f"{rename(path)}/{name}": number
        for path, value in split.items()
        for name, number in read_statistics(value, names).items()
    }
    if scalars:
        visualizer.add_scalars(scalars, step=step)
    for path, value in split.items():
        if value.bins is not None:
            visualizer.add_histogram(rename(path), to_histogram(value.bins), step)
    if file is not None:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        arrays: dict[str, Any] = {
            path: value.array for path, value in split.items() if value.array is not None
        }
        np.savez(file, **arrays)
