"""Reads checkpoints: the whole state for a resumed run, parameters for another model, or everything as NumPy."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jengine.checkpoint import arrays
from jengine.checkpoint.layout import STATE, read_meta, resolve
from jengine.checkpoint.report import CheckpointMismatchError, LoadReport, compare, prefixes
from jengine.errors import UnknownNameError, closest
from jengine.paths import flatten


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
      path: where it was read from.
      state: nested dicts and lists of NumPy arrays: `step`, `params`, `model_state`, `opt_state`, `hook_state`, `rng`
        (a PRNG key as its data, uint32).
      meta: the rest: `meta` (iter, epoch, seed, config), schedules, hook states, message hub.
    """

    path: str
    state: dict[str, Any]
    meta: dict[str, Any]

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.state["params"]


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads a whole checkpoint on any machine, without the config or the model that it came from.

    Args:
      path: a checkpoint, or a work dir for its newest one.

    Raises:
      FileNotFoundError, CorruptCheckpointError: there is none, or it is not whole.
    """
    directory = Path(resolve(path))
    state = arrays.read(directory / STATE, flatten(arrays.stored_tree(directory / STATE)))
    return Checkpoint(path=str(directory), state=state, meta=read_meta(directory))


def stored_arrays(path: str | os.PathLike[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array of a checkpoint by dotted path, `params.head.kernel`; reads no array."""
    return flatten(arrays.stored_tree(Path(resolve(path)) / STATE))


def stored_item(path: str | os.PathLike[str], item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The part of `stored_arrays` under the dotted path `item`, by the path within it.

    Raises:
      KeyError: there is nothing under that path; the message names the closest one.
    """
    everything = stored_arrays(path)
    prefix = f"{item}."
    found = {name.removeprefix(prefix): leaf for name, leaf in everything.items() if name.startswith(prefix)}
    if not found:
        known = prefixes(everything) if "." in item else {name.split(".")[0] for name in everything}
        raise UnknownNameError(f"checkpoint {path} has no {item!r}{closest(item, known)}")
    return found


def restore(
    path: str | os.PathLike[str],
    target: Mapping[str, Any],
    *,
    rename: Sequence[tuple[str, str]] = (),
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Reads a state as it was saved, bit for bit, onto the devices of `target`.

    Args:
      path: a checkpoint, or a work dir for its newest one.
      target: a dict of the items wanted (`params`, `opt_state`, …) with arrays or ShapeDtypeStructs: a JAX array or a
        struct with a sharding is placed so, on any number of devices; others come as NumPy arrays. Items that the
        checkpoint has beside these are left alone.
      rename: (stored, target) path prefixes, in whole segments, of what is to come from another place. The first that
        fits is applied.
      ignore: stored path prefixes, before they are renamed, that are left alone too.
      cast: whether a float array may be read into one of another float dtype.

    Returns:
      The state with the structure of `target`, and the meta.

    Raises:
      CheckpointMismatchError: paths, shapes or dtypes differ; nothing was read.
      FileNotFoundError, CorruptCheckpointError: the checkpoint does not exist or is incomplete.
    """
    directory = Path(resolve(path))
    wanted = {name: arrays.struct(leaf) for name, leaf in flatten(target).items()}
    items, left_alone = set(map(str, target)), tuple(f"{prefix}." for prefix in ignore)
    stored = {
        name: leaf
        for name, leaf in stored_arrays(directory).items()
        if name.partition(".")[0] in items and not f"{name}.".startswith(left_alone)
    }
    report = compare(stored, wanted, rename=rename, cast=cast)
    if not report.fits:
        raise CheckpointMismatchError(
            str(directory),
            report,
            "It was saved with another model, optimizer or set of hooks; to start from its parameters alone, "
            "use load_from without resume.",
        )
    return _rebuild(directory, target, wanted, report), read_meta(directory)


def load_params(
    path: str | os.PathLike[str],
    target: Any,
    *,
    strict: bool = True,
    rename: Sequence[tuple[str, str]] = (),
    item: str = "params",
) -> tuple[Any, LoadReport]:
    """Reads parameters into a model, which need not be the one that they came from.

    Args:
      path: a checkpoint, or a work dir for its newest one.
      target: pytree of arrays as the model has them; arrays (not structs) where something may be missing.
      strict: False keeps the target's value where the checkpoint has none or one of another shape, and leaves out what
        the target has no place for; the report says which.
      rename: (old, new) path prefixes, in whole segments: `("encoder", "backbone")`. An empty old adds, an empty new
        removes a prefix. The first that fits is applied.
      item: the dotted path of what to read: `params`, `model_state`, or `hook_state.EMAHook.params`, the raw parameters
        where averages were saved in their place.

    Returns:
      Parameters with the structure, dtypes and placement of `target`, and the report.

    Raises:
      CheckpointMismatchError: `strict`, and not everything fits; nothing was read.
      KeyError: the checkpoint has no such item. ValueError: a rename rule that fits nothing. TypeError: a struct in
        the target for which there is no array.
    """
    directory = Path(resolve(path))
    stored = stored_item(directory, item)
    wanted = {name: arrays.struct(leaf) for name, leaf in flatten(target).items()}
    report = compare(stored, wanted, rename=rename, cast=True)
    if not report.fits and strict:
        raise CheckpointMismatchError(
            str(directory),
            report,
            "rename=[(old, new)] maps path prefixes; strict=False keeps the model's own values where nothing fits.",
        )
    return _rebuild(directory, target, wanted, report, f"{item}."), report


def _rebuild(
    directory: Path, target: Any, wanted: Mapping[str, jax.ShapeDtypeStruct], report: LoadReport, prefix: str = ""
) -> Any:
    """`target` with what matched read from disk."""
    asked = {prefix + stored: wanted[name] for name, stored in report.matched.items()}
    found = arrays.read_flat(directory / STATE, asked)
    kept = flatten(target)
    for name, leaf in kept.items():
        if name not in report.matched and isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"{name} is not in the checkpoint, and the target has only its shape: give arrays")
    leaves = [
        arrays.rewrap(leaf, found[prefix + report.matched[name]]) if name in report.matched else leaf
        for name, leaf in kept.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)
