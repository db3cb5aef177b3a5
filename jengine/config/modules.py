"""Modules next to config files: imported while a config is loaded, and when a config names a class
in them.

While a config file is loaded, the directory comes first on `sys.path`, as for a Python script.
Afterwards it comes last: worker processes and imports inside functions find the modules, and no
other import is shadowed by a file with the same name. A name in a config,
`dict(type='my_net.MyCNN')`, is looked up next to the configs first.
"""

import ast
import collections
import contextlib
import functools
import importlib
import importlib.machinery
import os
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jengine.config.errors import ConfigError, UnknownNameError, did_you_mean
from jengine.config.plugins import load_provided
from jengine.config.storage import allowed_directory, is_url

# The modules imported from each directory with configs, the directory used last at the end: two
# directories may each have a `base.py`, and a module that registers classes must not run twice.
_DIRECTORIES: dict[str, dict[str, types.ModuleType]] = {}
ORIGINS: dict[str, str] = {}  # the URLs of directories that are copies


@contextlib.contextmanager
def importable(directory: pathlib.Path) -> Iterator[None]:
    """Put `directory` first on `sys.path`, also if another config directory has modules with the
    same names.

    From now on config names are looked up there before other config directories.
    """
    _DIRECTORIES[str(directory)] = _DIRECTORIES.pop(str(directory), {})
    with _first_on_path(str(directory)):
        yield
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # last, so it shadows nothing


def add_config_module(file: pathlib.Path, module: types.ModuleType) -> None:
    """Make a config file's module importable by name."""
    sys.modules[module.__name__] = module
    _DIRECTORIES[str(file.parent)][module.__name__] = module


def is_free(name: str, file: pathlib.Path) -> bool:
    """Return whether the module in `file` can have this name: no module outside config
    directories has it.
    """
    if "." in name or name in sys.stdlib_module_names:
        return False
    loaded = sys.modules.get(name)
    if loaded is not None and not any(
        siblings.get(name) is loaded for siblings in _DIRECTORIES.values()
    ):
        return False
    others = [path for path in sys.path if path not in _DIRECTORIES]
    spec = importlib.machinery.PathFinder.find_spec(name, others)
    return spec is None or spec.origin is None or os.path.realpath(spec.origin) == str(file)


def find_directory(module: str) -> str | None:
    """Return the config directory that has the top level of the dotted name `module`.

    The one used last counts.
    """
    top = module.partition(".")[0]
    return next(
        (path for path in reversed(_DIRECTORIES) if _contains(pathlib.Path(path), top)), None
    )


def imported_modules() -> collections.ChainMap[str, types.ModuleType]:
    """Return all imported modules by name, those next to config files first."""
    return collections.ChainMap(*reversed(_DIRECTORIES.values()), sys.modules)


def find_script_directory(module: str) -> str | None:
    """Return the script's directory if it has the top level of the imported `module`: commands
    search other ones.
    """
    top = module.partition(".")[0]
    directory = os.path.realpath(sys.path[0] or os.getcwd())
    is_own = (
        top in sys.modules
        and top not in ("jengine", "__main__")
        and _contains(pathlib.Path(directory), top)
    )
    return directory if is_own else None


def find_script_module(name: str) -> str | None:
    """Return the name by which the script that runs now can be imported for `name`, a class or
    function in it.

    From then on an import of that name returns the script's own module, so that nothing is
    registered twice. None in a notebook, for a name that the script does not define at the top
    level, and for a script that would run again if it was imported, as it has no `if __name__ ==
    '__main__':`.
    """
    script = sys.modules["__main__"]
    file = getattr(script, "__file__", None)
    spec = getattr(script, "__spec__", None)
    if file is None or not os.path.isfile(file):
        return None
    module = pathlib.Path(file).stem if spec is None else spec.name
    if (
        not module.rpartition(".")[2].isidentifier()
        or sys.modules.get(module, script) is not script
    ):
        return None
    if name.partition(".")[0] not in _list_importable(file):
        return None
    # Under its own name too: importing it again would run the script a second time, inside of
    # itself.
    sys.modules[module] = script
    return module


@functools.cache
def _list_importable(file: str) -> frozenset[str]:
    """Return the names that a script defines outside of `if __name__ == '__main__':`.

    None if it lacks that line.
    """
    body = ast.parse(pathlib.Path(file).read_text(encoding="utf-8")).body
    if not any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in body):
        return frozenset()
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    names = {target.id for target in assigned if isinstance(target, ast.Name)}
    return frozenset(names.union(node.name for node in body if isinstance(node, defined)))


