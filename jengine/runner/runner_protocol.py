"""Define the protocols of the Runner and its training loop for the other modules of this package.

The Runner imports these modules. They annotate it with the protocols below, which extend those of the hooks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from jengine.distributed.processes import Processes, SingleProcess
from jengine.hooks import runner_protocol
from jengine.hooks.hook_list import HookList
from jengine.hooks.runner_protocol import MaybeNone
from jengine.runner.interrupts import Interrupts
from jengine.runner.programs import TrainPrograms
from jengine.runner.start_from import ResumePolicy
from jengine.sharding import DispatchLimiter
from jengine.train.scanned_step import ChunkMetrics

PyTree = Any


class RunFiles(Protocol):
    """Describe the files of a run.

    Attributes:
      exist: whether they do: nothing was refused.
    """

    exist: bool

    def open(self) -> None:
        """Create them, unless they exist."""


class TrainLoop(runner_protocol.TrainLoop, Protocol):
    """Describe the training loop for this package.

    Attributes:
      iter: the number of completed training iterations.
      epoch: the number of completed epochs; 0 throughout in an iteration loop.
      epoch_start: `iter` at the start of the current epoch.
      position: the position in the data after the completed iterations; None before the first iteration.
      steps_per_call: the number of iterations in a chunk.
      on_recompile: 'warn' or 'raise'.
      on_nonfinite: 'stop', 'warn' or 'ignore'.
      is_consistent: False while counters, state and hooks disagree, as within an iteration.
    """

    iter: int
    epoch: int
    epoch_start: int
    position: Any
    is_consistent: bool
    steps_per_call: int
    on_recompile: str
    on_nonfinite: str


class Runner(runner_protocol.Runner, Protocol):
    """Describe the run for loops, checkpoints and reports.

    Attributes:
      optimizer_settings: the settings of the optimizer before schedulers change them; saved in checkpoints.
      settings: a description of all settings, see `describe_settings`; saved in checkpoints.
    """

    optimizer_settings: dict[str, dict[str, Any]]
    settings: dict[str, Any]

    @property
    def train_loop(self) -> TrainLoop | MaybeNone:
        """Return the training loop; None in runs that do not train."""

    @property
    def hook_list(self) -> HookList:
        """Return the hooks with their priorities and calls."""

    @property
    def resume_command(self) -> Callable[..., str]:
        """Return the function that describes how to continue the run, from a path or from the newest checkpoint."""

    def get_hooks_info(self) -> str:
        """Return a list of the hooks of each stage, in order, as text."""

    # --- Processes and devices ---

    @property
    def processes(self) -> SingleProcess | Processes:
        """Return the processes of the run."""

    @property
    def dispatch_limiter(self) -> DispatchLimiter:
        """Return the limit on unfinished dispatched steps."""

    @property
    def interrupts(self) -> Interrupts:
        """Return the handler of signals, which end training between two iterations."""

    # --- Steps ---

    @property
    def programs(self) -> TrainPrograms | MaybeNone:
        """Return the compiled programs of training; None before training."""

    def train_step(self, batch: PyTree) -> dict[str, jax.Array]:
        """Run one training step on a batch on its device, and return the metrics, which stay on the device."""

    def train_chunk(
        self, batches: Sequence[PyTree], hyperparams: Sequence[Mapping[str, Any]], is_update: Sequence[bool]
    ) -> ChunkMetrics:
        """Run a training step for each host batch in one call, and return the metrics of all steps."""

    def step_hyperparams(self) -> dict[str, Any]:
        """Return all hyperparameters of the step, as host values."""

    def eval_variables(self) -> dict[str, tuple[PyTree, PyTree]]:
        """Return the variables to evaluate: suffix of the metric names -> `(params, model_state)`."""

    # --- Checkpoints and reports ---

    @property
    def validations(self) -> list[tuple[int, int, dict[str, float]]]:
        """Return the epoch, iteration and metrics of each validation."""

    @property
    def files(self) -> RunFiles:
        """Return the files of this run, which exist from the first traced step or evaluation on."""

    def record_validation(self, metrics: dict[str, float]) -> None:
        """Record the metrics of a validation."""

    @property
    def iters_this_session(self) -> int:
        """Return the number of training iterations since `train` was called."""

    @property
    def resume_policy(self) -> ResumePolicy:
        """Return the side that holds after a resume, where config and checkpoint differ."""

    @property
    def configured_seed(self) -> int | None:
        """Return the seed in the config; None if it has none."""
