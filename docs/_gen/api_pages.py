"""Write the API pages: the public names of each package, documented by their docstrings."""

import importlib
import inspect
import types
from collections.abc import Iterator

from jengine.config import HOOKS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS, PARAM_SCHEDULERS
from jengine.config.plugins import list_extras

# Their entries are called by configs alone, and are described in the pages of the registries.
_REGISTRIES = (HOOKS, OPTIMIZERS, OPTIM_WRAPPER_CONSTRUCTORS, PARAM_SCHEDULERS)
_ROOMS = (
    "runner",
    "hooks",
    "model",
    "data",
    "optim",
    "optim.schedules",
    "optim.transforms",
    "train",
    "evaluation",
    "checkpoint",
    "logging",
    "parallel",
    "config",
    "config.registry",
    "config.annotations",
    "config.paths",
    "config.errors",
    "config.plugins",
)
PACKAGES = (
    *(f"jengine.{room}" for room in _ROOMS),
    *(f"jengine.extras.{extra}" for extra in list_extras()),
)


def write_page(name: str) -> str:
    """Return the page of a package or module as Markdown."""
    module = importlib.import_module(name)
    lines = [f"# {name}", "", (module.__doc__ or "").strip(), ""]
    registered = {entry for registry in _REGISTRIES for entry in map(registry.get, registry)}
    for public in _list_public_names(module):
        if getattr(module, public) not in registered:
            kind = "class" if inspect.isclass(getattr(module, public)) else "function"
            lines += [f"## {public}", "", "```{eval-rst}", f".. auto{kind}:: {name}.{public}"]
            lines += ["   :members:", "   :show-inheritance:"] if kind == "class" else []
            lines += ["```", ""]
    return "\n".join(lines)


def _list_public_names(module: types.ModuleType) -> Iterator[str]:
    """Yield the documented classes and functions that a package exports, or that a module
    defines.
    """
    is_package = hasattr(module, "__path__")
    for name in sorted(dir(module), key=str.lower):  # an extra's page imports names on access
        value = getattr(module, name, None)  # some entries have a second name
        defined_in = getattr(value, "__module__", "")
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if (
            value.__doc__
            and defined_in.startswith("jengine.")
            # Once: on the page of the module that defines it, or of the package that exports it,
            # which is not the room in which an extra offers it as well.
            and (
                defined_in == module.__name__
                or (is_package and not _is_exported(name, defined_in, module.__name__))
            )
        ):
            yield name


def _is_exported(name: str, defined_in: str, elsewhere: str) -> bool:
    """Return whether the page of the module that defines a name has it, and not the page
    `elsewhere`.
    """
    found = [package for package in PACKAGES if f"{defined_in}.".startswith(f"{package}.")]
    owner = max(found, key=len, default=elsewhere)
    return owner != elsewhere and name in dir(importlib.import_module(owner))
