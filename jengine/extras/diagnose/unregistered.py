"""The import path of a class that a config names as if it were registered."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from jengine.config.errors import UnknownNameError
from jengine.config.modules import imported_modules

_UNKNOWN = re.compile(r"must be a registered name or an import path, got '(\w+)'")


def name_unregistered(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the import path of a class or function in a module next to the configs, or in the
    script, that has the unknown name in an error.

    Explainer.
    """
    match = _UNKNOWN.search(str(error)) if isinstance(error, UnknownNameError) else None
    if match is None:
        return None
    # without the last map, which has all other modules
    for siblings in (*imported_modules().maps[:-1], {"__main__": sys.modules["__main__"]}):
        for key, module in siblings.items():
            if callable(vars(module).get(match[1])):
                path = f"{key}.{match[1]}"
                return (
                    f"{match[1]!r} is not registered: write type={path!r}, or register the class "
                    "with `register_module()`"
                )
    return None
