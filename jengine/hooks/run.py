"""The run as a value: who it is, where it writes, and what all of its parts share."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jengine.checkpoint.checkpointer import Checkpointer
from jengine.checkpoint.directories import CheckpointDirectories
from jengine.checkpoint.identity import Identity
from jengine.config.containers import resolve
from jengine.config.dump import format_description
from jengine.config.fingerprint import describe_run
from jengine.config.json_codec import Json
from jengine.config.storage import LocalFiles
from jengine.logging.async_writer import AsyncWriter
from jengine.logging.message_hub import MessageHub
from jengine.logging.processor import LogProcessor
from jengine.logging.stopwatch import Stopwatch
from jengine.logging.visualizer import Visualizer
from jengine.parallel.interrupts import Interrupts
from jengine.parallel.processes import ProcessGroup
from jengine.parallel.strategy import DispatchLimiter, Strategy


class Described(NamedTuple):
    """Texts for the files of a run."""

    settings: dict[str, Json]  # for checkpoints, see `describe_settings`
    cfg_text: str  # the content of config.py; empty without a config
    problems: list[str]  # what that file cannot reproduce


@dataclasses.dataclass(frozen=True, eq=False)
class Run(Identity):
    """A run: its identity, and what all of its parts share.

    Functions around a run take this value, and the loop or the state that they work on.
    """

    arguments: Mapping[str, Any]  # the Runner's
    constructor: Callable[..., Any]  # has these arguments
    subclass: str  # of the Runner, which config.py does not name; else empty
    processes: ProcessGroup
    strategy: Strategy
    limiter: DispatchLimiter
    interrupts: Interrupts
    stopwatch: Stopwatch
    logger: logging.Logger
    log_writer: AsyncWriter
    log_processor: LogProcessor
    message_hub: MessageHub
    visualizer: Visualizer
    directories: CheckpointDirectories
    files: LocalFiles  # sends small files, if the work dir is a URL
    send_files: Callable[[], None]  # send those that have changed; only a lost lock is an error
    checkpointer: Checkpointer
    # epoch, iteration and metrics of each validation
    validations: list[tuple[int, int, dict[str, float]]] = dataclasses.field(default_factory=list)
    # what the constructor has logged that the log file should have too
    notes: list[str] = dataclasses.field(default_factory=list)
    # the path and the `meta` of the checkpoint whose weights a run evaluates without training
    evaluated: dict[str, Any] = dataclasses.field(default_factory=dict)
    # of the programs in the checkpoint, if the run should have the same
    saved_hashes: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes the logs."""
        return jax.process_index() == 0

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.processes.count > 1

    @property
    def trains(self) -> bool:
        """Whether the config has the sections for training."""
        return self.arguments["train_cfg"] is not None

    @property
    def resume_is_exact(self) -> bool:
        """Whether any difference from the checkpoint is an error."""
        return bool(self.arguments["resume"] == "exact")

    @functools.cached_property
    def cfg(self) -> dict[str, Any]:
        """The config; without one, the description of the arguments."""
        given = self.arguments["cfg"]
        return self._description[0] if given is None else resolve(given)

    @functools.cached_property
    def _description(self) -> tuple[dict[str, Any], dict[str, Json]]:
        return describe_run(self.constructor, self.arguments, self.arguments["cfg"])

    @functools.cached_property
    def described(self) -> Described:
        """Texts for the files, made when training starts, before the run changes an object."""
        config, settings = self._description
        if not config:
            return Described(settings, "", [])
        path = os.path.join(self.arguments["work_dir"], "config.py")
        text, problems = format_description(config, path)
        if self.subclass:
            problems.append(f"use {self.subclass}.from_cfg(load_config(...))")
        return Described(settings, text, problems)

    def wait_for_device(self) -> None:
        """Wait until all dispatched steps are finished.

        The time counts as 'step', whatever the caller waits for.
        """
        with self.stopwatch.part("step"):
            self.limiter.drain()
