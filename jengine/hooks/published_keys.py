"""Check of the keys that CheckpointHook publishes."""

import difflib
from collections.abc import Sequence

from jengine.errors import ConfigError, closest
from jengine.hooks.checkpoint import CheckpointHook
from jengine.hooks.hook import Hook
from jengine.registry import is_built_in
from jengine.train import TrainState

# Entries in a checkpoint; hooks may add others in `before_save_checkpoint`
_CHECKPOINT_KEYS = (
    *TrainState.__dataclass_fields__, "state_dict", "meta", "message_hub", "hooks", "hyperparams", "visualizer",
    "replicas", "validations", "optimizer", "param_schedulers", "data", "accumulated", "exchanged",
    "optimizer_settings", "fingerprint",
)  # fmt: skip


def check_published_keys(hook: CheckpointHook, hooks: Sequence[Hook]) -> None:
    """Raise ConfigError if no checkpoint has a key to publish, and no custom hook may add it."""
    users = [h for h in hooks if not is_built_in(type(h)) and "before_save_checkpoint" in h.get_triggered_stages()]
    for key in hook.published_keys:
        is_close = difflib.get_close_matches(key, _CHECKPOINT_KEYS, n=1, cutoff=0.75)
        if key not in _CHECKPOINT_KEYS and (is_close or not users):
            hint = closest(key, _CHECKPOINT_KEYS)
            raise ConfigError(f"`{type(hook).__name__}.published_keys` must be keys of a checkpoint, got {key!r}{hint}")
