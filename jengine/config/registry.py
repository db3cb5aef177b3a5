"""Registries: the names in configs for classes and functions.

A registry imports the package with the built-in entries at the first look-up. This keeps `import
jengine` fast, and a config can use any registered name without importing a module.
"""

import functools
import importlib
import logging
import re
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, overload

from jengine import _REGISTERED_BY
from jengine.config.annotations import (
    alternatives,
    check_values,
    checked,
    checks_itself,
    is_mapping,
    name_of,
    parameters_of,
    takes_functions,
)
from jengine.config.errors import UnknownNameError, closest, config_path, list_unknown
from jengine.config.modules import (
    find_directory,
    import_attribute,
    imported_modules,
)
from jengine.config.plugins import find_missing, load_provided, provided
from jengine.config.storage import allowed_directory

T = TypeVar("T", bound=Callable[..., Any])
# `dict(type=NAME, ...)`, or NAME alone
Config: TypeAlias = Mapping[str, Any] | str | Callable[..., Any]
_LOGGER = logging.getLogger("jengine")
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
# by type, those of the items of a list or dict of functions
_Types: TypeAlias = dict[Any, "_Types"]
_REGISTRIES: "weakref.WeakSet[Registry]" = weakref.WeakSet()
_NUMBERS = frozenset({bool, int, float, type(None)})
_OF_USERS: dict[str, list[Callable[..., Any]]] = {}  # entries outside of jengine, by name


