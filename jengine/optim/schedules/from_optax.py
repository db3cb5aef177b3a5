"""Follow any schedule of optax, given by its name in a config or as a function of the step, as a rule.

The schedule gives the value of the optimizer's own settings; a group with a multiplier keeps it. optax computes with
arrays, so that values are taken in blocks, in float64 on the CPU: the accelerator is not touched.
"""

import contextlib
import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jengine.errors import ConfigError, UnknownNameError, closest, config_path, current_config_path
from jengine.optim.schedules.rules import Affine, Rule, StepFunction
from jengine.registry import check_arguments

Schedule = Callable[[Any], Any]  # step -> value, as `optax.Schedule`

_BLOCK = 1024  # values computed in one call
_SAMPLED = (0, 1, 10, 100, 1000, 10_000, 100_000)  # steps whose values describe a function in a checkpoint


@dataclasses.dataclass(frozen=True)
class OptaxRule(Rule):
    """A schedule of optax: `schedule=dict(type='warmup_cosine_decay_schedule', init_value=0.0, ...)`.

    Or a function of the step, `schedule=optax.cosine_decay_schedule(0.1, 1000)`. A schedule made of schedules
    (`join_schedules`) takes a list of such dicts and functions.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = None
    schedule: Mapping[str, Any] | Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", _plain(self.schedule))
        with config_path("schedule"):
            _check_scalar(make_schedule(self.schedule), _has_function(self.schedule))

    def bind(self, span: int) -> StepFunction:
        """Sets the value of the schedule, computed a block ahead."""
        value_at = _evaluator(make_schedule(self.schedule), _has_function(self.schedule))

        def change(t: int) -> Affine:
            return (0.0, value_at(t), 0.0)

        return change

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """The multiplier of each group: its initial value over the optimizer's own."""
        if reference == 0.0:
            raise ConfigError("a schedule of optax needs an optimizer whose own initial value is not 0")
        return [base / reference for base in bases]

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, with the name and some values in the place of a function, which cannot be saved."""
        return {"schedule": self._description}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Return the rule of a `state_dict`; this one where the state describes a function."""
        return self if is_function(state["schedule"]) else type(self)(state["schedule"])

    @functools.cached_property
    def _description(self) -> Any:
        return _described(self.schedule)


def is_function(described: Any) -> bool:
    """Return whether a setting from `OptaxRule.state_dict` describes a function, or contains one that is described."""
    if isinstance(described, Mapping):
        return "function" in described or any(map(is_function, described.values()))
    return isinstance(described, list) and any(map(is_function, described))


def make_schedule(cfg: Any) -> Schedule:
    """Make the optax schedule that `cfg` describes.

    Args:
      cfg: a function of the step; or `dict(type=NAME, **arguments)` with a name that optax has, whose arguments may be
        such dicts and functions, or lists of them.

    Raises:
      TypeError: neither, or arguments that the schedule does not take. KeyError: no schedule has that name.
    """
    import optax

    if callable(cfg) and not isinstance(cfg, type):
        return cfg
    if not isinstance(cfg, Mapping) or not isinstance(cfg.get("type"), str):
        raise TypeError(f"an optax schedule must be a function of the step or a dict with a 'type', got {cfg!r}")
    known = {name for name in vars(optax) if name.endswith(("_schedule", "_schedules"))} - {"scale_by_schedule"}
    known |= {"exponential_decay"}
    name = cfg["type"]
    if name not in known:
        raise UnknownNameError(f"optax has no schedule called {name!r}{closest(name, known)}")
    factory = getattr(optax, name)
    arguments = {key: value for key, value in cfg.items() if key != "type"}
    for key, value in arguments.items():
        with config_path(key):
            if isinstance(value, Mapping) and "type" in value:
                arguments[key] = make_schedule(value)
            elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
                arguments[key] = [make_schedule(item) for item in value]
    check_arguments(factory, arguments)
    return factory(**arguments)


def _check_scalar(schedule: Schedule, is_int: bool) -> None:
    """Raise TypeError unless `schedule` returns a number."""
    import jax

    first = _traced(schedule, is_int)
    first = schedule(0) if first is None else first
    arrays = [leaf for leaf in jax.tree.leaves(first) if hasattr(leaf, "dtype")]
    is_scalar = arrays[:1] == [first] and first.shape == () and np.dtype(first.dtype).kind in "iufV"  # V: bfloat16
    if not is_scalar and not (isinstance(first, numbers.Real) and not isinstance(first, bool)):
        found = ", ".join(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in arrays) or repr(first)
        raise TypeError(
            f"`{current_config_path()}` must return one number for a step, got {found} from {_name(schedule)}"
        )


def _traced(schedule: Schedule, is_int: bool) -> Any:
    """Return shape and dtype of the value of `schedule`; None if JAX cannot trace it, as with a branch on the step."""
    import jax

    try:
        return jax.eval_shape(schedule, jax.ShapeDtypeStruct((), np.int32 if is_int else np.float32))
    except Exception:  # whatever Python code raises that meets a tracer
        return None


def _evaluator(schedule: Schedule, is_int: bool) -> Callable[[int], float]:
    """Return `schedule` as a function from a step to a Python float.

    Args:
      schedule: computed `_BLOCK` steps at a time; one by one, from Python integers, if JAX cannot trace it.
      is_int: whether it takes integers, as in an optax chain; otherwise float64.
    """
    import jax

    if _traced(schedule, is_int) is None:
        return lambda t: float(schedule(t))
    computed: dict[int, np.ndarray] = {}
    evaluate = jax.jit(jax.vmap(lambda step: jax.numpy.asarray(schedule(step), dtype=float)))

    def block(number: int) -> np.ndarray:
        device = _host_device()
        steps = np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int64 if is_int else np.float64)
        with jax.enable_x64(True), jax.default_device(device):
            return jax.device_get(evaluate(jax.device_put(steps, device)))

    def value_at(t: int) -> float:
        number, offset = divmod(t, _BLOCK)
        if number not in computed:
            computed.clear()
            computed[number] = block(number)
        return float(computed[number][offset])

    return value_at


def _has_function(schedule: Any) -> bool:
    if isinstance(schedule, Mapping):
        return any(map(_has_function, schedule.values()))
    return any(map(_has_function, schedule)) if isinstance(schedule, list) else callable(schedule)


def _described(schedule: Any) -> Any:
    """Return `schedule` with functions as their names and some values, which fits JSON."""
    if callable(schedule):
        return {"function": _name(schedule), "values": _sample(schedule)}
    if isinstance(schedule, Mapping):
        return {key: _described(value) for key, value in schedule.items()}
    return [_described(item) for item in schedule] if isinstance(schedule, list) else schedule


def _sample(schedule: Schedule) -> dict[str, float]:
    """Return some values by step, to six digits: another machine may round differently."""
    values = {}
    with contextlib.suppress(LookupError):  # of a table that ends
        for step in _SAMPLED:
            values[str(step)] = float(f"{float(schedule(np.int32(step))):.6g}")
    return values


def _name(function: Schedule) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _host_device() -> Any:
    """A CPU device; another one where JAX was started without CPUs (`JAX_PLATFORMS=cuda`)."""
    import jax

    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _plain(value: Any) -> Any:
    """`value` with plain dicts and lists for whatever a config is made of."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
