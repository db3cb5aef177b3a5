"""Train in mixed precision: the network in a low precision, parameters, targets, loss and optimizer in float32."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.errors import closest
from jengine.model.autocast import autocast, compute_in
from jengine.optim.optimizers.common import Tree
from jengine.optim.transforms import (
    AccumulateState,
    GroupHyperparamsState,
    LossScaleState,
    dynamic_loss_scale,
    get_field,
    set_fields,
)
from jengine.optim.wrapper import OptimWrapper, OptState
from jengine.registry import OPTIM_WRAPPERS


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """OptimWrapper with a compute dtype and, for float16, a loss scale.

    The network computes in `dtype` where it is called through `autocast`; `LinenModel` and `NnxModel` do that
    themselves. Parameters, targets, the loss, model state and optimizer state stay in float32. `value_and_grad` raises
    a ValueError for a loss all of whose matrix products and convolutions would be in float32.

    With a loss scale, `update` takes gradients of the scaled loss, as `value_and_grad` gives them, and unscales them
    before clipping. An update whose gradients hold an infinity or a NaN is skipped: parameters and optimizer state stay
    as they are, the scale backs off, and `is_finite(opt_state)` is False.

    Args:
      loss_scale: 'dynamic'; a float, which never moves; a dict of `LossScale` arguments; None for no scaling; or
        'auto': 'dynamic' for float16, None for all others, whose range is that of float32.
      dtype: what the network computes in: 'bfloat16' or 'float16'.
      **kwargs: those of OptimWrapper.

    Attributes:
      loss_scale: the `LossScale`, or None without scaling.
      dtype: the compute dtype.

    Raises:
      TypeError: a loss_scale of another kind. ValueError: an unknown dtype, or settings outside their range.
    """

    def __init__(
        self,
        loss_scale: str | float | Mapping[str, Any] | None = "auto",
        dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = "bfloat16",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dtype = "bfloat16" if dtype is None else str(dtype)
        if loss_scale == "auto":
            loss_scale = "dynamic" if self.dtype == "float16" else None
        self.loss_scale = None if loss_scale is None else parse_loss_scale(loss_scale)

    @property
    def loss_scaler(self) -> "LossScale | None":
        """MMEngine's name of `loss_scale`; the scale itself is in the state: `optax.tree.get(state, 'loss_scale')`."""
        return self.loss_scale

    def autocast(self, apply_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of a network so that it computes in `dtype`; see `jengine.model.autocast`.

        Args:
          apply_fn: `(params, *inputs, **inputs) -> outputs`, such as the `apply` of a Linen module.

        Returns:
          A function that casts its floating arguments to `dtype` and its floating outputs to float32.
        """
        return autocast(apply_fn, self.dtype)

    def _skipping(self, chain: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
        return chain if self.loss_scale is None else dynamic_loss_scale(chain, *self.loss_scale)

    def state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Return what OptimWrapper saves, and the `loss_scaler` under the key names of PyTorch's GradScaler.

        Without a loss scale there is no `loss_scaler`.
        """
        if self.loss_scale is None:
            return super().state_dict(opt_state)
        scale, tracker = (get_field(opt_state, LossScaleState, name) for name in ("loss_scale", "growth_tracker"))
        loss_scaler = {
            "scale": float(scale),
            "growth_factor": self.loss_scale.growth_factor,
            "backoff_factor": self.loss_scale.backoff_factor,
            "growth_interval": self.loss_scale.growth_interval,
            "_growth_tracker": int(tracker),
        }
        return {**super().state_dict(opt_state), "loss_scaler": loss_scaler}

    def load_state_dict(self, state_dict: Mapping[str, Any], opt_state: OptState) -> OptState:
        """Restore a `state_dict`.

        Without a `loss_scaler` in it, the scale stays as it is in `opt_state`; without a loss scale in this wrapper,
        its `loss_scaler` is not used.
        """
        if self.loss_scale is None:
            saved_state = _without_loss_scale(state_dict["state"])
            return super().load_state_dict({**state_dict, "state": saved_state}, opt_state)
        scale, tracker = (get_field(opt_state, LossScaleState, name) for name in ("loss_scale", "growth_tracker"))
        if (saved := state_dict.get("loss_scaler")) is not None:
            self.loss_scale = self.loss_scale._replace(
                growth_factor=saved["growth_factor"],
                backoff_factor=saved["backoff_factor"],
                growth_interval=saved["growth_interval"],
            )
            self.__dict__.pop("tx", None)  # it is built again, with these settings
            scale, tracker = jnp.float32(saved["scale"]), jnp.int32(saved["_growth_tracker"])
        saved_state = _with_loss_scale(state_dict["state"], opt_state)
        opt_state = super().load_state_dict({**state_dict, "state": saved_state}, opt_state)
        return set_fields(opt_state, LossScaleState, loss_scale=scale, growth_tracker=tracker)

    def metrics(self, before: OptState, after: OptState) -> dict[str, jax.Array]:
        """Return what the log shows of an update, see OptimWrapper.

        Returns:
          With a loss scale also `loss_scale`, float32[], that of this update, and `skipped_steps`, float32[]. The
          `grad_norm` of a skipped update is infinite.
        """
        metrics = super().metrics(before, after)
        if self.loss_scale is None:
            return metrics
        if "grad_norm" in metrics:
            finite = get_field(after, LossScaleState, "is_finite")
            metrics = {"grad_norm": jnp.where(finite, metrics["grad_norm"], jnp.inf)}
        scale = get_field(before, LossScaleState, "loss_scale")
        skipped = get_field(after, LossScaleState, "skipped_steps")
        return {**metrics, "loss_scale": scale, "skipped_steps": skipped.astype(jnp.float32)}

    def is_finite(self, opt_state: OptState) -> jax.Array | None:
        """Return whether the last update was applied, bool[]; None without a loss scale, where none is skipped."""
        return get_field(opt_state, LossScaleState, "is_finite")

    def _scale_loss(self, loss: jax.Array, opt_state: OptState) -> jax.Array:
        if self.loss_scale is None:
            return loss
        return loss.astype(jnp.float32) * get_field(opt_state, LossScaleState, "loss_scale")

    def _call(self, loss_fn: Callable[..., Any], params: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return compute_in(self.dtype, lambda params: loss_fn(params, *args, **kwargs), params)


def _with_loss_scale(saved: Any, opt_state: Any) -> Any:
    """Return a saved state with the loss scale of `opt_state` where it has none of its own."""
    if isinstance(opt_state, LossScaleState):
        return saved if isinstance(saved, LossScaleState) else opt_state._replace(inner_state=saved)
    return saved._replace(inner_state=_with_loss_scale(saved.inner_state, opt_state.inner_state))


def _without_loss_scale(saved: Any) -> Any:
    """Return a saved state without its loss scale, if it has one."""
    if isinstance(saved, LossScaleState):
        return saved.inner_state
    if isinstance(saved, AccumulateState | GroupHyperparamsState):
        return saved._replace(inner_state=_without_loss_scale(saved.inner_state))
    return saved


class LossScale(NamedTuple):
    """Hold the settings of `dynamic_loss_scale`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-126
    max_scale: float = 2.0**127


def parse_loss_scale(loss_scale: str | float | Mapping[str, Any]) -> LossScale:
    """Read the `loss_scale` of an AmpOptimWrapper.

    Args:
      loss_scale: 'dynamic'; a float, for a constant scale; or a dict of the settings of `dynamic_loss_scale`.

    Raises:
      TypeError: anything else, or an unknown setting. ValueError: a setting outside its range.
    """
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        settings = LossScale()
    elif isinstance(loss_scale, float):
        settings = LossScale(init_scale=loss_scale, growth_factor=1.0, backoff_factor=1.0)
    elif isinstance(loss_scale, Mapping) or hasattr(loss_scale, "items"):
        arguments = dict(loss_scale.items())
        for key in arguments:
            if key not in LossScale._fields:
                raise TypeError(f"loss_scale has no {key!r}{closest(str(key), LossScale._fields)}")
        settings = LossScale(**arguments)
    else:
        raise TypeError(f"loss_scale must be 'dynamic', a float or a dict, found {loss_scale!r}")
    dynamic_loss_scale(optax.identity(), *settings)  # checks them
    return settings
