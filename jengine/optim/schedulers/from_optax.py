"""Any schedule of optax, by its name in a config, as a rule.

The schedule gives the value of the optimizer's own settings; a group with a multiplier keeps it. optax computes with
arrays, so that values are taken in blocks, in float64 on the CPU: the accelerator is not touched.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jengine.errors import ConfigError, UnknownNameError, closest, config_path
from jengine.optim.schedulers.rules import Affine, Rule, StepFunction
from jengine.registry import check_arguments

_BLOCK = 1024  # values computed in one call


@dataclasses.dataclass(frozen=True)
class OptaxRule(Rule):
    """A schedule of optax: `schedule=dict(type='warmup_cosine_decay_schedule', init_value=0.0, ...)`.

    A schedule made of schedules (`join_schedules`) takes a list of such dicts.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = None
    schedule: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", _plain(self.schedule))
        make_schedule(self.schedule)

    def bind(self, span: int) -> StepFunction:
        """Sets the value of the schedule, computed a block ahead."""
        value_at = _blocks(make_schedule(self.schedule))

        def change(t: int) -> Affine:
            return (0.0, value_at(t), 0.0)

        return change

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """The multiplier of each group: its initial value over the optimizer's own."""
        if reference == 0.0:
            raise ConfigError("a schedule of optax needs an optimizer whose own initial value is not 0")
        return [base / reference for base in bases]


def make_schedule(cfg: Any) -> Callable[[Any], Any]:
    """The optax schedule that `cfg` describes.

    Args:
      cfg: `dict(type=NAME, **arguments)` with a name that optax has; arguments may be such dicts, or lists of them.

    Raises:
      TypeError: not such a dict, or arguments that the schedule does not take. KeyError: no schedule has that name.
    """
    import optax

    if not isinstance(cfg, Mapping) or not isinstance(cfg.get("type"), str):
        raise TypeError(f"an optax schedule is a dict with a 'type', found {cfg!r}")
    known = {name for name in vars(optax) if name.endswith(("_schedule", "_schedules"))} - {"scale_by_schedule"}
    known |= {"exponential_decay"}
    name = cfg["type"]
    if name not in known:
        raise UnknownNameError(f"optax has no schedule called {name!r}{closest(name, known)}")
    factory = getattr(optax, name)
    arguments = {key: value for key, value in cfg.items() if key != "type"}
    check_arguments(factory, arguments)
    for key, value in arguments.items():
        with config_path(key):
            if isinstance(value, Mapping) and "type" in value:
                arguments[key] = make_schedule(value)
            elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
                arguments[key] = [make_schedule(item) for item in value]
    return factory(**arguments)


def _blocks(schedule: Callable[[Any], Any]) -> Callable[[int], float]:
    """`schedule` as a function from a step to a Python float that computes `_BLOCK` of its values at a time."""
    import jax

    computed: dict[int, np.ndarray] = {}
    evaluate = jax.jit(jax.vmap(lambda step: jax.numpy.asarray(schedule(step), dtype=float)))

    def block(number: int) -> np.ndarray:
        device = _host_device()
        steps = np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.float64)
        with jax.enable_x64(True), jax.default_device(device):
            return jax.device_get(evaluate(jax.device_put(steps, device)))

    def value_at(t: int) -> float:
        number, offset = divmod(t, _BLOCK)
        if number not in computed:
            computed.clear()
            computed[number] = block(number)
        return float(computed[number][offset])

    return value_at


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
