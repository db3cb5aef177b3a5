"""Config that lists its own runs; the second one crashes."""

from swept_config import get_config as get_config


def get_sweep():
    yield {"lr": 0.1}
    yield {"lr": 0.2, "custom_hooks[0].at": 3}
