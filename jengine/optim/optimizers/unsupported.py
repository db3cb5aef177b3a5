"""Optimizers of PyTorch that cannot be had here, refused by name with the reason."""

from typing import Any, NoReturn

from jengine.errors import ConfigError
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def LBFGS(**kwargs: Any) -> NoReturn:
    """Refuse: PyTorch's line search is not here; optax's is, as `lbfgs`.

    Raises:
      ConfigError: always.
    """
    raise ConfigError(
        "LBFGS evaluates the loss several times in a step with PyTorch's line search, which is not here; use optax's, "
        "dict(type='lbfgs')"
    )


@OPTIMIZERS.register_module()
def SparseAdam(**kwargs: Any) -> NoReturn:
    """Refuse: JAX has no sparse gradients.

    Raises:
      ConfigError: always.
    """
    raise ConfigError("SparseAdam is for sparse gradients, which JAX does not produce; use Adam")
