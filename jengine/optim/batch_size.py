"""Learning rates that are scaled with the batch size."""

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import check_arguments
from jengine.data.step_values import StepValues
from jengine.optim.schedules.chain import chain_of
from jengine.optim.schedules.formulas import ConstantFormula
from jengine.optim.schedules.scheduler import ParamScheduler, Schedulers
from jengine.optim.wrapper_dict import AnyWrapper, wrappers_by_name


class AutoScaleLR(NamedTuple):
    """Argument `auto_scale_lr`: whether to scale learning rates, and the batch size that they are
    for.

    `rule` is 'linear', the batch size over the base one, or 'sqrt', the root of that, as is usual
    for Adam.
    """

    base_batch_size: Count
    enable: bool = False
    rule: Literal["linear", "sqrt"] = "linear"

    def factor(self, batch_size: float, base: float) -> float:
        """Return what multiplies a learning rate for the batch size `base`."""
        ratio = batch_size / base
        return ratio if self.rule == "linear" else math.sqrt(ratio)


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
    optim_wrapper: AnyWrapper, scaling: AutoScaleLR, batch_size: int, logger: logging.Logger
) -> None:
    """Scale every learning rate by the rule, for the batch size over all devices.

    Raises:
      ConfigError: the batch size is not known (0), or an optimizer has no learning rate to scale.
    """
    if not scaling.enable:
        return
    if not batch_size:
        raise ConfigError(
            "`auto_scale_lr.enable` must be False for batches of unknown size (batch_axis=None "
            "without `batch_size`), got True"
        )
    factor = scaling.factor(batch_size, scaling.base_batch_size)
    for wrapper in wrappers_by_name(optim_wrapper).values():
        for group in chain_of(wrapper).groups:
            if "lr" not in group:
                raise ConfigError(
                    "`auto_scale_lr.enable` must be False for an optimizer without `lr`, got True"
                )
            group["lr"] = group["lr"] * factor  # before schedulers take their initial values
    if factor != 1.0:
        logger.info(f"Learning rates are scaled by {factor:g} for a batch size of {batch_size}.")


def scale_with_batch(
    schedulers: Schedulers,
    optim_wrapper: AnyWrapper,
    scaling: AutoScaleLR,
    batch_sizes: StepValues | None,
) -> None:
    """Scale the learning rates of each optimizer where the batch size changes, on top of any
    schedule.
    """
    if not scaling.enable or batch_sizes is None or not batch_sizes.milestones:
        return

    def factor(iteration: int) -> float:
        return scaling.factor(batch_sizes.at(iteration), batch_sizes.values[0])

    for name, wrapper in wrappers_by_name(optim_wrapper).items():
        chain_of(wrapper).lr_factor = factor
        # a schedule that changes nothing, so that the rate is set in each iteration
        counter = ParamScheduler(wrapper, "lr", ConstantFormula(1.0), by_epoch=False)
        (schedulers[name] if isinstance(schedulers, dict) else schedulers).append(counter)
