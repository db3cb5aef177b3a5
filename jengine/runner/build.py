"""Build the objects of a run from the sections of a config; errors name the section."""

from collections.abc import Mapping, Sequence
from typing import Any

from jengine.errors import ConfigError, config_path
from jengine.hooks import Hook
from jengine.model import CastModel, Model, get_precision
from jengine.optim.schedules import build_param_schedulers
from jengine.registry import LOG_PROCESSORS, LOOPS, MODELS, STRATEGIES, VISUALIZERS, check_arguments
from jengine.runner.hook_list import HookList
from jengine.runner.runner_protocol import Runner
from jengine.sharding import default_strategy

_SECTIONS = {
    "train": ("train_dataloader", "train_cfg", "optim_wrapper"),
    "val": ("val_dataloader", "val_cfg", "val_evaluator"),
    "test": ("test_dataloader", "test_cfg", "test_evaluator"),
}

DEFAULT_HOOKS: dict[str, dict[str, Any]] = dict(
    runtime_info=dict(type="RuntimeInfoHook"),
    timer=dict(type="IterTimerHook"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    logger=dict(type="LoggerHook"),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=1),
)


def check_sections(sections: Mapping[str, Any]) -> None:
    """Check that each of training, validation and test is complete or absent.

    Raises:
      ConfigError: a section is incomplete.
    """
    for mode, names in _SECTIONS.items():
        missing = [name for name in names if sections[name] is None]
        if missing and len(missing) < len(names):
            given = [name for name in names if name not in missing]
            raise ConfigError(
                f"the {mode} sections must be complete or absent, "
                f"got {', '.join(given)} without {', '.join(missing)}; give all of {', '.join(names)}, or none"
            )
    if sections["param_scheduler"] is not None and sections["optim_wrapper"] is None:
        raise ConfigError("param_scheduler needs an optim_wrapper")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Check that an argument is one of a few values.

    Raises:
      ConfigError: it is not.
    """
    with config_path(name):
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def build_model(model: Any, precision: Any) -> Model:
    """Return the model, from an instance or a config, under the precision policy."""
    with config_path("model"):
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
        return STRATEGIES.build(parallel) if hasattr(parallel, "items") else parallel


def build_hooks(default_hooks: Any, custom_hooks: Any) -> HookList:
    """Return the default hooks as changed by the config, followed by the custom ones.

    Args:
      default_hooks: configs or hooks by name; each replaces the default of its name or is added, and None removes
        the default.
      custom_hooks: a list of configs or hooks, or a single one.

    Raises:
      TypeError: an argument of another type. ValueError: None for a name that is not a default hook.
    """
    hooks = HookList()
    if default_hooks is not None and not hasattr(default_hooks, "items"):
        raise TypeError(f"default_hooks must be a dict of hooks by name, got {type(default_hooks).__name__}")
    merged: dict[str, Any] = {**DEFAULT_HOOKS, **dict((default_hooks or {}).items())}
    for name, hook in merged.items():
        with config_path("default_hooks", name):
            if hook is not None:
                hooks.register(hook)
            elif name not in DEFAULT_HOOKS:
                names = ", ".join(DEFAULT_HOOKS)
                raise ValueError(f"a default hook to remove must be one of {names}, got {name!r}")
    if hasattr(custom_hooks, "items") or isinstance(custom_hooks, Hook):
        custom_hooks = [custom_hooks]
    if custom_hooks is not None and not isinstance(custom_hooks, list | tuple):
        raise TypeError(f"custom_hooks must be a list of hooks, or one, got {type(custom_hooks).__name__}")
    for i, hook in enumerate(custom_hooks or []):
        with config_path("custom_hooks", i):
            hooks.register(hook)
    return hooks


def build_visualizer(visualizer: Any, save_dir: str) -> Any:
    """Return the visualizer, from an instance, a config, or None for scalars as JSON lines."""
    with config_path("visualizer"):
        if visualizer is None or hasattr(visualizer, "items"):
            cfg = dict(visualizer or {})
            return VISUALIZERS.build({"type": "Visualizer", "save_dir": save_dir, **cfg})
        return visualizer


def build_log_processor(log_processor: Any, *, by_epoch: bool) -> Any:
    """Return the log processor, from an instance, a config, or None; by default it counts as the training loop does."""
    with config_path("log_processor"):
        if log_processor is None or hasattr(log_processor, "items"):
            return LOG_PROCESSORS.build({"type": "LogProcessor", "by_epoch": by_epoch, **dict(log_processor or {})})
        return log_processor


def build_train_loop(runner: Runner, cfg: Any, dataloader: Any) -> Any:
    """Return the training loop, selected by `type`, or by `by_epoch` (default True)."""
    if not hasattr(cfg, "items"):
        return cfg
    with config_path("train_cfg"):
        cfg = dict(cfg)
        if "type" in cfg and "by_epoch" in cfg:
            raise ConfigError("train_cfg must have a type or by_epoch, got both; remove one of them")
        if "type" not in cfg:
            cfg["type"] = "EpochBasedTrainLoop" if cfg.pop("by_epoch", True) else "IterBasedTrainLoop"
        return LOOPS.build(cfg, runner=runner, dataloader=dataloader)


def build_schedulers(train_loop: Any, cfg: Any, optim_wrapper: Any) -> Any:
    """Return the schedulers of `cfg` for the hyperparameters of `optim_wrapper`, over all of training."""
    return build_param_schedulers(
        cfg,
        optim_wrapper,
        max_epochs=train_loop.max_epochs,
        max_iters=train_loop.max_iters,
        epoch_length=len(train_loop.dataloader),
        by_epoch_loop=train_loop.by_epoch,
    )


def check_train_loop(cfg: Any) -> None:
    """Check the arguments of the training loop before anything is built from the data.

    Raises:
      TypeError: unknown or missing arguments.
    """
    if hasattr(cfg, "items"):
        with config_path("train_cfg"):
            arguments = {k: v for k, v in cfg.items() if k != "by_epoch"}
            kind = arguments.pop("type", "EpochBasedTrainLoop" if cfg.get("by_epoch", True) else "IterBasedTrainLoop")
            entry = LOOPS.get(kind) if isinstance(kind, str) else kind
            check_arguments(entry, {"runner": None, "dataloader": None, **arguments})


def build_eval_loop(runner: Runner, mode: str, cfg: Any, dataloader: Any, evaluator: Any) -> Any:
    """Return the validation or test loop; `type` is optional."""
    from jengine.evaluation import build_evaluator

    if not hasattr(cfg, "items"):
        return cfg
    with config_path(f"{mode}_evaluator"):
        evaluator = build_evaluator(evaluator)
    with config_path(f"{mode}_cfg"):
        kind = {"val": "ValLoop", "test": "TestLoop"}[mode]
        return LOOPS.build({"type": kind, **dict(cfg)}, runner=runner, dataloader=dataloader, evaluator=evaluator)


def is_epoch_based(train_cfg: Any) -> bool:
    """Return whether the training loop of `train_cfg` counts epochs; True for a run without training."""
    if hasattr(train_cfg, "items"):
        return train_cfg.get("by_epoch", train_cfg.get("type") != "IterBasedTrainLoop")
    return train_cfg is None or train_cfg.by_epoch


def set_axis_name(axis_name: str | None, optim_wrapper: Any) -> None:
    """Set the mapped axis of the strategy's step, if there is one, on every wrapper."""
    for wrapper in _list_wrappers(optim_wrapper):
        wrapper.axis_name = axis_name or wrapper.axis_name


