"""Comparison of stored and expected arrays by path, before any array is read."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jengine.config.errors import closest, did_you_mean

_MAX_ROWS = 20
_ALWAYS = ("match", "missing", "unexpected", "mismatched")  # counted also if there are none


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

    def __str__(self) -> str:
        """Return the numbers of arrays by kind, and a line for each that does not match or is
        cast, at most twenty of each kind.
        """
        counts = {
            "match": len(self.matched),
            "missing": len(self.missing),
            "unexpected": len(self.unexpected),
            "mismatched": len(self.mismatched),
            "renamed": len(self.renamed),
            "reshaped": len(self.reshaped),
            "excluded": len(self.excluded),
            "ignored": len(self.ignored),
        }
        shown = (f"{count} {kind}" for kind, count in counts.items() if count or kind in _ALWAYS)
        kinds: dict[str, Mapping[str, str]] = {
            # A renamed array is missing under one name and unexpected under the other
            "missing": {
                path: did_you_mean(path, self.unexpected).removeprefix("; ")
                for path in self.missing
            },
            "unexpected": dict.fromkeys(self.unexpected, ""),
            "mismatched": {
                path: f"stored {stored}, expected {expected}"
                + (f"; {note}" if (note := self.notes.get(path)) else "")
                for path, (stored, expected) in self.mismatched.items()
            },
            "cast": {path: " -> ".join(types) for path, types in self.cast.items()},
        }
        lines = [", ".join(shown)]
        for kind, notes in kinds.items():
            found = [f"  {kind:<10}  {path}  {note}".rstrip() for path, note in notes.items()]
            lines += found[:_MAX_ROWS]
            if len(found) > _MAX_ROWS:
                lines.append(f"  {kind:<10}  … and {len(found) - _MAX_ROWS} more")
        return "\n".join(lines)


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
    1 match, 0 missing, 0 unexpected, 0 mismatched, 1 renamed
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