class Registry:
    """Names for classes and functions of one kind, such as hooks or datasets.

    >>> shapes = Registry("shape")
    >>> @shapes.register_module()
    ... class Square:
    ...     def __init__(self, side: float) -> None:
    ...         self.side = side
    >>> shapes.build(dict(type="Square", side=2)).side
    2

    Args:
      name: the entries' kind for error messages, in the singular: 'hook'.
      locations: module, or modules, that register the entries, imported at the first look-up; the
        page of a room may have a dict `provides` like that of an extra, with entries whose modules
        are imported when they are used.
      section: the section of the extras that has further entries, see `plugins`.
      checks_calls: whether calls of an entry check the arguments; else only `build` does.
      parent: a registry that shares its entries with this one, in both directions.
      scope: as in MMEngine, for a registry with a parent; names are found with any scope before
        them, and without.
      common: settings of any config, which its builder takes out before `build`, such as the
        `priority` of a hook; the error for an unknown argument lists them too.
    """

    def __init__(
        self,
        name: str,
        locations: str | Sequence[str] = (),
        section: str = "",
        checks_calls: bool = True,
        parent: "Registry | None" = None,
        scope: str | None = None,
        common: Sequence[str] = (),
    ) -> None:
        self._common = tuple(common)
        self._locations: list[str] = []
        self._section = section
        self._modules: dict[str, str] = {}  # by entry, of the pages
        self._checks_calls = checks_calls
        self._entries: dict[str, Callable[..., Any]] = {}
        if parent is None:  # else `find_registered` would find the entries twice
            _REGISTRIES.add(self)
        else:
            vars(self).update(vars(parent))  # the same lists and dicts
        self.name = name
        self.scope = scope
        self._name_with_article = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        locations = locations or _REGISTERED_BY.get(section, ())
        self._locations += [locations] if isinstance(locations, str) else locations

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: None = None
    ) -> Callable[[T], T]: ...

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, *, module: T
    ) -> T: ...

    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: Any = None
    ) -> Any:
        """Register a class or function, whose calls then check the arguments.

        As a decorator without `module`.

        A user's entry replaces a built-in one with the same name, with a line in the log.

        Args:
          name: the entry's name, or several; its `__name__` by default.
          force: replace existing entries with the same name.
          module: the class or function to register.

        Returns:
          `module`, or a decorator that registers the class or function and returns it.

        Raises:
          KeyError: a name is taken by an entry with the same origin and `force` is False.
            TypeError: the decorator without parentheses, or `module` cannot be called.
        """
        if name is not None and not isinstance(name, str) and not isinstance(name, Sequence):
            raise TypeError(
                f"`name` must be a string or a list of strings, got {name!r}; write "
                "@register_module() with parentheses"
            )

        def register(entry: T) -> T:
            """Register `entry` and return it."""
            # whose arguments `build` checks
            if self._checks_calls and not isinstance(entry, functools.partial):
                entry = checked(entry)
            is_own = is_built_in(entry)
            for key in [name] if isinstance(name, str) else name or [name_of(entry)]:
                self._add(key, entry, is_own, force)
            return entry

        return register if module is None else register(module)

    def _add(self, key: str, entry: Callable[..., Any], is_own: bool, force: bool) -> None:
        """Add an entry, `is_own` if jengine ships it."""
        if not is_own:
            _OF_USERS[key] = [*_OF_USERS.get(key, ()), entry]
        existing = self._entries.get(key)
        if existing is None or force:
            self._entries[key] = entry
            module = None if existing is not None or is_own else self._find_module(key)
            # else the extra's own entry, of another package
            if module is not None and _full_name(entry) != f"{module}.{key}":
                _LOGGER.info("The %s %s replaces %s.%s.", self.name, _full_name(entry), module, key)
        elif is_built_in(existing) == is_own:
            raise UnknownNameError(
                f"{self.name} {key!r} is already registered as {_full_name(existing)}; pass "
                "force=True to replace it"
            )
        else:  # built-in entries may be imported after the user's
            users, own = (existing, entry) if is_own else (entry, existing)
            self._entries[key] = users
            _LOGGER.info(
                "The %s %s replaces jengine's %s.", self.name, _full_name(users), _full_name(own)
            )

    def get(self, key: str) -> Callable[..., Any]:
        """Return the entry registered as `key`.

        Args:
          key: 'Name', 'scope.Name' (the scope is ignored), or a dotted import path. If its module
            is next to a config file, it is an import path.

        Raises:
          KeyError: no such entry; the message suggests the closest name. Errors in an imported
            module keep their type.
        """
        if not isinstance(key, str):
            raise TypeError(f"{self.name} must be looked up by a name, got {key!r}")
        module, _, name = key.rpartition(".")
        if module and find_directory(module) is not None and allowed_directory() is None:
            return self._import(key)
        if self._locations or name not in self._entries:
            self._import_entries(key, name)
        for registered in (key, name):
            if registered in self._entries:
                return self._entries[registered]
        if module:
            return self._import(key)
        hint = find_missing(name) or closest(name, self._names())
        raise UnknownNameError(
            f"{self.name} must be a registered name or an import path, got {key!r}{hint}"
        )

    def get_type(self, kind: Any) -> Any:
        """Return the class or function in a config's `type`, which may be a name."""
        if not isinstance(kind, str):
            return kind
        if kind in self._entries and not self._locations:
            return self._entries[kind]
        with config_path("type"):
            return self.get(kind)

    def build(self, cfg: Config, **extra: Any) -> Any:
        """Build an object from a config.

        Args:
          cfg: `dict(type=NAME, **arguments)`, where NAME may also be the class itself, or NAME
            alone. It is not modified.
          **extra: further arguments for the constructor; those in `cfg` take precedence.

        Raises:
          KeyError: an unknown type. TypeError: `cfg` is not such a dict, or the arguments do not
            match the constructor.
          ArgumentError: an argument is out of range.
        """
        entry, arguments = self._parse(cfg, extra)
        is_checked = checks_itself(entry)
        check_arguments(entry, arguments, tuple(extra), values=not is_checked, common=self._common)
        return entry(**arguments)

    def build_function(self, cfg: Any) -> Any:
        """Return a function: an entry by name or from a config, or `cfg` itself if it is neither.

        From a config with a class, or with all arguments that a function requires, the result of
        the call is returned. Otherwise the function waits for the others, with those in the config
        set.

        >>> FUNCTIONS.build_function(dict(type="math.isclose", a=1.0))(b=1.0)
        True

        Raises:
          KeyError, TypeError: as for `build`.
        """
        if not isinstance(cfg, str) and not hasattr(cfg, "items"):
            return cfg
        kind = cfg if isinstance(cfg, str) else cfg.get("type")
        if isinstance(kind, str) and kind in self._entries:
            kind = self._entries[kind]
        elif isinstance(kind, str):
            with config_path("type"):
                kind = self._get_function(kind)
        if isinstance(kind, type):
            return self.build({"type": kind} if isinstance(cfg, str) else {**cfg, "type": kind})
        if isinstance(cfg, str):
            return kind
        entry, arguments = self._parse({**cfg, "type": kind}, {})
        _, required, _ = _accepted(entry)
        check_arguments(entry, arguments, supplied=tuple(required - arguments.keys()))
        return (
            entry(**arguments)
            if required <= set(arguments)
            else functools.partial(entry, **arguments)
        )

    def check(self, cfg: Config, **extra: Any) -> None:
        """Check a config without building anything.

        Arguments and errors as for `build`, with stand-ins in `extra`.
        """
        entry, arguments = self._parse(cfg, {})
        check_arguments(entry, arguments, supplied=tuple(extra))

    def _get_function(self, key: str) -> Callable[..., Any]:
        """Return the entry registered as `key`, or the class or function with this import path."""
        is_path = "." in key and key.rpartition(".")[2] not in self
        if is_path and allowed_directory() is not None:  # a config from elsewhere
            return load_provided("known_types", "find_known_function")(key, imported_modules())
        return self.get(key)

    def _import(self, path: str) -> Callable[..., Any]:
        """Import the class or function at `path`.

        KeyError if there is none; errors in the module itself are raised with a note about the
        user's line.
        """
        try:
            return import_attribute(path)
        except UnknownNameError as error:
            raise UnknownNameError(
                f"{self.name} must be a registered name or an import path, got {path!r}: {error}"
            ) from None

    def _parse(
        self, cfg: Config, extra: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return a config's class or function, and the arguments."""
        if isinstance(cfg, str):
            cfg = {"type": cfg}
        elif not hasattr(cfg, "items"):
            raise TypeError(
                f"{self._name_with_article} must be a dict with a 'type', got "
                f"{type(cfg).__name__}: {cfg!r}"
            )
        arguments = {**extra, **typing.cast(Mapping[str, Any], cfg)}
        arguments.pop("_delete_", None)
        arguments.pop("_scope_", None)
        entry = arguments.pop("type", None)
        if entry is None:
            raise TypeError(
                f"{self._name_with_article} must have a 'type', got only the keys "
                f"{sorted(map(str, arguments))}"
            )
        if isinstance(entry, str):
            is_known = entry in self._entries and not self._locations
            entry = self._entries[entry] if is_known else self.get_type(entry)
        if not callable(entry):
            raise TypeError(
                f"the type of {self._name_with_article} must be a name or a class, got {entry!r}"
            )
        if not _NUMBERS.issuperset(map(type, arguments.values())):
            arguments = resolve_functions(entry, arguments)
        return entry, arguments

    def __contains__(self, key: str) -> bool:
        return key in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names()))

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"Registry({self.name!r}, {len(self)} entries)"

    def _import_entries(self, *names: str) -> None:
        """Import the page with the built-in entries, and the modules that provide `names`."""
        while self._locations:
            page = importlib.import_module(self._locations.pop())
            self._modules |= getattr(page, "provides", {}).get(self._section, {})
        for name in names:
            if name not in self._entries and (module := self._find_module(name)):
                # a module may make what it provides on use
                getattr(importlib.import_module(module), name, None)

    def _find_module(self, name: str) -> str | None:
        """Return the module of an entry that is imported on use."""
        return provided(self._section).get(name) or self._modules.get(name)

    def _names(self) -> set[str]:
        """Return the names of all entries, without importing more of them."""
        self._import_entries()
        return {*self._entries, *self._modules, *provided(self._section)}


