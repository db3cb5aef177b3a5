"""Config writing, as Python files that can be loaded again."""

import ast
import importlib
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jengine.config.containers import ConfigLike, iter_nodes, resolve
from jengine.config.description import SCRIPTS, Unwritable, describe
from jengine.config.errors import ConfigError
from jengine.config.load import MODULE_PREFIX
from jengine.config.modules import (
    ORIGINS,
    find_directory,
    find_script_directory,
    find_script_module,
)
from jengine.config.plugins import load_each
from jengine.config.registry import list_registered_by_users
from jengine.config.storage import is_url

WIDTH = 100
_MAX_PATHS = 4  # in one message
_UNWRITTEN = "<not written: "
_IMPORT_PATH = re.compile(r"[\w-]+(\.\w+)+")
_NUMPY = {"np": "numpy", "jnp": "jax.numpy"}  # whose arrays a file may have
_NO_PATH = (MODULE_PREFIX, *SCRIPTS)  # beginnings of module names that cannot be imported


def dump_config(cfg: ConfigLike, path: str | os.PathLike[str] | None = None) -> str:
    """Return the text of a Python file whose `get_config()` returns the config.

    `load_config` reads an equal config from it, and imports the modules that define the user's
    classes. Classes and functions are written as dotted import paths, which every registry
    resolves, and arrays of at most 1,000 numbers as they are. A value that cannot be written (a
    larger array, an object, a function in a function) becomes a note of what it was, with a
    warning.

    Args:
      cfg: a dict or a ConfigDict.
      path: the file that will have the text, to which module directories are relative; absolute by
        default. With another suffix than `.py` the text is that of the `config_writers` of the
        extras.

    >>> print(dump_config({"train_cfg": {"max_epochs": 3}}))
    \"\"\"The resolved config of a run.\"\"\"
    <BLANKLINE>
    <BLANKLINE>
    def get_config() -> dict:
        return {'train_cfg': {'max_epochs': 3}}
    <BLANKLINE>
    """
    text, problems = format_config(cfg, path)
    for problem in problems:
        warnings.warn(f"{problem}; the file says only what it was", stacklevel=2)
    suffix = pathlib.Path(path or "").suffix
    if suffix in ("", ".py"):
        return text
    for convert in load_each("config_writers"):
        if (converted := convert(text, suffix)) is not None:
            return converted
    raise ConfigError(
        f"a config must be written to a Python file, or to a kind that an extra writes, got {path}"
    )


def format_config(
    cfg: ConfigLike, path: str | os.PathLike[str] | None = None
) -> tuple[str, list[str]]:
    """Return the text for `dump_config`, and a sentence for each value that the file cannot
    reproduce.
    """
    return format_description(describe(resolve(cfg)), path)


def format_description(
    description: dict[str, Any], path: str | os.PathLike[str] | None = None
) -> tuple[str, list[str]]:
    """Return the same as `format_config`, from what `describe` returns."""
    writer = Writer()
    literal = writer.literal(description, indent=4, path="")
    modules = {}
    for directory, names in sorted(writer.modules.items()):
        key = ORIGINS.get(directory, directory)  # a URL or an absolute path
        if directory and key == directory and path is not None and not is_url(path):
            key = pathlib.Path(
                os.path.relpath(directory, os.path.realpath(pathlib.Path(path).parent))
            ).as_posix()
        modules[key] = sorted(names)
    listed = _MODULES.format(Writer().literal(modules, indent=0, path="")) if modules else ""
    imports = "".join(
        f"\nimport {module} as {name}" for name, module in _NUMPY.items() if name in writer.arrays
    )
    imports += "\n" if imports else ""
    text = (
        f'"""The resolved config of a run."""\n{imports}{listed}\n\ndef get_config() -> dict:\n   '
        f" return {literal}\n"
    )
    return text, [f"{_list_first(paths)} {problem}" for problem, paths in writer.problems.items()]


