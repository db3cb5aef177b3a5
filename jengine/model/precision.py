"""Precision policies: the dtypes for parameters, network and predictions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jengine.config.annotations import checked, is_mapping
from jengine.config.errors import config_path
from jengine.config.registry import MODELS, Config, as_config
from jengine.model.autocast import cast_floating, cast_floating_like, compute_in
from jengine.model.model import (
    FROZEN,
    Batch,
    Losses,
    Model,
    ModelState,
    ModelWrapper,
    Params,
    PyTree,
    predict_with_key,
)

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@checked
@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of a precision policy. It does not affect the model state; losses are float32.

    Attributes:
      compute: network dtype: parameters and floating-point inputs are cast when the model calls the
        network. Targets and losses stay in float32.
      params: dtype in which parameters are initialized, updated and saved.
      output: prediction dtype.
    """

    compute: Dtype = "float32"
    params: Dtype = "float32"
    output: Dtype = "float32"


def get_precision(precision: str | Mapping[str, str] | Precision | None) -> Precision | None:
    """Return the policy for a config.

    >>> get_precision("bfloat16")
    Precision(compute='bfloat16', params='float32', output='float32')

    Args:
      precision: None for no policy, the compute dtype ('bfloat16'), a dict with `Precision`'s
        fields, or a `Precision`.

    Raises:
      TypeError: an unknown field or another type. ConfigError: an unknown dtype.
    """
    if precision is None or isinstance(precision, Precision):
        return precision
    fields: Any = {"compute": precision} if isinstance(precision, str) else precision
    return Precision(**fields)


class CastModel(ModelWrapper):
    """Model with a precision policy, which casts the network, but not the losses and the model
    state.

    `LinenModel` and `NnxModel` cast when they call the module. A custom model must call the network
    through `jengine.model.autocast`, as only there can inputs be distinguished from targets;
    otherwise `loss` and `predict` raise an error.
    """

    keeps_variables = True

    def __init__(self, model: Model, precision: Precision) -> None:
        super().__init__(model)
        self.precision = precision

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Initialize the model and cast the parameters, trained and frozen, to
        `precision.params`.
        """
        params, model_state = self.model.init(rng, batch)
        # Frozen parameters are weights too; the rest of the model state, such as statistics, keeps
        # its dtypes.
        if FROZEN in model_state:
            model_state = {
                **model_state,
                FROZEN: cast_floating(model_state[FROZEN], self.precision.params),
            }
        return cast_floating(params, self.precision.params), model_state

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the predictions in `precision.output`."""

        def predict(params: Params) -> PyTree:
            return predict_with_key(self.model, params, model_state, batch, rng)

        return cast_floating(
            compute_in(self.precision.compute, predict, params), self.precision.output
        )

    def train_step(self, state: Any, batch: Batch, ctx: Any) -> tuple[Any, Mapping[str, Any]]:
        """Run the inner model's training step with its networks in `precision.compute`."""
        new_state, metrics = compute_in(
            self.precision.compute,
            # `compute_in` traces a function of the parameters, and checks the products in it.
            lambda params: self.model.train_step(state.replace(params=params), batch, ctx),
            state.params,
        )
        # Statistics of a network in low precision, which a step returns in the dtypes that it got
        model_state = cast_floating_like(new_state.model_state, state.model_state)
        return new_state.replace(model_state=model_state), metrics

    def _wrap_loss(
        self,
        loss: Callable[..., Any],
        params: Params,
        model_state: ModelState,
        batch: Batch,
        **kwargs: Any,
    ) -> tuple[Losses, PyTree]:
        """Return the losses in at least float32, and the new model state in the original dtypes."""
        losses, new_state = compute_in(
            self.precision.compute,
            lambda params: loss(params, model_state, batch, **kwargs),
            params,
        )
        new_state = cast_floating_like(new_state, model_state)  # e.g. statistics
        # The mean over a batch in bfloat16 has 8 bits; a float64 loss stays as it is.
        return jax.tree.map(
            lambda x: cast_floating(x, jnp.result_type(x, jnp.float32)), losses
        ), new_state


def build_model(
    model: Model | Config, precision: str | Mapping[str, str] | Precision | None
) -> Model:
    """Return the model, from an instance or a config, under the precision policy."""
    with config_path("model"):
        built: Any = as_config(model)
        if is_mapping(built):
            built = MODELS.build(built)
        missing = [
            name for name in ("init", "loss", "predict") if not callable(getattr(built, name, None))
        ]
        if missing:
            raise TypeError(
                f"a model must have init, loss and predict, got {type(built).__name__} without "
                f"{', '.join(missing)}; wrap a Flax module in LinenModel or NnxModel, and plain "
                "functions in FunctionalModel"
            )
    with config_path("precision"):
        policy = get_precision(precision)
    return built if policy is None else CastModel(built, policy)
