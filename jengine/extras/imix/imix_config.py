"""Conversion from a config in iMIX's style to Runner arguments."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from jengine.config.annotations import Count, check_values, is_mapping, parameters_of
from jengine.config.containers import check_keys
from jengine.config.errors import ArgumentError, ConfigError, config_path
from jengine.extras.imix.checkpoint import CheckPointHook
from jengine.extras.imix.optimizer import Fp16OptimizerHook, OptimizerHook


class _Sections(NamedTuple):
    """Config keys and types."""

    model: Any
    work_dir: str | os.PathLike[str]
    train_data: Mapping[str, Any]
    optimizer: Any
    test_data: Mapping[str, Any] | None = None
    optimizer_config: Mapping[str, Any] | None = None
    lr_config: Mapping[str, Any] | None = None
    momentum_config: Mapping[str, Any] | None = None
    fp16: Mapping[str, Any] | bool | None = None
    gradient_accumulation_steps: Count = 1
    is_lr_accumulation: bool = True
    total_epochs: Count | None = None
    max_iter: Count | None = None
    by_iter: bool | None = None
    log_config: Mapping[str, Any] | None = None
    checkpoint_config: Mapping[str, Any] | None = None
    is_run_eval: bool = True
    eval_iter_period: Count | None = None
    custom_hooks: Any = None
    load_from: Any = None
    resume_from: Any = None
    seed: int | None = 0


KEYS = _Sections._fields
_DATA_KEYS = ("samples_per_gpu", "workers_per_gpu", "data", "sampler")
_SECTION_KEYS = {
    "optimizer_config": ("grad_clip",),
    "log_config": ("period", "hooks"),
    "checkpoint_config": tuple(name for name in parameters_of(CheckPointHook) if name != "self"),
}
_REPLACED = ("timer", "logger", "param_scheduler", "checkpoint")


def from_imix(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config in iMIX's style to the arguments of a Runner.

    iMIX's hooks replace the default hooks for timing, logging, schedules and checkpoints. An
    optimizer wrapper with `OptimizerHook`'s settings makes the updates. Model, data and metrics are
    jengine's, under iMIX's keys.

    >>> data = dict(samples_per_gpu=8, data=dict(type="my_data.Questions"))
    >>> cfg = from_imix(
    ...     dict(
    ...         model=dict(type="my_model.Vqa"),
    ...         work_dir="runs/vqa",
    ...         train_data=data,
    ...         max_iter=1000,
    ...         optimizer=dict(type="BertAdam", lr=1e-3),
    ...     )
    ... )
    >>> cfg["train_cfg"]
    {'by_epoch': False, 'max_iters': 1000, 'val_begin': 1001}

    Args:
      cfg: `model`, `work_dir`, `optimizer`; `train_data` and `test_data`, each
        `dict(samples_per_gpu=, data=dict(...), workers_per_gpu=0)`, the latter with
        `post_processor=dict(metrics=[...])`; `total_epochs`, or `max_iter` with or without
        `by_iter=True`; and any of `optimizer_config=dict(grad_clip=)`, `fp16`,
        `gradient_accumulation_steps`, `is_lr_accumulation`, `lr_config=dict(policy=, ...)`,
        `momentum_config=dict(policy=, ...)`, `log_config=dict(period=, hooks=[...])`,
        `checkpoint_config`, `is_run_eval`, `eval_iter_period`, `custom_hooks`, `load_from`,
        `resume_from`, `seed`. It is not modified.

    Returns:
      A plain dict for `Runner.from_cfg`, or for a config file to return.

    Raises:
      ConfigError: a key is unknown or missing, or the length is given in both epochs and
        iterations.
      ArgumentError: `custom_hooks` is not a list.
    """
    cfg = dict(cfg.items())
    check_keys(cfg, KEYS)
    for name in ("model", "work_dir", "train_data", "optimizer"):
        if cfg.get(name) is None:
            raise ConfigError(f"a config in iMIX's style must have the key {name!r}, got none")
    check_values("", _Sections, cfg)
    for name, known in _SECTION_KEYS.items():
        with config_path(name):
            check_keys(dict(cfg.get(name) or {}), known)
    sections = _Sections(**cfg)
    hooks = sections.custom_hooks
    if hooks is not None and not isinstance(hooks, list | tuple):
        raise ArgumentError(f"`custom_hooks` must be a list of hooks, got {type(hooks).__name__}")
    optimizer, wrapper_options = _optimizer_hook(sections)
    lr, momentum = (_schedule(name, cfg.get(name)) for name in ("lr_config", "momentum_config"))
    arguments: dict[str, Any] = dict(
        model=sections.model,
        work_dir=sections.work_dir,
        train_dataloader=_dataloader("train_data", sections.train_data),
        train_cfg=_train_cfg(sections),
        optim_wrapper={**wrapper_options, **_split_optimizer(sections.optimizer)},
        param_scheduler=[schedule for schedule in (lr, momentum) if schedule],
        default_hooks=dict.fromkeys(_REPLACED),
        custom_hooks=[optimizer, *_hooks(sections, lr, momentum), *(hooks or [])],
        load_from=sections.load_from,
        resume=sections.resume_from or False,
        randomness=dict(seed=sections.seed),
    )
    if sections.test_data is None or not sections.is_run_eval:
        return arguments
    metrics = dict(sections.test_data.get("post_processor") or {}).get("metrics")
    if not metrics:
        raise ConfigError(
            "`test_data` must have post_processor=dict(metrics=[...]), got no metrics"
        )
    loader = _dataloader("test_data", sections.test_data)
    for mode in ("val", "test"):  # both on the test data
        arguments |= {
            f"{mode}_dataloader": dict(loader),
            f"{mode}_cfg": {},
            f"{mode}_evaluator": metrics,
        }
    return arguments


