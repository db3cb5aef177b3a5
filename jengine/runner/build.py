"""Build the objects of a run from the sections of a config, each inside `config_path(section)`."""

from collections.abc import Mapping
from typing import Any

from jengine.annotations import Count
from jengine.errors import ConfigError, config_path
from jengine.hooks import Hook
from jengine.model import CastModel, Model, get_precision
from jengine.optim.schedules import build_param_schedulers
from jengine.registry import LOG_PROCESSORS, LOOPS, MODELS, STRATEGIES, VISUALIZERS, as_config, check_arguments
from jengine.runner.check import train_loop_config
from jengine.runner.hook_list import HookList
from jengine.runner.runner_protocol import Runner
from jengine.sharding import default_strategy

DEFAULT_HOOKS: dict[str, dict[str, Any]] = dict(
    runtime_info=dict(type="RuntimeInfoHook"),
    timer=dict(type="IterTimerHook"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    logger=dict(type="LoggerHook"),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=1),
)


def build_model(model: Any, precision: Any) -> Model:
    """Return the model, from an instance or a config, under the precision policy."""
    with config_path("model"):
        model = as_config(model)
        if hasattr(model, "items"):
            model = MODELS.build(model)
        missing = [name for name in ("init", "loss", "predict") if not callable(getattr(model, name, None))]
        if missing:
            raise TypeError(
                f"a model must have init, loss and predict; {type(model).__name__} lacks {', '.join(missing)}: wrap "
                "a Flax module in LinenModel or NnxModel, and plain functions in FunctionalModel"
            )
    with config_path("precision"):
        policy = get_precision(precision)
    return model if policy is None else CastModel(model, policy)


def build_strategy(parallel: Any) -> Any:
    """Return the strategy, from None (see `default_strategy`), an instance or a config."""
    with config_path("parallel"):
        if parallel is None:
            return default_strategy()
        parallel = as_config(parallel)
        if hasattr(parallel, "items"):
            return STRATEGIES.build(parallel)
        return _require(parallel, "compile_train_step", "parallel")


def _require(built: Any, method: str, argument: str) -> Any:
    """Return an object that the user built, if it has a method that its kind requires."""
    if not callable(getattr(built, method, None)):
        raise TypeError(f"`{argument}` must be a dict with a type, or have a method {method!r}, got {built!r}")
    return built


def build_hooks(default_hooks: Any, custom_hooks: Any) -> HookList:
    """Return the default hooks as changed by the config, followed by the custom ones.

    Args:
      default_hooks: by name: a config or a hook replaces the default of that name or is added; None removes
        the default.
      custom_hooks: a list of configs or hooks, or a single one.

    Raises:
      TypeError: not of that form. ValueError: None under a name that is no default hook.
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
                known = ", ".join(DEFAULT_HOOKS)
                raise ValueError(f"None removes a default hook: its name must be one of {known}, got {name!r}")
    if isinstance(custom_hooks, str) or hasattr(custom_hooks, "items") or isinstance(custom_hooks, Hook):
        custom_hooks = [custom_hooks]
    if custom_hooks is not None and not isinstance(custom_hooks, list | tuple):
        raise TypeError(f"custom_hooks must be a list of hooks, or one, got {type(custom_hooks).__name__}")
    for i, hook in enumerate(custom_hooks or []):
        with config_path("custom_hooks", i):
            hooks.register(hook)
    return hooks


def build_visualizer(visualizer: Any, save_dir: str) -> Any:
    """Return the visualizer, from None (scalars as JSON lines), an instance or a config."""
    with config_path("visualizer"):
        visualizer = as_config(visualizer)
        if visualizer is None or hasattr(visualizer, "items"):
            cfg = dict(visualizer or {})
            return VISUALIZERS.build({"type": "Visualizer", "save_dir": save_dir, **cfg})
        return _require(visualizer, "add_scalars", "visualizer")


def build_log_processor(log_processor: Any, *, by_epoch: bool) -> Any:
    """Return the log processor, from None, an instance or a config; it counts as the training loop does."""
    with config_path("log_processor"):
        log_processor = as_config(log_processor)
        if log_processor is None or hasattr(log_processor, "items"):
            return LOG_PROCESSORS.build({"type": "LogProcessor", "by_epoch": by_epoch, **dict(log_processor or {})})
        return _require(log_processor, "get_log_after_iter", "log_processor")


def build_train_loop(runner: Runner, cfg: Any, dataloader: Any) -> Any:
    """Return the training loop, chosen by `type`, or by `by_epoch` (default True)."""
    cfg = as_config(cfg)
    if not hasattr(cfg, "items"):
        return cfg
    with config_path("train_cfg"):
        return LOOPS.build(train_loop_config(cfg), runner=runner, dataloader=dataloader)


def build_schedulers(train_loop: Any, cfg: Any, optim_wrapper: Any) -> Any:
    """Return the schedulers of `cfg` for the hyperparameters of `optim_wrapper`, over a whole training loop."""
    return build_param_schedulers(
        cfg,
        optim_wrapper,
        max_epochs=train_loop.max_epochs,
        max_iters=train_loop.max_iters,
        epoch_length=len(train_loop.dataloader),
        by_epoch_loop=train_loop.by_epoch,
    )


def build_eval_loop(runner: Runner, mode: str, cfg: Any, dataloader: Any, evaluator: Any) -> Any:
    """Return the validation or test loop; `type` is optional."""
    cfg = as_config(cfg)
    if not hasattr(cfg, "items"):
        return cfg
    with config_path(f"{mode}_cfg"):
        kind = {"val": "ValLoop", "test": "TestLoop"}[mode]
        return LOOPS.build({"type": kind, **dict(cfg)}, runner=runner, dataloader=dataloader, evaluator=evaluator)


def map_over(axis_name: str | None, optim_wrapper: Any) -> None:
    """Set the mapped axis of the strategy's step on every wrapper, if there is one."""
    for wrapper in optim_wrapper.values() if isinstance(optim_wrapper, Mapping) else [optim_wrapper]:
        wrapper.axis_name = axis_name or wrapper.axis_name


