"""Optimizers from optax: by name and arguments in a config, or as a built transformation.

An optax factory closes over hyperparameters. To pass them as data, the factory is called while
tracing, with traced scalars instead of float arguments. Each group has a separate chain.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax import OptState, Updates

from jengine.config.annotations import Decay, Fraction, NonNegative, check_values
from jengine.config.plugins import load_provided, provided
from jengine.config.registry import OPTIMIZERS
from jengine.optim.optimizers.common import Parts
from jengine.optim.optimizers.optimizer import Optimizer

# without optimizers that need gradients of single examples (dpsgd) or another transformation
# (schedule_free)
OPTAX_NAMES = (
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "adan",
    "amsgrad",
    "fromage",
    "lamb",
    "lars",
    "lbfgs",
    "lion",
    "noisy_sgd",
    "novograd",
    "optimistic_adam_v2",
    "optimistic_gradient_descent",
    "polyak_sgd",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
    "sign_sgd",
    "signum",
    "sm3",
    "yogi",
)
OPTAX_CONTRIB_NAMES = (
    "acprop",
    "ademamix",
    "adopt",
    "cocob",
    "dadapt_adamw",
    "dog",
    "dowg",
    "galore",
    "madgrad",
    "momo",
    "momo_adam",
    "prodigy",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "simplified_ademamix",
    "sophia",
)

Factory = Callable[..., optax.GradientTransformation]


def from_optax(transformation: optax.GradientTransformation | optax.MultiSteps) -> Optimizer:
    """Return a built transformation as an optimizer with one group.

    The group has no hyperparameters, except those that `optax.inject_hyperparams` keeps in the
    state and that do not follow an optax schedule. These may be set and scheduled, `learning_rate`
    as `lr`.

    >>> from_optax(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)).defaults
    {'lr': 0.5}
    """
    if isinstance(transformation, optax.MultiSteps):
        # MultiSteps is a class with the methods of a transformation but is not one for
        # `optax.chain`.
        transformation = transformation.gradient_transformation()
    tx = _drop_unknown_arguments(optax.with_extra_args_support(transformation))
    injected = _find_injected_hyperparams(tx)
    names = {"lr": "learning_rate"} if "learning_rate" in injected else {}
    defaults = {"lr" if name in names.values() else name: value for name, value in injected.items()}

    def parts(**settings: Any) -> Parts:
        hyperparams = {names.get(name, name): value for name, value in settings.items()}
        return [("optax", _plain(_set_hyperparams(tx, hyperparams) if hyperparams else tx))]

    # Nobody knows what a foreign transformation does with a tensor, so layers of a stack cannot
    # have settings of their own.
    return Optimizer("optax", defaults, parts, tuple(defaults), per_parameter=(), whole_tensor=True)


def from_factory(factory: Factory) -> Callable[..., Optimizer]:
    """Return a function with the arguments of `factory` that builds an `Optimizer`.

    Floats are hyperparameters.
    """
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Optimizer:
        # Defaults count as settings too: what is not written in the config can still be scheduled.
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        name = factory.__name__
        has_rate = "learning_rate" in settings
        if has_rate:
            lr = settings.pop("learning_rate")
            if callable(lr):
                raise TypeError(
                    f"{name}: learning_rate must be a number, got a schedule; put it into "
                    "param_scheduler"
                )
            settings = {"lr": lr, **settings}
        # else a schedule
        numbers = {key: value for key, value in bound.arguments.items() if not callable(value)}
        check_values(name, _ranges, numbers)
        hyperparams = tuple(
            k for k, v in settings.items() if isinstance(v, float) or (k == "lr" and v is not None)
        )

        def parts(**arguments: Any) -> Parts:
            if has_rate:
                arguments["learning_rate"] = arguments.pop("lr")
            return [(name, _plain(factory(**arguments)))]

        return Optimizer(name, settings, parts, hyperparams, per_parameter=(), whole_tensor=True)

    return build


def _ranges(
    learning_rate: NonNegative | None,
    weight_decay: NonNegative | None,
    momentum: Fraction | None,
    b1: Decay,
    b2: Decay,
    b3: Decay,
    betas: tuple[Decay, Decay],
    rho: Fraction,
    eps: NonNegative,
    eps_root: NonNegative,
) -> None:
    """Annotate the arguments that mean the same in all optax optimizers, which take any number."""


def _drop_unknown_arguments(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that ignores extra arguments.

    Optax's `sam`, for one, only takes its own.
    """
    parameters = inspect.signature(tx.update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return tx

    def update(
        grads: Updates, state: OptState, params: Any | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        return tx.update(
            grads,
            state,
            params,
            **{name: value for name, value in extra.items() if name in parameters},
        )

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _set_hyperparams(
    tx: optax.GradientTransformationExtraArgs, hyperparams: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """Return an `optax.inject_hyperparams` transformation with these hyperparameters, not kept
    in the state.
    """

    def remove(state: OptState) -> Any:
        # Out of the state: a checkpoint would restore an old rate over that of a schedule.
        return state._replace(
            hyperparams={k: v for k, v in state.hyperparams.items() if k not in hyperparams}
        )

    def init(params: Any) -> Any:
        return remove(tx.init(params))

    def update(
        grads: Updates, state: OptState, params: Any | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        full_state = state._replace(hyperparams={**state.hyperparams, **hyperparams})
        updates, state = tx.update(grads, full_state, params, **extra)
        return updates, remove(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _plain(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation for the network's parameters: `optax.lookahead` takes a pair."""
    if "train_fast" not in provided("optimizer_parts"):
        return tx
    train_fast = load_provided("optimizer_parts", "train_fast")
    return train_fast(optax.with_extra_args_support(tx), _example_state(tx))


def _example_state(tx: optax.GradientTransformation) -> OptState | None:
    """Return the state for small parameters; None for a transformation that requires others."""
    leaf = {"parameter": jax.ShapeDtypeStruct((1,), jnp.float32)}
    try:
        # A pair for `optax.lookahead`, and a tree for others
        return jax.eval_shape(tx.init, optax.LookaheadParams(leaf, leaf))
    except Exception:
        return None


def _find_injected_hyperparams(tx: optax.GradientTransformation) -> dict[str, float]:
    """Return the hyperparameters that `optax.inject_hyperparams` keeps in the state and that
    have no schedule.
    """
    if not isinstance(_example_state(tx), optax.InjectStatefulHyperparamsState):
        return {}
    leaf = {"parameter": jnp.zeros(1)}
    state: Any = tx.init(optax.LookaheadParams(leaf, leaf))
    return {
        k: float(v)
        for k, v in state.hyperparams.items()
        if k not in state.hyperparams_states and v.ndim == 0
    }


for _module, _names in ((optax, OPTAX_NAMES), (optax.contrib, OPTAX_CONTRIB_NAMES)):
    for _name in _names:
        OPTIMIZERS.register_module()(from_factory(getattr(_module, _name)))
# Under the whole path, as `muon` is the name of jengine's own, which trains by role.
OPTIMIZERS.register_module(name="optax.contrib.muon")(from_factory(optax.contrib.muon))
