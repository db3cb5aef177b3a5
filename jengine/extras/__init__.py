"""Optional parts. Each folder registers itself with its `plugin.py`, and can be deleted."""

import importlib
import pathlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if not name.startswith("_") and name in __dir__():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(path.parent.name for path in pathlib.Path(__file__).parent.glob("*/plugin.py"))
