"""Define precision policies: the dtypes of the parameters, of the network's computation and of the predictions."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jengine.errors import closest
from jengine.model.autocast import cast_floating, compute_in
from jengine.model.model import Losses, Model, PyTree

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Hold the dtypes of a precision policy. It does not affect the model state; losses are float32.

    Attributes:
      compute: dtype of the network: parameters and floating-point inputs are cast when the model calls its network.
        Targets and losses stay in float32.
      params: dtype in which parameters are initialized, updated and saved.
      output: dtype of predictions.
    """

    compute: str = "float32"
    params: str = "float32"
    output: str = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = getattr(self, field.name)
            if dtype not in _DTYPES:
                hint = closest(str(dtype), _DTYPES)
                raise ValueError(f"precision: `{field.name}` must be a floating-point dtype, got {dtype!r}{hint}")


def get_precision(precision: str | Mapping[str, str] | Precision | None) -> Precision | None:
    """Return the policy of a config.

    Args:
      precision: None for no policy, the compute dtype ('bfloat16'), a dict of `Precision`'s fields, or a `Precision`.

    Raises:
      TypeError: if `precision` has an unknown field or another type.
      ValueError: if a dtype is unknown.
    """
    if precision is None or isinstance(precision, Precision):
        return precision
    if isinstance(precision, str):
        return Precision(compute=precision)
    if isinstance(precision, Mapping):
        names = [field.name for field in dataclasses.fields(Precision)]
        for key in precision:
            if key not in names:
                raise TypeError(f"precision has no field {key!r}{closest(str(key), names)}")
        return Precision(**precision)
    raise TypeError(f"`precision` must be None, the name of a dtype or a dict, got {precision!r}")


class CastModel(Model):
    """Apply a precision policy to a model: cast its network, but not its losses and model state.

    `LinenModel` and `NnxModel` cast when they call their module. A custom model must call its network through
    `jengine.model.autocast`, as only there can inputs be distinguished from targets; otherwise `loss` and `predict`
    raise an error.

    Args:
      model: the model.
      precision: the policy.
    """

    def __init__(self, model: Model, precision: Precision) -> None:
        self.model = model
        self.precision = precision

    @property
    def module_types(self) -> Mapping[str, str]:  # type: ignore[override]
        """The module types of the inner model."""
        return self.model.module_types

    @property
    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:  # type: ignore[override]
        """The logical axes of the inner model."""
        return self.model.logical_axes

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Initialize the model and cast the parameters to `precision.params`."""
        params, model_state = self.model.init(rng, batch)
        return cast_floating(params, self.precision.params), model_state

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Return the losses in at least float32, and the new model state in its original dtypes."""
        return self._loss(self.model.loss, params, model_state, batch, rng, hyperparams)

    def phase_loss(
        self,
        phase: str,
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        *,
        rng: jax.Array,
        hyperparams: Mapping[str, Any],
    ) -> tuple[Losses, PyTree]:
        """Return the losses of one phase, see `loss`."""
        fn = functools.partial(self.model.phase_loss, phase)
        return self._loss(fn, params, model_state, batch, rng, hyperparams)

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Return the predictions in `precision.output`."""

        def predict(params: PyTree) -> PyTree:
            return self.model.predict(params, model_state, batch)

        return cast_floating(compute_in(self.precision.compute, predict, params), self.precision.output)

    def _loss(
        self,
        fn: Callable[..., tuple[Losses, PyTree]],
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        rng: jax.Array,
        hyperparams: Mapping[str, Any],
    ) -> tuple[Losses, PyTree]:
        def loss(params: PyTree) -> tuple[Losses, PyTree]:
            return fn(params, model_state, batch, rng=rng, hyperparams=hyperparams)

        losses, new_state = compute_in(self.precision.compute, loss, params)
        new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, model_state)
        return jax.tree.map(lambda x: cast_floating(x, jnp.result_type(x, jnp.float32)), losses), new_state
