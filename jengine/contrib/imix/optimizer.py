"""How the parameters are updated, as iMIX says it: settings of the optimizer wrapper, for the update is in the step."""

from collections.abc import Mapping
from typing import Any, Literal

from jengine.annotations import Count
from jengine.contrib.imix.hook_base import HookBase
from jengine.errors import ConfigError, closest
from jengine.hooks.priority import PriorityStatus
from jengine.optim.transforms.clip import parse_clip_grad
from jengine.registry import HOOKS

_MODES = ("all",)


@HOOKS.register_module()
class OptimizerHook(HookBase):
    """Says what an update is: over how many iterations gradients are accumulated, and how they are clipped.

    Backward pass, clipping and update are parts of the compiled step, so this hook does nothing while training runs;
    whatever comes after it, the first of all, sees the updated parameters. `wrapper_options` are the arguments of the
    optimizer wrapper that does what the hook says; `from_imix` builds that wrapper. Other than in iMIX, gradients are
    clipped once an update, when the window is full, and the iterations left at the end make an update of their own. The
    norm before clipping is logged as `grad_norm`.

    Args:
      grad_clip: `dict(max_norm=, norm_type=2)`; or `dict(max_grad_l2_norm=, clip_norm_mode='all', use_scale=)`, whose
        `use_scale` has no effect, for gradients are unscaled before they are clipped. None for no clipping.
      gradient_accumulation_steps: iterations whose mean gradient makes one update.

    Raises:
      TypeError, ValueError, AssertionError: a `grad_clip` that makes no sense.
    """

    default_level = PriorityStatus.HIGH
    wrapper_type = "OptimWrapper"

    def __init__(self, grad_clip: Mapping[str, Any] | None = None, gradient_accumulation_steps: Count = 1) -> None:
        self.grad_clip = _read_clip(grad_clip)
        self.gradient_accumulation_steps = gradient_accumulation_steps

    def wrapper_options(self) -> dict[str, Any]:
        """The optimizer wrapper as a config without its `optimizer`."""
        options: dict[str, Any] = {
            "type": self.wrapper_type,
            "accumulative_counts": self.gradient_accumulation_steps,
        }
        return options if self.grad_clip is None else {**options, "clip_grad": self.grad_clip}

    def before_train(self) -> None:
        """Checks that the run's optimizer wrapper does what the hook says.

        Raises:
          ConfigError: it does something else.
        """
        wrapper = self.trainer.optim_wrapper
        asked = self.gradient_accumulation_steps, parse_clip_grad(self.grad_clip)
        found = wrapper.accumulative_counts, wrapper.clip_grad
        if asked != found:
            raise ConfigError(
                f"{type(self).__name__} asks for updates over {asked[0]} iterations with clipping {asked[1]}, and the "
                f"optimizer wrapper has {found[0]} and {found[1]}; build the run with from_imix, or give optim_wrapper="
                f"dict({', '.join(f'{key}={value!r}' for key, value in self.wrapper_options().items())}, ...)"
            )


@HOOKS.register_module()
class Fp16OptimizerHook(OptimizerHook):
    """`OptimizerHook` in half precision with a loss scale.

    The network computes in float16; parameters, losses and optimizer state stay in float32. An update whose gradients
    are not finite is left out, and the scale backs off. With accumulation, gradients are unscaled and clipped once, at
    the end of the window.

    Args:
      grad_clip: as for OptimizerHook.
      grad_scaler_config: `init_scale`, `growth_factor`, `backoff_factor` and `growth_interval` of the loss scale; the
        usual ones by default.
      gradient_accumulation_steps: as for OptimizerHook.
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
        """The optimizer wrapper as a config without its `optimizer`."""
        return {**super().wrapper_options(), "loss_scale": self.grad_scaler_config or "dynamic", "dtype": self.dtype}

    def before_train(self) -> None:
        """Checks that the run's optimizer wrapper scales the loss.

        Raises:
          ConfigError: it does not, or clips or accumulates otherwise.
        """
        super().before_train()
        if getattr(self.trainer.optim_wrapper, "loss_scale", None) is None:
            raise ConfigError(
                f"{type(self).__name__} needs an AmpOptimWrapper, found {type(self.trainer.optim_wrapper).__name__}; "
                "build the run with from_imix, or give optim_wrapper=dict(type='AmpOptimWrapper', ...)"
            )


def _read_clip(grad_clip: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`grad_clip` as the optimizer wrapper has it."""
    if grad_clip is None:
        return None
    clip = dict(grad_clip.items())
    if "max_grad_l2_norm" in clip:
        mode = clip.pop("clip_norm_mode", "all")
        if mode not in _MODES:
            raise ConfigError(f"grad_clip: clip_norm_mode is 'all', the norm of all gradients together; found {mode!r}")
        clip.pop("use_scale", None)
        norm = clip.pop("max_grad_l2_norm")
        if clip:
            known = ("max_grad_l2_norm", "clip_norm_mode", "use_scale")
            name = next(iter(clip))
            raise ConfigError(f"grad_clip with max_grad_l2_norm has no {name!r}{closest(str(name), known)}")
        clip = {"max_norm": norm}
    parse_clip_grad(clip)
    return clip
