"""Config writing, as Python files that can be loaded again."""

import ast
import contextlib
import functools
import importlib
import math
import operator
import os
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jengine.config.annotations import parameters_of, takes_functions
from jengine.config.construction import Unwritable, is_small_array
from jengine.config.containers import ConfigLike, iter_nodes, resolve
from jengine.config.errors import ConfigError
from jengine.config.load import MODULE_PREFIX
from jengine.config.modules import find_directory, find_script_directory, name_script
from jengine.config.plugins import load_each
from jengine.config.registry import find_registered, is_built_in
from jengine.config.remote import find_origin
from jengine.config.storage import is_url

WIDTH = 100
_MAX_PATHS = 4  # in one message
_UNWRITTEN = "<not written: "
_SCRIPTS = ("__main__", "__mp_main__")
_NUMPY = {"np": "numpy", "jnp": "jax.numpy"}  # whose arrays a file may have
_NO_PATH = (MODULE_PREFIX, *_SCRIPTS)  # beginnings of module names that cannot be imported


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
    writer = Writer()
    literal = writer.literal(resolve(cfg), indent=4, path="")
    modules = {}
    for directory, names in sorted(writer.modules.items()):
        key = find_origin(directory) or directory  # a URL or an absolute path
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
    """Writer for values as Python source."""

    def __init__(self) -> None:
        # with the classes, by directory; "" for those on `sys.path`
        self.modules: dict[str, set[str]] = {}
        self.arrays: set[str] = set()  # the keys of `_NUMPY` that the text uses
        self.problems: dict[str, list[str]] = {}  # why values cannot be written, with their paths

    def literal(self, value: Any, indent: int, path: str) -> str:
        """Return `value` as source: on one line if it fits, else one item per line."""
        if (jax := sys.modules.get("jax")) is not None and isinstance(
            value, jax.sharding.PartitionSpec
        ):
            value = tuple(value)  # which the rules of a strategy accept too
        if type(value) in (list, tuple):
            brackets = "[]" if isinstance(value, list) else "()"
            items = [
                self.literal(simplify(item), indent + 4, f"{path}[{i}]")
                for i, item in enumerate(value)
            ]
            comma = "," if brackets == "()" and len(items) == 1 else ""
        elif isinstance(value, dict):
            brackets = "{}"
            comma = ""
            items = []
            for key, item in value.items():
                item_path = f"{path}.{key}" if path else str(key)
                item = simplify(item)
                self._check_argument(value.get("type"), key, item, item_path)
                source = self.literal(item, indent + 4, item_path)
                source = f"{self.literal(key, indent + 4, path)}: {source}"
                items.append(self.format_item(item_path, source, indent + 4))
        elif is_small_array(value):
            return self._array(value, indent, path)
        else:
            return self._scalar(value, path)
        line = f"{brackets[0]}{', '.join(items)}{comma}{brackets[1]}"
        if "\n" not in line and indent + len(line) <= WIDTH:
            return line
        margin = " " * indent
        lines = [brackets[0], *(f"{margin}    {item}," for item in items), f"{margin}{brackets[1]}"]
        return "\n".join(lines)

    def format_item(self, path: str, source: str, indent: int) -> str:
        """Return the source of the item of a dict, `key: value`, at `path`."""
        return source

    def _array(self, value: Any, indent: int, path: str) -> str:
        name = "np" if isinstance(value, np.ndarray) else "jnp"
        self.arrays.add(name)
        return (
            f"{name}.array({self.literal(np.asarray(value).tolist(), indent, path)}, "
            f"{value.dtype.name!r})"
        )

    def _scalar(self, value: Any, path: str) -> str:
        if isinstance(value, np.generic):
            value = value.item()
        # repr writes `nan` and `inf`, which are no names in a Python file.
        if type(value) is float and not math.isfinite(value):
            return f'float("{value}")'
        if type(value) is str:
            self._add_modules_of(value, path)
        if value is None or value is ... or type(value) in (bool, int, float, complex, str, bytes):
            return repr(value)
        if isinstance(value, os.PathLike):
            return repr(os.fspath(value))
        import_path = _find_import_path(value)
        if import_path is None or import_path.startswith(_SCRIPTS):
            what = _describe_value(value)
            self._add_problem(
                path, f"must be a literal or importable to be written to a config file, got {what}"
            )
            return repr(import_path or f"{_UNWRITTEN}{re.split('[,:] ', what)[0]}>")
        self._add_modules_of(import_path, path)
        return repr(import_path)

    def _add_problem(self, path: str, problem: str) -> None:
        self.problems.setdefault(problem, []).append(f"`{path}`")

    def _check_argument(self, kind: Any, name: str, value: Any, path: str) -> None:
        """Note a function that the class of a config would read back as text, because its
        argument takes anything.
        """
        entry = (
            kind
            if callable(kind)
            else next(iter(find_registered(kind)), None)
            if isinstance(kind, str)
            else None
        )
        if name == "type" or entry is None or not callable(value):
            return
        with contextlib.suppress(TypeError, ValueError):  # no signature
            parameter = parameters_of(entry).get(name)
            if (
                parameter is not None
                and not takes_functions(parameter)
                and _find_import_path(value) is not None
            ):
                self._add_problem(
                    path,
                    "must be an argument that is annotated as a function to be read again, got "
                    f"{value.__name__} for "
                    f"`{parameter}`: annotate it in {getattr(entry, '__name__', entry)} as "
                    f"{'`type`' if isinstance(value, type) else '`Callable`'}",
                )

    def _add_modules_of(self, name: str, path: str) -> None:
        """Add the modules that define a name in the config: an import path, or a name that the
        user registered.
        """
        if re.fullmatch(r"[\w-]+(\.\w+)+", name) and (
            directory := find_directory(name) or find_script_directory(name)
        ):
            self.modules.setdefault(directory, set()).add(name.partition(".")[0])
        # A registered name alone tells nobody where its class is: the module, to be imported first,
        # is written too.
        for entry in find_registered(name):
            if is_built_in(entry):
                continue
            module = entry.__module__
            if module in _SCRIPTS:
                module = name_script(entry.__name__) or module
            if module.startswith(_NO_PATH):
                is_script = module.startswith("__")
                place = "a script" if is_script else "a config file with the name of another module"
                self._add_problem(
                    path,
                    f"must be registered in a module that can be imported, got {name!r}, which is "
                    f"registered in {place}",
                )
                continue
            directory = find_directory(module) or find_script_directory(module) or ""
            self.modules.setdefault(directory, set()).add(module)


