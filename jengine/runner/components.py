"""Components of a run, built from config sections; errors name the section."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jengine.annotations import Count, is_mapping
from jengine.errors import ConfigError, config_path, did_you_mean
from jengine.evaluation.sections import split_settings
from jengine.hooks import Hook
from jengine.hooks.hook_list import HookList
from jengine.logging import AsyncWriter, MessageHub, build_logger
from jengine.model import CastModel, Model, get_precision
from jengine.optim import OptimWrapper, OptimWrapperDict
from jengine.optim.schedules import build_param_schedulers
from jengine.registry import LOG_PROCESSORS, LOOPS, MODELS, STRATEGIES, VISUALIZERS, as_config, check_arguments
from jengine.runner.config_checks import EVAL_LOOPS, is_epoch_based, train_loop_config
from jengine.runner.runner_protocol import RunnerInternals
from jengine.runner.workdir import Identity
from jengine.sharding import default_strategy
from jengine.train.state import MAX_STEP
from jengine.visualization import Visualizer

DEFAULT_HOOKS: dict[str, dict[str, Any]] = dict(
    runtime_info=dict(type="RuntimeInfoHook"),
    timer=dict(type="IterTimerHook"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    logger=dict(type="LoggerHook"),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=1),
)

# --- Model, strategy and logs ---


def build_model(model: Any, precision: Any) -> Model:
    """Return the model, from an instance or a config, under the precision policy."""
    with config_path("model"):
        model = as_config(model)
        if hasattr(model, "items"):
            model = MODELS.build(model)
        missing = [name for name in ("init", "loss", "predict") if not callable(getattr(model, name, None))]
        if missing:
            raise TypeError(
                f"a model must have init, loss and predict, got {type(model).__name__} without {', '.join(missing)}; "
                "wrap a Flax module in LinenModel or NnxModel, and plain functions in FunctionalModel"
            )
    with config_path("precision"):
        policy = get_precision(precision)
    return model if policy is None else CastModel(model, policy)


def build_strategy(parallel: Any) -> Any:
    """Return the strategy, from an instance, a config, or None (see `default_strategy`)."""
    with config_path("parallel"):
        if parallel is None:
            return default_strategy()
        parallel = as_config(parallel)
        strategy = STRATEGIES.build(parallel) if hasattr(parallel, "items") else parallel
        _require(strategy, "compile_train_step", "parallel")
        if jax.process_count() > 1 and not strategy.mesh_shape:
            raise ConfigError(
                f"must have a mesh over the devices of all {jax.process_count()} processes, such as Pjit's, "
                f"got {type(strategy).__name__}, with which each process would train alone"
            )
        return strategy


def build_logs(identity: Identity, level: int | str) -> tuple[logging.Logger, AsyncWriter, MessageHub]:
    """Return the logger, the log writer and the message hub; the log file is opened later."""
    with config_path("log_level"):
        log_file = os.path.join(identity.log_dir, f"{identity.timestamp}.log")
        logger = build_logger(log_file=log_file, level=level, wait=True)
    if identity.resume_note:
        logger.info(identity.resume_note)
    writer = AsyncWriter()
    message_hub = MessageHub.new_instance(identity.experiment_name)
    message_hub.before_read = writer.flush  # reads see all scalars that were queued
    return logger, writer, message_hub


def build_visualizer(visualizer: Any, save_dir: str) -> Any:
    """Return the visualizer, from an instance, a config, or None for JSON lines and PNG files."""
    default = {"type": "LocalVisualizer", "save_dir": save_dir}
    return _build(VISUALIZERS, visualizer, default, "visualizer", "add_scalars")


def build_log_processor(log_processor: Any, train_cfg: Any) -> Any:
    """Return the log processor, from an instance, a config, or None; by default it counts as the training loop does."""
    default = {"type": "LogProcessor", "by_epoch": is_epoch_based(train_cfg)}
    return _build(LOG_PROCESSORS, log_processor, default, "log_processor", "get_log_after_iter")


def _build(registry: Any, value: Any, default: Mapping[str, Any], argument: str, method: str) -> Any:
    """Build a config, completed with the default; or return an instance, which must have the method."""
    with config_path(argument):
        value = as_config(value)
        if value is None or hasattr(value, "items"):
            return registry.build({**default, **dict(value or {})})
        return _require(value, method, argument)


def _require(built: Any, method: str, argument: str) -> Any:
    if not callable(getattr(built, method, None)):
        raise TypeError(f"`{argument}` must be a dict with a type, or have a method {method!r}, got {built!r}")
    return built


# --- Hooks ---


def register_default_hooks(hook_list: HookList, hooks: Any = None) -> None:
    """Register the default hooks; `hooks` replaces them by name, removes them with None, or adds others."""
    if hooks is not None and not hasattr(hooks, "items"):
        raise TypeError(f"default_hooks must be a dict of hooks by name, got {type(hooks).__name__}")
    missing = {name: hook for name, hook in DEFAULT_HOOKS.items() if name not in hook_list.names}
    known = [*DEFAULT_HOOKS, *(name for name in hook_list.names if name not in DEFAULT_HOOKS)]
    for name, hook in {**missing, **dict((hooks or {}).items())}.items():
        with config_path("default_hooks", name):
            if hook is not None:
                _check_hook_name(name, known)
                hook_list.register(hook, name=name)
            elif name not in known:
                raise ValueError(f"a default hook to remove must be one of {', '.join(known)}, got {name!r}")
            else:
                hook_list.remove(name)


def _check_hook_name(name: str, known: Sequence[str]) -> None:
    # `logger_of_mine` is another name, `loger` is a misspelled one
    hint = "" if any(str(name).startswith(other) for other in known) else did_you_mean(str(name), known, cutoff=0.8)
    if hint:
        raise ConfigError(f"`default_hooks` must have other names for further hooks, got {name!r}{hint}")


def register_custom_hooks(hook_list: HookList, hooks: Any = None) -> None:
    """Register further hooks: a list with hooks or configs, or a single one."""
    if isinstance(hooks, str | Hook) or hasattr(hooks, "items"):
        hooks = [hooks]
    if hooks is not None and not isinstance(hooks, list | tuple):
        raise TypeError(f"custom_hooks must be a list of hooks, or one, got {type(hooks).__name__}")
    for i, hook in enumerate(hooks or []):
        with config_path("custom_hooks", i):
            hook_list.register(hook)


def require_drawing(visualizer: Any, hook: Hook) -> None:
    """Raise ConfigError, TypeError or ImportError if a hook passes samples to a visualizer that cannot draw them."""
    if hook.draws_samples:
        _require(visualizer, "add_datasample", "visualizer")
        if isinstance(visualizer, Visualizer):  # a custom class may lack the check
            visualizer.require_drawing(type(hook).__name__)


# --- Loops and schedules ---


def build_train_loop(runner: RunnerInternals, cfg: Any, dataloader: Any) -> Any:
    """Return the training loop, selected by `type`, or by `by_epoch` (default True)."""
    loop = as_config(cfg)
    if hasattr(loop, "items"):
        with config_path("train_cfg"):
            loop = LOOPS.build(train_loop_config(cfg), runner=runner, dataloader=dataloader)
    if math.isfinite(loop.max_iters) and loop.max_iters > MAX_STEP:
        raise ConfigError(
            f"`train_cfg` must have at most {MAX_STEP} iterations, which the int32 `state.step` can count, got "
            f"{loop.max_iters}"
        )
    return loop


def build_eval_loop(runner: RunnerInternals, mode: str, sections: Mapping[str, Any], loaders: Mapping[str, Any]) -> Any:
    """Return the validation or test loop over the dataloaders by evaluation name; `type` is optional."""
    loop, evaluators = as_config(sections[f"{mode}_cfg"]), sections[f"{mode}_evaluator"]
    if not is_mapping(loop):
        return loop
    with config_path(f"{mode}_cfg"):
        settings, own = split_settings(f"{mode}_cfg", loop, list(loaders))
        cfg = {"type": EVAL_LOOPS[mode], **dict(settings), **({"evaluations": own} if own else {})}
        parts = (loaders, evaluators) if list(loaders) != [""] else (loaders[""], evaluators[""])
        return LOOPS.build(cfg, runner=runner, dataloader=parts[0], evaluator=parts[1])


def build_schedulers(train_loop: Any, cfg: Any, optim_wrapper: OptimWrapper | OptimWrapperDict) -> Any:
    """Return the parameter schedulers over the whole training."""
    return build_param_schedulers(
        cfg,
        optim_wrapper,
        max_epochs=train_loop.max_epochs,
        max_iters=None if math.isinf(train_loop.max_iters) else int(train_loop.max_iters),
        epoch_length=train_loop.epoch_length,
        by_epoch_loop=train_loop.by_epoch,
    )


# --- The optimizer ---


def list_wrappers(optim_wrapper: OptimWrapper | OptimWrapperDict) -> list[OptimWrapper]:
    """Return the wrappers of all optimizers."""
    return list(optim_wrapper.values()) if isinstance(optim_wrapper, OptimWrapperDict) else [optim_wrapper]


def check_accumulation(optim_wrapper: OptimWrapper | OptimWrapperDict, module_types: Mapping[str, str]) -> str:
    """Return a warning about BatchNorm under gradient accumulation; empty without both."""
    norms = [path for path, kind in module_types.items() if "BatchNorm" in kind]
    if not (optim_wrapper.accumulates and norms):
        return ""
    counts = max(wrapper.accumulative_counts for wrapper in list_wrappers(optim_wrapper))
    return (
        f"Gradients are accumulated over {counts} iterations, but BatchNorm "
        f"({norms[0]}{f' and {len(norms) - 1} more' if len(norms) > 1 else ''}) computes its statistics from each "
        "small batch: the result differs from that of the large batch."
    )


class AutoScaleLR(NamedTuple):
    """Argument `auto_scale_lr`: whether to scale learning rates, and the batch size that they are for."""

    base_batch_size: Count
    enable: bool = False


def read_auto_scale_lr(cfg: Mapping[str, Any] | None) -> AutoScaleLR:
    """Return the checked argument; None disables it."""
    if cfg is None:
        return AutoScaleLR(1)
    with config_path("auto_scale_lr"):
        if not hasattr(cfg, "items"):
            raise TypeError(f"`auto_scale_lr` must be a dict, got {cfg!r}")
        check_arguments(AutoScaleLR, dict(cfg))
        return AutoScaleLR(**dict(cfg))


def scale_lr(
    optim_wrapper: OptimWrapper | OptimWrapperDict, scaling: AutoScaleLR, batch_size: int, logger: logging.Logger
) -> None:
    """Scale every learning rate by the linear rule: the batch size over all devices, over the base batch size."""
    if not scaling.enable:
        return
    factor = batch_size / scaling.base_batch_size
    for wrapper in list_wrappers(optim_wrapper):
        for group in [*wrapper.param_groups, wrapper.base_param_settings]:
            if group is not None:
                if "lr" not in group:
                    raise ConfigError("`auto_scale_lr.enable` must be False for an optimizer without `lr`, got True")
                group["lr"] = group["lr"] * factor  # before schedulers take their initial values
    if factor != 1.0:
        logger.info(f"Learning rates are scaled by {factor:g} for a batch size of {batch_size}.")
