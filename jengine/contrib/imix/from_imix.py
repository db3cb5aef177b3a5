"""A config in iMIX's style as the arguments of a Runner."""

from collections.abc import Mapping
from typing import Any

from jengine.config import check_keys
from jengine.contrib.imix.optimizer import Fp16OptimizerHook, OptimizerHook
from jengine.errors import ConfigError, config_path

_KEYS = (
    "model", "work_dir", "train_data", "test_data", "optimizer", "optimizer_config", "lr_config", "momentum_config",
    "fp16", "gradient_accumulation_steps", "is_lr_accumulation", "total_epochs", "max_iter", "by_iter", "log_config",
    "checkpoint_config", "is_run_eval", "eval_iter_period", "custom_hooks", "load_from", "resume_from", "seed",
)  # fmt: skip
_DATA_KEYS = ("samples_per_gpu", "workers_per_gpu", "data", "sampler")
_REPLACED = ("timer", "logger", "param_scheduler", "checkpoint")


def from_imix(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Runner that trains as a config in iMIX's style says.

    iMIX's hooks take the place of the default hooks for timing, logging, schedules and checkpoints. Updates are made by
    an optimizer wrapper, as `OptimizerHook` describes it. Model, data and metrics are jengine's own, under iMIX's keys.

    Args:
      cfg: `model`, `work_dir`, `optimizer`; `train_data` and `test_data`, each `dict(samples_per_gpu=, data=dict(...),
        workers_per_gpu=0)`, the latter with `post_processor=dict(metrics=[...])`; `total_epochs`, or `max_iter` with or
        without `by_iter=True`; and any of `optimizer_config=dict(grad_clip=)`, `fp16`, `gradient_accumulation_steps`,
        `is_lr_accumulation`, `lr_config=dict(policy=, ...)`, `momentum_config` likewise,
        `log_config=dict(period=, hooks=[...])`, `checkpoint_config`, `is_run_eval`, `eval_iter_period`, `custom_hooks`,
        `load_from`, `resume_from`, `seed`. It is left as it was.

    Returns:
      The arguments, a plain dict; `Runner.from_cfg` takes it, and a config file may return it.

    Raises:
      ConfigError: an unknown key, one that is missing, or a length in both epochs and iterations.
      AssertionError: `custom_hooks` is no list.
    """
    cfg = dict(cfg.items())
    check_keys(cfg, _KEYS)
    for name in ("model", "work_dir", "train_data", "optimizer"):
        if cfg.get(name) is None:
            raise ConfigError(f"a config in iMIX's style needs the key {name!r}")
    has_test = cfg.get("test_data") is not None and cfg.get("is_run_eval", True)
    optimizer = _optimizer_hook(cfg)
    schedules = {name: _schedule(name, cfg) for name in ("lr_config", "momentum_config")}
    arguments: dict[str, Any] = dict(
        model=cfg["model"],
        work_dir=cfg["work_dir"],
        train_dataloader=_dataloader("train_data", cfg["train_data"]),
        train_cfg=_train_cfg(cfg),
        optim_wrapper={**_hook(optimizer).wrapper_options(), **_optimizer_and_rules(cfg["optimizer"])},
        param_scheduler=[schedule for schedule in schedules.values() if schedule is not None],
        default_hooks=dict.fromkeys(_REPLACED),
        custom_hooks=[optimizer, *_hooks(cfg, schedules, has_test), *_custom_hooks(cfg)],
        load_from=cfg.get("load_from"),
        resume=cfg.get("resume_from") or False,
        randomness=dict(seed=cfg.get("seed", 0)),
    )
    return {**arguments, **_evaluation(cfg["test_data"])} if has_test else arguments


def _optimizer_hook(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the hook that says what an update is."""
    options = {
        "grad_clip": dict(cfg.get("optimizer_config") or {}).get("grad_clip"),
        "gradient_accumulation_steps": cfg.get("gradient_accumulation_steps", 1),
    }
    fp16 = cfg.get("fp16")
    if fp16 is None or fp16 is False:
        return {"type": "OptimizerHook", **options}
    scaler = dict(fp16.items()) if hasattr(fp16, "items") else None
    return {"type": "Fp16OptimizerHook", **options, "grad_scaler_config": scaler}


def _optimizer_and_rules(optimizer: Any) -> dict[str, Any]:
    """Return `optimizer`, `constructor` and `paramwise_cfg`, of which iMIX has the last two within the first."""
    if not hasattr(optimizer, "items"):
        return {"optimizer": optimizer}
    own = dict(optimizer.items())
    rules = {name: own.pop(name) for name in ("constructor", "paramwise_cfg") if name in own}
    if rules or "training_encoder_lr_multiply" in own:
        rules.setdefault("constructor", "DefaultOptimizerConstructor")  # iMIX's
    return {**rules, "optimizer": own}


def _hook(cfg: Mapping[str, Any]) -> OptimizerHook:
    kinds = {"OptimizerHook": OptimizerHook, "Fp16OptimizerHook": Fp16OptimizerHook}
    with config_path("optimizer_config"):
        return kinds[cfg["type"]](**{name: value for name, value in cfg.items() if name != "type"})


def _schedule(name: str, cfg: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schedule as a scheduler's config; None where there is none."""
    schedule = dict(cfg.get(name) or {})
    if not schedule:
        return None
    if schedule.get("policy") is None:
        raise ConfigError(f"{name} names its scheduler as `policy`")
    return {"type": schedule.pop("policy"), **schedule}


def _hooks(cfg: Mapping[str, Any], schedules: Mapping[str, Any], has_test: bool) -> list[dict[str, Any]]:
    """iMIX's default hooks after the optimizer's, in its order."""
    log = {"period": 50, **dict(cfg.get("log_config") or {})}
    with config_path("log_config"):
        check_keys(log, ("period", "hooks"))
    lr_config = schedules["lr_config"] or {}
    warmup = lr_config.get("warmup_iters", lr_config.get("warmup_iterations", 0))
    momentum = ["MomentumSchedulerHook"] if schedules["momentum_config"] else []
    hooks: list[dict[str, Any]] = [
        *(
            dict(type=hook, is_lr_accumulation=cfg.get("is_lr_accumulation", True))
            for hook in ["LRSchedulerHook", *momentum]
        ),
        dict(type="IterationTimerHook", warmup_iter=warmup),
        dict(type="PeriodicLogger", loggers=log.get("hooks"), log_config_period=log["period"]),
        dict(type="CheckPointHook", **dict(cfg.get("checkpoint_config") or {})),
    ]
    if has_test:
        evaluate = dict(type="EvaluateHook", eval_iter_period=cfg.get("eval_iter_period"))
        dialog = "VisDial" in str(dict(cfg["test_data"].get("data") or {}).get("type"))
        hooks.append({**evaluate, "metrics": ["ndcg"]} if dialog else evaluate)
    return hooks


def _custom_hooks(cfg: Mapping[str, Any]) -> list[Any]:
    hooks = cfg.get("custom_hooks")
    if hooks is not None and not isinstance(hooks, list | tuple):
        raise AssertionError(f"custom_hooks is a list of hooks, found {type(hooks).__name__}")
    return list(hooks or [])


def _train_cfg(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """How long to train. The validation is EvaluateHook's: the loop's own would begin after the end."""
    epochs: Any = cfg.get("total_epochs")
    iterations: Any = cfg.get("max_iter")
    if (epochs is None) == (iterations is None):
        raise ConfigError(
            f"give the length as total_epochs or as max_iter, one of the two; found {epochs!r} and {iterations!r}"
        )
    if cfg.get("by_iter", iterations is not None) is not (iterations is not None):
        raise ConfigError("by_iter=True goes with max_iter, by_iter=False with total_epochs")
    if iterations is not None:
        return dict(by_epoch=False, max_iters=iterations, val_begin=iterations + 1)
    return dict(by_epoch=True, max_epochs=epochs, val_begin=epochs + 1)


def _dataloader(name: str, cfg: Any) -> dict[str, Any]:
    with config_path(name):
        data = {key: value for key, value in cfg.items() if key != "post_processor"}
        check_keys(data, _DATA_KEYS)
        for key in ("samples_per_gpu", "data"):
            if key not in data:
                raise ConfigError(f"{name} needs the key {key!r}")
    sampler = {} if data.get("sampler") is None else {"sampler": data["sampler"]}
    return dict(
        batch_size=data["samples_per_gpu"], num_workers=data.get("workers_per_gpu", 0), dataset=data["data"], **sampler
    )


def _evaluation(test_data: Mapping[str, Any]) -> dict[str, Any]:
    """Validation and test, both on the test data."""
    metrics = dict(test_data.get("post_processor") or {}).get("metrics")
    if not metrics:
        raise ConfigError("test_data needs post_processor=dict(metrics=[...]): what is measured on it")
    loader = _dataloader("test_data", test_data)
    return dict(
        val_dataloader=loader, val_cfg={}, val_evaluator=metrics,
        test_dataloader=dict(loader), test_cfg={}, test_evaluator=metrics,
    )  # fmt: skip