def simplify(value: Any) -> Any:
    """Return the config of a `functools.partial` with keywords, a dtype's name.

    Anything else unchanged.

    >>> simplify(functools.partial(sorted, reverse=True)), simplify(np.float32)
    ({'type': <built-in function sorted>, 'reverse': True}, 'float32')
    """
    if isinstance(value, functools.partial) and not value.args and "type" not in value.keywords:
        return {"type": value.func, **value.keywords}
    is_dtype = isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    )
    # `jnp.bfloat16`
    if is_dtype or (callable(value) and isinstance(getattr(value, "dtype", None), np.dtype)):
        return np.dtype(value).name
    return value


def _find_import_path(value: Any) -> str | None:
    """Return the shortest dotted path from which `value` can be imported, if there is one."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not module or not name or module.startswith(MODULE_PREFIX):
        return None
    found = vars(sys.modules.get(module, types))
    if found.get(name) is not value:  # `errors = jax.vmap(error)` has the name 'error'
        name = next((key for key, item in found.items() if item is value), name)
    if "<" in name:
        return None
    if module in _SCRIPTS and (script := name_script(name)):
        return f"{script}.{name}"
    # Prefer re-exports: `optax.adamw` to `optax._src.alias.adamw`, and `jax.nn.gelu` to
    # `jax._src.nn.functions.gelu`
    public = [part for part in module.split(".") if not part.startswith("_")]
    for parts in (public, module.split(".")):
        for count in range(1, len(parts) + 1):
            package = ".".join(parts[:count])
            with contextlib.suppress(ImportError, AttributeError):
                if operator.attrgetter(name)(importlib.import_module(package)) is value:
                    return f"{package}.{name}"
    return _find_import_path(value.__wrapped__) if _is_jitted(value) else None


def _is_jitted(value: Any) -> bool:
    """Return whether a value is a function of `jax.jit`, in whose place the step can call the
    function itself.
    """
    jax = sys.modules.get("jax")
    return (
        jax is not None and isinstance(value, jax.stages.Wrapped) and hasattr(value, "__wrapped__")
    )


_INSTEAD = "`dict(type=..., **arguments)` with the class or function that returns it"


def _describe_value(value: Any) -> str:
    """Return what a value is that cannot be written, and what to write instead."""
    if isinstance(value, Unwritable):
        return f"{value.kind}: write {value.instead or _INSTEAD}"
    kind = type(value).__name__
    name = getattr(value, "__qualname__", "")
    if getattr(value, "__module__", "") in _SCRIPTS and "<" not in name:
        guard = (
            " (a script can be imported if it runs nothing outside of `if __name__ == '__main__':`)"
        )
        return (
            f"{kind} {name} of a script or notebook: move it into a module next to it, and import "
            f"it from there{guard if hasattr(sys.modules['__main__'], '__file__') else ''}"
        )
    if "<locals>" in name:
        return (
            f"{kind} {name}, which another function defines: move it to the top level of a module "
            "with `def`, or write `dict(type=..., **arguments)` with the function that returns it"
        )
    if name.endswith("<lambda>"):
        return f"{kind} <lambda>: write it with `def` at the top level of a module"
    # of `jax.vmap` and its like
    if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        return (
            f"{kind} {name}, made of {wrapped.__module__}.{name}: give it a name at the top level "
            "of a module"
        )
    if isinstance(value, type | types.FunctionType):
        return (
            f"{kind} {name}, which `import {value.__module__}` does not find, perhaps as another "
            "file has this name"
        )
    return f"{kind}: write {_INSTEAD}"