def _optimizer_hook(cfg: _Sections) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the hook that describes the updates, and the arguments for the
    optimizer wrapper.
    """
    options: dict[str, Any] = {
        "grad_clip": dict(cfg.optimizer_config or {}).get("grad_clip"),
        "gradient_accumulation_steps": cfg.gradient_accumulation_steps,
    }
    hook: type[OptimizerHook] = OptimizerHook
    if cfg.fp16 is not None and cfg.fp16 is not False:
        options["grad_scaler_config"] = None if cfg.fp16 is True else dict(cfg.fp16.items())
        hook = Fp16OptimizerHook
    with config_path("optimizer_config"):
        return {"type": hook.__name__, **options}, hook(**options).wrapper_options()


def _split_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return `optimizer`, `constructor` and `paramwise_cfg`.

    IMIX has the last two inside the first.
    """
    if not is_mapping(optimizer):
        return {"optimizer": optimizer}
    arguments = dict(optimizer.items())
    names: list[str] = [name for name in ("constructor", "paramwise_cfg") if name in arguments]
    rules = {name: arguments.pop(name) for name in names}
    if rules or "training_encoder_lr_multiply" in arguments:
        rules.setdefault("constructor", "DefaultOptimizerConstructor")  # iMIX's
    return {**rules, "optimizer": arguments}


def _schedule(name: str, cfg: Mapping[str, Any] | None) -> dict[str, Any]:
    schedule = dict(cfg or {})
    if schedule and schedule.get("policy") is None:
        raise ConfigError(
            f"`{name}` must have a `policy`, the type of its scheduler, got {sorted(schedule)}"
        )
    return {"type": schedule.pop("policy"), **schedule} if schedule else {}


def _hooks(
    cfg: _Sections, lr: Mapping[str, Any], momentum: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return iMIX's default hooks after the optimizer hook, in iMIX's order."""
    log = {"period": 50, **dict(cfg.log_config or {})}
    warmup = lr.get("warmup_iters", lr.get("warmup_iterations", 0))
    hooks: list[dict[str, Any]] = [
        *(
            dict(type=hook, is_lr_accumulation=cfg.is_lr_accumulation)
            for hook in ("LRSchedulerHook", *(["MomentumSchedulerHook"] if momentum else []))
        ),
        dict(type="IterationTimerHook", warmup_iter=warmup),
        dict(type="PeriodicLogger", loggers=log.get("hooks"), log_config_period=log["period"]),
        {"type": "CheckPointHook", **dict(cfg.checkpoint_config or {})},
    ]
    if cfg.test_data is not None and cfg.is_run_eval:
        # iMIX evaluates VisDial by NDCG alone.
        is_visdial = "VisDial" in str(dict(cfg.test_data.get("data") or {}).get("type"))
        metrics = {"metrics": ["ndcg"]} if is_visdial else {}
        hooks.append({"type": "EvaluateHook", "eval_iter_period": cfg.eval_iter_period, **metrics})
    return hooks


def _train_cfg(cfg: _Sections) -> dict[str, Any]:
    epochs = cfg.total_epochs
    iterations = cfg.max_iter
    if (epochs is None) == (iterations is None):
        raise ConfigError(
            f"exactly one of `total_epochs` and `max_iter` must be given, got {epochs!r} and "
            f"{iterations!r}"
        )
    if cfg.by_iter not in (None, iterations is not None):
        raise ConfigError(
            f"`by_iter` must be True with max_iter, False with total_epochs, got {cfg.by_iter!r}"
        )
    # `val_begin` is after the end, because EvaluateHook runs the validations.
    if iterations is not None:
        return dict(by_epoch=False, max_iters=iterations, val_begin=iterations + 1)
    return dict(by_epoch=True, max_epochs=epochs, val_begin=(epochs or 0) + 1)


def _dataloader(name: str, cfg: Any) -> dict[str, Any]:
    with config_path(name):
        data = {key: value for key, value in cfg.items() if key != "post_processor"}
        check_keys(data, _DATA_KEYS)
        for key in ("samples_per_gpu", "data"):
            if key not in data:
                raise ConfigError(f"`{name}` must have the key {key!r}, got {sorted(data)}")
    sampler = {} if data.get("sampler") is None else {"sampler": data["sampler"]}
    return dict(
        batch_size=data["samples_per_gpu"],
        num_workers=data.get("workers_per_gpu", 0),
        dataset=data["data"],
        **sampler,
    )
