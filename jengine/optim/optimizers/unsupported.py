"""Reject PyTorch optimizers that are not supported, with the reason."""

from typing import Any, NoReturn

from jengine.errors import ConfigError
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def LBFGS(**kwargs: Any) -> NoReturn:
    """Reject LBFGS: PyTorch's line search is not implemented; optax's L-BFGS is available as `lbfgs`.

    Raises:
      ConfigError: always.
    """
    raise ConfigError(
        "LBFGS evaluates the loss several times per step with PyTorch's line search, which is not implemented; use "
        "optax's, dict(type='lbfgs')"
    )


@OPTIMIZERS.register_module()
def SparseAdam(**kwargs: Any) -> NoReturn:
    """Reject SparseAdam: JAX has no sparse gradients.

    Raises:
      ConfigError: always.
    """
    raise ConfigError("SparseAdam is for sparse gradients, which JAX does not produce; use Adam")
