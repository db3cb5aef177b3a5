"""The Runner and its training loop as the other modules of this package see them.

The Runner imports these modules; they annotate it with the protocols below, which add to those of the hooks what only
this package uses.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from jengine.hooks import runner_protocol
from jengine.hooks.hook_list import HookList
from jengine.hooks.runner_protocol import MaybeNone
from jengine.parallel import InFlight
from jengine.parallel.processes import Alone, Processes
from jengine.runner.interrupts import Interrupts
from jengine.runner.training_step import TrainingStep

PyTree = Any


class TrainLoop(runner_protocol.TrainLoop, Protocol):
    """Describe the training loop for the code that steps it.

    Attributes:
      iter: the number of completed training iterations.
      epoch: the number of completed epochs; 0 throughout in an iteration loop.
      in_iteration: True within an iteration, while state and counters may disagree.
    """

    iter: int
    epoch: int
    in_iteration: bool

    @property
    def runner(self) -> "Runner":
        """Return the Runner whose model is trained."""

    def run_iter(self, batch_idx: int, batch: PyTree) -> None:
        """Run one iteration."""


class Runner(runner_protocol.Runner, Protocol):
    """Describe the run for loops, checkpoints and reports."""

    @property
    def train_loop(self) -> TrainLoop | MaybeNone:
        """Return the training loop; None in runs that do not train."""

    @property
    def hook_list(self) -> HookList:
        """Return the hooks with their priorities and calls."""

    def get_hooks_info(self) -> str:
        """Return a listing of the hooks of each stage, in order."""

    # --- Processes and devices ---

    @property
    def processes(self) -> Alone | Processes:
        """Return the processes of the run."""

    @property
    def strategy(self) -> Any:
        """Return the strategy: placement and compilation."""

    @property
    def in_flight(self) -> InFlight:
        """Return the limit on unfinished dispatched steps."""

    @property
    def interrupts(self) -> Interrupts:
        """Return the handler of signals that end training between two iterations."""

    # --- Steps ---

    @property
    def step(self) -> TrainingStep:
        """Return the compiled programs of training."""

    def train_step(self, batch: PyTree) -> dict[str, jax.Array]:
        """Run one training step on a batch that is on its device, and return its metrics, which stay there."""

    def take_steps(
        self, call: Callable[..., tuple[Any, Mapping[str, jax.Array]]], *plan: Any
    ) -> Mapping[str, jax.Array]:
        """Run several training steps by `call(state, *plan) -> (state, metrics)`, a method of `step`."""

    def eval_variables(self) -> dict[str, tuple[PyTree, PyTree]]:
        """Return what validation and test evaluate: suffix of the metric names -> `(params, model_state)`."""

    # --- Checkpoints and reports ---

    @property
    def state_shapes(self) -> Any:
        """Return the shapes and dtypes of the training state, also while the state is still being computed."""

    @property
    def validations(self) -> list[tuple[int, int, dict[str, float]]]:
        """Return the epoch, iteration and metrics of each validation."""

    def note_validation(self, metrics: dict[str, float]) -> None:
        """Record the metrics of a validation."""

    @property
    def iters_done_here(self) -> int:
        """Return the number of training iterations since `train` was called."""

    @property
    def param_scheduler_on_resume(self) -> str:
        """Return whose schedules hold after a resume where they differ: 'checkpoint' or 'config'."""
