"""Write configs as Python files that can be loaded again."""

import ast
import importlib
import math
import os
import pathlib
import warnings
from typing import Any

import numpy as np

from jengine.config.load import MODULE_PREFIX
from jengine.config.resolve import resolve
from jengine.errors import ConfigError

_WIDTH = 100


def dump_config(cfg: Any) -> str:
    """Return the text of a Python file whose `get_config()` returns the config.

    `load_config` reads an equal config from it. Classes and functions are written as their dotted import path, which
    every registry resolves. A value that cannot be written (an array, an object, a class of the config file itself) is
    replaced by its repr, with a warning.

    Args:
      cfg: a dict or a ConfigDict.
    """
    return (
        '"""The resolved config of a run."""\n\n\n'
        f"def get_config() -> dict:\n    return {_literal(resolve(cfg), indent=4, path='')}\n"
    )


def parse_config(text: str) -> dict[str, Any]:
    """Return the config of a text that `dump_config` wrote, without running it.

    Raises:
      ConfigError: the text has another form.
    """
    try:
        (returned,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Return))
        cfg = ast.literal_eval(_ReplaceNames().visit(returned).value)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the text of a config must be one that `dump_config` wrote: {error}") from error
    if not isinstance(cfg, dict):
        raise ConfigError(f"the text of a config must return a dict, got {type(cfg).__name__}")
    return cfg


class _ReplaceNames(ast.NodeTransformer):
    """Replace `float("inf")` and `Ellipsis`, which are not literals, by their values."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))], keywords=[]):
                return ast.Constant(float(text))
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(...) if node.id == "Ellipsis" else node


def write_config(cfg: Any, path: str | os.PathLike[str]) -> None:
    """Write a config file, atomically: an existing file is either replaced or, if writing fails, left unchanged.

    Args:
      cfg: a dict, a ConfigDict, or the text of a config file as `dump_config` returns it.
      path: the file; its directory is created if it does not exist.
    """
    target = pathlib.Path(path)
    text = cfg if isinstance(cfg, str) else dump_config(cfg)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _literal(value: Any, indent: int, path: str) -> str:
    """Return `value` as Python source: on one line if it fits, else one item per line."""
    if type(value) in (list, tuple):
        brackets = "[]" if isinstance(value, list) else "()"
        items = [_literal(item, indent + 4, f"{path}[{i}]") for i, item in enumerate(value)]
        comma = "," if brackets == "()" and len(items) == 1 else ""
    elif isinstance(value, dict):
        brackets, comma = "{}", ""
        items = [
            f"{_literal(key, indent + 4, path)}: {_literal(item, indent + 4, f'{path}.{key}' if path else str(key))}"
            for key, item in value.items()
        ]
    else:
        return _scalar(value, path)
    line = f"{brackets[0]}{', '.join(items)}{comma}{brackets[1]}"
    if "\n" not in line and indent + len(line) <= _WIDTH:
        return line
    margin = " " * indent
    lines = [brackets[0], *(f"{margin}    {item}," for item in items), f"{margin}{brackets[1]}"]
    return "\n".join(lines)


def _scalar(value: Any, path: str) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or value is ... or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, np.dtype):
        return repr(value.name)
    import_path = _find_import_path(value)
    if import_path is None:
        warnings.warn(
            f"`{path}` must be a literal or importable to be written to a config file, got {type(value).__name__}; "
            "wrote its repr",
            stacklevel=2,
        )
    return repr(import_path or repr(value))


def _find_import_path(value: Any) -> str | None:
    """Return the shortest dotted path from which `value` can be imported, if there is one."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or module.startswith(MODULE_PREFIX) or module == "__main__" or "." in name:
        return None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):  # prefer re-exports: `optax.adamw` to `optax._src.alias.adamw`
        package = ".".join(parts[:count])
        try:
            if getattr(importlib.import_module(package), name, None) is value:
                return f"{package}.{name}"
        except ImportError:
            return None
    return None
