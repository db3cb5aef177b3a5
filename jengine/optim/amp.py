"""Train in mixed precision: the network in a low precision, parameters, targets, loss and optimizer in float32."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.errors import closest
from jengine.model.autocast import autocast, compute_in
from jengine.optim.clip import clipping
from jengine.optim.core import Tree
from jengine.optim.loss_scale import LossScaleState, all_finite, parse_loss_scale
from jengine.optim.state import OptState
from jengine.optim.wrapper import OptimWrapper
from jengine.registry import OPTIM_WRAPPERS

_DTYPES = ("bfloat16", "float16", "float32", "float64")


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """OptimWrapper with a compute dtype and, for float16, a loss scale.

    The network computes in `dtype` where it is called through `autocast`; `LinenModel` and `NnxModel` do that
    themselves. Parameters, targets, the loss, model state and optimizer state stay in float32. `value_and_grad` raises
    a ValueError for a loss all of whose matrix products and convolutions would be in float32.

    With a loss scale, `update` takes gradients of the scaled loss, as `value_and_grad` gives them, and unscales them
    before clipping. An update whose gradients hold an infinity or a NaN is skipped: parameters and optimizer state stay
    as they are, the scale backs off, and `opt_state.loss_scale.finite` is False.

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
        dtype: str | None = "bfloat16",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dtype = "bfloat16" if dtype is None else str(dtype)
        if self.dtype not in _DTYPES:
            raise ValueError(f"AmpOptimWrapper: unknown dtype {dtype!r}{closest(self.dtype, _DTYPES)}")
        if loss_scale == "auto":
            loss_scale = "dynamic" if self.dtype == "float16" else None
        self.loss_scale = None if loss_scale is None else parse_loss_scale(loss_scale)

    def autocast(self, apply_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of a network so that it computes in `dtype`; see `jengine.model.autocast`.

        Args:
          apply_fn: `(params, *inputs, **inputs) -> outputs`, such as the `apply` of a Linen module.

        Returns:
          A function that casts its floating arguments to `dtype` and its floating outputs to float32.
        """
        return autocast(apply_fn, self.dtype)

    def init(self, params: Tree) -> OptState:
        """The state before the first update; see OptimWrapper."""
        opt_state = super().init(params)
        return opt_state if self.loss_scale is None else opt_state._replace(loss_scale=self.loss_scale.init())

    def state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Everything that OptimWrapper saves, and the `loss_scaler` under the key names of PyTorch's GradScaler.

        Without a loss scale there is no `loss_scaler`.
        """
        if self.loss_scale is None:
            return super().state_dict(opt_state)
        scale = _loss_scale(opt_state)
        loss_scaler = {
            "scale": float(scale.scale),
            "growth_factor": self.loss_scale.growth_factor,
            "backoff_factor": self.loss_scale.backoff_factor,
            "growth_interval": self.loss_scale.growth_interval,
            "_growth_tracker": int(scale.growth_tracker),
        }
        return {**super().state_dict(opt_state), "loss_scaler": loss_scaler}

    def load_state_dict(self, state_dict: Mapping[str, Any], opt_state: OptState) -> OptState:
        """Load a `state_dict`.

        Without a `loss_scaler` in it, the scale stays as it is in `opt_state`; without a loss scale in this wrapper,
        its `loss_scaler` is not used.
        """
        opt_state = super().load_state_dict(state_dict, opt_state)
        saved = state_dict.get("loss_scaler")
        if saved is None or self.loss_scale is None:
            return opt_state
        self.loss_scale = self.loss_scale._replace(
            growth_factor=saved["growth_factor"],
            backoff_factor=saved["backoff_factor"],
            growth_interval=saved["growth_interval"],
        )
        scale = _loss_scale(opt_state)._replace(
            scale=jnp.asarray(saved["scale"], jnp.float32),
            growth_tracker=jnp.asarray(saved["_growth_tracker"], jnp.int32),
        )
        return opt_state._replace(loss_scale=scale)

    def as_optax(self) -> optax.GradientTransformationExtraArgs:
        """As for OptimWrapper, but not with a loss scale, which a chain of gradient transformations cannot see.

        Raises:
          ValueError: there is a loss scale.
        """
        if self.loss_scale is None:
            return super().as_optax()
        raise ValueError("a plain optax chain cannot scale the loss: use an OptimWrapper, with bfloat16 for speed")

    def _clip_and_step(
        self, grads: Tree, opt_state: OptState, params: Tree, hyperparams: Mapping[str, Any], outcome: Any
    ) -> tuple[Tree, OptState]:
        if self.loss_scale is None:
            return super()._clip_and_step(grads, opt_state, params, hyperparams, outcome)
        scale = _loss_scale(opt_state)
        finite = all_finite(grads)
        inverse = 1 / scale.scale

        def unscaled() -> Tree:
            return jax.tree.map(lambda g: g * inverse.astype(g.dtype), grads)

        clip, metrics = clipping(unscaled(), self.clip_grad)

        # the branch unscales and clips by itself: what it is handed would have to be written out for it
        def apply(inner: Any) -> tuple[Tree, Any]:
            updates, inner = self.grouped.update(clip(unscaled()), inner, params, hyperparams)
            return outcome.of(updates), inner

        def skip(inner: Any) -> tuple[Tree, Any]:
            if outcome.unchanged is not None:
                return outcome.unchanged, inner
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(apply, inner)[0]), inner

        # a branch, not a selection on every leaf: that costs four times the update
        result, inner = jax.lax.cond(finite, apply, skip, opt_state.inner)
        moved = self.loss_scale.update(scale, finite)
        metrics |= {"loss_scale": scale.scale, "skipped_steps": moved.skipped.astype(jnp.float32)}
        count = opt_state.count + finite.astype(jnp.int32)
        return result, opt_state._replace(count=count, inner=inner, loss_scale=moved, metrics=metrics)

    def _metric_names(self) -> tuple[str, ...]:
        names = super()._metric_names()
        return names if self.loss_scale is None else (*names, "loss_scale", "skipped_steps")

    def _scale_loss(self, loss: jax.Array, opt_state: OptState) -> jax.Array:
        if self.loss_scale is None:
            return loss
        return loss.astype(jnp.float32) * _loss_scale(opt_state).scale

    def _call(self, loss_fn: Callable[..., Any], params: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return compute_in(self.dtype, lambda params: loss_fn(params, *args, **kwargs), params)


def _loss_scale(opt_state: OptState) -> LossScaleState:
    if opt_state.loss_scale is None:
        raise ValueError("the state has no loss scale: make it with AmpOptimWrapper.init")
    return opt_state.loss_scale
