"""Protocols of the Runner and its loops, as hooks and loops see them.

Hooks annotate `runner: RunnerProtocol` instead of importing `jengine.runner`, which imports them.
Members are read-only unless a hook may set them. The types are those that a hook sees in the stages
of training, validation or test; what a run does not need, such as the training loop in a test, is
None in the other stages.
"""
# ruff: noqa: D102 - comments describe the members

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax

from jengine.checkpoint.checkpointer import Checkpointer
from jengine.data.batch_check import Batch
from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.evaluation.evaluator import Evaluator
from jengine.hooks.run import Run
from jengine.logging.async_writer import AsyncWriter
from jengine.logging.message_hub import MessageHub
from jengine.logging.processor import LogProcessor
from jengine.logging.stopwatch import Stopwatch
from jengine.logging.visualizer import Visualizer
from jengine.model.model import Model
from jengine.optim.schedules.scheduler import Schedulers
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict
from jengine.parallel.processes import ProcessGroup
from jengine.parallel.strategy import Strategy
from jengine.train.programs import TrainPrograms
from jengine.train.scanned_step import ChunkMetrics
from jengine.train.state import TrainState

Loader: TypeAlias = DataLoader | IterableLoader


class Progress(Protocol):
    """Progress and length of training."""

    @property
    def iter(self) -> int: ...  # completed training iterations
    @property
    def epoch(self) -> int: ...  # completed epochs; 0 throughout in an iteration loop
    @property
    def max_iters(self) -> int | float: ...  # iterations of the whole run; `math.inf` if unknown
    @property
    def max_epochs(self) -> int: ...  # epochs of the whole run; 1 in an iteration loop


class TrainLoopProtocol(Progress, Protocol):
    """Training loop, as hooks see it.

    Set `stop_training` to end training after the current iteration or chunk.
    """

    stop_training: bool
    is_consistent: bool  # False while counters, state and hooks disagree

    @property
    def by_epoch(self) -> bool: ...  # whether the loop counts in epochs
    @property
    def on_recompile(self) -> str | None: ...  # 'warn' or 'raise'

    # whether epochs are parts of one stream over the data, not passes
    repeats_data: bool
    dataloader: Loader
    steps_per_call: int  # iterations in a chunk
    micro_batches: int  # parts of a device's share of a batch
    batches_per_iteration: int
    epoch_start: int  # `iter` at the start of the current epoch

    @property
    # iterations in an epoch, or in a pass over the data; None if unknown
    def epoch_length(self) -> int | None: ...

    seconds: float  # time of the training iterations in this session
    steps_left: int  # those of the current chunk after the one that hooks see

    @property
    def remaining_seconds(self) -> float | None: ...  # estimated; None if the end is unknown
    # whether training is still what its config and hooks describe; for log lines
    def check(self) -> None: ...
    def run(self) -> None: ...  # train to the end


class EvalLoopProtocol(Protocol):
    """Validation or test loop, as hooks see it.

    Among several evaluations, the members are those of the current one.
    """

    @property
    def dataloader(self) -> Loader: ...
    @property
    # batches in a pass; None before the first if unknown until then
    def epoch_length(self) -> int | None: ...
    @property
    def evaluator(self) -> Evaluator: ...
    # evaluate `model` from now on, with the parameters of the run
    def predict_with(self, model: Any) -> None: ...
    # evaluate once; the metrics by name
    def run(self, names: Sequence[str] | None = None) -> dict[str, float]: ...


class RunnerProtocol(Progress, Protocol):
    """The run, as hooks see it.

    Attributes:
      state: the `TrainState`; None before the first call of `train`, `val` or `test`. The next step
        donates its arrays.
    """

    @property
    def state(self) -> TrainState: ...
    @state.setter
    def state(self, state: TrainState) -> None: ...

    programs: TrainPrograms  # None before training
    resume_command: Callable[..., str]  # see `default_resume_command`

    # --- Identity and directories ---
    @property
    def iters_this_session(self) -> int: ...  # since the start or the resume

    run: Run  # what all parts of the run share
    experiment_name: str
    timestamp: str  # start time, which names the log files
    work_dir: str  # directory or URL of checkpoints and logs
    # directory for small files: the work dir, or one that is copied to its URL
    local_dir: str
    log_dir: str  # directory of the log files, in `local_dir`
    seed: int
    is_main_process: bool  # whether this process writes the logs
    processes: ProcessGroup  # those that train together

    # --- Model and optimizer ---
    model: Model
    optim_wrapper: OptimWrapper | OptimWrapperDict  # built for training only
    param_schedulers: Schedulers  # by optimizer if there are several

    @property
    # step inputs; a new value does not recompile the step
    def hyperparams(self) -> MutableMapping[str, Any]: ...

    constants: dict[str, Any]  # arrays that the step reads in `hyperparams`, see `Runner`
    strategy: Strategy  # places arrays on devices
    checks: Any  # the `step_checks` with `check=True`, else None

    # --- Loops and data ---
    @property
    def train_loop(self) -> TrainLoopProtocol: ...
    @property
    def val_loop(self) -> EvalLoopProtocol: ...
    @property
    def test_loop(self) -> EvalLoopProtocol: ...

    train_dataloader: Loader
    val_dataloader: Loader | dict[str, Loader]  # several by evaluation name
    test_dataloader: Loader | dict[str, Loader]

    # --- Logs ---
    logger: logging.Logger
    message_hub: MessageHub
    visualizer: Visualizer
    log_processor: LogProcessor
    log_writer: AsyncWriter
    stopwatch: Stopwatch

    # --- Hooks and checkpoints ---
    @property
    # `Hook`s (that module imports this one), in the order in which they run
    def hooks(self) -> Sequence[Any]: ...

    hook_list: Any  # the `HookList`
    checkpointer: Checkpointer

    def register_hook(self, hook: Any, priority: int | str | None = None) -> None:
        """Add a hook, given as an instance or a config; `priority` overrides that of the hook."""

    def call_hook(self, stage: str, **arguments: Any) -> None:
        """Call each hook that defines `stage`, in priority order."""

    # --- Steps, which loops call ---
    def train_step(self, batch: Batch) -> dict[str, jax.Array]: ...
    def train_chunk(
        self,
        batches: Sequence[Any],
        hyperparams: Sequence[Mapping[str, Any]],
        is_update: Sequence[bool],
    ) -> ChunkMetrics: ...
    def step_hyperparams(self) -> dict[str, Any]: ...
    def take_hyperparams(self) -> None: ...
    def eval_variables(self) -> dict[str, tuple[Any, Any]]: ...

    # --- What hooks may do to the run ---
    def set_lr(self, lr: float, optimizer: str = "") -> None:
        """Set the learning rate from the next step on; a schedule goes on from it."""

    def reset_optimizer(
        self, groups: Sequence[int | str] | None = None, optimizer: str = ""
    ) -> None:
        """Start the optimizer anew, for all or some parameter groups."""

    def predict(self, data: Any, batch_size: int | None = None, seed: int | None = None) -> Any:
        """Return the predictions for arrays, a dataset or batches, with the weights of a
        validation.
        """

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
        """Write a checkpoint in the background and return its path; `options` as the Runner's."""
