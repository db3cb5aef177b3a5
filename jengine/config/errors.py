"""Errors with the config path, the expected and the actual value, and the closest legal name.

`config_path` tracks the current path in a context variable, so it need not be passed to every
constructor. An exception raised within it gets the full path as a note.
"""

import contextlib
import contextvars
import difflib
import functools
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

_CONFIG_PATH: contextvars.ContextVar[tuple[str | int, ...]] = contextvars.ContextVar(
    "jengine_config_path", default=()
)


class ConfigError(ValueError):
    """Illegal value in a config."""


class ArgumentError(ConfigError, AssertionError):
    """Illegal argument for which MMEngine documents an AssertionError: handlers for either type
    catch it.
    """


class MissingPackageError(ConfigError, ImportError):
    """Optional packages are not installed."""


class CheckpointMismatchError(ValueError):
    """Error of a checkpoint whose arrays differ from the expected ones; see `report`.

    Args:
      path: the checkpoint.
      report: a `LoadReport`, what does not fit.
      advice: what to do.
    """

    def __init__(self, path: str, report: Any, advice: str) -> None:
        super().__init__(f"checkpoint {path} does not fit: {report}\n{advice}")
        self.path = path
        self.report = report


@contextlib.contextmanager
def require_extra(extra: str, need: str) -> Iterator[None]:
    """Import optional packages in the body.

    Args:
      extra: the extra of jengine that installs them.
      need: what requires which package, for the error: 'drawing requires Pillow'.

    Raises:
      MissingPackageError: one is not installed; the message has the command that installs the
        extra.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(f"{need}: pip install 'jengine[{extra}]'") from error


class UnknownNameError(KeyError):
    """Unknown name. Unlike a plain KeyError, it prints the message instead of the message's
    repr.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a suggestion for a misspelled name, to be appended to an error message.

    Empty if no legal name is close.

    >>> did_you_mean("Adamw", ["Adam", "AdamW"])
    "; did you mean 'AdamW'?"
    >>> did_you_mean("learning_rate", ["lr", "momentum"])
    "; did you mean 'lr'?"

    Args:
      name: the given name.
      candidates: the legal names.
      cutoff: the least similarity, from 0 to 1.
    """
    name = str(name)
    names = sorted(map(str, candidates))
    by_lower = {n.lower(): n for n in reversed(names)}
    close = functools.partial(difflib.get_close_matches, n=1, cutoff=cutoff)
    # another case takes precedence: `Adamw` is as close to `Adam` as to `AdamW`
    exact = by_lower.get(name.lower())
    match = [exact] if exact else close(name, names)
    match = match or [by_lower[n] for n in close(name.lower(), by_lower)]
    # `learning_rate` for `lr`
    match = match or [n for n in names if _initials(n) == name or _initials(name) == n]
    return f"; did you mean {match[0]!r}?" if match else ""


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_")) if "_" in name.strip("_") else ""


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return a suggestion like `did_you_mean`, or ".

    Expected one of: ..." with all legal names if none is close.
    """
    names = sorted(str(c) for c in candidates)
    return did_you_mean(name, names) or (f"; expected one of: {', '.join(names)}" if names else "")


def list_unknown(unknown: Iterable[str], candidates: Iterable[str]) -> str:
    """Return misspelled names, each with its suggestion by `closest`.

    >>> list_unknown(["intervall", "prio"], ["interval", "priority"])
    "'intervall'; did you mean 'interval'?, 'prio'; did you mean 'priority'?"
    """
    names = [str(c) for c in candidates]
    return ", ".join(f"{key!r}{closest(key, names)}" for key in unknown)


def current_config_path() -> str:
    """Return the current config path as a string, `custom_hooks[0].interval`.

    Empty outside `config_path`.
    """
    text = ""
    for key in _CONFIG_PATH.get():
        text += f"[{key}]" if isinstance(key, int) else (f".{key}" if text else str(key))
    return text


def read_seconds(variable: str, default: float, least: float = 0.0) -> float:
    """Return the seconds in an environment variable.

    Raises:
      ConfigError: it is not a finite number, or less than `least`.
    """
    text = os.environ.get(variable, str(default))
    with contextlib.suppress(ValueError):
        if least <= (seconds := float(text)) < math.inf:
            return seconds
    at_least = f", at least {least:g}" if least else ""
    raise ConfigError(
        f"the environment variable {variable} must be a number of seconds{at_least}, got {text!r}"
    )


@contextlib.contextmanager
def config_path(*keys: str | int) -> Iterator[None]:
    """Extend the current config path by `keys` for the body.

    Add the path as a note to exceptions it raises.

    >>> with config_path("custom_hooks", 0):
    ...     current_config_path()
    'custom_hooks[0]'
    """
    token = _CONFIG_PATH.set((*_CONFIG_PATH.get(), *keys))
    try:
        yield
    except Exception as error:
        if not any(
            note.startswith("in the config at ") for note in getattr(error, "__notes__", ())
        ):
            error.add_note(f"in the config at `{current_config_path()}`")
        raise
    finally:
        _CONFIG_PATH.reset(token)
