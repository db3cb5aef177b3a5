"""Pretrained weights on disk or in memory: which format they have, which arrays, and how to read
these.

| weights | names of the arrays |
|---|---|
| checkpoint of jengine, or a work dir for its newest one | dotted paths in the training state |
| `.safetensors`, an index of such files, or a directory with `model.safetensors` | as in the file, such as PyTorch's |
| `.npz` | as in the file, with dots for slashes |
| Orbax: a PyTree checkpoint, a step of a `CheckpointManager`, or its directory for the newest one | dotted paths |
| `.msgpack` of Flax's `to_bytes`, or `checkpoint_N` of its old `save_checkpoint` | dotted paths |
| `.eqx` of Equinox's `tree_serialise_leaves` | dotted paths in the pytree that was saved |
| in memory: a pytree of arrays, an `nnx.State` or an `nnx.Module` | dotted paths |
"""

import atexit
import dataclasses
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jengine.checkpoint import arrays
from jengine.checkpoint.layout import ALONE, STATE, find_checkpoint, read_meta
from jengine.checkpoint.manifest import MANIFEST, META
from jengine.checkpoint.restore import list_arrays
from jengine.config.downloads import local_copy
from jengine.config.paths import dotted, flatten
from jengine.config.storage import download_file, is_url, list_directory, storage_path
from jengine.extras.weights import files
from jengine.extras.weights.huggingface import CONFIG, read_config
from jengine.parallel.processes import ProcessGroup

Structs = Mapping[str, jax.ShapeDtypeStruct]
# the file or directory, the name in it, shape and dtype
Entry = tuple[epath.Path, str, jax.ShapeDtypeStruct]

FORMATS = (
    "a checkpoint or work dir of jengine, a .safetensors file or its .safetensors.index.json, an "
    ".npz, .msgpack or "
    ".eqx file, an Orbax checkpoint; or, in memory, a pytree of arrays, an nnx.State or an "
    "nnx.Module"
)
_INDEX = ".safetensors.index.json"
HUB_FILES = ("model.safetensors.index.json", "model.safetensors")  # as on the Hugging Face Hub
_METADATA = "_METADATA"  # the file that Orbax writes next to the arrays of a pytree
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
# files of `flax.serialization` and of `flax.training.checkpoints`
_FLAX = re.compile(r".*\.msgpack|checkpoint_\d+")
_WEB = re.compile("https?://")
_STEP = re.compile(r"(?:.*\D)?(\d+)")  # names of the steps of a CheckpointManager


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Named arrays that are read on demand.

    Attributes:
      label: the path or the kind of object, for messages.
      structs: shape and dtype by name.
      read: yields pairs of name and array for some `structs`. If a struct has a sharding or another
        dtype, the array may have these already.
      meta: the metadata from a jengine checkpoint; {} for other weights.
      config: the `config.json` of Hugging Face next to the weights; {} without one.
    """

    label: str
    structs: Structs
    read: Callable[[Structs], Iterator[tuple[str, Any]]]
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
    if absolute.is_file():
        known = (".safetensors", ".npz", ".eqx", _INDEX)
        if not absolute.name.endswith(known) and not _FLAX.fullmatch(absolute.name):
            hint = ""
            if absolute.suffix in _PICKLES:
                hint = (
                    "; loading a pickle may run any code, so convert it once with PyTorch: "
                    "safetensors.torch.save_file(torch.load(path, weights_only=True), "
                    "'model.safetensors')"
                )
            raise ValueError(f"weights must be {FORMATS}; got the file {absolute}{hint}")
        return str(absolute)
    if _find_orbax(absolute):
        return str(absolute)
    try:
        return find_checkpoint(absolute, checksums=checksums, processes=processes)
    except FileNotFoundError as error:
        for name in HUB_FILES:
            if (absolute / name).is_file():
                return str(absolute / name)
        # a wrong name needs no list of formats
        if "did you mean" in str(error) or ", which has " in str(error):
            raise
        raise FileNotFoundError(f"{error}; weights must be {FORMATS}") from None


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
      structure: the pytree that an .eqx file was written from, with any values.

    Raises:
      TypeError: an object in memory that is not a pytree of arrays. Other errors: see
        `locate_weights`.

    >>> open_weights({"fc": {"bias": np.zeros(3)}}).structs["fc.bias"].shape
    (3,)
    """
    if not isinstance(weights, str | os.PathLike):
        return _open_memory(weights)
    path = storage_path("path", weights if verified else locate_weights(weights))
    if is_url(path) and path.suffix and path.is_file():
        return dataclasses.replace(
            open_weights(
                _download(path), raw=raw, evaluated=evaluated, verified=True, structure=structure
            ),
            label=str(path),
        )
    if path.suffix == ".npz":
        entries = {
            name.replace("/", "."): (path, name, struct)
            for name, struct in files.list_npz(path).items()
        }
        return _make_source(path, entries, files.read_npz)
    if _FLAX.fullmatch(path.name):
        # no index: read as a whole
        return dataclasses.replace(_open_memory(files.read_msgpack(path)), label=str(path))
    if path.suffix == ".eqx":
        if structure is None:
            raise TypeError(
                f"`structure` must be the pytree that was saved to read {path}, got None"
            )
        entries = {
            name: (path, *entry) for name, entry in files.list_eqx(path, flatten(structure)).items()
        }
        return _make_source(path, entries, files.read_eqx)
    if path.name.endswith((".safetensors", _INDEX)):
        if path.name.endswith(_INDEX):
            entries = _list_shards(path)
        else:
            entries = {
                name: (path, name, struct) for name, struct in files.list_safetensors(path).items()
            }
        source = _make_source(path, entries, files.read_safetensors)
        return dataclasses.replace(source, config=read_config(path.parent))
    if items := _find_orbax(path):
        prefixes = {
            "" if len(items) == 1 else f"{item}.": directory for item, directory in items.items()
        }
        entries = {
            prefix + name: (directory, name, struct)
            for prefix, directory in prefixes.items()
            for name, struct in flatten(arrays.read_structs(directory)).items()
        }
        return _make_source(path, entries, _read_orbax)
    return _open_checkpoint(path, "exchanged" if raw else "evaluated" if evaluated else "")


