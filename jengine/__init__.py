"""Training engine for JAX models, with the interface of MMEngine's Runner.

Submodules are imported on first access, which keeps `import jengine` fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jengine.versions import __version__ as __version__

if TYPE_CHECKING:
    from jengine.cli.report import report as report
    from jengine.config import load_config as load_config
    from jengine.runner import Runner as Runner
    from jengine.runner import load_model as load_model
    from jengine.sweeps import sweep as sweep

_NAMES = {
    "Runner": "jengine.runner",
    "load_config": "jengine.config",
    "load_model": "jengine.runner",
    "report": "jengine.cli.report",
    "sweep": "jengine.sweeps",
}
_PACKAGES = (
    "averaging",
    "checkpoint",
    "config",
    "contrib",
    "data",
    "distributed",
    "errors",
    "evaluation",
    "hooks",
    "logging",
    "model",
    "optim",
    "paths",
    "registry",
    "runner",
    "sharding",
    "train",
    "visualization",
)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"jengine.{name}")
    raise AttributeError(f"module 'jengine' has no attribute {name!r}")
