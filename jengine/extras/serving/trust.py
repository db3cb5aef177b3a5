"""Guard for configs in foreign checkpoints, which must not choose the code that runs or the files
that are read.

A name in a config can be any import path, so `type='os.system'` would run a command. Inside
`only_known_classes` an import path must end in a registered name, or be a network or model in a
module that is already imported. Other classes are refused, since `subprocess.Popen` is one of them.
Functions are refused when they are called, as a model that predicts calls no loss; only those of
optax and `jax.nn` can be called. Paths in the config must lie in the checkpoint.
"""

import contextlib
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.storage import allowed_directory, reading_only
from jengine.model.model import Model

# Modules and their classes that are the bases of networks
_NETWORKS = (
    ("flax.linen", "Module"),
    ("flax.nnx", "Module"),
    ("haiku", "Module"),
    ("equinox", "Module"),
)


def only_known_classes(source: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context that restricts import paths in configs, and the files that are read, in this
    thread.

    `source` is the checkpoint whose config is used; None restricts nothing.
    """
    return reading_only(source)


def find_known_class(path: str, modules: Mapping[str, types.ModuleType]) -> type:
    """Return the class at `package.module.Class` among imported modules by name, without importing
    anything.

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
    # The classes themselves: a name or a module is what a class says of itself.
    bases = [
        vars(sys.modules[module]).get(name) for module, name in _NETWORKS if module in sys.modules
    ]
    if not any(base in found.__mro__ for base in [*bases, Model]):
        raise _refuse(path, "a class that is not registered must be a network or a model")
    return found


def find_known_function(path: str, modules: Mapping[str, types.ModuleType]) -> Any:
    """Return the class or function at `package.module.name`.

    In place of a refused one, a function that raises that.
    """
    try:
        return find_known_class(path, modules)
    except ConfigError as error:
        refusal = error
    module, _, name = path.rpartition(".")
    found = vars(modules[module]).get(name) if module in modules else None
    # Functions of optax and jax.nn only compute: a config from elsewhere may name them, and nothing
    # else.
    pure = [*vars(modules["jax.nn"]).values(), *vars(modules["jax.nn.initializers"]).values()]
    if callable(found) and (_is_of_optax(found) or any(found is known for known in pure)):
        return found
    return RefusedFunction(refusal)


class RefusedFunction:
    """Function that a foreign config may not name: calls raise the error."""

    def __init__(self, error: ConfigError) -> None:
        self._error = error
        # With an argument that is missing, so that it waits for a call as any function
        kinds = inspect.Parameter
        self.__signature__ = inspect.Signature(
            [kinds("inputs", kinds.POSITIONAL_OR_KEYWORD), kinds("others", kinds.VAR_KEYWORD)]
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error."""
        raise self._error


def _refuse(path: str, reason: str) -> ConfigError:
    return ConfigError(
        "a config from elsewhere must name registered classes or networks of imported modules, "
        f"got {path!r} in {allowed_directory()}: {reason}; if you trust the file, pass trust=True "
        "(on the command line --trust), with which it can run any code"
    )


def _is_of_optax(found: Any) -> bool:
    """Return whether a function is what optax itself has under its name, whatever it says of its
    module.
    """
    module = sys.modules.get(str(getattr(found, "__module__", "")))
    if module is None or not module.__name__.startswith("optax."):
        return False
    return vars(module).get(getattr(found, "__name__", "")) is found