def _download(path: epath.Path) -> epath.Path:
    """Return a copy of a file in object storage, with shards and config; it is removed when the
    process ends.
    """
    directory = epath.Path(tempfile.mkdtemp(prefix="jengine-weights-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    download_file(path, directory / path.name)
    names = files.parse_index(directory / path.name) if path.name.endswith(_INDEX) else ()
    for name in {CONFIG, *names} & {
        name for name, is_dir in list_directory(path.parent).items() if not is_dir
    }:
        # a name is data: only one that is next to the file
        download_file(path.parent / name, directory / name)
    return directory / path.name


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


def _list_shards(path: epath.Path) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file, names in files.read_index(path).items():
        shard = path.parent / file
        stored = files.list_safetensors(shard)
        # Now, and not when the tensor is read: an interrupted download leaves an index with shards
        # of another version.
        if missing := [name for name in names if name not in stored]:
            raise ValueError(f"{path} lists {missing[0]!r} in {file}, which does not have it")
        entries |= {name: (shard, name, stored[name]) for name in names}
    return entries


def _find_orbax(path: epath.Path, with_steps: bool = True) -> dict[str, epath.Path]:
    """Return the item directories in an Orbax checkpoint by name ('' without items); {} for
    anything else.

    With `with_steps`, `path` may also be a directory with steps, of which the newest counts.
    """
    # jengine's own have Orbax's files too, but must be verified by the manifest
    if not path.is_dir() or (path / MANIFEST).exists() or (path / META).exists():
        return {}
    if (path / _METADATA).is_file():
        return {"": path}
    children = sorted(child for child in path.iterdir() if child.is_dir())
    with_arrays = (child for child in children if (child / _METADATA).is_file())
    if items := {child.name: child for child in with_arrays if not _STEP.fullmatch(child.name)}:
        return items
    steps = [
        (int(match[1]), child)
        for child in children
        if with_steps and (match := _STEP.fullmatch(child.name))
    ]
    return next(
        (items for _, step in sorted(steps, reverse=True) if (items := _find_orbax(step, False))),
        {},
    )


def _read_orbax(directory: epath.Path, structs: Structs) -> Iterable[tuple[str, Any]]:
    return arrays.read_flat(directory, structs).items()


def _open_checkpoint(path: epath.Path, moved: str) -> WeightSource:
    """Open a jengine checkpoint, where `moved` names the metadata with the items to read from
    other paths.
    """
    meta = read_meta(path)
    structs = list_arrays(path)
    names = {name: name for name in structs}
    # `trained` takes the name of `item`, which is hidden
    for item, trained in meta.get(moved, {}).items():
        names = {
            name: stored for name, stored in names.items() if not f"{name}.".startswith(f"{item}.")
        }
        names |= {
            item + name.removeprefix(trained): name
            for name in structs
            if f"{name}.".startswith(f"{trained}.")
        }
    entries = {name: (path / STATE, stored, structs[stored]) for name, stored in names.items()}
    return _make_source(path, entries, _read_orbax, meta)


def _make_source(
    path: epath.Path,
    entries: Mapping[str, Entry],
    read: Callable[[epath.Path, Structs], Iterable[tuple[str, Any]]],
    meta: Mapping[str, Any] | None = None,
) -> WeightSource:
    """Return a source for weights on disk; `read` yields stored names and arrays from one file
    or directory.
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
                f"weights must be {FORMATS}; got {label} with {type(leaf).__name__} at `{name}`"
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
