"""Weights to load: own checkpoints, arrays in memory, and what readers of other formats find.

| weights | names of the arrays |
|---|---|
| checkpoint of jengine, or a work dir for its newest one | dotted paths in the training state |
| in memory: a pytree of arrays, an `nnx.State` or an `nnx.Module` | dotted paths |
| what a `WeightReader` locates | as the reader says |
"""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jengine.checkpoint import arrays, orbax
from jengine.checkpoint.layout import ALONE, STATE, find_checkpoint, read_meta
from jengine.checkpoint.manifest import MANIFEST, META
from jengine.checkpoint.report import rename_paths
from jengine.checkpoint.restore import list_arrays
from jengine.config.paths import dotted, flatten
from jengine.config.plugins import load_each
from jengine.config.storage import local_copy, storage_path
from jengine.extras.weights.array_rules import RuleLike
from jengine.parallel.processes import ProcessGroup

Structs = Mapping[str, jax.ShapeDtypeStruct]
# the file or directory, the name in it, shape and dtype
Entry = tuple[epath.Path, str, jax.ShapeDtypeStruct]

_WEB = re.compile("https?://")


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Named arrays that are read on demand.

    Attributes:
      label: the path or the kind of object, for messages.
      structs: shape and dtype by name.
      read: yields pairs of name and array for some `structs`. If a struct has a sharding or another
        dtype, the array may have these already.
      meta: the metadata from a jengine checkpoint; {} for other weights.
      config: the settings of the model next to the weights; {} without any.
      find_rules: takes the names of the weights and of the parameters, and returns the rules that
        this model needs, where the user gives none.
      find_differences: takes the model, and returns what it computes in another way than that of
        the weights.
    """

    label: str
    structs: Structs
    read: Callable[[Structs], Iterator[tuple[str, Any]]]
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    find_rules: Callable[[Iterable[str], Iterable[str]], Sequence[RuleLike]] = lambda *_: ()
    find_differences: Callable[[Any], Sequence[str]] = lambda _: ()


class WeightReader(NamedTuple):
    """Reader for weights in another format; extras provide readers in the section "readers".

    Attributes:
      formats: what it reads, for messages: 'an .npz file'.
      locate: takes an absolute path that is no checkpoint of jengine, and returns where weights in
        this format are, or None.
      open: takes what `locate` has returned, and the pytree that the weights were saved from, for
        files without names.
    """

    formats: str
    locate: Callable[[epath.Path], epath.Path | None]
    open: Callable[[epath.Path, Any], WeightSource]


def describe_formats() -> str:
    """Return what weights can be, for messages."""
    formats = [reader.formats for reader in _list_readers()]
    found = ", ".join(["a checkpoint or work dir of jengine", *formats])
    return f"{found}; or, in memory, a pytree of arrays, an nnx.State or an nnx.Module"


def locate_weights(
    path: str | os.PathLike[str], *, checksums: bool = False, processes: ProcessGroup = ALONE
) -> str:
    """Return the absolute path to weights.

    Args:
      path: see the table above; a file may be at an `https://` URL, from which it is fetched once,
        see `local_copy`.
      checksums, processes: see `find_checkpoint`, for jengine checkpoints.

    Raises:
      FileNotFoundError: nothing is there. ValueError: another file format. CorruptCheckpointError:
        the checkpoint is incomplete or damaged.
    """
    absolute = storage_path("path", local_copy(path) if _WEB.match(os.fspath(path)) else path)
    for reader in _list_readers(absolute):
        if (found := reader.locate(absolute)) is not None:
            return str(found)
    if absolute.is_file():
        raise ValueError(f"weights must be {describe_formats()}; got the file {absolute}")
    try:
        return find_checkpoint(absolute, checksums=checksums, processes=processes)
    except FileNotFoundError as error:
        # a wrong name needs no list of formats
        if "did you mean" in str(error) or ", which has " in str(error):
            raise
        raise FileNotFoundError(f"{error}; weights must be {describe_formats()}") from None


def open_weights(
    weights: Any,
    *,
    raw: bool = False,
    evaluated: bool = False,
    verified: bool = False,
    structure: Any = None,
) -> WeightSource:
    """Open weights on disk or in memory.

    Args:
      weights: a path, or an object in memory.
      raw: whether to take the trained values from a checkpoint that has averages.
      evaluated: whether to take the values that a checkpoint's run has validated; not with `raw`.
      verified: whether `locate_weights` has returned the path, so the files will not be looked at
        again.
      structure: the pytree that a file without names was written from, with any values.

    Raises:
      TypeError: an object in memory that is not a pytree of arrays. Other errors: see
        `locate_weights`.

    >>> open_weights({"fc": {"bias": np.zeros(3)}}).structs["fc.bias"].shape
    (3,)
    """
    if not isinstance(weights, str | os.PathLike):
        return _open_memory(weights)
    path = storage_path("path", weights if verified else locate_weights(weights))
    for reader in _list_readers(path):
        if reader.locate(path) is not None:
            return reader.open(path, structure)
    return _open_checkpoint(path, "exchanged" if raw else "evaluated" if evaluated else "")


def _list_readers(path: epath.Path | None = None) -> list[WeightReader]:
    """Return the readers of the extras; [] for a `path` with a checkpoint of jengine."""
    return [] if path is not None and is_own(path) else list(load_each("readers"))


def is_own(path: epath.Path) -> bool:
    """Return whether a directory is a checkpoint of jengine, which its manifest verifies."""
    return (path / MANIFEST).exists() or (path / META).exists()


def is_pytree_of_arrays(value: Any) -> bool:
    """Return whether `value` is an `nnx.Module` or a pytree with at least one level and one array.

    >>> is_pytree_of_arrays({"bias": np.zeros(3)}), is_pytree_of_arrays(np.zeros(3))
    (True, False)
    """
    if _is_module(value):
        return True
    leaves = jax.tree.leaves(value)
    return (
        bool(leaves) and leaves[0] is not value and any(hasattr(leaf, "shape") for leaf in leaves)
    )


def _open_checkpoint(path: epath.Path, moved: str) -> WeightSource:
    """Open a jengine checkpoint, where `moved` names the metadata with the items to read from
    other paths.
    """
    meta = read_meta(path)
    structs = list_arrays(path)
    rename = [(trained, item) for item, trained in meta.get(moved, {}).items()]
    hidden = tuple(f"{item}." for _, item in rename)  # the trained values take their names
    shown = (name for name in structs if not f"{name}.".startswith(hidden))
    names = rename_paths(shown, rename)
    entries = {name: (path / STATE, stored, structs[stored]) for name, stored in names.items()}
    return make_source(path, entries, read_orbax, meta)


def read_orbax(directory: epath.Path, structs: Structs) -> Iterable[tuple[str, Any]]:
    """Return pairs of name and array from a directory that Orbax has written."""
    return orbax.read(directory, structs).items()


def make_source(
    path: epath.Path,
    entries: Mapping[str, Entry],
    read: Callable[[epath.Path, Structs], Iterable[tuple[str, Any]]],
    meta: Mapping[str, Any] | None = None,
) -> WeightSource:
    """Return a source for weights on disk.

    `read` yields stored names and arrays from one file or directory.
    """

    def read_entries(wanted: Structs) -> Iterator[tuple[str, Any]]:
        # each file is opened once, whatever the order of the names
        groups: dict[epath.Path, dict[str, str]] = {}
        for name in wanted:
            place, stored, _ = entries[name]
            groups.setdefault(place, {})[stored] = name
        for place, names in groups.items():
            for stored, array in read(
                place, {stored: wanted[name] for stored, name in names.items()}
            ):
                yield names[stored], array

    return WeightSource(
        str(path),
        {name: struct for name, (*_, struct) in entries.items()},
        read_entries,
        meta or {},
    )


def _open_memory(weights: Any) -> WeightSource:
    leaves = _flatten_memory(weights)
    label = f"the {type(weights).__name__} in memory"
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray) and hasattr(leaf, "__array__"):
            leaf = leaves[name] = np.asarray(leaf)  # from another library, such as PyTorch on a CPU
        if not hasattr(leaf, "dtype"):
            raise TypeError(
                f"weights must be {describe_formats()}; got {label} with {type(leaf).__name__} at "
                f"`{name}`"
            )

    def read(structs: Structs) -> Iterator[tuple[str, Any]]:
        for name in structs:
            leaf = leaves[name]
            leaf = jax.random.key_data(leaf) if arrays.is_key(leaf) else leaf
            # A copy, because the first step donates what it is given.
            yield name, jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)

    return WeightSource(
        label, {name: arrays.to_struct(leaf) for name, leaf in leaves.items()}, read
    )


def _flatten_memory(weights: Any) -> dict[str, Any]:
    """Return arrays by name; NNX variables are below `params` or `model_state`, by type."""
    if "flax.nnx" not in sys.modules:
        return flatten(weights)
    from flax import nnx
    from flax.core.meta import AxisMetadata

    def is_wrapper(node: Any) -> bool:
        return isinstance(node, nnx.Variable | AxisMetadata)

    # a module's arrays are in its state
    tree = nnx.state(weights) if _is_module(weights) else weights
    leaves: dict[str, Any] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_wrapper)[0]:
        if isinstance(node, nnx.RngState):
            continue  # random streams follow the seed of the run
        item = ""
        if isinstance(node, nnx.Variable):
            item = "params" if isinstance(node, nnx.Param) else "model_state"
        leaves |= {
            ".".join(filter(None, (item, dotted(path), name))): x
            for name, x in flatten(node).items()
        }
    return leaves


def _is_module(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # not imported: then no object can be one of its types
    return nnx is not None and isinstance(value, nnx.Module)