def check_accumulation(optim_wrapper: Any, module_types: Mapping[str, str]) -> str:
    """Return a warning about BatchNorm under gradient accumulation, to log before training; empty without both."""
    norms = [path for path, kind in module_types.items() if "BatchNorm" in kind]
    if not (optim_wrapper.accumulates and norms):
        return ""
    return (
        f"Gradients are accumulated over {optim_wrapper.accumulative_counts} iterations, but BatchNorm "
        f"({norms[0]}{f' and {len(norms) - 1} more' if len(norms) > 1 else ''}) computes its statistics from each "
        "small batch: the result differs from that of the large batch."
    )


def scale_lr(optim_wrapper: Any, auto_scale_lr: Any, batch_size: int) -> float:
    """Scale every learning rate by the linear rule: the actual batch size over that of the config's learning rates.

    Args:
      optim_wrapper: its groups are scaled, including the group of base settings.
      auto_scale_lr: None, or `dict(enable=bool, base_batch_size=int)`.
      batch_size: examples per iteration over all devices.

    Returns:
      The factor.
    """
    if auto_scale_lr is None:
        return 1.0
    with config_path("auto_scale_lr"):
        cfg = dict(auto_scale_lr)
        check_arguments(_auto_scale_lr, cfg)
        enable, base = _auto_scale_lr(**cfg)
    if not enable:
        return 1.0
    factor = batch_size / base
    for wrapper in _list_wrappers(optim_wrapper):
        for group in [*wrapper.param_groups, wrapper.base_param_settings]:
            if group is not None:
                if "lr" not in group:
                    raise ConfigError("`auto_scale_lr.enable` must be False for an optimizer without `lr`, got True")
                group["lr"] = group["lr"] * factor
    return factor


def _list_wrappers(optim_wrapper: Any) -> list[Any]:
    """Return the wrappers of all optimizers."""
    return list(optim_wrapper.values()) if isinstance(optim_wrapper, Mapping) else [optim_wrapper]


def _auto_scale_lr(base_batch_size: int, enable: bool = False) -> tuple[bool, int]:
    if base_batch_size < 1:
        raise ValueError(f"base_batch_size must be a positive number of examples, got {base_batch_size}")
    return enable, base_batch_size
