"""Protocols for the Runner and the training loop in the other modules of this package, which the
Runner imports.

They extend those for hooks with what only the run itself needs. `Runner` and `TrainLoop` describe
the members.
"""
# ruff: noqa: D102

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from jengine.config.json_codec import Json
from jengine.data.batch_check import Batch
from jengine.hooks import runner_protocol
from jengine.hooks.hook_list import HookList
from jengine.parallel.processes import ProcessGroup
from jengine.parallel.strategy import DispatchLimiter
from jengine.runner.interrupts import Interrupts
from jengine.train.programs import TrainPrograms
from jengine.train.scanned_step import ChunkMetrics

PyTree = Any


class RunFilesProtocol(Protocol):
    """Files of a run, see `RunFiles`."""

    exist: bool

    def open(self) -> None: ...  # create them
    # whether the work dir is still this run's
    def check(self, *, before_write: bool = False) -> None: ...
    def fetch(self) -> None: ...  # those of an earlier session, if the work dir is a URL
    def send(self) -> None: ...  # those that have changed, if the work dir is a URL
    # send the rest; without `keep` local ones may be removed
    def close(self, *, keep: bool) -> None: ...


class TrainLoopInternals(runner_protocol.TrainLoopProtocol, Protocol):
    """Training loop with the counters that a resume sets."""

    iter: int
    epoch: int
    epoch_start: int
    position: Any
    batch: Batch  # None between iterations
    is_consistent: bool
    steps_per_call: int
    batches_per_iteration: int
    on_recompile: str
    micro_batches: int
    settings: Any  # `TrainSettings`


class RunnerInternals(runner_protocol.RunnerProtocol, Protocol):
    """Runner, as loops, checkpoints and reports see it."""

    cfg: Any  # the config, or {}
    # a description of all arguments, see `describe_settings`; saved in checkpoints
    settings: dict[str, Json]
    # before schedulers change them; saved in checkpoints
    configured_seed: int | None  # None if the config has none
    # whose optimizer and schedule settings hold after a resume
    resume_is_exact: bool  # whether a difference from the checkpoint is an error
    # those of the programs in the checkpoint, if the run should have the same
    saved_hashes: dict[str, str]
    resume_command: Callable[..., str]
    hook_list: HookList
    processes: ProcessGroup
    interrupts: Interrupts
    dispatch_limiter: DispatchLimiter
    validations: list[tuple[int, int, dict[str, float]]]  # epoch, iteration and metrics
    programs: TrainPrograms  # None before training

    @property
    def train_loop(self) -> TrainLoopInternals: ...  # None in runs that do not train
    @property
    def iters_this_session(self) -> int: ...  # since the start or the resume
    @property
    def files(self) -> RunFilesProtocol: ...
    def get_hooks_info(self) -> str: ...  # the hooks of each stage, in order
    def train_step(self, batch: Batch) -> dict[str, jax.Array]: ...
    def train_chunk(
        self,
        batches: Sequence[PyTree],
        hyperparams: Sequence[Mapping[str, Any]],
        is_update: Sequence[bool],
    ) -> ChunkMetrics: ...
    def step_hyperparams(self) -> dict[str, Any]: ...
    def take_hyperparams(self) -> None: ...
    def eval_variables(self) -> dict[str, tuple[PyTree, PyTree]]: ...
