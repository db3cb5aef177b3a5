"""Define precision policies: the dtype that parameters are kept in, and the one that the network computes in."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jengine.errors import closest
from jengine.model.autocast import cast_floating, compute_in
from jengine.model.model import Losses, Model, PyTree

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Hold a policy. Losses and model state are float32 (or what they were) whatever the network computes in.

    Attributes:
      compute: dtype that parameters and floating-point inputs are cast to where the model calls its network. Targets
        and losses stay in float32.
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
    """`model` under a precision policy: its network computes in another dtype, its losses and model state do not.

    `LinenModel` and `NnxModel` cast where they call their module. A model of your own calls its network through
    `jengine.model.autocast`: only there can inputs be distinguished from targets. One that does not is an error.
    """

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
        return cast_floating(params, self.precision.params), model_state

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Return the losses in float32, of the batch as it is, and the model state in the dtypes that it had."""
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
        """As `loss`, for the loss of one phase."""
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
        return cast_floating(losses, "float32"), new_state
