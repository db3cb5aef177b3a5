"""Preview the schedules of a config without its model: every hyperparameter of the optimizer over the whole run."""

from collections.abc import Mapping, Sequence
from typing import Any

from jengine.data import build_dataloader
from jengine.errors import ConfigError, config_path
from jengine.optim.schedules import build_param_schedulers, flatten_schedulers
from jengine.runner.check import counts_epochs, train_loop_config, wrappers_without_params

Curves = dict[str, list[float]]


def preview_schedules(cfg: Mapping[str, Any], epoch_length: int | None = None) -> Curves:
    """Run the schedulers of a config over a whole run, on the host alone.

    Neither the model nor a batch is built. Where the run or a schedule counts in epochs, the length of an epoch is that
    of the training data, which are built for it unless `epoch_length` is given. Groups that `paramwise_cfg` would make
    are not known without the model: the result is the optimizer's own setting, which they multiply.

    Args:
      cfg: a resolved config with `train_cfg`, `optim_wrapper` and perhaps `param_scheduler`.
      epoch_length: iterations in an epoch.

    Returns:
      Name of the hyperparam (prefixed with the optimizer's name where there are several) -> its value in each
      iteration.

    Raises:
      ConfigError: the config trains nothing. Otherwise as the build of its parts.
    """
    for section in ("train_cfg", "optim_wrapper"):
        if cfg.get(section) is None:
            raise ConfigError(f"there are no schedules: the config has no {section}")
    train_cfg = train_loop_config(cfg["train_cfg"])
    by_epoch = counts_epochs(train_cfg)
    if epoch_length is None and (by_epoch or _counts_in_epochs(cfg.get("param_scheduler"))):
        with config_path("train_dataloader"):
            epoch_length = len(build_dataloader(cfg["train_dataloader"], train=True))
    max_epochs = train_cfg["max_epochs"] if by_epoch else 1
    max_iters = max_epochs * (epoch_length or 0) if by_epoch else train_cfg["max_iters"]
    wrappers = wrappers_without_params(cfg["optim_wrapper"])
    several = list(wrappers) != [""]
    schedulers = build_param_schedulers(
        cfg.get("param_scheduler"),
        wrappers if several else wrappers[""],
        max_epochs=max_epochs,
        max_iters=max_iters,
        epoch_length=epoch_length,
        by_epoch_loop=by_epoch,
    )
    return _run(wrappers, flatten_schedulers(schedulers), max_iters, epoch_length if by_epoch else None)


def _run(wrappers: Mapping[str, Any], schedulers: Sequence[Any], max_iters: int, epoch_length: int | None) -> Curves:
    curves: Curves = {}
    by_iter = [s for s in schedulers if not s.by_epoch]
    by_epoch = [s for s in schedulers if s.by_epoch]
    for iteration in range(1, max_iters + 1):
        for name, wrapper in wrappers.items():
            for key, value in _numbers(wrapper.param_groups[0]).items():
                curves.setdefault(f"{name}.{key}" if name else key, []).append(value)
        for scheduler in by_iter:
            scheduler.step()
        if epoch_length is not None and iteration % epoch_length == 0:
            for scheduler in by_epoch:
                scheduler.step()
    return curves


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of the group that a schedule may change, without the schedulers' own entries."""
    numbers = {k: float(v) for k, v in group.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    betas = {f"beta{i}": float(beta) for i, beta in enumerate(group.get("betas", ()), 1)}
    return {k: v for k, v in {**numbers, **betas}.items() if not k.startswith("initial_") and k != "eps"}


def _counts_in_epochs(cfg: Any) -> bool:
    """Return whether an entry of a scheduler config depends on the length of an epoch."""
    if not hasattr(cfg, "items"):
        return any(_counts_in_epochs(entry) for entry in cfg or [])
    if "type" not in cfg:  # schedulers by the name of their optimizer
        return any(_counts_in_epochs(entry) for entry in cfg.values())
    return cfg.get("by_epoch", True) or cfg.get("convert_to_iter_based", False)
