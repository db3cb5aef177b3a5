"""Define the protocols of the Runner and its loops for hooks.

Hooks annotate `runner: Runner` with the protocol below instead of importing `jengine.runner`, which imports them.
Members are read-only unless a hook may set them.
"""

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from jengine.checkpoint import Checkpointer
from jengine.data import DataLoader, IterableLoader
from jengine.evaluation import Evaluator
from jengine.logging import AsyncWriter, LogProcessor, MessageHub, PhaseTimer
from jengine.model import Model
from jengine.optim import OptimWrapper, OptimWrapperDict
from jengine.optim.schedules import Schedulers
from jengine.sharding import Strategy
from jengine.train import TrainState
from jengine.visualization import Visualizer

PyTree = Any
MaybeNone = Any  # in a union: None in runs that do not need the object; most hooks can ignore that case


class TrainLoop(Protocol):
    """Describe the training loop for hooks.

    Attributes:
      stop_training: set it to True to end training after the current iteration or chunk.
    """

    stop_training: bool

    def check(self) -> None:
        """Check that training is still what its config and hooks describe; called at log lines."""

    @property
    def by_epoch(self) -> bool:
        """Return whether the loop counts in epochs."""

    @property
    def dataloader(self) -> DataLoader | IterableLoader:
        """Return the loader of the training data."""

    @property
    def iter(self) -> int:
        """Return the number of completed training iterations."""

    @property
    def epoch(self) -> int:
        """Return the number of completed epochs; 0 throughout in an iteration loop."""

    @property
    def epoch_start(self) -> int:
        """Return `iter` at the start of the current epoch."""

    @property
    def epoch_length(self) -> int | None:
        """Return the number of iterations in an epoch, or in a pass over the data; None if unknown."""

    @property
    def max_iters(self) -> int | float:
        """Return the number of training iterations of the whole run; `math.inf` if unknown."""

    @property
    def max_epochs(self) -> int:
        """Return the number of epochs of the whole run; 1 in an iteration loop."""

    def run(self) -> None:
        """Train to the end."""


class EvalLoop(Protocol):
    """Describe the loop of a validation or a test for hooks."""

    @property
    def dataloader(self) -> DataLoader | IterableLoader:
        """Return the loader of the evaluation data."""

    @property
    def epoch_length(self) -> int | None:
        """Return the number of batches to evaluate on; None if it is unknown before the first evaluation."""

    @property
    def evaluator(self) -> Evaluator:
        """Return the metrics."""

    def predict_with(self, model: Any) -> None:
        """Evaluate `model` from now on, with the parameters of the run."""

    def run(self) -> dict[str, float]:
        """Evaluate once and return the metrics by name."""


class Runner(Protocol):
    """Describe the run for hooks.

    Attributes:
      state: the `TrainState`; None before the first call of `train`, `val` or `test`. The next step donates its arrays.
    """

    state: TrainState | MaybeNone

    # --- Progress ---

    @property
    def iter(self) -> int:
        """Return the number of completed training iterations."""

    @property
    def epoch(self) -> int:
        """Return the number of completed epochs; 0 throughout in an iteration loop."""

    @property
    def max_iters(self) -> int | float:
        """Return the number of training iterations of the whole run; `math.inf` if unknown."""

    @property
    def max_epochs(self) -> int:
        """Return the number of epochs of the whole run; 1 in an iteration loop."""

    # --- Identity and directories ---

    @property
    def experiment_name(self) -> str:
        """Return the name of the run in its logs."""

    @property
    def timestamp(self) -> str:
        """Return the start time of the run, which names its log files."""

    @property
    def work_dir(self) -> str:
        """Return the directory of checkpoints and logs."""

    @property
    def log_dir(self) -> str:
        """Return the directory of this run's log files."""

    @property
    def run_id(self) -> str:
        """Return the identifier that distinguishes the checkpoints of this run from those of others."""

    @property
    def seed(self) -> int:
        """Return the seed of the run."""

    @property
    def cfg_text(self) -> str:
        """Return the config as text; empty without a config."""

    @property
    def is_main_process(self) -> bool:
        """Return whether this process writes the logs."""

    # --- Model and optimizer ---

    @property
    def model(self) -> Model:
        """Return the model."""

    @property
    def optim_wrapper(self) -> OptimWrapper | OptimWrapperDict | MaybeNone:
        """Return the optimizer wrapper; None before it is built and in runs that do not train."""

    @property
    def param_schedulers(self) -> Schedulers | MaybeNone:
        """Return the parameter schedulers, by optimizer if there are several; None in runs that do not train."""

    @property
    def hyperparams(self) -> MutableMapping[str, Any]:
        """Return the scalars that hooks pass to the compiled step; changing a value does not recompile it."""

    @property
    def strategy(self) -> Strategy:
        """Return the strategy, which places arrays on devices."""

    # --- Loops and data ---

    @property
    def train_loop(self) -> TrainLoop | MaybeNone:
        """Return the training loop; None in runs that do not train."""

    @property
    def val_loop(self) -> EvalLoop | MaybeNone:
        """Return the validation loop; None in runs that do not validate."""

    @property
    def test_loop(self) -> EvalLoop | MaybeNone:
        """Return the test loop; None in runs that do not test."""

    @property
    def train_dataloader(self) -> DataLoader | IterableLoader | MaybeNone:
        """Return the loader of the training data; None without one."""

    @property
    def val_dataloader(self) -> DataLoader | IterableLoader | MaybeNone:
        """Return the loader of the validation data; None without one."""

    @property
    def test_dataloader(self) -> DataLoader | IterableLoader | MaybeNone:
        """Return the loader of the test data; None without one."""

    # --- Logs ---

    @property
    def logger(self) -> logging.Logger:
        """Return the logger of the terminal and the log file."""

    @property
    def message_hub(self) -> MessageHub:
        """Return the histories of scalars, and the values that hooks share."""

    @property
    def visualizer(self) -> Visualizer:
        """Return the visualizer, which writes scalars and images to its backends."""

    @property
    def log_processor(self) -> LogProcessor:
        """Return the object that formats log lines."""

    @property
    def log_writer(self) -> AsyncWriter:
        """Return the background writer of logs."""

    @property
    def phase_timer(self) -> PhaseTimer:
        """Return the timer of the phases of the run."""

    # --- Hooks and checkpoints ---

    @property
    def hooks(self) -> Sequence[Any]:  # of `Hook`, whose module imports this one
        """Return the hooks in the order in which they run."""

    def register_hook(self, hook: Any, priority: int | str | None = None) -> None:
        """Add a hook, given as an instance or a config; `priority` overrides that of the hook."""

    def call_hook(self, stage: str, **arguments: Any) -> None:
        """Call each hook that defines `stage`, in priority order."""

    @property
    def checkpointer(self) -> Checkpointer:
        """Return the writer of this run's checkpoints."""

    def save_checkpoint(
        self,
        out_dir: str | None = None,
        filename: str = "checkpoint",
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        by_epoch: bool = True,
        **options: Any,
    ) -> str:
        """Write a checkpoint in the background and return its path; `options` are for `Checkpointer.save`."""
