"""The registered schedulers: every family for the learning rate, the momentum and any named
value.
"""

import inspect
from typing import Any

from jengine.config.plugins import load_provided, provided
from jengine.config.registry import PARAM_SCHEDULERS
from jengine.optim.schedules import formulas, from_optax
from jengine.optim.schedules.scheduler import ParamScheduler

# Arguments that all schedulers have, after the optimizer, the name and the settings
_COMMON = {
    parameter.name: parameter
    for parameter in [*inspect.signature(ParamScheduler).parameters.values()][3:]
}


def make_scheduler(
    name: str,
    family: type[Any],
    param_name: str | None = None,
    base: type[ParamScheduler] = ParamScheduler,
    by_epoch: bool = True,
) -> type[ParamScheduler]:
    """Create the scheduler class for a family and register it in `PARAM_SCHEDULERS`.

    Args:
      name: class name.
      family: frozen dataclass for the settings, a `Formula`; the fields become arguments of the
        class.
      param_name: the value to schedule; None to make it an argument.
      base: the base class, which defines `step`.
      by_epoch: default of the argument `by_epoch`.

    Returns:
      A class whose arguments are the optimizer wrapper, `param_name` unless given here, the family
      settings, then `begin`, `end`, `last_step`, `by_epoch` and `verbose`.
    """
    signature = _signature(family, param_name is None, by_epoch)

    def init(self: ParamScheduler, *args: Any, **kwargs: Any) -> None:
        """Build the formula from the family settings and pass the rest to the base class."""
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        common = {key: settings.pop(key) for key in _COMMON}
        del settings["self"]
        optimizer = settings.pop("optimizer")
        scheduled_name = settings.pop("param_name", param_name)
        base.__init__(self, optimizer, scheduled_name, family(**settings), **common)

    # For the registry, which checks arguments by signature, and for `help`.
    init.__signature__ = signature  # type: ignore[attr-defined]
    init.__name__ = "__init__"
    members = {
        "__init__": init,
        "__doc__": family.__doc__,
        "__module__": __name__,
        "family": family,
        "mirrors_betas": param_name == "momentum",
        "skips_zero": param_name == "weight_decay",
    }
    return PARAM_SCHEDULERS.register_module(name)(type(name, (base,), members))


def _signature(family: type[Any], with_name: bool, by_epoch: bool) -> inspect.Signature:
    """Return the arguments of a scheduler class: optimizer, name, settings, then the common
    arguments.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = list(inspect.signature(family).parameters.values())
    name = [inspect.Parameter("param_name", kind, annotation=str)] if with_name else []
    return inspect.Signature(
        [
            *(
                inspect.Parameter(leading, kind, annotation=Any)
                for leading in ("self", "optimizer")
            ),
            *name,
            *(parameter for parameter in own if parameter.kind is kind),
            *(_COMMON | {"by_epoch": _COMMON["by_epoch"].replace(default=by_epoch)}).values(),
            # Keyword-only parameters last, as Python requires; MMEngine's positional order is kept
            # before them.
            *(parameter for parameter in own if parameter.kind is not kind),
        ]
    )


_NAMES = {"LR": "lr", "Momentum": "momentum", "ParamScheduler": None}  # by the end of a class name


def make_variants(
    name: str, family: type[Any], base: type[ParamScheduler] = ParamScheduler
) -> tuple[type[ParamScheduler], ...]:
    """Create `{name}LR`, `{name}Momentum` and `{name}ParamScheduler` for a family."""
    return tuple(
        make_scheduler(name + ending, family, param_name, base)
        for ending, param_name in _NAMES.items()
    )


_FAMILIES: dict[str, type[Any]] = {
    "Constant": formulas.ConstantFormula,
    "Linear": formulas.LinearFormula,
    "Step": formulas.StepFormula,
    "MultiStep": formulas.MultiStepFormula,
    "Exponential": formulas.ExponentialFormula,
    "Poly": formulas.PolyFormula,
    "CosineAnnealing": formulas.CosineAnnealingFormula,
    "Optax": from_optax.OptaxFormula,
}
_SCHEDULERS: dict[str, tuple[type[Any], str | None]] = {
    **{
        family + ending: (formula, name)
        for family, formula in _FAMILIES.items()
        for ending, name in _NAMES.items()
    },
    "CosineAnnealingWeightDecay": (formulas.CosineAnnealingFormula, "weight_decay"),
}
provides = {"PARAM_SCHEDULERS": dict.fromkeys(_SCHEDULERS, __name__)}
__all__ = ["make_scheduler", "make_variants", *_SCHEDULERS]


def __getattr__(name: str) -> Any:
    # Made on use: a run uses few of the classes.
    if name in provided("PARAM_SCHEDULERS"):  # of an extra
        return load_provided("PARAM_SCHEDULERS", name)
    if name not in _SCHEDULERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family, param_name = _SCHEDULERS[name]
    globals()[name] = make_scheduler(name, family, param_name)
    return globals()[name]
