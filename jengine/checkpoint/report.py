"""What of a checkpoint fits what is wanted of it, and what does not: compared by path before any array is read."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jengine.errors import closest

_ROWS = 20


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The outcome of holding what is stored against what is wanted, by dotted path.

    Attributes:
      matched: wanted path to stored path, of all that is loaded.
      missing: wanted, but not stored.
      unexpected: stored, but not wanted.
      mismatched: wanted path to (stored, wanted) shape and dtype, where they are at odds.
      cast: like `mismatched`, of what is loaded with another dtype than it was stored with.
    """

    matched: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[str, str]]
    cast: dict[str, tuple[str, str]]

    @property
    def fits(self) -> bool:
        """Whether everything wanted is stored and everything stored is wanted."""
        return not (self.missing or self.unexpected or self.mismatched)

    def table(self) -> str:
        """One line for each path that does not fit or is cast, at most twenty of a kind."""
        rows: list[tuple[str, str, str]] = []
        rows += _limited("missing", [(path, closest_hint(path, self.unexpected)) for path in self.missing])
        rows += _limited("unexpected", [(path, "") for path in self.unexpected])
        rows += _limited("mismatch", [(p, f"stored {s}, expected {w}") for p, (s, w) in self.mismatched.items()])
        rows += _limited("cast", [(p, f"{s} to {w}") for p, (s, w) in self.cast.items()])
        width = max((len(path) for _, path, _ in rows), default=0)
        return "\n".join(f"  {kind:<10}  {path:<{width}}  {note}".rstrip() for kind, path, note in rows)

    def __str__(self) -> str:
        counts = (
            f"{len(self.matched)} match, {len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.mismatched)} mismatched"
        )
        return "\n".join(filter(None, (counts, self.table())))


class CheckpointMismatchError(ValueError):
    """A checkpoint holds other arrays than were asked for. `report` says which."""

    def __init__(self, path: str, report: LoadReport, advice: str) -> None:
        super().__init__(f"checkpoint {path} does not fit: {report}\n{advice}")
        self.report = report


def compare(
    stored: Mapping[str, jax.ShapeDtypeStruct],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    *,
    rename: Sequence[tuple[str, str]] = (),
    cast: bool = False,
) -> LoadReport:
    """Holds stored arrays against wanted ones.

    Args:
      stored: by dotted path.
      wanted: by dotted path.
      rename: (old, new) prefixes of whole path segments; the first that fits a stored path is applied to it.
      cast: whether a float array may be loaded into one of another float dtype.

    Raises:
      ValueError: a rename rule that fits no stored path, or two stored paths that become one.
    """
    renamed = _renamed(tuple(stored), rename)
    matched, mismatched, casts = {}, {}, {}
    for path, want in wanted.items():
        if path not in renamed:
            continue
        have = stored[renamed[path]]
        differs = (describe(have), describe(want))
        castable = cast and jnp.issubdtype(have.dtype, jnp.floating) and jnp.issubdtype(want.dtype, jnp.floating)
        if have.shape != want.shape or (have.dtype != want.dtype and not castable):
            mismatched[path] = differs
            continue
        matched[path] = renamed[path]
        if have.dtype != want.dtype:
            casts[path] = differs
    return LoadReport(
        matched=matched,
        missing=tuple(path for path in wanted if path not in renamed),
        unexpected=tuple(path for path in renamed if path not in wanted),
        mismatched=mismatched,
        cast=casts,
    )


def describe(leaf: jax.ShapeDtypeStruct) -> str:
    """Dtype and shape as one reads them: `float32[3,4]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def prefixes(paths: Iterable[str]) -> set[str]:
    """Every dotted path that leads to one of `paths`: `a` and `a.b` for `a.b.c`."""
    return {path[:i] for path in paths for i, char in enumerate(path) if char == "."}


def closest_hint(path: str, candidates: Sequence[str]) -> str:
    """'did you mean …' when one of `candidates` is close, else nothing."""
    hint = closest(path, candidates)
    return hint.removeprefix("; ") if "did you mean" in hint else ""


def _renamed(paths: Sequence[str], rename: Sequence[tuple[str, str]]) -> dict[str, str]:
    """New path to stored path."""
    found: dict[str, str] = {}
    used = set()
    for path in paths:
        new = path
        for old, replacement in rename:
            rest = (
                path if not old else path[len(old) + 1 :] if path.startswith(f"{old}.") else "" if path == old else None
            )
            if rest is not None:
                used.add(old)
                new = ".".join(filter(None, (replacement, rest)))
                break
        if new in found:
            raise ValueError(f"rename makes both {found[new]!r} and {path!r} into {new!r}")
        found[new] = path
    for old, replacement in rename:
        if old not in used:
            raise ValueError(
                f"rename ({old!r}, {replacement!r}) fits no path of the checkpoint{closest(old, prefixes(paths))}"
            )
    return found


def _limited(kind: str, entries: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    rows = [(kind, path, note) for path, note in entries[:_ROWS]]
    return [*rows, (kind, f"… and {len(entries) - _ROWS} more", "")] if len(entries) > _ROWS else rows
