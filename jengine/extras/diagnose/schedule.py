"""`jengine schedule`: the optimizer's hyperparameters over the whole run, drawn as curves."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.cli.commands import load
from jengine.config.containers import resolve
from jengine.config.errors import ConfigError, config_path
from jengine.data.build import build_dataloader
from jengine.data.step_values import is_step_values, parse_step_values
from jengine.extras.diagnose.groups import save_figure
from jengine.optim.schedules.chain import chain_of, value_range
from jengine.optim.schedules.scheduler_builder import build_param_schedulers
from jengine.optim.wrapper_builder import check_optim_wrapper
from jengine.runner.config_checks import adapt_config, is_epoch_based, train_loop_config
from jengine.train.phases import batches_per_iteration

_WIDTH = 72
_HEIGHT = 10

Curves = dict[str, list[float]]


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Draw the schedules in the terminal, or save them as a PNG file."""
    curves = preview_schedules(load(args, overrides), args.epoch_length)
    varying = {name: values for name, values in curves.items() if min(values) != max(values)}
    constant = {name: values[0] for name, values in curves.items() if name not in varying}
    if args.png:
        _save_png(varying or curves, args.png)
        print(f"saved to {args.png}")
    else:
        for name, values in varying.items():
            print(plot(values, name), end="\n\n")
    if constant:
        print("constant: " + ", ".join(f"{name} {value:g}" for name, value in constant.items()))


def plot(
    values: Sequence[float], name: str, height: int = _HEIGHT, ends: tuple[str, str] | None = None
) -> str:
    """Draw a curve as text in `height` rows.

    `ends` are the marks below the first and last number; by default one number per iteration is
    expected.

    >>> print(plot([0.0, 1.0, 2.0], "lr", height=3))
    lr: 0 to 2, between 0 and 2
    2 |  *
      | *
    0 |*
      +---
       0 2
    """
    width = min(_WIDTH, len(values))
    # Sampled with both ends, so that the curve starts and ends where the schedule does.
    columns = [values[round(i * (len(values) - 1) / max(width - 1, 1))] for i in range(width)]
    low = min(values)
    high = max(values)
    rows = [round((value - low) / ((high - low) or 1.0) * (height - 1)) for value in columns]
    margin = max(len(f"{low:.3g}"), len(f"{high:.3g}"))
    lines = [f"{name}: {values[0]:.4g} to {values[-1]:.4g}, between {low:.4g} and {high:.4g}"]
    for row in reversed(range(height)):
        label = {height - 1: f"{high:.3g}", 0: f"{low:.3g}"}.get(row, "")
        cells = "".join("*" if r == row else " " for r in rows)
        lines.append(f"{label:>{margin}} |{cells}".rstrip())
    lines.append(" " * margin + " +" + "-" * width)
    first, last = ends or ("0", str(len(values) - 1))
    lines.append(" " * (margin + 2) + first + last.rjust(width - len(first)))
    return "\n".join(lines)


def _save_png(curves: Mapping[str, Sequence[float]], path: str) -> None:
    with save_figure(path, len(curves), sharex=True, figsize=(8, 2.2 * len(curves) + 0.6)) as axes:
        for axis, (name, values) in zip(axes, curves.items(), strict=True):
            axis.plot(values)
            axis.set_ylabel(name)
            axis.grid(alpha=0.3)
        axes[-1].set_xlabel("iteration")


