"""iMIX's optimizer hooks, whose settings become those of the optimizer wrapper in the compiled
step.
"""

from collections.abc import Mapping
from typing import Any, Literal

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError, closest
from jengine.config.registry import HOOKS
from jengine.extras.imix.hook_base import HookBase
from jengine.extras.imix.levels import PriorityStatus
from jengine.extras.optimizers.amp import AmpOptimWrapper
from jengine.optim.transforms.clip import parse_clip_grad


@HOOKS.register_module()
class OptimizerHook(HookBase):
    """Hook that describes an update: for how many iterations to accumulate gradients, and how to
    clip them.

    Backward pass, clipping and update are parts of the compiled step, so this hook does nothing
    during training, and all hooks see the updated parameters. `wrapper_options` returns the
    arguments for the matching optimizer wrapper, which `from_imix` builds. Unlike in iMIX,
    gradients are clipped once per update, after accumulation, and the remaining iterations at the
    end make another update. The norm before clipping is logged as `grad_norm`.

    >>> OptimizerHook(dict(max_grad_l2_norm=1.0), gradient_accumulation_steps=4).wrapper_options()
    {'type': 'OptimWrapper', 'accumulative_counts': 4, 'clip_grad': {'max_norm': 1.0}}

    Args:
      grad_clip: `dict(max_norm=, norm_type=2)`; or `dict(max_grad_l2_norm=, clip_norm_mode='all',
        use_scale=)`, whose `use_scale` has no effect, because gradients are unscaled before they
        are clipped. None for no clipping.
      gradient_accumulation_steps: iterations per update, which uses their mean gradient.
    """

    default_level = PriorityStatus.HIGH
    wrapper_type = "OptimWrapper"

    def __init__(
        self, grad_clip: Mapping[str, Any] | None = None, gradient_accumulation_steps: Count = 1
    ) -> None:
        self.grad_clip = _convert_grad_clip(grad_clip)
        self.gradient_accumulation_steps = gradient_accumulation_steps

    def wrapper_options(self) -> dict[str, Any]:
        """Return the optimizer wrapper config without the `optimizer`."""
        options: dict[str, Any] = {
            "type": self.wrapper_type,
            "accumulative_counts": self.gradient_accumulation_steps,
        }
        return options if self.grad_clip is None else {**options, "clip_grad": self.grad_clip}

    def before_train(self) -> None:
        """Check that the optimizer wrapper of the run has the hook settings."""
        wrapper = self.trainer.optim_wrapper
        # The wrapper does the work, and the hook only has iMIX's name: two places with different
        # numbers must be an error.
        expected = self.gradient_accumulation_steps, parse_clip_grad(self.grad_clip)
        actual = wrapper.accumulative_counts, wrapper.clip_grad
        if expected != actual:
            options = ", ".join(f"{key}={value!r}" for key, value in self.wrapper_options().items())
            raise ConfigError(
                f"the optimizer wrapper must have the accumulative_counts={expected[0]} and "
                f"clip_grad={expected[1]} of {type(self).__name__}, got {actual[0]} and "
                f"{actual[1]}; build the run with from_imix, or use "
                f"optim_wrapper=dict({options}, ...)"
            )


@HOOKS.register_module()
class Fp16OptimizerHook(OptimizerHook):
    """Hook that describes an update in half precision with a loss scale; see `OptimizerHook`.

    The network computes in float16; parameters, losses and optimizer state stay in float32. An
    update with non-finite gradients is skipped, and the loss scale is reduced. With accumulation,
    gradients are unscaled and clipped once per update.

    Args:
      grad_scaler_config: `init_scale`, `growth_factor`, `backoff_factor` and `growth_interval`;
        optional.
      dtype: 'float16' or 'bfloat16'.
    """

    wrapper_type = "AmpOptimWrapper"

    def __init__(
        self,
        grad_clip: Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        gradient_accumulation_steps: Count = 1,
        dtype: Literal["bfloat16", "float16", "float32", "float64"] = "float16",
    ) -> None:
        super().__init__(grad_clip, gradient_accumulation_steps)
        self.grad_scaler_config = dict(grad_scaler_config or {})
        self.dtype = dtype

    def wrapper_options(self) -> dict[str, Any]:
        """Return the optimizer wrapper config without the `optimizer`."""
        return {
            **super().wrapper_options(),
            "loss_scale": self.grad_scaler_config or "dynamic",
            "dtype": self.dtype,
        }

    def before_train(self) -> None:
        """Check that the optimizer wrapper of the run scales the loss and has the hook settings."""
        super().before_train()
        wrapper = self.trainer.optim_wrapper
        if not isinstance(wrapper, AmpOptimWrapper) or wrapper.loss_scale is None:
            raise ConfigError(
                f"{type(self).__name__} must have an AmpOptimWrapper with a loss scale, got "
                f"{type(wrapper).__name__}; build the run with from_imix, or use "
                "optim_wrapper=dict(type='AmpOptimWrapper', ...)"
            )


def _convert_grad_clip(grad_clip: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Convert iMIX's `grad_clip` to `clip_grad` of the optimizer wrapper."""
    if grad_clip is None:
        return None
    clip = dict(grad_clip.items())
    if "max_grad_l2_norm" in clip:
        mode = clip.pop("clip_norm_mode", "all")
        if mode != "all":
            raise ConfigError(
                f"`grad_clip.clip_norm_mode` must be 'all', the global norm, got {mode!r}"
            )
        clip.pop("use_scale", None)
        norm = clip.pop("max_grad_l2_norm")
        if clip:
            known = ("max_grad_l2_norm", "clip_norm_mode", "use_scale")
            name = next(iter(clip))
            raise ConfigError(
                "the keys of `grad_clip` with max_grad_l2_norm must be known, got "
                f"{name!r}{closest(str(name), known)}"
            )
        clip = {"max_norm": norm}
    parse_clip_grad(clip)
    return clip
