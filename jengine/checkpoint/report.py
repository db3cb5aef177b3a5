"""Comparison of stored and expected arrays by path, before any array is read."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jengine.config.errors import closest, did_you_mean
from jengine.logging.tables import format_table

_MAX_ROWS = 20
_MAX_NAMES = 2  # in a row of the summary
_PROBLEMS = ("missing", "unexpected", "mismatched", "cast")  # rows of the table
_ALWAYS_SHOWN = ("loaded", "renamed", "reshaped", "missing", "unexpected")  # also without names


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Report on how stored arrays match the expected ones, by dotted path.

    Attributes:
      matched: expected path to stored path, for all arrays to load.
      missing: expected, but not stored.
      unexpected: stored, but not expected.
      mismatched: expected path to (stored, expected) shape and dtype, where they differ.
      cast: like `mismatched`, for arrays that are loaded with another dtype.
      reshaped: path to (stored, expected) shape, for arrays that are transposed, split or resized.
      excluded: expected, but left as they are on request.
      ignored: stored, but not weights: optimizer state, counters.
      notes: what would help, or which rule is responsible, for some in `mismatched`.
      ambiguous: those in `mismatched` whose axes may be in either order, so that loading them would
        be a guess.
    """

    matched: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[str, str]]
    cast: dict[str, tuple[str, str]]
    reshaped: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ambiguous: tuple[str, ...] = ()

    @property
    def renamed(self) -> dict[str, str]:
        """Entries in `matched` whose paths differ."""
        return {path: stored for path, stored in self.matched.items() if path != stored}

    @property
    def fits(self) -> bool:
        """Whether expected and stored arrays match one to one."""
        return not (self.missing or self.unexpected or self.mismatched)

    def table(self) -> str:
        """Return one line for each path that does not match or is cast, at most twenty of each
        kind.
        """
        rows: list[tuple[str, str, str]] = []
        for kind, entries in self._list().items():
            if kind in _PROBLEMS:
                rows += [(kind, path, note) for path, note in entries[:_MAX_ROWS]]
                if len(entries) > _MAX_ROWS:
                    rows.append((kind, f"… and {len(entries) - _MAX_ROWS} more", ""))
        width = max((len(path) for _, path, _ in rows), default=0)
        return "\n".join(
            f"  {kind:<10}  {path:<{width}}  {note}".rstrip() for kind, path, note in rows
        )

    def summary(self) -> str:
        """Return a table with the number of arrays of each kind, and the first few names."""
        rows = []
        for kind, entries in self._list().items():
            if entries or kind in _ALWAYS_SHOWN:
                names = [f"{path}: {note}" if note else path for path, note in entries[:_MAX_NAMES]]
                more = len(entries) - _MAX_NAMES
                names += [f"… and {more} more"] if more > 0 else []
                rows.append([kind, len(entries), ", ".join(names)])
        return format_table(["parameters", "count", "names"], rows, align=["left", "right", "left"])

    def _list(self) -> dict[str, list[tuple[str, str]]]:
        """Return path and note of each array by kind."""

        def compared(pairs: Mapping[str, tuple[str, str]]) -> list[tuple[str, str]]:
            return [(path, f"{stored} -> {expected}") for path, (stored, expected) in pairs.items()]

        def named(paths: Iterable[str]) -> list[tuple[str, str]]:
            return [(path, "") for path in paths]

        return {
            "loaded": named(self.matched),
            "renamed": named(f"{stored} -> {path}" for path, stored in self.renamed.items()),
            "reshaped": compared(self.reshaped),
            # A renamed array is missing under one name and unexpected under the other
            "missing": [
                (path, did_you_mean(path, self.unexpected).removeprefix("; "))
                for path in self.missing
            ],
            "unexpected": named(self.unexpected),
            "mismatched": [
                (path, "; ".join(filter(None, (text, self.notes.get(path)))))
                for path, (stored, expected) in self.mismatched.items()
                for text in [f"stored {stored}, expected {expected}"]
            ],
            "cast": compared(self.cast),
            "excluded": named(self.excluded),
            "ignored": named(self.ignored),
        }

    def __str__(self) -> str:
        counts = (
            f"{len(self.matched)} match, {len(self.missing)} missing, {len(self.unexpected)} "
            f"unexpected, {len(self.mismatched)} mismatched"
        )
        return "\n".join(filter(None, (counts, self.table())))


def compare(
    stored: Mapping[str, jax.ShapeDtypeStruct],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    *,
    rename: Sequence[tuple[str, str]] = (),
    cast: bool = False,
) -> LoadReport:
    """Compare stored arrays with the expected ones, both by dotted path.

    Args:
      stored, expected: shapes and dtypes.
      rename: see `rename_paths`, for stored paths.
      cast: whether a float array may be cast to another float dtype.

    Raises:
      ValueError: see `rename_paths`.

    >>> array = jax.ShapeDtypeStruct((3,), jnp.float32)
    >>> print(compare({"fc.bias": array}, {"head.bias": array}, rename=[("fc", "head")]))
    1 match, 0 missing, 0 unexpected, 0 mismatched
    """
    renamed = rename_paths(stored, rename)
    matched = {}
    mismatched = {}
    casts = {}
    for path, target in expected.items():
        if path not in renamed:
            continue
        source = stored[renamed[path]]
        types = (describe(source), describe(target))
        # Floats only: an integer in the place of a float is another array
        castable = (
            cast
            and jnp.issubdtype(source.dtype, jnp.floating)
            and jnp.issubdtype(target.dtype, jnp.floating)
        )
        if source.shape != target.shape or (source.dtype != target.dtype and not castable):
            mismatched[path] = types
            continue
        matched[path] = renamed[path]
        if source.dtype != target.dtype:
            casts[path] = types
    missing = tuple(path for path in expected if path not in renamed)
    unexpected = tuple(path for path in renamed if path not in expected)
    return LoadReport(matched, missing, unexpected, mismatched, casts)


def rename_paths(paths: Iterable[str], rename: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return each path by its new name: the first of the (old, new) prefixes that matches it, in
    whole segments, is replaced.

    >>> rename_paths(["fc.bias"], [("fc", "head")]), rename_paths(["bias"], [("", "fc")])
    ({'head.bias': 'fc.bias'}, {'fc.bias': 'bias'})

    Raises:
      ValueError: a prefix matches no path, or two paths become equal.
    """
    rules = [(old, new) for old, new in rename]
    used = set()
    renamed: dict[str, str] = {}
    for path in paths:
        found = (rule for rule in rules if not rule[0] or f"{path}.".startswith(f"{rule[0]}."))
        rule = next(found, ("", ""))
        used.add(rule)
        name = ".".join(filter(None, (rule[1], path.removeprefix(rule[0]).removeprefix("."))))
        if name in renamed:
            raise ValueError(
                f"`rename` must keep paths distinct, got {name!r} for both {renamed[name]!r} and "
                f"{path!r}"
            )
        renamed[name] = path
    for rule in rules:
        if rule not in used:
            hint = closest(rule[0], list_prefixes(renamed.values()))
            raise ValueError(
                f"`rename` must start with a prefix of a stored path, got {rule}{hint}"
            )
    return renamed


def list_prefixes(paths: Iterable[str]) -> set[str]:
    """Return all dotted paths above `paths`: `a` and `a.b` for `a.b.c`."""
    return {path[:i] for path in paths for i, char in enumerate(path) if char == "."}


def describe(leaf: jax.ShapeDtypeStruct) -> str:
    """Return dtype and shape as text, `float32[3,4]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
