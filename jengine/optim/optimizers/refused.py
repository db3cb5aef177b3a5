"""Optimizers of PyTorch that cannot be had here, refused by name with the reason."""

from typing import Any, NoReturn

from jengine.errors import ConfigError
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def LBFGS(**kwargs: Any) -> NoReturn:
    """Refused: a step evaluates the loss several times, an iteration of training gives it one gradient.

    Raises:
      ConfigError: always.
    """
    raise ConfigError(
        "LBFGS evaluates the loss several times in a step, but a training iteration computes one gradient; use "
        "optax.lbfgs in a loop of your own, or another optimizer such as AdamW"
    )


@OPTIMIZERS.register_module()
def SparseAdam(**kwargs: Any) -> NoReturn:
    """Refused: JAX has no sparse gradients.

    Raises:
      ConfigError: always.
    """
    raise ConfigError("SparseAdam is for sparse gradients, which JAX does not produce; use Adam")
