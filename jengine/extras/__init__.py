"""Optional parts. Each folder registers itself with its `plugin.py`, and can be deleted."""

import importlib as _importlib
import pathlib as _pathlib
from typing import Any as _Any


def __getattr__(name: str) -> _Any:
    if name == "__all__":
        return __dir__()
    if not name.startswith("_") and name in __dir__():
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(path.parent.name for path in _pathlib.Path(__file__).parent.glob("*/plugin.py"))
