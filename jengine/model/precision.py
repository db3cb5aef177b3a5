"""Precision policies: which dtype the parameters are kept in, and which the model computes in."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jengine.errors import closest
from jengine.model.model import Losses, Model, PyTree

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Precision:
    """A policy. Losses and model state are float32 (or what they were) whatever the model computes in.

    Attributes:
      compute: dtype that parameters and floating-point inputs are cast to before the model sees them.
      params: dtype in which parameters are initialised, updated and saved.
      output: dtype of predictions.
    """

    compute: str = "float32"
    params: str = "float32"
    output: str = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = getattr(self, field.name)
            if dtype not in _DTYPES:
                raise ValueError(f"precision: {field.name} is a floating-point dtype, found {dtype!r}"
                                 f"{closest(str(dtype), _DTYPES)}")  # fmt: skip


def get_precision(precision: str | Mapping[str, str] | Precision | None) -> Precision | None:
    """A policy from a config: None, the compute dtype ('bfloat16'), or a dict of `Precision`'s fields.

    Raises:
      TypeError: an unknown field or kind of value. ValueError: an unknown dtype.
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
    raise TypeError(f"precision is None, a dtype name or a dict, found {precision!r}")


class CastModel(Model):
    """`model` under a precision policy: the same three functions, with casts at their borders."""

    def __init__(self, model: Model, precision: Precision) -> None:
        self.model = model
        self.precision = precision

    @property
    def module_types(self) -> Mapping[str, str]:  # type: ignore[override]
        """Those of the model inside."""
        return self.model.module_types

    @property
    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:  # type: ignore[override]
        """Those of the model inside."""
        return self.model.logical_axes

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Initialises the model and casts the parameters to `precision.params`."""
        params, model_state = self.model.init(rng, batch)
        return _cast(params, self.precision.params), model_state

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Computes in `precision.compute`; losses come back in float32, the state in the dtypes that it had."""
        return self._cast_around(self.model.loss, params, model_state, batch, rng, hyperparams)

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
        """As `loss`, for the loss of one phase."""
        fn = functools.partial(self.model.phase_loss, phase)
        return self._cast_around(fn, params, model_state, batch, rng, hyperparams)

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Computes in `precision.compute`; predictions come back in `precision.output`."""
        compute = self.precision.compute
        predictions = self.model.predict(_cast(params, compute), model_state, _cast(batch, compute))
        return _cast(predictions, self.precision.output)

    def _cast_around(
        self,
        loss: Callable[..., tuple[Losses, PyTree]],
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        rng: jax.Array,
        hyperparams: Mapping[str, Any],
    ) -> tuple[Losses, PyTree]:
        compute = self.precision.compute
        losses, new_state = loss(
            _cast(params, compute), model_state, _cast(batch, compute), rng=rng, hyperparams=hyperparams
        )
        new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, model_state)
        return _cast(losses, "float32"), new_state


def _cast(tree: PyTree, dtype: str) -> PyTree:
    """The floating-point leaves of `tree` in `dtype`, the others as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, tree)