def import_attribute(path: str) -> Any:
    """Import a class or function by dotted path, `package.module.Class` or
    `package.module.Class.method`.

    Raises:
      ConfigError: the config is from elsewhere, see `reading_only`, and may not name it.
      UnknownNameError: there is no such module, or it does not have the attribute.
      Exception: an error of the module itself, ImportError or any other, with a note of the user's
        line.
    """
    if allowed_directory() is not None:
        return load_provided("known_types", "find_known_class")(path, imported_modules())
    parts = path.split(".")
    directory = find_directory(parts[0])
    with contextlib.nullcontext() if directory is None else _first_on_path(directory):
        # The longest prefix first: `pkg.mod.Class.method` may have any number of parts that are
        # modules.
        for count in range(len(parts) - 1, 0, -1):
            module = _import_module(".".join(parts[:count]))
            if module is not None:
                return _get_attribute(module, parts[count:])
    stems = {
        file.stem for file in pathlib.Path(next(reversed(_DIRECTORIES), os.devnull)).glob("*.py")
    }
    searched = " on sys.path" + (f" or in {', '.join(_DIRECTORIES)}" if _DIRECTORIES else "")
    raise UnknownNameError(
        f"there is no module {parts[0]!r}{searched}{did_you_mean(parts[0], stems)}"
    )


def import_listed(listed: Mapping[str, Sequence[str]], file: pathlib.Path) -> None:
    """Import the modules that the config file lists by directory as `CONFIG_MODULES`.

    '' for those on `sys.path`.

    A directory is relative to the file or to a directory above it, so a copy in a subdirectory
    works too; or a URL.

    Raises:
      ConfigError: not in that form, or there is no such directory with these modules.
    """
    if not isinstance(listed, Mapping) or not all(
        isinstance(key, str) and isinstance(names, Sequence) and not isinstance(names, str)
        for key, names in listed.items()
    ):
        raise ConfigError(
            f"`CONFIG_MODULES` must be a dict of lists of modules by directory, got {listed!r}"
        )
    for key, names in listed.items():
        with importable(_find_listed(key, names, file)) if key else contextlib.nullcontext():
            for name in names:
                importlib.import_module(name)


def _find_listed(key: str, names: Sequence[str], file: pathlib.Path) -> pathlib.Path:
    if is_url(key):
        return load_provided("url_files", "fetch_modules")(key)
    for parent in file.parents:
        directory = pathlib.Path(os.path.normpath(parent / key))
        if all(_contains(directory, name.partition(".")[0]) for name in names):
            return directory
    raise ConfigError(
        f"`CONFIG_MODULES` must have the directory of {', '.join(names)}, got {key!r}, where "
        "these modules are not: correct it in the file if one of them was moved"
    )


@contextlib.contextmanager
def _first_on_path(directory: str) -> Iterator[None]:
    siblings = _DIRECTORIES[directory]
    for other in _DIRECTORIES.values():
        for name, module in other.items():
            top = pathlib.Path(directory, name.partition(".")[0])
            if (
                other is not siblings
                and sys.modules.get(name) is module
                and (top.is_dir() or top.with_suffix(".py").is_file())
            ):
                del sys.modules[name]
    sys.modules.update(siblings)  # so a module that registers classes does not run again
    before = set(sys.modules)
    sys.path.insert(0, directory)
    importlib.invalidate_caches()  # the directory may have new files since the last import
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(
                f"{directory}{os.sep}"
            ):
                siblings[name] = sys.modules[name]


def _contains(directory: pathlib.Path, top: str) -> bool:
    return (directory / f"{top}.py").is_file() or (directory / top / "__init__.py").is_file()


def _import_module(name: str) -> types.ModuleType | None:
    """Return the module, None if it does not exist; errors in it get a note."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        # Missing is this module or a parent of it; if it is one that the module itself imports, the
        # user must see that.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            return None
        error.add_note(f"while importing {name!r}")
        raise


def _get_attribute(module: types.ModuleType, names: Sequence[str]) -> Any:
    value: Any = module
    for name in names:
        if not hasattr(value, name):
            if module.__name__ == "__main__":
                raise UnknownNameError(
                    f"the script that runs now has no {name!r}, which the config names as a part "
                    "of the script or notebook that wrote it: move it into a module of its own, "
                    f"and name it 'module.{name}'"
                )
            public = [known for known in vars(module) if not known.startswith("_")]
            file = f" ({module.__file__})" if getattr(module, "__file__", None) else ""
            raise UnknownNameError(
                f"the module {module.__name__!r}{file} has no {name!r}{did_you_mean(name, public)}"
            )
        value = getattr(value, name)
    return value