def warnings_of(optim_wrapper: Any, module_types: Mapping[str, str]) -> list[str]:
    """Return warnings about the use of this optimizer with this model, to log before training."""
    if getattr(optim_wrapper, "accumulative_counts", 1) == 1:
        return []
    norms = [path for path, kind in module_types.items() if "BatchNorm" in kind]
    if not norms:
        return []
    return [
        f"Gradients are accumulated over {optim_wrapper.accumulative_counts} iterations, but BatchNorm "
        f"({norms[0]}{f' and {len(norms) - 1} more' if len(norms) > 1 else ''}) takes its statistics from each "
        "small batch: the result is not that of the large batch."
    ]


def scale_lr(optim_wrapper: Any, auto_scale_lr: Any, batch_size: int) -> float:
    """Scale every learning rate by the linear rule: real batch size over the one that the config was made for.

    Args:
      optim_wrapper: its groups are scaled, including the one that holds the base settings.
      auto_scale_lr: None, or `dict(enable=bool, base_batch_size=int)`.
      batch_size: examples per iteration over all devices.

    Returns:
      The factor.
    """
    if auto_scale_lr is None:
        return 1.0
    enable, base = read_auto_scale_lr(auto_scale_lr)
    if not enable:
        return 1.0
    factor = batch_size / base
    for wrapper in optim_wrapper.values() if isinstance(optim_wrapper, Mapping) else [optim_wrapper]:
        for group in [*wrapper.param_groups, wrapper.base_param_settings]:
            if group is not None:
                if "lr" not in group:
                    raise ConfigError("`auto_scale_lr.enable` must be False where the optimizer has no `lr`, got True")
                group["lr"] = group["lr"] * factor
    return factor


def read_auto_scale_lr(cfg: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether learning rates are scaled, and the batch size that they are for."""
    with config_path("auto_scale_lr"):
        if not hasattr(cfg, "items"):
            raise TypeError(f"`auto_scale_lr` must be a dict, got {cfg!r}")
        check_arguments(_auto_scale_lr, dict(cfg))
        return _auto_scale_lr(**dict(cfg))


def _auto_scale_lr(base_batch_size: Count, enable: bool = False) -> tuple[bool, int]:
    return enable, base_batch_size


class NoOptimizer:
    """Replace the optimizer wrapper where no optimizer is needed."""

    def init(self, params: Any) -> None:
        """Return None: there is no state."""
        return None