def as_config(value: object) -> Any:
    """Return `dict(type=value)` for a type's bare name, and anything else unchanged."""
    return {"type": value} if isinstance(value, str) else value


def resolve_functions(entry: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with functions in place of import paths, where `entry` takes functions.

    A config file can name a function, `loss='my_losses.focal'`, also with arguments,
    `collate_fn=dict(type='my_data.collate', pad_value=0)`.

    >>> def train(schedule: Callable[[int], float]): ...
    >>> resolve_functions(train, {"schedule": "math.sqrt"})
    {'schedule': <built-in function sqrt>}

    Raises:
      KeyError: there is no such function.
    """
    result = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, str | list | tuple) or (
            hasattr(value, "items") and not isinstance(value, type)
        ):
            types, takes = _function_types(entry, name)
            # an argument that takes dicts too reads them itself
            if types and (types.get(Mapping) != {} or not is_mapping(value)):
                with config_path(name):
                    result[name] = _resolve_function(value, types, takes)
    return result


@functools.lru_cache(maxsize=4096)
def _function_types(entry: Callable[..., Any], name: str) -> tuple[_Types, bool]:
    """Return the types of an argument that takes functions, or lists or dicts of them, and whether
    it may be a function itself; no types for another argument.
    """
    try:
        parameter = parameters_of(entry)[name]
    except (KeyError, TypeError, ValueError):  # some built-ins have no signature
        return {}, False
    types = _types(parameter.annotation)
    takes = takes_functions(parameter)
    return types if takes or any(types.values()) else {}, takes


def _types(annotation: Any) -> _Types:
    """Return the types of an annotation, each with the types of the items if it is a list or dict
    of functions.
    """
    types: _Types = {}
    for kind in alternatives(annotation):
        origin = typing.get_origin(kind) or kind
        args = typing.get_args(kind)
        inner = _types(args[-1]) if args and origin in (Sequence, Mapping) else {}
        types[origin] = inner if Callable in inner else {}
    return types


def _resolve_function(value: Any, types: _Types, takes: bool) -> Any:
    """Return the function that `value` names, if an argument with these types takes functions.

    Else `value`.
    """
    if isinstance(value, str):
        is_path = _IMPORT_PATH.fullmatch(value) is not None
        if not takes or str in types or (Literal in types and not is_path):
            return value
        if Mapping in types and not is_path:  # a registered name, as `dict(type=NAME)`
            return as_config(value)
        return FUNCTIONS._get_function(value)
    if isinstance(value, list | tuple):
        inner = types.get(Sequence)
        return [_resolve_function(item, inner, True) for item in value] if inner else value
    if not is_mapping(value):  # an item of a list or dict
        return value
    if "type" in value:
        return FUNCTIONS.build_function(value) if takes and Mapping not in types else value
    inner = types.get(Mapping)
    return (
        {name: _resolve_function(item, inner, True) for name, item in value.items()}
        if inner
        else value
    )


def check_arguments(
    entry: Callable[..., Any],
    arguments: Mapping[str, Any],
    supplied: Sequence[str] = (),
    *,
    values: bool = True,
    common: Sequence[str] = (),
) -> None:
    """Check `arguments` against the signature and the annotations of `entry` before calling it.

    Args:
      entry: a class or function; one without a signature, as some built-ins, is not checked.
      arguments: by name.
      supplied: arguments that the caller adds: they need not be in `arguments`, and no message
        suggests them.
      values: whether to check values too, which the call of a `checked` entry does itself.
      common: further settings that the config may have, for the message.

    Raises:
      TypeError: an unknown argument (the message suggests the closest), a missing one, or one with
        another type.
      ArgumentError: one is out of range.
    """
    try:
        accepted, required, is_open = _accepted(entry)
    except (TypeError, ValueError):
        return
    if not is_open and not arguments.keys() <= accepted.keys():
        unknown = [key for key in arguments if key not in accepted]
        own = [*(key for key in accepted if key not in supplied), *common]
        names = list_unknown(map(str, unknown), own)
        raise TypeError(f"{name_of(entry)} has no argument{'s' * (len(unknown) > 1)} {names}")
    if missing := required - arguments.keys() - set(supplied):
        names = ", ".join(repr(key) for key in accepted if key in missing)
        raise TypeError(f"{name_of(entry)} needs the argument{'s' * (len(missing) > 1)} {names}")
    if values and arguments:
        check_values(None, entry, arguments)


@functools.lru_cache(maxsize=1024)
def _accepted(entry: Callable[..., Any]) -> tuple[dict[str, Any], frozenset[str], bool]:
    """Return the arguments by name, those without a default, and whether it takes any others."""
    accepted = {}
    required = set()
    is_open = False
    for name, p in parameters_of(entry).items():
        is_open |= p.kind is p.VAR_KEYWORD
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            accepted[name] = p
            if p.default is p.empty:
                required.add(name)
    return accepted, frozenset(required), is_open


def is_built_in(entry: Callable[..., Any]) -> bool:
    """Return whether jengine ships `entry`; optax's functions keep the name of their module."""
    function = entry.func if isinstance(entry, functools.partial) else entry
    module = function.__module__ or ""  # None for what `exec` defines
    return module.partition(".")[0] in ("jengine", "optax")


def find_registered(name: str, import_all: bool = False) -> list[Callable[..., Any]]:
    """Return the entries called `name`, without a scope, in all registries.

    With `import_all`, all built-in entries are imported if no entry has this name so far.
    """
    found = []
    for registry in _REGISTRIES:
        if name in registry._entries:
            found.append(registry._entries[name])
    if found or not import_all:
        return found
    for registry in list(_REGISTRIES):  # an imported module may have a registry of its own
        if registry._locations or name in registry._modules or name in provided(registry._section):
            registry._import_entries(name)
    return find_registered(name)


def list_registered_by_users(name: str) -> list[Callable[..., Any]]:
    """Return the entries called `name`, without a scope, that are not part of jengine."""
    if name not in _OF_USERS:
        return []
    return [entry for entry in _OF_USERS[name] if entry in find_registered(name)]


def _full_name(entry: Callable[..., Any]) -> str:
    function: Any = entry.func if isinstance(entry, functools.partial) else entry
    return f"{function.__module__}.{function.__qualname__}"


HOOKS: Registry = Registry("hook", section="HOOKS", common=("priority",))
OPTIMIZERS: Registry = Registry("optimizer", section="OPTIMIZERS", common=("state_dtype",))
OPTIM_WRAPPERS: Registry = Registry("optimizer wrapper", section="OPTIM_WRAPPERS")
OPTIM_WRAPPER_CONSTRUCTORS: Registry = Registry(
    "optimizer wrapper constructor", section="OPTIM_WRAPPER_CONSTRUCTORS"
)
PARAM_SCHEDULERS: Registry = Registry("parameter scheduler", section="PARAM_SCHEDULERS")
MODELS: Registry = Registry("model", section="MODELS")
DATASETS: Registry = Registry("dataset", section="DATASETS")
TRANSFORMS: Registry = Registry("transform", section="TRANSFORMS")
DATA_SAMPLERS: Registry = Registry("data sampler", section="DATA_SAMPLERS")
# Calls of functions are not checked: they take arrays.
FUNCTIONS: Registry = Registry("function", section="FUNCTIONS", checks_calls=False)
LOOPS: Registry = Registry("loop", section="LOOPS")
METRICS: Registry = Registry("metric", section="METRICS")
EVALUATOR: Registry = Registry("evaluator", section="EVALUATOR")
VISUALIZERS: Registry = Registry("visualizer", section="VISUALIZERS")
VISBACKENDS: Registry = Registry("visualization backend", section="VISBACKENDS")
LOG_PROCESSORS: Registry = Registry("log processor", section="LOG_PROCESSORS")
STRATEGIES: Registry = Registry("strategy", section="STRATEGIES")
