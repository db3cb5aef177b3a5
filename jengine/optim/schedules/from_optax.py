"""Formula that follows an optax schedule, given by name in a config or as a function of the step.

The schedule returns the value for the optimizer's own settings; groups with a multiplier keep it.
optax computes with arrays, so values are computed in blocks, in float64 on the CPU: the accelerator
is not used.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jengine.config.containers import resolve
from jengine.config.errors import (
    ConfigError,
    config_path,
    current_config_path,
)
from jengine.config.registry import FUNCTIONS
from jengine.optim.schedules.formulas import Changes, Formula, Steps, map_floats

Schedule = Callable[[Any], Any]  # step -> value, as `optax.Schedule`

_BLOCK = 1024  # values computed in one call
_NUMBERS = (numbers.Real, np.ndarray, jax.Array, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class OptaxFormula(Formula):
    """Follow an optax schedule: `schedule=dict(type='warmup_cosine_decay_schedule', init_value=0.0,
    ...)`.

    The schedule may also be a function of the step, `schedule=optax.cosine_decay_schedule(0.1,
    1000)`. A schedule of schedules (`join_schedules`) takes a list of such dicts and functions.

    Attributes:
      schedule: a function from the step to the value, or the name of one in optax as `type`, with
        arguments.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = None
    is_alone: ClassVar[bool] = True
    schedule: Mapping[str, Any] | Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", resolve(vars(self))["schedule"])
        with config_path("schedule"):
            first = self._function(0) if self._traced is None else self._traced
            if getattr(first, "shape", ()) != () or not isinstance(first, _NUMBERS):
                raise TypeError(
                    f"`{current_config_path()}` must return one number for a step, got {first!r}"
                )

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the scheduled values, computed in blocks."""
        if self._traced is None:
            values = map_floats(self._function, steps.tolist())
        else:
            values = self._evaluate(steps)
        return np.zeros(len(steps)), values, np.zeros(len(steps))

    def targets(self, initial_values: Sequence[float], reference: float) -> list[float]:
        """Return each group's multiplier: the initial value divided by that in the optimizer's
        own settings.
        """
        # A multiplier is a quotient by it.
        if reference == 0.0:
            raise ConfigError(
                "the optimizer's own initial value must not be 0 for an optax schedule, got 0"
            )
        return [initial / reference for initial in initial_values]

    @property
    def block(self) -> int:  # type: ignore[override]
        """One if JAX cannot trace the schedule: each value calls a user's function."""
        return 1 if self._traced is None else _BLOCK

    @property
    def _dtype(self) -> Any:
        """Integers for functions, as in an optax chain; the schedules of optax take float64."""
        has_function = any(map(callable, jax.tree.leaves(self.schedule, is_leaf=callable)))
        return np.int64 if has_function else np.float64

    @functools.cached_property
    def _function(self) -> Schedule:
        return make_schedule(self.schedule)

    @functools.cached_property
    def _traced(self) -> Any:
        """The value's shape and dtype; None if JAX cannot trace it, as a branch on the step."""
        try:
            return jax.eval_shape(self._function, jax.ShapeDtypeStruct((), self._dtype))
        except Exception:  # user code may raise anything when it is called with a tracer
            return None

    @functools.cached_property
    def _compiled(self) -> Callable[[Any], jax.Array]:
        # One call for many steps, as each dispatch has a cost on the host.
        return jax.jit(jax.vmap(lambda step: jax.numpy.asarray(self._function(step), dtype=float)))

    def _evaluate(self, steps: Steps) -> np.ndarray:
        """Compute the values, float64[n], `_BLOCK` steps at a time."""
        device = _host_device()
        padded = np.pad(steps, (0, -len(steps) % _BLOCK), mode="edge").astype(self._dtype)
        # float64, so that values equal those of the other schedules, which are Python floats.
        with jax.enable_x64(True), jax.default_device(device):
            values = [
                jax.device_get(self._compiled(jax.device_put(block, device)))
                for block in padded.reshape(-1, _BLOCK)
            ]
        return np.concatenate(values)[: len(steps)]


def make_schedule(cfg: Mapping[str, Any] | Schedule) -> Schedule:
    """Build an optax schedule from a config.

    >>> make_schedule(
    ...     dict(type="linear_schedule", init_value=0.0, end_value=1.0, transition_steps=4)
    ... )(1).item()
    0.25

    Args:
      cfg: a function of the step; or `dict(type=NAME, **arguments)` with an optax schedule's name,
        whose arguments may also be such dicts and functions, or lists of them.

    Raises:
      TypeError: `cfg` is neither, or an argument is unknown. KeyError: optax has no function of
        that name.
    """
    if callable(cfg) and not isinstance(cfg, type):
        return cfg
    if not isinstance(cfg, Mapping) or not isinstance(cfg.get("type"), str):
        raise TypeError(
            f"`schedule` must be a function of the step or a dict with a 'type', got {cfg!r}"
        )
    arguments = {}
    for key, value in cfg.items():
        with config_path(key):
            if isinstance(value, Mapping) and "type" in value:
                value = make_schedule(value)
            elif isinstance(value, list | tuple) and any(
                isinstance(item, Mapping) for item in value
            ):
                value = [make_schedule(item) for item in value]
        arguments[key] = value
    name = cfg["type"]
    full_name = name if "." in name else f"optax.{name}"
    return FUNCTIONS.build({**arguments, "type": full_name})


def _host_device() -> Any:
    """Return a CPU device; another device if JAX has no CPU backend (`JAX_PLATFORMS=cuda`)."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