def preview_schedules(cfg: Mapping[str, Any], epoch_length: int | None = None) -> Curves:
    """Compute the schedules of a config over a whole run, only on the host.

    Neither the model nor a batch is built. If the run or a schedule counts epochs, the training
    data are built for the epoch length, unless `epoch_length` gives the iterations in an epoch. The
    groups of `paramwise_cfg` are unknown without the model: the result is the optimizer's own
    setting, which they multiply.

    Returns:
      The value in each iteration by the name of the hyperparameter, prefixed with the optimizer's
      name if there are several.

    Raises:
      ConfigError: the config does not train, or a value is out of range, such as a negative
        learning rate. Also the errors of building its parts.
    """
    cfg, _ = adapt_config(resolve(cfg))
    for section in ("train_cfg", "optim_wrapper"):
        if cfg.get(section) is None:
            raise ConfigError(f"the config must have {section} to have schedules, got no {section}")
    train_cfg = train_loop_config(cfg["train_cfg"])
    by_epoch = is_epoch_based(train_cfg)
    if epoch_length is None and (by_epoch or _needs_epoch_length(cfg.get("param_scheduler"))):
        with config_path("train_dataloader"):
            epoch_length = (
                train_cfg.get("epoch_length")
                or build_dataloader(cfg["train_dataloader"], train=True).length
            )
            if epoch_length is not None and "epoch_length" not in train_cfg:
                # The loader counts batches, the schedule iterations, which may take several.
                epoch_length //= batches_per_iteration(train_cfg.get("phases"))
    if by_epoch and epoch_length is None:
        raise ConfigError(
            "`train_cfg.epoch_length` must be given for data without a length, got none"
        )
    max_epochs = train_cfg["max_epochs"] if by_epoch else 1
    max_iters = max_epochs * (epoch_length or 0) if by_epoch else train_cfg["max_iters"]
    wrappers = check_optim_wrapper(cfg["optim_wrapper"])
    build_param_schedulers(
        cfg.get("param_scheduler"),
        wrappers.get("", wrappers),
        max_epochs=max_epochs,
        max_iters=max_iters,
        epoch_length=epoch_length,
        by_epoch_loop=by_epoch,
    )
    curves: Curves = {}
    for name, wrapper in wrappers.items():
        scheduled = chain_of(wrapper).at(np.arange(max_iters))[0]
        for key, values in scheduled.items():
            check_values(key, values)
        for key, value in _select_hyperparams(wrapper.param_groups[0]).items():
            values = scheduled.get("momentum" if key == "beta1" else key, np.full(max_iters, value))
            curves[f"{name}.{key}" if name else key] = values.tolist()
    whole = cfg["optim_wrapper"]
    data: Any = cfg.get("train_dataloader")
    data = data if hasattr(data, "items") else {}
    numbers = {
        name: data.get(name) for name in ("batch_size", "global_batch_size", "example_length")
    }
    numbers["accumulative_counts"] = (
        whole.get("accumulative_counts") if hasattr(whole, "items") else None
    )
    for key, number in numbers.items():
        if is_step_values(number):
            curves[key] = [float(parse_step_values(number).at(step)) for step in range(max_iters)]
    return curves


def check_values(name: str, values: np.ndarray) -> None:
    """Raise ConfigError for a value of a schedule, float64[n], that training would refuse."""
    lowest, highest, legal = value_range(name)
    illegal = np.flatnonzero(~((values >= lowest) & (values <= highest)))  # also NaN
    for step in illegal[:1]:
        raise ConfigError(
            f"`{name}` must be {legal}, got {values[step]:g} from `param_scheduler` in iteration "
            f"{step + 1}"
        )


def _select_hyperparams(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of the group that a schedule may change, without the
    schedulers' own entries.
    """
    scalars = {
        k: float(v)
        for k, v in group.items()
        if isinstance(v, int | float) and not isinstance(v, bool)
    }
    betas = {f"beta{i}": float(beta) for i, beta in enumerate(group.get("betas", ()), 1)}
    return {
        k: v for k, v in {**scalars, **betas}.items() if not k.startswith("initial_") and k != "eps"
    }


def _needs_epoch_length(cfg: Any) -> bool:
    """Return whether a scheduler config depends on the length of an epoch."""
    if callable(cfg):  # a function of the iteration
        return False
    if not hasattr(cfg, "items"):
        return any(_needs_epoch_length(entry) for entry in cfg or [])
    if "type" not in cfg:  # schedulers by optimizer
        return any(_needs_epoch_length(entry) for entry in cfg.values())
    return cfg.get("by_epoch", True) or cfg.get("convert_to_iter_based", False)
