"""Registries: names in a config file to the classes and functions that they stand for.

A registry fills itself: the package that holds its built-in entries is imported at the first look-up, so that
`import jengine` stays light and a config can name anything without importing it.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jengine.errors import UnknownNameError, closest, config_path

T = TypeVar("T", bound=Callable[..., Any])


class Registry:
    """A table of names.

    Args:
      name: what its entries are, in the singular, as error messages call them.
      location: the package that registers the built-in entries, imported at the first look-up.
      contrib: packages that register further entries, imported when a name is not found without them.
    """

    def __init__(self, name: str, location: str, contrib: Sequence[str] = ()) -> None:
        self.name = name
        self._one = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        self._locations = [location]
        self._contrib = list(contrib)
        self._entries: dict[str, Callable[..., Any]] = {}

    def register_module(self, name: str | None = None, force: bool = False) -> Callable[[T], T]:
        """Decorates a class or function to make it known under `name` (its own name by default).

        Raises:
          KeyError: the name is taken and `force` is False.
        """

        def register(entry: T) -> T:
            """Makes `entry` known and returns it."""
            key = name or entry.__name__
            if key in self._entries and not force:
                raise UnknownNameError(
                    f"{self.name} {key!r} is already registered as {self._entries[key].__module__}."
                    f"{self._entries[key].__qualname__}; pass force=True to replace it"
                )
            self._entries[key] = entry
            return entry

        return register

    def get(self, key: str) -> Callable[..., Any]:
        """The entry called `key`; 'scope.Name' stands for 'Name', and a dotted import path for what it imports.

        Raises:
          KeyError: nothing has that name; the message lists the closest.
        """
        module, _, last = key.rpartition(".")
        self._load(key, last)
        if key in self._entries:
            return self._entries[key]
        if last in self._entries:
            return self._entries[last]
        if module and (found := _import(module, last)) is not None:
            return found
        raise UnknownNameError(f"no {self.name} is called {key!r}{closest(last, self._entries)}")

    def build(self, cfg: Any, **extra: Any) -> Any:
        """Builds what `cfg` describes.

        Args:
          cfg: `dict(type=NAME, **arguments)`; NAME may be the class itself. It is left as it was.
          **extra: arguments for the constructor that the config need not give; the config wins where both do.

        Raises:
          KeyError: unknown type. TypeError: not such a dict, or arguments that the constructor does not have.
        """
        if isinstance(cfg, tuple) and len(cfg) == 1:
            raise TypeError(f"{self._one} is a dict, found a tuple of one: remove the comma after `dict(...)`")
        if not hasattr(cfg, "items"):
            raise TypeError(f"{self._one} is a dict with a 'type', found {type(cfg).__name__}: {cfg!r}")
        arguments = {**extra, **{k: v for k, v in cfg.items() if k != "_delete_"}}
        entry = arguments.pop("type", None)
        if entry is None:
            raise TypeError(f"{self._one} needs a 'type'; found only the keys {sorted(map(str, arguments))}")
        if isinstance(entry, str):
            with config_path("type"):
                entry = self.get(entry)
        check_arguments(entry, arguments)
        return entry(**arguments)

    def __contains__(self, key: str) -> bool:
        self._load(key)
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._load()
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.name!r}, {len(self._entries)} entries)"

    def _load(self, *names: str) -> None:
        """Imports what registers entries; what seldom is needed only if none of `names` is known without it."""
        while self._locations:
            importlib.import_module(self._locations.pop())
        while self._contrib and not any(name in self._entries for name in names):
            importlib.import_module(self._contrib.pop())


def check_arguments(entry: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Holds `arguments` against the signature of `entry` before it is called.

    Raises:
      TypeError: an argument that `entry` does not take (with the closest that it does), or one that is missing.
    """
    try:
        parameters = inspect.signature(entry).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return
    name = getattr(entry, "__name__", repr(entry))
    kinds = inspect.Parameter
    named = {k: p for k, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    if not any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        for key in arguments:
            if key not in named:
                raise TypeError(f"{name} has no argument {key!r}{closest(str(key), named)}")
    missing = [k for k, p in named.items() if p.default is kinds.empty and k not in arguments]
    if missing:
        raise TypeError(f"{name} needs the argument{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}")


def _import(module: str, name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


_IMIX, _SELFSUP, _SEGMENTATION = (f"jengine.contrib.{name}" for name in ("imix", "selfsup", "segmentation"))

HOOKS = Registry("hook", "jengine.hooks", contrib=(_IMIX, _SELFSUP, _SEGMENTATION))
OPTIMIZERS = Registry("optimizer", "jengine.optim", contrib=(_IMIX,))
OPTIM_WRAPPERS = Registry("optimizer wrapper", "jengine.optim")
OPTIM_WRAPPER_CONSTRUCTORS = Registry("optimizer wrapper constructor", "jengine.optim", contrib=(_IMIX,))
PARAM_SCHEDULERS = Registry("parameter scheduler", "jengine.optim", contrib=(_IMIX,))
MODELS = Registry("model", "jengine.model")
DATASETS = Registry("dataset", "jengine.data", contrib=(_SELFSUP,))
TRANSFORMS = Registry("transform", "jengine.data")
DATA_SAMPLERS = Registry("data sampler", "jengine.data", contrib=(_SELFSUP,))
LOOPS = Registry("loop", "jengine.runner")
METRICS = Registry("metric", "jengine.evaluation", contrib=(_SEGMENTATION,))
EVALUATOR = Registry("evaluator", "jengine.evaluation")
VISUALIZERS = Registry("visualizer", "jengine.visualization")
VISBACKENDS = Registry("visualization backend", "jengine.visualization")
LOG_PROCESSORS = Registry("log processor", "jengine.logging")
STRATEGIES = Registry("strategy", "jengine.sharding")
