"""Report errors with the config path, the expected and the actual value, and the closest legal name.

The current path in the config is kept in a context variable, so that a constructor five calls deep needs no argument
for it: `config_path` extends it, and every exception that leaves carries the full path as a note.
"""

import contextlib
import contextvars
import difflib
from collections.abc import Iterable, Iterator

_PLACE: contextvars.ContextVar[tuple[str | int, ...]] = contextvars.ContextVar("jengine_config_place", default=())


class ConfigError(ValueError):
    """Signal that the config asks for something that cannot be built."""


class ArgumentError(ConfigError, AssertionError):
    """Signal an illegal argument for which MMEngine documents an AssertionError: handlers of either type catch it."""


class UnknownNameError(KeyError):
    """Signal a name that no registry or table has. Print its message unchanged (KeyError would print its repr)."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint at the candidate that was probably meant.

    Args:
      name: the given name.
      candidates: the legal names.

    Returns:
      "; did you mean 'x'?" when one of them is close, else the whole list of legal names.
    """
    names = sorted(str(c) for c in candidates)
    by_lower = {n.lower(): n for n in reversed(names)}
    exact = by_lower.get(str(name).lower())  # first: `Adamw` is as close to `Adam` as to `AdamW`
    match = [exact] if exact else difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    match = match or [by_lower[m] for m in difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)]
    if match:
        return f"; did you mean {match[0]!r}?"
    return f"; expected one of: {', '.join(names)}" if names else ""


def current_config_path() -> str:
    """Return the current path in the config in its written form, `custom_hooks[0].interval`; empty outside
    `config_path`."""
    text = ""
    for key in _PLACE.get():
        text += f"[{key}]" if isinstance(key, int) else (f".{key}" if text else str(key))
    return text


@contextlib.contextmanager
def config_path(*keys: str | int) -> Iterator[None]:
    """Run the body under `keys` of the config; an exception that leaves gets a note with the path."""
    token = _PLACE.set((*_PLACE.get(), *keys))
    try:
        yield
    except Exception as error:
        if not any(note.startswith("in the config at ") for note in getattr(error, "__notes__", ())):
            error.add_note(f"in the config at `{current_config_path()}`")
        raise
    finally:
        _PLACE.reset(token)
