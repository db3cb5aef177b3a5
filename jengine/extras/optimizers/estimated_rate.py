"""Optimizers of optax that estimate the learning rate, with MMEngine's arguments."""

import optax.contrib

from jengine.config.annotations import Decay, NonNegative
from jengine.config.errors import ConfigError
from jengine.config.registry import OPTIMIZERS
from jengine.optim.optimizers.optax_optimizers import from_factory
from jengine.optim.optimizers.optimizer import Optimizer


@OPTIMIZERS.register_module()
def DAdaptAdam(
    lr: NonNegative = 1.0,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    decouple: bool = False,
    d0: NonNegative = 1e-6,
) -> Optimizer:
    """Build optax's `dadapt_adamw`, which estimates the learning rate, with MMEngine's arguments.

    Args:
      lr: factor for the estimate; schedules change it. Each parameter group has a separate
        estimate.
      betas: decay rates for the gradient and square averages.
      eps: added to the denominator.
      weight_decay: weight decay coefficient.
      decouple: must be True for a weight decay: optax's is decoupled.
      d0: the initial estimate.

    Raises:
      ConfigError: a weight decay without `decouple`.

    Source: Defazio and Mishchenko, Learning-Rate-Free Learning by D-Adaptation, arXiv:2301.07733.
    """
    if weight_decay and not decouple:
        raise ConfigError(
            "`DAdaptAdam.decouple` must be True with a weight_decay, which optax decouples, got "
            "False"
        )
    # Through the factory at each trace, as for all of optax: `lr` is an input of the step, not a
    # constant.
    return from_factory(optax.contrib.dadapt_adamw)(
        learning_rate=lr, betas=betas, eps=eps, weight_decay=weight_decay, estim_lr0=d0
    )


@OPTIMIZERS.register_module()
def Prodigy(
    lr: NonNegative = 1.0,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    beta3: Decay | None = None,
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    decouple: bool = True,
    safeguard_warmup: bool = False,
    d0: NonNegative = 1e-6,
    d_coef: NonNegative = 1.0,
) -> Optimizer:
    """Build optax's `prodigy`, which estimates the learning rate, with MMEngine's arguments.

    Args:
      lr, betas, eps, weight_decay, decouple, d0: see `DAdaptAdam`.
      beta3: decay rate for the estimate; None for the square root of the second beta.
      safeguard_warmup: estimate without the warm-up of `lr`.
      d_coef: factor for the estimate, which stays in it.

    Raises:
      ConfigError: a weight decay without `decouple`.

    Source: Mishchenko and Defazio, Prodigy, arXiv:2306.06101.
    """
    if weight_decay and not decouple:
        raise ConfigError(
            "`Prodigy.decouple` must be True with a weight_decay, which optax decouples, got False"
        )
    return from_factory(optax.contrib.prodigy)(
        learning_rate=lr,
        betas=betas,
        beta3=beta3,
        eps=eps,
        weight_decay=weight_decay,
        safeguard_warmup=safeguard_warmup,
        estim_lr0=d0,
        estim_lr_coef=d_coef,
    )
