"""Training engine for JAX models, with the interface of MMEngine's Runner.

Submodules are imported on first access, which keeps `import jengine` fast. Extras add names of
their own, such as `load_model`.
"""

import importlib as _importlib
from typing import Any as _Any

from jengine.versions import __version__ as __version__

_NAMES = {"Runner": "jengine.runner", "load_config": "jengine.config"}
_ROOMS = (
    "config",
    "logging",
    "data",
    "model",
    "optim",
    "parallel",
    "checkpoint",
    "train",
    "evaluation",
    "hooks",
    "runner",
    "extras",
)
# The modules that register the core's entries, by registry: `config` itself knows no later room.
_REGISTERED_BY = {
    "HOOKS": "jengine.hooks",
    "OPTIMIZERS": "jengine.optim",
    "OPTIM_WRAPPERS": "jengine.optim",
    "OPTIM_WRAPPER_CONSTRUCTORS": "jengine.optim",
    "PARAM_SCHEDULERS": "jengine.optim.schedules.variants",
    "MODELS": "jengine.model",
    "DATASETS": "jengine.data",
    "TRANSFORMS": "jengine.data",
    "DATA_SAMPLERS": "jengine.data",
    "FUNCTIONS": "jengine.data",
    "LOOPS": "jengine.runner",
    "METRICS": "jengine.evaluation",
    "EVALUATOR": "jengine.evaluation",
    "VISUALIZERS": "jengine.logging",
    "VISBACKENDS": "jengine.logging",
    "LOG_PROCESSORS": "jengine.logging",
    "STRATEGIES": "jengine.parallel",
}


def __getattr__(name: str) -> _Any:
    if name in _NAMES:
        return getattr(_importlib.import_module(_NAMES[name]), name)
    if name in _ROOMS:
        return _importlib.import_module(f"jengine.{name}")
    if name == "__all__":  # not the rooms: `logging` would hide Python's
        return [public for public in __dir__() if public not in _ROOMS]
    if not name.startswith("_"):
        from jengine.config.plugins import find_missing, load_provided, provided

        if name in provided("jengine"):
            return load_provided("jengine", name)
        raise AttributeError(f"module 'jengine' has no attribute {name!r}{find_missing(name)}")
    raise AttributeError(f"module 'jengine' has no attribute {name!r}")


def __dir__() -> list[str]:
    from jengine.config.plugins import provided

    return sorted({*_NAMES, *_ROOMS, *provided("jengine")})
