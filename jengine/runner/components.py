"""Components of a run, built from config sections; errors name the section."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jengine.checkpoint.checkpointer import Checkpointer
from jengine.checkpoint.directories import CheckpointDirectories
from jengine.checkpoint.identity import Identity
from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.plugins import provided
from jengine.config.registry import (
    LOG_PROCESSORS,
    LOOPS,
    STRATEGIES,
    VISUALIZERS,
    Config,
    Registry,
    as_config,
)
from jengine.config.storage import LocalFiles, find_scheme
from jengine.hooks.hook import Hook
from jengine.hooks.run import Run
from jengine.hooks.run_record import GroupTable
from jengine.hooks.runner_protocol import Loader, RunnerProtocol, TrainLoopProtocol
from jengine.logging.async_writer import AsyncWriter
from jengine.logging.console import build_logger
from jengine.logging.message_hub import MessageHub
from jengine.logging.processor import LogProcessor
from jengine.logging.stopwatch import Stopwatch
from jengine.logging.visualizer import Visualizer
from jengine.optim.batch_size import scale_lr, scale_with_batch
from jengine.optim.schedules.scheduler import Schedulers
from jengine.optim.schedules.scheduler_builder import build_param_schedulers
from jengine.optim.wrapper_dict import AnyWrapper
from jengine.parallel.interrupts import Interrupts
from jengine.parallel.processes import ProcessGroup
from jengine.parallel.strategy import DispatchLimiter, Strategy, default_strategy
from jengine.runner.config_checks import LoopSection, is_epoch_based
from jengine.train.state import MAX_STEP


def build_strategy(parallel: Strategy | Config | None) -> Any:
    """Return the strategy from an instance, a config, or None (see `default_strategy`)."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # JAX asserts where it has no plugin
        raise ConfigError(
            "JAX must have devices of JAX_PLATFORMS, as set in the environment, got none of "
            f"{os.environ.get('JAX_PLATFORMS')!r}: install jax with them, such as 'jax[cuda13]', "
            f"or unset it; {error}".removesuffix("; ")
        ) from None
    with config_path("parallel"):
        if parallel is None:
            return default_strategy()
        strategy: Any = as_config(parallel)
        strategy = STRATEGIES.build(strategy) if is_mapping(strategy) else strategy
        _require(strategy, "compile_train_step", "parallel")
        if (count := jax.process_count()) > 1 and not strategy.mesh_shape:
            raise ConfigError(
                f"must have a mesh over the devices of all {count} processes, such as Pjit's, got "
                f"{type(strategy).__name__}, with which each process would train alone"
            )
        return strategy


def build_run(
    identity: Identity,
    arguments: Mapping[str, Any],
    constructor: Callable[..., Any],
    subclass: str,
    processes: ProcessGroup,
    strategy: Strategy,
    visualizer: Visualizer,
    hooks: Iterable[Hook],
) -> Run:
    """Return what all parts of the run share; the files are opened later.

    Args:
      identity: the name, the seed and the directories.
      arguments, constructor, subclass: see `Run`.
      processes, strategy, visualizer: of the run.
      hooks: may write checkpoints to directories of their own.
    """
    directories = CheckpointDirectories(list_directories(identity.work_dir, hooks), identity.run_id)
    files = LocalFiles()
    if (scheme := find_scheme(identity.work_dir)) is not None:
        check = functools.partial(directories.check_locks, before_write=True)
        files = scheme.send_files(identity.local_dir, identity.work_dir, check)

    def send_files() -> None:
        directories.check_locks(before_write=True)
        files.send_all()

    log_processor = build_log_processor(arguments["log_processor"], arguments["train_cfg"])
    with config_path("log_level"):
        logger = build_logger(level=arguments["log_level"])
    writer = AsyncWriter()
    message_hub = MessageHub.new_instance(identity.experiment_name)
    message_hub.before_read = writer.flush  # reads see all scalars that were queued
    if isinstance(log_processor, LogProcessor):  # else one of the user's
        message_hub.keep(log_processor.windows)
    return Run(
        **vars(identity),
        arguments=arguments,
        constructor=constructor,
        subclass=subclass,
        processes=processes,
        strategy=strategy,
        limiter=DispatchLimiter(strategy.max_in_flight),
        interrupts=Interrupts(processes),
        stopwatch=Stopwatch(),
        logger=logger,
        log_writer=writer,
        log_processor=log_processor,
        message_hub=message_hub,
        visualizer=visualizer,
        directories=directories,
        files=files,
        send_files=send_files,
        # before a seal, which must not be ahead of the log
        checkpointer=Checkpointer(identity.work_dir, identity.run_id, before_seal=send_files),
    )


