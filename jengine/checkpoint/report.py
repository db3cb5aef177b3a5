"""Compare the arrays of a checkpoint with the expected ones by path, before any array is read."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jengine.checkpoint.rules import rename_paths
from jengine.errors import closest
from jengine.logging import format_table

_MAX_ROWS = 20
_MAX_NAMES = 2  # in a row of the summary
_ALWAYS_SHOWN = ("loaded", "renamed", "reshaped", "missing", "unexpected")  # also without names


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Report how stored arrays match the expected ones, by dotted path.

    Attributes:
      matched: expected path to stored path, for all arrays to load.
      missing: expected, but not stored.
      unexpected: stored, but not expected.
      mismatched: expected path to (stored, expected) shape and dtype, where they differ.
      cast: like `mismatched`, for arrays that are loaded with another dtype.
      reshaped: path to (stored, expected) shape, for arrays that are transposed, split or resized.
      excluded: expected, but left as they are on request.
      ignored: stored, but not weights: the state of an optimizer, counters.
      resizable: those of `mismatched` that `interpolate` would resize.
    """

    matched: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[str, str]]
    cast: dict[str, tuple[str, str]]
    reshaped: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    resizable: tuple[str, ...] = ()

    @property
    def renamed(self) -> dict[str, str]:
        """The part of `matched` in which the paths differ."""
        return {path: stored for path, stored in self.matched.items() if path != stored}

    @property
    def fits(self) -> bool:
        """Whether expected and stored arrays match one to one."""
        return not (self.missing or self.unexpected or self.mismatched)

    def table(self) -> str:
        """Return one line for each path that does not match or is cast, at most twenty of each kind."""
        rows: list[tuple[str, str, str]] = []
        rows += _limit_rows("missing", [(path, hint_closest(path, self.unexpected)) for path in self.missing])
        rows += _limit_rows("unexpected", [(path, "") for path in self.unexpected])
        rows += _limit_rows("mismatch", [(path, self._describe_mismatch(path)) for path in self.mismatched])
        rows += _limit_rows("cast", [(p, f"{s} to {e}") for p, (s, e) in self.cast.items()])
        width = max((len(path) for _, path, _ in rows), default=0)
        return "\n".join(f"  {kind:<10}  {path:<{width}}  {note}".rstrip() for kind, path, note in rows)

    def summary(self) -> str:
        """Return a table with the number of arrays of each kind, and the first few names."""
        kinds: dict[str, list[str]] = {
            "loaded": list(self.matched),
            "renamed": [f"{stored} -> {path}" for path, stored in self.renamed.items()],
            "reshaped": [f"{path}: {stored} -> {expected}" for path, (stored, expected) in self.reshaped.items()],
            "cast": [f"{path}: {stored} -> {expected}" for path, (stored, expected) in self.cast.items()],
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "mismatched": [f"{path}: {self._describe_mismatch(path)}" for path in self.mismatched],
            "excluded": list(self.excluded),
            "ignored": list(self.ignored),
        }
        shown = {kind: names for kind, names in kinds.items() if names or kind in _ALWAYS_SHOWN}
        rows = [[kind, len(names), _shorten(names)] for kind, names in shown.items()]
        return format_table(["parameters", "count", "names"], rows, align=["left", "right", "left"])

    def _describe_mismatch(self, path: str) -> str:
        stored, expected = self.mismatched[path]
        advice = f"; interpolate=[{path!r}] resizes it" if path in self.resizable else ""
        return f"stored {stored}, expected {expected}{advice}"

    def __str__(self) -> str:
        counts = (
            f"{len(self.matched)} match, {len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.mismatched)} mismatched"
        )
        return "\n".join(filter(None, (counts, self.table())))


class CheckpointMismatchError(ValueError):
    """Signal that the arrays of a checkpoint differ from the expected ones; see `report`."""

    def __init__(self, path: str, report: LoadReport, advice: str) -> None:
        super().__init__(f"checkpoint {path} does not fit: {report}\n{advice}")
        self.report = report


def compare(
    stored: Mapping[str, jax.ShapeDtypeStruct],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    *,
    rename: Sequence[tuple[str, str]] = (),
    cast: bool = False,
) -> LoadReport:
    """Compare stored arrays with the expected ones.

    Args:
      stored: by dotted path.
      expected: by dotted path.
      rename: (old, new) prefixes of whole path segments, or regular expressions of them; the first that matches a
        stored path is applied to it.
      cast: whether a float array may be cast to another float dtype.

    Raises:
      ValueError: a rename rule matches no stored path, or two stored paths become equal.
    """
    renamed = _invert(rename_paths(tuple(stored), rename))
    matched, mismatched, casts = {}, {}, {}
    for path, target in expected.items():
        if path not in renamed:
            continue
        source = stored[renamed[path]]
        types = (describe(source), describe(target))
        castable = cast and jnp.issubdtype(source.dtype, jnp.floating) and jnp.issubdtype(target.dtype, jnp.floating)
        if source.shape != target.shape or (source.dtype != target.dtype and not castable):
            mismatched[path] = types
            continue
        matched[path] = renamed[path]
        if source.dtype != target.dtype:
            casts[path] = types
    return LoadReport(
        matched=matched,
        missing=tuple(path for path in expected if path not in renamed),
        unexpected=tuple(path for path in renamed if path not in expected),
        mismatched=mismatched,
        cast=casts,
    )


def describe(leaf: jax.ShapeDtypeStruct) -> str:
    """Return dtype and shape as text, `float32[3,4]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def hint_closest(path: str, candidates: Sequence[str]) -> str:
    """Return 'did you mean …' if one of `candidates` is close, else an empty string."""
    hint = closest(path, candidates)
    return hint.removeprefix("; ") if "did you mean" in hint else ""


def _invert(renamed: Mapping[str, str]) -> dict[str, str]:
    """Return stored paths by their new path."""
    inverse: dict[str, str] = {}
    for path, new in renamed.items():
        if new in inverse:
            raise ValueError(f"`rename` must keep paths distinct, got {new!r} for both {inverse[new]!r} and {path!r}")
        inverse[new] = path
    return inverse


def _limit_rows(kind: str, entries: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    rows = [(kind, path, note) for path, note in entries[:_MAX_ROWS]]
    return [*rows, (kind, f"… and {len(entries) - _MAX_ROWS} more", "")] if len(entries) > _MAX_ROWS else rows


def _shorten(names: Sequence[str]) -> str:
    more = [f"… and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return ", ".join([*names[:_MAX_NAMES], *more])
