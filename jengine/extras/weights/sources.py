"""Readers for weights of other libraries.

| weights | names of the arrays |
|---|---|
| `.safetensors`, an index of such files, or a directory with one of these | as in the file |
| `.npz` | as in the file, with dots for slashes |
| Orbax: a PyTree checkpoint, a step of a `CheckpointManager`, or its directory | dotted paths |
| `.msgpack` of Flax's `to_bytes`, or `checkpoint_N` of its old `save_checkpoint` | dotted paths |
| `.eqx` of Equinox's `tree_serialise_leaves` | dotted paths in the pytree that was saved |
"""

import atexit
import dataclasses
import functools
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from etils import epath

from jengine.checkpoint.layout import list_checkpoints
from jengine.checkpoint.orbax import read_structs
from jengine.config.paths import flatten
from jengine.config.plugins import load_provided
from jengine.config.storage import is_url, list_directory
from jengine.extras.weights import files
from jengine.extras.weights.huggingface import CONFIG, choose_rules, find_differences, read_config
from jengine.extras.weights.npz_files import list_npz, read_npz
from jengine.extras.weights.weight_source import (
    Entry,
    WeightReader,
    WeightSource,
    describe_formats,
    is_own,
    make_source,
    open_weights,
    read_orbax,
)

_INDEX = ".safetensors.index.json"
HUB_FILES = ("model.safetensors.index.json", "model.safetensors")  # as on the Hugging Face Hub
_METADATA = "_METADATA"  # the file that Orbax writes next to the arrays of a pytree
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_STEP = re.compile(r"(?:.*\D)?(\d+)")  # names of the steps of a CheckpointManager


# --- Files ---


def _make_reader(
    formats: str, pattern: str, open_file: Callable[[epath.Path, Any], WeightSource]
) -> WeightReader:
    """Return a reader for files with such names, also in object storage."""

    def locate(path: epath.Path) -> epath.Path | None:
        return path if re.fullmatch(pattern, path.name) and path.is_file() else None

    def open_at(path: epath.Path, structure: Any) -> WeightSource:
        source = open_file(_download(path) if is_url(path) else path, structure)
        return dataclasses.replace(source, label=str(path))

    return WeightReader(formats, locate, open_at)


def _download(path: epath.Path) -> epath.Path:
    """Return a copy of a file in object storage, with shards and config.

    It is removed when the process ends.
    """
    directory = epath.Path(tempfile.mkdtemp(prefix="jengine-weights-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    download_file = load_provided("url_files", "download_file")
    download_file(path, directory / path.name)
    names = files.parse_index(directory / path.name) if path.name.endswith(_INDEX) else ()
    for name in {CONFIG, *names} & {
        name for name, is_dir in list_directory(path.parent).items() if not is_dir
    }:
        # a name is data: only one that is next to the file
        download_file(path.parent / name, directory / name)
    return directory / path.name


def _open_npz(path: epath.Path, structure: Any) -> WeightSource:
    entries = {
        name.replace("/", "."): (path, name, struct) for name, struct in list_npz(path).items()
    }
    return make_source(path, entries, read_npz)


def _open_msgpack(path: epath.Path, structure: Any) -> WeightSource:
    return open_weights(files.read_msgpack(path))  # no index: read as a whole


def _open_eqx(path: epath.Path, structure: Any) -> WeightSource:
    if structure is None:
        raise TypeError(f"`structure` must be the pytree that was saved to read {path}, got None")
    found = files.list_eqx(path, flatten(structure))
    return make_source(
        path, {name: (path, *entry) for name, entry in found.items()}, files.read_eqx
    )


def _open_safetensors(path: epath.Path, structure: Any) -> WeightSource:
    if path.name.endswith(_INDEX):
        entries = _list_shards(path)
    else:
        entries = {
            name: (path, name, struct) for name, struct in files.list_safetensors(path).items()
        }
    config = read_config(path.parent)
    return dataclasses.replace(
        make_source(path, entries, files.read_safetensors),
        config=config,
        find_rules=functools.partial(choose_rules, config),
        find_differences=functools.partial(find_differences, config),
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


_files = _make_reader(
    "a .safetensors file or its .safetensors.index.json",
    r".*\.safetensors(\.index\.json)?",
    _open_safetensors,
)


def _locate_safetensors(path: epath.Path) -> epath.Path | None:
    """Return a file, also that in a directory of the Hub.

    A pickle of PyTorch is an error that says how to convert it.
    """
    if (file := _files.locate(path)) is not None:
        return file
    if path.suffix in PICKLES and path.is_file():
        raise ValueError(
            f"weights must be {describe_formats()}; got the file {path}; loading a pickle may run "
            "any code, so convert it once with PyTorch: safetensors.torch.save_file(torch.load("
            "path, weights_only=True), 'model.safetensors')"
        )
    found = (path / name for name in HUB_FILES if (path / name).is_file())
    # In a run's work dir they are exported ones, next to the checkpoints that are meant
    return next((file for file in found if not list_checkpoints(path)), None)


# --- Directories ---


def _find_orbax(path: epath.Path, with_steps: bool = True) -> dict[str, epath.Path]:
    """Return the item directories in an Orbax checkpoint by name ('' without items).

    {} for anything else.

    With `with_steps`, `path` may also be a directory with steps, of which the newest counts.
    """
    if not path.is_dir() or is_own(path):  # jengine's have Orbax's files too
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


def _open_orbax(path: epath.Path, structure: Any) -> WeightSource:
    items = _find_orbax(path)
    entries: dict[str, Entry] = {
        ("" if len(items) == 1 else f"{item}.") + name: (directory, name, struct)
        for item, directory in items.items()
        for name, struct in flatten(read_structs(directory)).items()
    }
    return make_source(path, entries, read_orbax)


safetensors = _files._replace(locate=_locate_safetensors)
npz = _make_reader("an .npz file", r".*\.npz", _open_npz)
# files of `flax.serialization` and of `flax.training.checkpoints`
msgpack = _make_reader("a .msgpack file", r".*\.msgpack|checkpoint_\d+", _open_msgpack)
eqx = _make_reader("an .eqx file", r".*\.eqx", _open_eqx)
orbax = WeightReader(
    "an Orbax checkpoint", lambda path: path if _find_orbax(path) else None, _open_orbax
)
