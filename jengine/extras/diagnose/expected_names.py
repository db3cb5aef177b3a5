"""Names that hooks expect elsewhere in a config, and what they save, checked before training."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError, closest, config_path
from jengine.config.json_codec import pack
from jengine.config.registry import is_built_in
from jengine.evaluation.evaluator import Evaluator
from jengine.hooks.checkpoint import CheckpointHook
from jengine.hooks.hook import Hook
from jengine.optim.schedules.scheduler import ParamScheduler
from jengine.train.state import TrainState
from jengine.train.traced_hooks import hook_names

_VAL_LOOPS = ("ValLoop", "MultiValLoop")
# Entries in a checkpoint; hooks may add others in `before_save_checkpoint`
_CHECKPOINT_KEYS = (
    *TrainState.__dataclass_fields__,
    "state_dict",
    "meta",
    "message_hub",
    "hooks",
    "hyperparams",
    "visualizer",
    "replicas",
    "validations",
    "optimizer",
    "param_schedulers",
    "data",
    "exchanged",
    "set_by_hand",
    "fingerprint",
)


def check_stage_arguments(hooks: Sequence[Hook], *_: Any) -> None:
    """Raise ConfigError for a stage that does not take what the loops pass to it."""
    for hook in hooks:
        stages = () if is_built_in(type(hook)) else hook.get_triggered_stages()
        for stage in stages:
            names = list(inspect.signature(getattr(Hook, stage)).parameters)[1:]
            # a wrapper may add arguments, as that of iMIX's hooks does
            given = inspect.signature(getattr(hook, stage), follow_wrapped=False)
            try:
                given.bind(None, **dict.fromkeys(names[1:]))
            except TypeError:
                raise ConfigError(
                    f"`{type(hook).__name__}.{stage}` must have the arguments "
                    f"(self, {', '.join(names)}), got "
                    f"({', '.join(['self', *given.parameters])})"
                ) from None


def check_expected_names(
    hooks: Sequence[Hook], schedulers: Sequence[ParamScheduler], sections: Mapping[str, Any]
) -> None:
    """Check the metrics that hooks and schedules follow, and the keys that a hook publishes.

    Raises:
      ConfigError: a metric that no evaluator computes, or a key that no checkpoint has.
    """
    monitored = [
        (f"{type(hook).__name__}.{name}", metric)
        for hook in hooks
        for name, metric, _ in hook.monitored_metrics()
    ]
    monitored += [
        ("param_scheduler.monitor", s.settings.monitor) for s in schedulers if s.need_val_args
    ]
    custom = [hook for hook in hooks if not is_built_in(type(hook))]
    stages = {stage for hook in custom for stage in hook.get_triggered_stages()}
    # custom hooks may add metrics
    known = () if "after_val_epoch" in stages else _known_metrics(sections)
    for path, metric in monitored:
        if not known or metric in known:
            continue
        # Their passes end in a suffix: 'accuracy_origin'
        has_suffixes = any(type(hook).eval_variables is not Hook.eval_variables for hook in hooks)
        if not (has_suffixes and metric.startswith(known)):
            raise ConfigError(
                f"`{path}` must be a metric of val_evaluator, got "
                f"{metric!r}{closest(metric, known)}"
            )
    for hook in hooks:
        if isinstance(hook, CheckpointHook):
            if "before_save_checkpoint" not in stages:  # custom hooks may add the key
                _check_published_keys(hook)
            if known:
                with config_path("save_best"):
                    hook.check_auto(known[0])


def check_saved_states(
    hooks: Sequence[Hook], schedulers: Sequence[ParamScheduler], sections: Mapping[str, Any]
) -> None:
    """Raise ConfigError if a checkpoint cannot hold the state of a hook.

    A state that exists only during training is checked when it is saved.
    """
    if not [hook for hook in hooks if isinstance(hook, CheckpointHook)]:
        return
    names: dict[int, str] | None = None
    for hook in hooks:
        if type(hook).state_dict is Hook.state_dict or is_built_in(type(hook)):
            continue
        names = names or {id(other): name for name, other in hook_names(hooks).items()}
        name = names[id(hook)]
        state = None
        with contextlib.suppress(Exception):  # it may read what training sets
            state = hook.state_dict()
        try:
            pack(state, f"{name}.state_dict()")
        except TypeError as error:
            raise ConfigError(str(error)) from None


def _known_metrics(sections: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all validation metrics; () if custom classes may add others."""
    cfg = sections["val_cfg"]
    if not is_mapping(cfg) or cfg["type"] not in _VAL_LOOPS:
        return ()
    names: list[str] = []
    for name, evaluator in (sections["val_evaluator"] or {}).items():
        if type(evaluator) is not Evaluator or not (own := evaluator.names):
            return ()
        names += [f"{name}/{x}" for x in own] if name else own
    return tuple(names)


def _check_published_keys(hook: CheckpointHook) -> None:
    """Raise ConfigError if no checkpoint has a key."""
    for key in hook.published_keys:
        if key not in _CHECKPOINT_KEYS:
            raise ConfigError(
                f"`{type(hook).__name__}.published_keys` must be keys of a checkpoint, got "
                f"{key!r}{closest(key, _CHECKPOINT_KEYS)}"
            )
