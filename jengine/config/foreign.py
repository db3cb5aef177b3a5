"""Guard for configs in foreign checkpoints, which must not choose the code that runs.

A name in a config can be any import path, so `type='os.system'` would run a command. Inside `only_known_classes` an
import path must be a class in a module that is already imported: a user's module, or a network or model in an installed
package. Other classes in packages are refused, since `subprocess.Popen` is one of them. Functions are refused when they
are called, as a model that predicts calls no loss; only those of optax and `jax.nn` can be called.
"""

import contextlib
import contextvars
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from jengine.errors import ConfigError

_INSTALLED = ("site-packages", "dist-packages")
_NETWORKS = ("flax", "haiku", "equinox", "jengine")  # their classes `Module` and `Model` are the bases of networks
_source: contextvars.ContextVar[str | None] = contextvars.ContextVar("jengine_foreign_config", default=None)


@contextlib.contextmanager
def only_known_classes(source: str | None) -> Iterator[None]:
    """Restrict import paths in configs inside, in this thread.

    `source` is the file whose config is used, for the error; None restricts nothing.
    """
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)  # also after an error


def is_restricted() -> bool:
    """Return whether import paths are restricted in this thread."""
    return _source.get() is not None


def find_known_class(path: str, modules: Mapping[str, types.ModuleType]) -> type:
    """Return the class at `package.module.Class` among imported modules by name, without importing anything.

    Raises:
      ConfigError: the module is not imported, or a foreign config may not name the class.
    """
    parts = path.split(".")
    count = next((i for i in range(len(parts) - 1, 0, -1) if ".".join(parts[:i]) in modules), 0)
    if not count:
        raise _refuse(path, f"its module is not imported: import {path.rpartition('.')[0]} first")
    found: Any = modules[".".join(parts[:count])]
    for name in parts[count:]:  # not getattr, with which lazy modules import others
        found = vars(found).get(name) if isinstance(found, types.ModuleType | type) else None
    if not isinstance(found, type):
        raise _refuse(path, "it is not a class of that module")
    bases = ((base.__name__, base.__module__.partition(".")[0]) for base in found.__mro__)
    is_network = any(name in ("Module", "Model") and package in _NETWORKS for name, package in bases)
    if not is_network and not _is_of_user(found):
        raise _refuse(path, "a class of a package must be a network or a model")
    return found


def find_known_function(path: str, modules: Mapping[str, types.ModuleType]) -> Any:
    """Return the class or function at `package.module.name`; in place of a refused one, a function that raises that."""
    try:
        return find_known_class(path, modules)
    except ConfigError as error:
        refusal = error
    module, _, name = path.rpartition(".")
    found = vars(modules[module]).get(name) if module in modules else None
    pure = [*vars(modules["jax.nn"]).values(), *vars(modules["jax.nn.initializers"]).values()]
    # Functions of optax and jax.nn only compute: a config from elsewhere may name them, and nothing else.
    is_pure = str(getattr(found, "__module__", "")).startswith("optax.") or any(found is known for known in pure)
    if callable(found) and is_pure:
        return found
    return RefusedFunction(refusal)


class RefusedFunction:
    """Function that a foreign config may not name: calls raise the error."""

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error."""
        raise self._error


def _refuse(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"a config from elsewhere must name registered classes or classes of imported modules, got {path!r} in "
        f"{_source.get()}: {reason}; if you trust the file, pass trust=True (on the command line --trust), with which "
        "it can run any code"
    )


def _is_of_user(found: type) -> bool:
    """Return whether a class comes neither from Python nor from jengine nor from an installed package."""
    top = found.__module__.partition(".")[0]
    if top in sys.stdlib_module_names or top == "jengine":
        return False
    file = getattr(sys.modules.get(found.__module__), "__file__", None)
    return file is None or not set(_INSTALLED) & set(pathlib.Path(file).parts)
