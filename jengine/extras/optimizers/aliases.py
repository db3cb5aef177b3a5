"""Names that differ from optax's in case only: optax's optimizers, with a warning.

Each takes optax's arguments, with `lr` for `learning_rate` and `betas` for `b1`, `b2` and `b3`.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optax

from jengine.config.annotations import Decay, NonNegative
from jengine.config.registry import OPTIMIZERS
from jengine.optim.optimizers.optax_optimizers import Factory, from_factory
from jengine.optim.optimizers.optimizer import Optimizer


def _alias(name: str, factory: Factory, other: str) -> Callable[..., Optimizer]:
    parameters = dict(inspect.signature(factory).parameters)
    decays = [parameters.pop(decay) for decay in ("b1", "b2", "b3") if decay in parameters]

    def build(lr: NonNegative, **arguments: Any) -> Optimizer:
        warnings.warn(f"{name} is optax's {factory.__name__}; {other}", FutureWarning, stacklevel=3)
        betas = arguments.pop("betas", [decay.default for decay in decays])
        given = dict(zip([decay.name for decay in decays], betas, strict=True))
        return from_factory(factory)(learning_rate=lr, **given, **arguments)

    build.__name__ = build.__qualname__ = name
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter("lr", kind, annotation=NonNegative)]
    if decays:
        default = tuple(decay.default for decay in decays)
        own.append(inspect.Parameter("betas", kind, default=default, annotation=Sequence[Decay]))
    del parameters["learning_rate"]
    others = [parameter.replace(kind=kind) for parameter in parameters.values()]
    vars(build)["__signature__"] = inspect.Signature([*own, *others], return_annotation=Optimizer)
    build.__doc__ = f"Build optax's `{factory.__name__}`, with a warning: {other}."
    return OPTIMIZERS.register_module()(build)


Adafactor = _alias(
    "Adafactor",
    optax.adafactor,
    "PyTorch's, which factors the last two axes of every tensor, is TorchAdafactor",
)
Adan = _alias(
    "Adan",
    optax.adan,
    "MMPretrain's, with a proximal decay and other weights of differences, is ProximalAdan",
)