def list_directories(work_dir: str, hooks: Iterable[Hook]) -> list[str]:
    """Return the work dir and the other directories to which hooks write checkpoints."""
    return [work_dir, *(path for hook in hooks for path in hook.list_directories(work_dir))]


def build_visualizer(visualizer: Visualizer | Config | None, save_dir: str) -> Visualizer:
    """Return the visualizer, from an instance, a config, or None for JSON lines and PNG files."""
    default = {"type": next(iter(provided("default_visualizer")), "Visualizer")}
    default["save_dir"] = save_dir
    return _build(VISUALIZERS, visualizer, default, "visualizer", "add_scalars")


def build_log_processor(
    log_processor: LogProcessor | Config | None, train_cfg: LoopSection | None
) -> LogProcessor:
    """Return the log processor, from an instance, a config, or None.

    By default it counts as the training loop does.
    """
    default = {"type": "LogProcessor", "by_epoch": is_epoch_based(train_cfg)}
    return _build(LOG_PROCESSORS, log_processor, default, "log_processor", "get_log_after_iter")


def _build(
    registry: Registry, value: Any, default: Mapping[str, Any], argument: str, method: str
) -> Any:
    """Build a config, completed with the default.

    Or return an instance, which must have the method.
    """
    with config_path(argument):
        value = as_config(value)
        if value is None or hasattr(value, "items"):
            return registry.build({**default, **dict(value or {})})  # `type` may be left out
        return _require(value, method, argument)


def _require(built: Any, method: str, argument: str) -> Any:
    if not callable(getattr(built, method, None)):
        raise TypeError(
            f"`{argument}` must be a dict with a type, or have a method {method!r}, got {built!r}"
        )
    return built


def has_own_step(runner: RunnerProtocol) -> bool:
    """Return whether a subclass of the Runner overrides `train_step`."""
    return type(runner).train_step.__module__ != "jengine.runner.runner"


def build_train_loop(runner: RunnerProtocol, cfg: LoopSection, dataloader: Loader) -> Any:
    """Return the training loop from its section, which `read_sections` has completed."""
    loop: Any = cfg
    if is_mapping(cfg):
        with config_path("train_cfg"):
            loop = LOOPS.build(cfg, runner=runner, dataloader=dataloader)
    if has_own_step(runner) and loop.steps_per_call > 1:
        raise ConfigError(
            "`train_cfg.steps_per_call` must be 1 for a Runner with a `train_step` of its own, "
            f"which chunks would not call, got {loop.steps_per_call}; for chunks write the step "
            "as a `train_step` of the model"
        )
    # epochs are iterations only with the data
    if MAX_STEP < loop.max_iters < math.inf:
        raise ConfigError(
            f"`train_cfg` must be at most {MAX_STEP} iterations, as the device counts them in 32 "
            f"bits, got {loop.max_iters}"
        )
    return loop


def build_eval_loop(
    runner: RunnerProtocol, mode: str, sections: Mapping[str, Any], loaders: Mapping[str, Loader]
) -> Any:
    """Return the validation or test loop over the dataloaders by evaluation name."""
    loop = sections[f"{mode}_cfg"]
    if not is_mapping(loop):
        return loop
    evaluators = sections[f"{mode}_evaluator"]
    parts = (loaders, evaluators) if list(loaders) != [""] else (loaders[""], evaluators[""])
    with config_path(f"{mode}_cfg"):
        return LOOPS.build(loop, runner=runner, dataloader=parts[0], evaluator=parts[1])


def build_schedulers(
    run: Run, loop: TrainLoopProtocol, sections: Mapping[str, Any], wrapper: AnyWrapper
) -> tuple[GroupTable, Schedulers]:
    """Return the table of the parameter groups, and the schedulers over the whole training.

    The table is from before schedulers change the groups.
    """
    loader = loop.dataloader
    scaling = sections["auto_scale_lr"]
    shards = run.strategy.data_shard.for_axis(loader.batch_axis).count
    scale_lr(wrapper, scaling, (loader.batch_size or 0) * shards, run.logger)
    table = wrapper.group_table()
    schedulers = build_param_schedulers(
        sections["param_scheduler"],
        wrapper,
        max_epochs=loop.max_epochs,
        max_iters=None if math.isinf(loop.max_iters) else int(loop.max_iters),
        epoch_length=loop.epoch_length,
        by_epoch_loop=loop.by_epoch,
    )
    scale_with_batch(schedulers, wrapper, scaling, loader.batch_sizes)
    return table, schedulers
