"""Mixed precision: the network computes in low precision.

Parameters, targets, loss and optimizer in float32.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import OptState

from jengine.config.annotations import is_mapping
from jengine.config.registry import OPTIM_WRAPPERS, check_arguments
from jengine.model.autocast import at_least_float32, autocast, compute_in, current_dtype
from jengine.optim.transforms.accumulate import AccumulateState
from jengine.optim.transforms.fields import get_field
from jengine.optim.transforms.groups import GroupHyperparamsState
from jengine.optim.transforms.loss_scale import LossScale, LossScaleState, dynamic_loss_scale
from jengine.optim.wrapper import OptimWrapper

_SAVED_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")  # as PyTorch's GradScaler


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """OptimWrapper with a compute dtype and, for float16, a loss scale.

    A network called through `autocast` computes in `dtype`; `LinenModel` and `NnxModel` call theirs
    through it. Parameters, targets, the loss, model state and optimizer state stay in float32.
    `value_and_grad` raises a ValueError for a loss whose matrix products and convolutions are all
    in float32.

    >>> from jengine.optim.optimizers.adam import AdamW
    >>> AmpOptimWrapper(optimizer=AdamW(lr=1e-3), dtype="float16").loss_scale.init_scale
    65536.0

    With a loss scale, `update` takes gradients of the scaled loss, as returned by `value_and_grad`,
    and unscales them before clipping. An update with an infinity or a NaN in the gradients is
    skipped: parameters and optimizer state do not change, the scale is reduced, and
    `is_finite(opt_state)` is False.

    Args:
      loss_scale: 'dynamic'; a float, for a constant scale; a dict of `LossScale` arguments; None
        for no scaling; or 'auto': 'dynamic' for float16, None for other dtypes, which have
        float32's range. As an attribute the `LossScale`, or None.
      dtype: the network's compute dtype, 'bfloat16' or 'float16'.
      **kwargs: OptimWrapper arguments.

    Raises:
      TypeError: an invalid loss_scale. ValueError: an unknown dtype, or an illegal setting.
    """

    def __init__(
        self,
        loss_scale: str | float | Mapping[str, Any] | None = "auto",
        dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = "bfloat16",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dtype = "bfloat16" if dtype is None else str(dtype)
        # float16 has 5 bits of exponent and needs a scale; bfloat16 has the range of float32 and
        # would only lose time.
        if loss_scale == "auto":
            loss_scale = "dynamic" if self.dtype == "float16" else None
        self.loss_scale = None if loss_scale is None else parse_loss_scale(loss_scale)

    @property
    def loss_scaler(self) -> LossScale | None:
        """MMEngine's name for `loss_scale`.

        The current scale is `optax.tree.get(opt_state, 'loss_scale')`.
        """
        return self.loss_scale

    def autocast(self, apply_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a network's `apply` so that it computes in `dtype` and returns float32.

        See `jengine.model.autocast`.
        """
        return autocast(apply_fn, self.dtype)

    @contextlib.contextmanager
    def optim_context(self, model: Any = None) -> Iterator[bool]:
        """Surround the forward pass within a loss, whose network `autocast` casts.

        Yield whether it updates.

        Raises:
          RuntimeError: outside of a loss that this wrapper, or a Runner, calls and checks for low
            precision.
        """
        if current_dtype() is None and jnp.dtype(self.dtype).itemsize < 4:
            raise RuntimeError(
                "AmpOptimWrapper.optim_context cannot cast what is computed inside, because JAX "
                "has no autocast: call the network as `outputs = wrapper.autocast(apply)(params, "
                "x)`, and the loss by `wrapper.update_params` or `wrapper.value_and_grad`"
            )
        with super().optim_context(model) as is_update:
            yield is_update

    def _add_loss_scaling(
        self, chain: optax.GradientTransformationExtraArgs
    ) -> optax.GradientTransformationExtraArgs:
        # Around the chain, as clipping needs unscaled gradients, and a skip must keep all of its
        # state.
        return chain if self.loss_scale is None else dynamic_loss_scale(chain, *self.loss_scale)

    def state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Return OptimWrapper's state dict, and with a loss scale `loss_scaler`, with
        GradScaler's keys.
        """
        if self.loss_scale is None:
            return super().state_dict(opt_state)
        scale, tracker = (
            get_field(opt_state, LossScaleState, name) for name in ("loss_scale", "growth_tracker")
        )
        settings = {name: getattr(self.loss_scale, name) for name in _SAVED_SETTINGS}
        # The names of PyTorch's GradScaler, which MMEngine writes into its checkpoints.
        loss_scaler = {"scale": float(scale), **settings, "_growth_tracker": int(tracker)}
        return {**super().state_dict(opt_state), "loss_scaler": loss_scaler}

    def load_state_dict(self, state_dict: Mapping[str, Any], opt_state: OptState) -> OptState:
        """Restore a `state_dict`, also from a wrapper without a loss scale or with one.

        If the saved state has no loss scale, the one in `opt_state` is kept. The settings of the
        scale are those of this wrapper.
        """
        saved = state_dict["state"]
        if self.loss_scale is None or get_field(saved, LossScaleState, "loss_scale") is None:
            saved = _with_loss_scale_of(opt_state, saved)
        return super().load_state_dict({**state_dict, "state": saved}, opt_state)

    def metrics(self, before: OptState, after: OptState) -> dict[str, jax.Array]:
        """Return the metrics for the log, see OptimWrapper.

        With a loss scale they include `loss_scale`, float32[], that of this update, and
        `skipped_steps`, float32[]. The `grad_norm` of a skipped update is infinite.
        """
        metrics = super().metrics(before, after)
        if self.loss_scale is None:
            return metrics
        if "grad_norm" in metrics:
            finite = get_field(after, LossScaleState, "is_finite")
            # The chain did not run, so its norm is of an earlier update.
            metrics = {"grad_norm": jnp.where(finite, metrics["grad_norm"], jnp.inf)}
        scale = get_field(before, LossScaleState, "loss_scale")
        skipped = get_field(after, LossScaleState, "skipped_steps")
        return {**metrics, "loss_scale": scale, "skipped_steps": skipped.astype(jnp.float32)}

    def is_finite(self, opt_state: OptState) -> jax.Array | None:
        """Return whether the last update was applied, bool[].

        None without a loss scale: no update is skipped.
        """
        return get_field(opt_state, LossScaleState, "is_finite")

    def _scale_loss(self, loss: jax.Array, opt_state: OptState) -> jax.Array:
        if self.loss_scale is None:
            return loss
        # A scale of 65536 is above the largest float16.
        return at_least_float32(loss) * get_field(opt_state, LossScaleState, "loss_scale")

    def _call_loss(
        self, loss_fn: Callable[..., Any], params: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        return compute_in(self.dtype, lambda params: loss_fn(params, *args, **kwargs), params)


def parse_loss_scale(loss_scale: str | float | Mapping[str, Any]) -> LossScale:
    """Parse the `loss_scale` of an AmpOptimWrapper that has one.

    Raises:
      TypeError: not 'dynamic', a float or a dict, or an unknown setting. ValueError: an illegal
        setting.
    """
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        settings = LossScale()
    elif isinstance(loss_scale, float):
        # Factors of 1 keep the scale constant; overflows are still skipped.
        settings = LossScale(init_scale=loss_scale, growth_factor=1.0, backoff_factor=1.0)
    elif is_mapping(loss_scale):
        arguments = dict(loss_scale.items())
        check_arguments(LossScale, arguments)
        settings = LossScale(**arguments)
    else:
        raise TypeError(f"`loss_scale` must be 'dynamic', a float or a dict, got {loss_scale!r}")
    settings.check()  # before any step is traced
    return settings


def _with_loss_scale_of(opt_state: Any, saved: Any) -> Any:
    """Return a saved state with the loss scale of `opt_state`, or without one if that has none."""
    if isinstance(saved, AccumulateState | GroupHyperparamsState):
        inner = _with_loss_scale_of(opt_state.inner_state, saved.inner_state)
        return saved._replace(inner_state=inner)
    inner = saved.inner_state if isinstance(saved, LossScaleState) else saved
    is_scaled = isinstance(opt_state, LossScaleState)
    return opt_state._replace(inner_state=inner) if is_scaled else inner