def find_unwritten(cfg: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each value that `format_config` could not write, and what it was.

    >>> list(find_unwritten({"model": {"loss": "<not written: function <lambda>>"}}))
    [('model.loss', 'function <lambda>')]
    """
    for place, value in iter_nodes(cfg, path):
        if isinstance(value, str) and value.startswith(_UNWRITTEN):
            yield place, value.removeprefix(_UNWRITTEN).removesuffix(">")


def check_written(cfg: Any, path: str = "") -> None:
    """Raise ConfigError if a config from a file lacks values that could not be written."""
    found = list(find_unwritten(cfg, path))
    if found:
        missing = _list_first([f"`{path}` ({what})" for path, what in found])
        raise ConfigError(
            f"the config must have {missing}, which the run that wrote it had in memory only: "
            "write it in the file as `dict(type='my_module.make', ...)`, or pass it in Python "
            "(`load_model(..., model=...)`)"
        )


def _list_first(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MAX_PATHS} more" if len(items) > _MAX_PATHS else ""
    return ", ".join(items[:_MAX_PATHS]) + more


def parse_config(text: str, *, arrays: bool = True) -> dict[str, Any]:
    """Return the config in a text that `dump_config` wrote, without running it.

    Args:
      text: a Python file.
      arrays: whether arrays are arrays, rather than lists.

    Raises:
      ConfigError: the text has another form.

    >>> parse_config(dump_config({"train_cfg": {"max_epochs": 3}}))
    {'train_cfg': {'max_epochs': 3}}
    """
    try:
        (returned,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Return))
        cfg = ast.literal_eval(_ReplaceNames(arrays).visit(returned).value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        # the text may be anything
        raise ConfigError(
            f"the text of a config must be one that `dump_config` wrote: {error}"
        ) from error
    if not isinstance(cfg, dict):
        raise ConfigError(f"the text of a config must return a dict, got {type(cfg).__name__}")
    return cfg


def parse_modules(text: str) -> dict[str, list[str]]:
    """Return `CONFIG_MODULES` in a text that `dump_config` wrote, without running it.

    >>> parse_modules("CONFIG_MODULES = {'..': ['my_net']}")
    {'..': ['my_net']}
    """
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="CONFIG_MODULES")], value=value):
                return ast.literal_eval(value)
    return {}


class _ReplaceNames(ast.NodeTransformer):
    """Transformer that evaluates `float("inf")`, arrays and `Ellipsis`, which are not literals."""

    def __init__(self, arrays: bool) -> None:
        self._arrays = arrays

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(
                func=ast.Name(id="float"), args=[ast.Constant(value=str(text))], keywords=[]
            ):
                return ast.Constant(float(text))
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="np" | "jnp" as name), attr="array"),
                args=[items, ast.Constant(value=str(dtype))],
            ) if np.dtype(dtype).kind in "biuf":
                values = ast.literal_eval(self.visit(items))
                return ast.Constant(
                    importlib.import_module(_NUMPY[name]).array(values, dtype)
                    if self._arrays
                    else values
                )
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(...) if node.id == "Ellipsis" else node


def write_config(cfg: ConfigLike | str, path: str | os.PathLike[str]) -> None:
    """Write a config file, atomically: an existing file is either replaced or, if writing fails,
    left unchanged.

    Args:
      cfg: a dict, a ConfigDict, or the text that `dump_config` returns.
      path: the file; missing directories are created.
    """
    target = pathlib.Path(path)
    text = cfg if isinstance(cfg, str) else dump_config(cfg, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:  # in the same directory, since a rename is atomic only within a file system
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)  # atomic
    finally:
        temporary.unlink(missing_ok=True)  # after an error


_MODULES = """
# Modules of the classes in the config, by directory, relative to this file; "" for those on \
sys.path.
CONFIG_MODULES = {}
"""


class Writer:
    """Writer for descriptions as Python source.

    `comment` returns lines for the item of a dict at a path, written with an indent.
    """

    def __init__(self, comment: Callable[[str, int], str] | None = None) -> None:
        self._comment = comment
        # with the classes, by directory; "" for those on `sys.path`
        self.modules: dict[str, set[str]] = {}
        self.arrays: set[str] = set()  # the keys of `_NUMPY` that the text uses
        self.problems: dict[str, list[str]] = {}  # why values cannot be written, with their paths

    def literal(self, value: Any, indent: int, path: str) -> str:
        """Return a value that `describe` returns as source: on one line if it fits, else one item
        per line.
        """
        kind = type(value)
        if kind is str:
            self._add_modules_of(value, path)
        if kind is float and value - value != 0:  # repr writes `nan` and `inf`, which are no names
            return f'float("{value}")'
        if isinstance(value, Unwritable):
            problem = (
                "must be a literal or importable to be written to a config file, got "
                f"{value.kind}: write `dict(type=..., **arguments)` with a class or function at "
                "the top level of a module"
            )
            self.problems.setdefault(problem, []).append(f"`{path}`")
            return repr(value.path or f"{_UNWRITTEN}{value.kind}>")
        if kind in (list, tuple):
            opening, closing = "[]" if kind is list else "()"
            items = [self.literal(item, indent + 4, f"{path}[{i}]") for i, item in enumerate(value)]
        elif kind is dict:
            opening, closing = "{}"
            items = []
            for key, item in value.items():
                name = f"{path}.{key}" if path else str(key)
                text = self.literal(item, indent + 4, name)
                comment = self._comment(name, indent + 4) if self._comment else ""
                items.append(f"{comment}{key!r}: {text}")
        elif hasattr(value, "dtype"):
            name = "np" if isinstance(value, np.ndarray) else "jnp"
            self.arrays.add(name)
            numbers = self.literal(np.asarray(value).tolist(), indent, path)
            return f"{name}.array({numbers}, {value.dtype.name!r})"
        else:
            return repr(value)
        comma = "," if kind is tuple and len(items) == 1 else ""
        line = f"{opening}{', '.join(items)}{comma}{closing}"
        if "\n" not in line and indent + len(line) <= WIDTH:
            return line
        margin = "\n" + " " * indent
        lines = f",{margin}    ".join(items)
        return f"{opening}{margin}    {lines},{margin}{closing}"

    def _add_modules_of(self, name: str, path: str) -> None:
        """Add the modules that define a name in the config: an import path, or a name that the
        user registered.
        """
        if _IMPORT_PATH.fullmatch(name) and (
            directory := find_directory(name) or find_script_directory(name)
        ):
            self.modules.setdefault(directory, set()).add(name.partition(".")[0])
        # A registered name alone tells nobody where its class is: the module, to be imported first,
        # is written too.
        for entry in list_registered_by_users(name):
            module = entry.__module__
            if module in SCRIPTS:
                module = find_script_module(entry.__name__) or module
            if module.startswith(_NO_PATH):
                is_script = module.startswith("__")
                place = "a script" if is_script else "a config file with the name of another module"
                problem = (
                    f"must be registered in a module that can be imported, got {name!r}, which is "
                    f"registered in {place}"
                )
                self.problems.setdefault(problem, []).append(f"`{path}`")
                continue
            directory = find_directory(module) or find_script_directory(module) or ""
            self.modules.setdefault(directory, set()).add(module)
