"""Checkpoint reading: a full state to resume a run, parameters for another model, or everything
as NumPy arrays.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import jax

from jengine.checkpoint.arrays import decode_leaf, to_struct
from jengine.checkpoint.hook_states import match_hook_states
from jengine.checkpoint.layout import (
    STATE,
    CorruptCheckpointError,
    find_checkpoint,
    open_checkpoint,
    read_meta,
)
from jengine.checkpoint.orbax import read, read_own, read_structs
from jengine.checkpoint.report import LoadReport, compare, list_prefixes
from jengine.config.annotations import checked
from jengine.config.errors import CheckpointMismatchError, UnknownNameError, closest
from jengine.config.paths import flatten, map_with_path
from jengine.config.storage import list_files, storage_path

_MAX_RATIO = 1000  # bytes of arrays for each byte of their files
_ADVICE = "strict=False keeps the model's own values where nothing fits."


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Checkpoint in memory.

    Attributes:
      path: the directory that it was read from.
      state: nested dicts and lists with NumPy arrays: `step`, `params`, `model_state`, `opt_state`,
        `hook_state`, `rng` (the PRNG key's data, uint32).
      meta: everything else: `meta` (iter, epoch, seed, config), schedules, hook states, message
        hub.
    """

    path: str
    state: dict[str, Any]
    meta: dict[str, Any]

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.state["params"]


def load(path: str | os.PathLike[str], *, checksums: bool = True) -> Checkpoint:
    """Read a full checkpoint on any machine, without its config or model.

    Args:
      path: a checkpoint, or a work dir for its newest one.
      checksums: whether to verify the file checksums first.

    Raises:
      FileNotFoundError, CorruptCheckpointError: the checkpoint does not exist, or is incomplete or
        damaged.
    """
    directory = storage_path("path", find_checkpoint(path, checksums=checksums))
    tree = read_structs(directory / STATE)
    structs = flatten(tree)
    claimed = sum(leaf.size * leaf.dtype.itemsize for leaf in structs.values())
    actual = sum(info.size for info in list_files(directory / STATE).values())
    # before memory is allocated: files may be compressed, but not that much
    if claimed > _MAX_RATIO * actual:
        raise CorruptCheckpointError(
            f"checkpoint {directory} is corrupt: {actual} bytes claim to be {claimed}"
        )
    values = read_own(directory / STATE, structs)
    state = map_with_path(lambda name, _: values[name], tree)
    return Checkpoint(path=str(directory), state=state, meta=read_meta(directory, states=True))


