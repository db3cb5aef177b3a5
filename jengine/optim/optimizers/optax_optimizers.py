"""Use the optimizers of optax by their names and arguments in a config, and optax transformations that are built.

A factory of optax closes over its numbers. To have them as data it is called inside the trace, with the scalars of a
group in the place of its float arguments. Each group has a chain of its own, on its own parameters.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jengine.annotations import NonNegative, check_values
from jengine.optim.optimizers.common import Parts, Tree
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.registry import OPTIMIZERS

# left out: what needs gradients of single examples (dpsgd) or another transformation (schedule_free)
_NAMES = (
    "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad", "fromage",
    "lamb", "lars", "lbfgs", "lion", "noisy_sgd", "novograd", "optimistic_adam_v2", "optimistic_gradient_descent",
    "polyak_sgd", "radam", "rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi",
)  # fmt: skip
_CONTRIB_NAMES = (
    "acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "galore", "madgrad", "momo", "momo_adam",
    "muon", "prodigy", "schedule_free_adamw", "schedule_free_sgd", "simplified_ademamix",
)  # fmt: skip

Factory = Callable[..., optax.GradientTransformation]


def from_optax(transformation: optax.GradientTransformation | optax.MultiSteps) -> Optimizer:
    """Return a transformation that is already built as an optimizer of one group.

    Its numbers are its own: the group has none, unless `optax.inject_hyperparams` keeps them in the state. Those may be
    set and scheduled, `learning_rate` as `lr`, where it has no schedule for them.
    """
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    tx = optax.with_extra_args_support(transformation)
    injected = _injected(tx)
    defaults = {"lr" if name == "learning_rate" else name: value for name, value in injected.items()}

    def parts(**settings: Any) -> Parts:
        numbers = {"learning_rate" if name == "lr" else name: value for name, value in settings.items()}
        return [("optax", _with_numbers(tx, numbers) if numbers else tx)]

    return Optimizer("optax", defaults, parts, tuple(defaults), by_leaf=(), whole_tensor=True)


def _with_numbers(
    tx: optax.GradientTransformationExtraArgs, numbers: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of `optax.inject_hyperparams` on numbers that its own state does not keep."""

    def without(state: Any) -> Any:
        return state._replace(hyperparams={k: v for k, v in state.hyperparams.items() if k not in numbers})

    def init(params: Tree) -> Any:
        return without(tx.init(params))

    def update(grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        whole = state._replace(hyperparams={**state.hyperparams, **numbers})
        updates, state = tx.update(grads, whole, params, **extra)
        return updates, without(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _injected(tx: optax.GradientTransformation) -> dict[str, float]:
    """Return the numbers that `optax.inject_hyperparams` keeps in the state, without those that follow a schedule."""
    try:
        state = jax.eval_shape(tx.init, {"parameter": jax.ShapeDtypeStruct((1,), jnp.float32)})
    except Exception:  # a transformation for parameters of other names or shapes
        return {}
    if not isinstance(state, optax.InjectStatefulHyperparamsState):
        return {}
    state = tx.init({"parameter": jnp.zeros(1)})
    return {k: float(v) for k, v in state.hyperparams.items() if k not in state.hyperparams_states and v.ndim == 0}


def register(factory: Factory) -> None:
    """Make a factory of optax known to configs under its own name, with its own arguments.

    Args:
      factory: a function that returns a gradient transformation, of `learning_rate` as a rule, and other settings.
    """
    OPTIMIZERS.register_module()(from_factory(factory))


def from_factory(factory: Factory) -> Callable[..., Optimizer]:
    """Return a function of the arguments of `factory` that returns an `Optimizer`, whose floats are data."""
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Optimizer:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        name, has_rate = factory.__name__, "learning_rate" in settings
        if has_rate:
            lr = settings.pop("learning_rate")
            if callable(lr):
                raise TypeError(
                    f"{name}: learning_rate must be a number, found a schedule; put it into param_scheduler"
                )
            check_values(name, _check_rate, {"learning_rate": lr})
            settings = {"lr": lr, **settings}
        numbers = tuple(k for k, v in settings.items() if isinstance(v, float) or (k == "lr" and v is not None))

        def parts(**own: Any) -> Parts:
            if has_rate:
                own["learning_rate"] = own.pop("lr")
            return [(name, factory(**own))]

        return Optimizer(name, settings, parts, numbers, by_leaf=(), whole_tensor=True)

    return build


def _check_rate(learning_rate: NonNegative | None = None) -> None:
    """Have the annotation of the learning rate that this module allows: optax takes schedules too, and any number."""


for _name in _NAMES:
    register(getattr(optax, _name))
for _name in _CONTRIB_NAMES:
    register(getattr(optax.contrib, _name))
