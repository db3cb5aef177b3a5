"""Compare the arrays of a checkpoint with the expected ones by path, before any array is read."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jengine.errors import closest

_MAX_ROWS = 20


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Report how stored arrays match the expected ones, by dotted path.

    Attributes:
      matched: expected path to stored path, for all arrays to load.
      missing: expected, but not stored.
      unexpected: stored, but not expected.
      mismatched: expected path to (stored, expected) shape and dtype, where they differ.
      cast: like `mismatched`, for arrays that are loaded with another dtype.
    """

    matched: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[str, str]]
    cast: dict[str, tuple[str, str]]

    @property
    def fits(self) -> bool:
        """Whether expected and stored arrays match one to one."""
        return not (self.missing or self.unexpected or self.mismatched)

    def table(self) -> str:
        """Return one line for each path that does not match or is cast, at most twenty of each kind."""
        rows: list[tuple[str, str, str]] = []
        rows += _limit_rows("missing", [(path, hint_closest(path, self.unexpected)) for path in self.missing])
        rows += _limit_rows("unexpected", [(path, "") for path in self.unexpected])
        rows += _limit_rows("mismatch", [(p, f"stored {s}, expected {e}") for p, (s, e) in self.mismatched.items()])
        rows += _limit_rows("cast", [(p, f"{s} to {e}") for p, (s, e) in self.cast.items()])
        width = max((len(path) for _, path, _ in rows), default=0)
        return "\n".join(f"  {kind:<10}  {path:<{width}}  {note}".rstrip() for kind, path, note in rows)

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
      rename: (old, new) prefixes of whole path segments; the first that matches a stored path is applied to it.
      cast: whether a float array may be cast to another float dtype.

    Raises:
      ValueError: a rename rule matches no stored path, or two stored paths become equal.
    """
    renamed = _rename_paths(tuple(stored), rename)
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


def list_prefixes(paths: Iterable[str]) -> set[str]:
    """Return all dotted paths above `paths`: `a` and `a.b` for `a.b.c`."""
    return {path[:i] for path in paths for i, char in enumerate(path) if char == "."}


def hint_closest(path: str, candidates: Sequence[str]) -> str:
    """Return 'did you mean …' if one of `candidates` is close, else an empty string."""
    hint = closest(path, candidates)
    return hint.removeprefix("; ") if "did you mean" in hint else ""


def _rename_paths(paths: Sequence[str], rename: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return stored paths by their new path."""
    renamed: dict[str, str] = {}
    used = set()
    for path in paths:
        new = path
        for old, replacement in rename:
            rest = _strip_prefix(path, old)
            if rest is not None:
                used.add(old)
                new = ".".join(filter(None, (replacement, rest)))
                break
        if new in renamed:
            raise ValueError(f"`rename` must keep paths distinct, got {new!r} for both {renamed[new]!r} and {path!r}")
        renamed[new] = path
    for old, replacement in rename:
        if old not in used:
            hint = closest(old, list_prefixes(paths))
            raise ValueError(
                f"`rename` must start with a prefix of a stored path, got ({old!r}, {replacement!r}){hint}"
            )
    return renamed


def _strip_prefix(path: str, prefix: str) -> str | None:
    """Return `path` without the segments of `prefix`; None if it does not start with them."""
    if not prefix:
        return path
    if path == prefix:
        return ""
    return path[len(prefix) + 1 :] if path.startswith(f"{prefix}.") else None


def _limit_rows(kind: str, entries: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    rows = [(kind, path, note) for path, note in entries[:_MAX_ROWS]]
    return [*rows, (kind, f"… and {len(entries) - _MAX_ROWS} more", "")] if len(entries) > _MAX_ROWS else rows