def list_arrays(path: str | os.PathLike[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes by dotted path, without reading the arrays."""
    return flatten(read_structs(open_checkpoint(path)[0] / STATE))


def list_item_arrays(path: str | os.PathLike[str], item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes under the dotted path `item`, by path below it.

    Raises:
      KeyError: the checkpoint does not have the item; the message names the closest one.
    """
    stored = list_arrays(path)
    prefix = f"{item}."
    structs = {
        name.removeprefix(prefix): leaf for name, leaf in stored.items() if name.startswith(prefix)
    }
    if not structs:
        known = list_prefixes(stored) if "." in item else {name.split(".")[0] for name in stored}
        raise UnknownNameError(f"checkpoint {path} has no {item!r}{closest(item, known)}")
    return structs


def restore(
    path: str | os.PathLike[str],
    target: Mapping[str, Any],
    *,
    rename: Sequence[tuple[str, str]] = (),
    ignore: Sequence[str] = (),
    cast: bool = False,
    checksums: bool = True,
) -> tuple[Any, dict[str, Any]]:
    """Restore a saved state bit for bit, onto the devices of `target`.

    Args:
      path: a checkpoint, or a work dir for its newest one.
      target: a dict with the items to restore (`params`, `opt_state`, …) as arrays or
        ShapeDtypeStructs. A JAX array or a struct with a sharding gives a JAX array with that
        sharding, on any number of devices; others give NumPy arrays. Other items in the checkpoint
        are ignored. With `hook_state`, parameters and averages that the checkpoint has exchanged
        change places again.
      rename: (stored, target) path prefixes in whole segments; the first match is applied.
      ignore: stored path prefixes to ignore, matched before `rename`.
      cast: whether a float array may be cast to another float dtype.
      checksums: whether to verify the file checksums first.

    Returns:
      The state in the structure of `target`, and the metadata.

    Raises:
      CheckpointMismatchError: paths, shapes or dtypes differ; nothing was read.
      FileNotFoundError, CorruptCheckpointError: the checkpoint does not exist or is incomplete.
    """
    found = find_checkpoint(path, checksums=checksums)
    if "hook_state" in target:  # a whole state, with what the checkpoint has exchanged
        exchanged = read_meta(found).get("exchanged", {}).items()
        swaps = {item: source for item, source in exchanged if item in target}
        match = match_hook_states(target["hook_state"], list_arrays(found), swaps)
        rename = [*rename, *match.rename]
        ignore = [*ignore, *match.ignore]
    return restore_verified(found, target, rename, ignore, cast)


def restore_verified(
    path: str | os.PathLike[str],
    target: Mapping[str, Any],
    rename: Sequence[tuple[str, str]] = (),
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Restore a checkpoint that `find_checkpoint` has already verified; see `restore`."""
    directory = storage_path("path", path)
    advice = (
        "A resumed run must have the model, optimizer and hooks that saved it: use the config of "
        f"that run, {directory.parent / 'config.py'}. For a new run with the parameters that fit, "
        f"write load_from=dict(path={str(directory)!r}, strict=False) in place of resume, and "
        "another work_dir."
    )
    state, _ = _load_items(directory, target, rename, ignore, cast=cast, advice=advice)
    return state, read_meta(directory, states=True)


def load_items(
    path: str | os.PathLike[str],
    target: Mapping[str, Any],
    *,
    moved: Mapping[str, str],
    strict: bool,
) -> tuple[Any, LoadReport]:
    """Load the items of `target` from a verified checkpoint; those in `moved` are at other paths.

    Raises:
      CheckpointMismatchError: `strict`, and something does not match; nothing was read.
    """
    rename = [(stored, item) for item, stored in moved.items()]
    return _load_items(storage_path("path", path), target, rename, list(moved), strict=strict)


def _load_items(
    directory: PurePath,
    target: Mapping[str, Any],
    rename: Sequence[tuple[str, str]],
    ignore: Sequence[str],
    cast: bool = True,
    strict: bool = True,
    advice: str = _ADVICE,
) -> tuple[Any, LoadReport]:
    wanted = tuple(f"{prefix}." for prefix in (*target, *(old for old, _ in rename)))
    ignored = tuple(f"{prefix}." for prefix in ignore)
    stored = {
        name: leaf
        for name, leaf in list_arrays(directory).items()
        if f"{name}.".startswith(wanted) and not f"{name}.".startswith(ignored)
    }
    return _load_matched(directory, target, stored, rename, cast, strict, advice)


@checked
def load_params(
    path: str | os.PathLike[str],
    target: Any,
    *,
    strict: bool = True,
    rename: Sequence[tuple[str, str]] = (),
    item: str = "params",
    checksums: bool = True,
) -> tuple[Any, LoadReport]:
    """Load parameters into a model, which may differ from the model that was saved.

    Args:
      path: a checkpoint, or a work dir for its newest one.
      target: the model parameters as a pytree of arrays; stored ones may be ShapeDtypeStructs.
      strict: False keeps the target's value if the checkpoint has none or one with another shape,
        and ignores stored parameters that the target does not have; the report lists them.
      rename: (stored, target) path prefixes in whole segments; the first match is applied.
      item: the dotted path to the parameters: `params`, `model_state`, or
        `hook_state.EMAHook.params`, the raw parameters if averages were saved as `params`.
      checksums: whether to verify the file checksums first.

    Returns:
      Parameters in the structure, dtypes and placement of `target`, and the report.

    Raises:
      CheckpointMismatchError: `strict`, and something does not match; nothing was read.
      KeyError: the checkpoint does not have the item. ValueError: a rename rule without a match.
        TypeError: a struct in the target for which no array is stored.
    """
    directory = storage_path("path", find_checkpoint(path, checksums=checksums))
    stored = list_item_arrays(directory, item)
    advice = f"rename=[(old, new)] replaces path prefixes; {_ADVICE}"
    return _load_matched(directory, target, stored, rename, True, strict, advice, f"{item}.")


def _load_matched(
    directory: PurePath,
    target: Any,
    stored: Mapping[str, jax.ShapeDtypeStruct],
    rename: Sequence[tuple[str, str]],
    cast: bool,
    strict: bool,
    advice: str,
    prefix: str = "",
) -> tuple[Any, LoadReport]:
    """Return `target` with the stored arrays that match, and the report."""
    expected = {name: to_struct(leaf) for name, leaf in flatten(target).items()}
    # Compared by names and shapes before a byte is read: an error costs no time, whatever the size.
    report = compare(stored, expected, rename=rename, cast=cast)
    if strict and not report.fits:
        raise CheckpointMismatchError(str(directory), report, advice)
    # The target's dtypes and shardings: Orbax casts, and reads onto the devices
    structs = {prefix + stored: expected[name] for name, stored in report.matched.items()}
    loaded = read(directory / STATE, structs)
    leaves = flatten(target)
    for name, leaf in leaves.items():
        if name in report.matched:
            leaves[name] = decode_leaf(loaded[prefix + report.matched[name]], leaf)
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"`{name}` must be an array, got a ShapeDtypeStruct: the checkpoint has no value "
                "for it"
            )
    # in the order of `flatten`
    return jax.tree.unflatten(jax.tree.structure(target), list(leaves.values())), report
