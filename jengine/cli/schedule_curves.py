"""Preview the schedules of a config: every hyperparameter of the optimizer over the whole run, without the model."""

from collections.abc import Mapping, Sequence
from typing import Any

from jengine.data import build_dataloader
from jengine.errors import ConfigError, config_path
from jengine.optim import check_optim_wrapper
from jengine.optim.schedules import build_param_schedulers, flatten_schedulers
from jengine.runner.config_checks import is_epoch_based, train_loop_config

Curves = dict[str, list[float]]


def preview_schedules(cfg: Mapping[str, Any], epoch_length: int | None = None) -> Curves:
    """Run the schedulers of a config over a whole run, only on the host.

    Neither the model nor a batch is built. If the run or a schedule counts epochs, the training data are built for the
    length of an epoch, unless `epoch_length` is given. The groups of `paramwise_cfg` are unknown without the model: the
    result is the optimizer's own setting, which they multiply.

    Args:
      cfg: a resolved config with `train_cfg`, `optim_wrapper` and optionally `param_scheduler`.
      epoch_length: iterations in an epoch.

    Returns:
      The value in each iteration by the name of the hyperparameter, prefixed with the optimizer's name if there are
      several.

    Raises:
      ConfigError: the config does not train. Also the errors of building its parts.
    """
    for section in ("train_cfg", "optim_wrapper"):
        if cfg.get(section) is None:
            raise ConfigError(f"the config must have {section} to have schedules, got no {section}")
    train_cfg = train_loop_config(cfg["train_cfg"])
    by_epoch = is_epoch_based(train_cfg)
    if epoch_length is None and (by_epoch or _needs_epoch_length(cfg.get("param_scheduler"))):
        with config_path("train_dataloader"):
            epoch_length = train_cfg.get("epoch_length") or build_dataloader(cfg["train_dataloader"], train=True).length
    if by_epoch and epoch_length is None:
        raise ConfigError("`train_cfg.epoch_length` must be given for data without a length, got none")
    max_epochs = train_cfg["max_epochs"] if by_epoch else 1
    max_iters = max_epochs * (epoch_length or 0) if by_epoch else train_cfg["max_iters"]
    wrappers = check_optim_wrapper(cfg["optim_wrapper"])
    has_several = list(wrappers) != [""]
    schedulers = build_param_schedulers(
        cfg.get("param_scheduler"),
        wrappers if has_several else wrappers[""],
        max_epochs=max_epochs,
        max_iters=max_iters,
        epoch_length=epoch_length,
        by_epoch_loop=by_epoch,
    )
    return _record_curves(wrappers, flatten_schedulers(schedulers), max_iters, epoch_length if by_epoch else None)


def _record_curves(
    wrappers: Mapping[str, Any], schedulers: Sequence[Any], max_iters: int, epoch_length: int | None
) -> Curves:
    curves: Curves = {}
    by_iter = [s for s in schedulers if not s.by_epoch]
    by_epoch = [s for s in schedulers if s.by_epoch]
    for iteration in range(1, max_iters + 1):
        for name, wrapper in wrappers.items():
            for key, value in _select_hyperparams(wrapper.param_groups[0]).items():
                curves.setdefault(f"{name}.{key}" if name else key, []).append(value)
        if iteration == max_iters:
            break
        for scheduler in by_iter:
            scheduler.step()
        if epoch_length is not None and iteration % epoch_length == 0:
            for scheduler in by_epoch:
                scheduler.step()
    return curves


def _select_hyperparams(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of the group that a schedule may change, without the schedulers' own entries."""
    scalars = {k: float(v) for k, v in group.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    betas = {f"beta{i}": float(beta) for i, beta in enumerate(group.get("betas", ()), 1)}
    return {k: v for k, v in {**scalars, **betas}.items() if not k.startswith("initial_") and k != "eps"}


def _needs_epoch_length(cfg: Any) -> bool:
    """Return whether a scheduler config depends on the length of an epoch."""
    if not hasattr(cfg, "items"):
        return any(_needs_epoch_length(entry) for entry in cfg or [])
    if "type" not in cfg:  # schedulers by optimizer
        return any(_needs_epoch_length(entry) for entry in cfg.values())
    return cfg.get("by_epoch", True) or cfg.get("convert_to_iter_based", False)
