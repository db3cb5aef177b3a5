"""Extras: optional parts, each a folder that lists as data what it provides, and can be deleted.

An extra is a folder with a module `plugin` next to the rooms of the core, or a module of an
installed package with an entry point in the group `jengine.extras`. The module imports nothing
heavy; its dict `provides` has sections, each with names and the modules that define them:

    provides = {
        "HOOKS": {"CountHook": "my_package.count"},  # entries of a registry
        "names": {"count": "my_package.count"},  # to import from the package
        "commands": {"count": "my_package.commands"},  # of `jengine`
        "requires": {"boats": "my_boats"},  # other extras that it imports
    }

A name imports its own module when it is used. docs/house.md lists the sections.
"""

import functools
import importlib
import importlib.metadata
import inspect
import json
import pathlib
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from jengine.config.errors import ConfigError, UnknownNameError

Provides: TypeAlias = Mapping[str, Mapping[str, str]]  # section -> name -> module

# The folder of the extras, and the group of the entry points of other packages' extras.
_GROUP = ".".join((__name__.partition(".")[0], "extras"))
_FOLDER = pathlib.Path(__file__).parent.parent / "extras"


@functools.cache
def list_extras() -> Mapping[str, Provides]:
    """Return what each extra provides, by its name, without those that lack an extra they require.

    Raises:
      ConfigError: two extras have one name.
    """
    found = _find_extras()
    return {name: provides for name, provides in found.items() if not _missing(provides, found)}


@functools.cache
def provided(section: str) -> Mapping[str, str]:
    """Return the modules that the extras provide in a section, by name.

    >>> provided("HOOKS").get("NoSuchHook")

    Raises:
      ConfigError: two extras provide one name in this section.
    """
    modules: dict[str, str] = {}
    owners: dict[str, str] = {}
    for extra, provides in list_extras().items():
        for name, module in provides.get(section, {}).items():
            if name in owners:
                raise ConfigError(
                    f"the extras must have different names in {section}, got {name!r} in "
                    f"{owners[name]!r} and {extra!r}"
                )
            modules[name] = module
            owners[name] = extra
    return modules


def load_provided(section: str, name: str) -> Any:
    """Import and return the object that an extra provides under this name.

    Raises:
      UnknownNameError: no extra provides it.
    """
    if name not in provided(section):
        raise UnknownNameError(f"no extra provides {name!r} in {section}{find_missing(name)}")
    return getattr(importlib.import_module(provided(section)[name]), name)


def load_each(section: str) -> list[Any]:
    """Import and return all objects that extras provide in a section, in the order of their
    names.
    """
    loaded = []
    for name, module in sorted(provided(section).items()):
        loaded.append(getattr(importlib.import_module(module), name))
    return loaded


def find_missing(name: str) -> str:
    """Return where a name is that no installed extra provides, as the end of a sentence, or ""."""
    found = _find_extras()
    for extra, provides in found.items():
        if name in set().union(*provides.values()) and (missing := _missing(provides, found)):
            return f"; it is in the extra {extra!r}, which needs {missing!r}, not installed"
    index = _FOLDER / "names.json"
    shipped = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
    for extra, names in shipped.items():
        if name in names and extra not in found:
            return f"; it is in the extra {extra!r}, which is not installed"
    return ""


def lazy_names(package: str, provides: Provides) -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Return `__getattr__` and `__dir__` for a page, whose names here are imported on use.

    >>> __getattr__, __dir__ = lazy_names("shapes", {"names": {"sqrt": "math"}})
    >>> __getattr__("sqrt")(4.0)
    2.0
    """
    modules = find_modules(provides)

    def get_name(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        if name == "__all__":
            return list_names()
        if not name.startswith("_") and name in provided(package):  # of an extra
            return load_provided(package, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return public_names(package, [*modules, *provided(package)])

    return get_name, list_names


def find_modules(provides: Provides) -> dict[str, str]:
    """Return the module of each name that an extra or a page has for `from ... import NAME`."""
    return {
        name: module
        for section, names in provides.items()
        if section.isupper() or section == "names"
        for name, module in names.items()
    }


def public_names(page: str, lazy: Iterable[str]) -> list[str]:
    """Return the names of a page for users: what it imports now or on use, and its packages."""
    names = {
        name
        for name, value in vars(sys.modules[page]).items()
        if not name.startswith("_")
        and (not inspect.ismodule(value) or value.__package__ == f"{page}.{name}")
    }
    return sorted(names.union(lazy) - {"provides"})


@functools.cache
def _find_extras() -> Mapping[str, Provides]:
    found: dict[str, Provides] = {}
    for path in sorted(_FOLDER.glob("*/plugin.py")):
        found[path.parent.name] = runpy.run_path(str(path))["provides"]  # imports no package
    for point in importlib.metadata.entry_points(group=_GROUP):
        if point.name in found:
            raise ConfigError(
                f"extras must have different names, got {point.name!r} twice, also from the "
                f"package {point.dist.name if point.dist else point.value!r}"
            )
        try:
            found[point.name] = importlib.import_module(point.value).provides
        except Exception as error:
            error.add_note(f"in the extra {point.name!r} of an installed package, {point.value!r}")
            raise
    return found


def _missing(provides: Provides, found: Mapping[str, Provides]) -> str | None:
    return next((name for name in provides.get("requires", {}) if name not in found), None)
