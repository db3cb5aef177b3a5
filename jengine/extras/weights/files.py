"""Readers for safetensors, .eqx and msgpack files; only that of msgpack loads the whole file."""

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jengine.config.errors import MissingPackageError
from jengine.config.json_codec import decode_object
from jengine.config.storage import LARGE, read_bytes
from jengine.extras.weights.npz_files import as_bfloat16, read_header

SAFETENSORS_DTYPES: dict[str, DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def check_safetensors_installed() -> None:
    """Raise ImportError if the package safetensors is missing."""
    if importlib.util.find_spec("safetensors") is None:
        raise MissingPackageError(
            "safetensors files require safetensors: pip install 'jengine[safetensors]'"
        )


def list_safetensors(path: str | os.PathLike[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each tensor in a safetensors file by name.

    Raises:
      ValueError: not a safetensors file, or a dtype that NumPy does not have. ImportError:
        safetensors is missing.
    """
    structs = {}
    with _open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensor = file.get_slice(name)
            if (dtype := tensor.get_dtype()) not in SAFETENSORS_DTYPES:
                raise ValueError(
                    f"`{name}` must have one of the dtypes {', '.join(SAFETENSORS_DTYPES)}, got "
                    f"{dtype}"
                )
            structs[name] = jax.ShapeDtypeStruct(
                tuple(tensor.get_shape()), SAFETENSORS_DTYPES[dtype]
            )
    return structs


def read_safetensors(
    path: str | os.PathLike[str], names: Iterable[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors from a safetensors file by name, one at a time."""
    with _open_safetensors(path) as file:
        for name in names:
            yield name, file.get_tensor(name)


def parse_index(path: Path) -> dict[str, list[str]]:
    """Return the tensor names in each shard that a `model.safetensors.index.json` lists, by file
    name.

    Raises:
      ValueError: the file is not such an index.
    """
    try:
        weight_map = decode_object(read_bytes(path))["weight_map"]
        shards: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            shards.setdefault(str(file), []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not an index of safetensors files: it has no `weight_map`"
        ) from error
    return shards


def read_index(path: Path) -> dict[str, list[str]]:
    """Return what `parse_index` returns.

    Raise ValueError also if a shard is missing or not next to the index.
    """
    shards = parse_index(path)
    for file in shards:
        # a name is data: never a path
        if os.path.basename(file) != file or not (path.parent / file).is_file():
            raise ValueError(f"{path} must list files next to it, got {file!r}, which is not there")
    return shards


def list_eqx(path: Path, leaves: Mapping[str, Any]) -> dict[str, tuple[str, jax.ShapeDtypeStruct]]:
    """Return the offset, for `read_eqx`, and the shape of each array in a file of
    `equinox.tree_serialise_leaves`.

    The file has neither names nor a structure: one array after another, in NumPy's format.

    Args:
      path: the file.
      leaves: those of the pytree that was saved, by name, in the same order. Python's numbers in
        the file that are not among them (a module's settings) are skipped, others that are not
        stored (functions) are left out.

    Raises:
      ValueError: the file has other arrays than `leaves`, or another format.
    """
    entries = list(_iterate_arrays(path))
    stored = [struct.shape for _, struct in entries]
    found = dict[str, tuple[str, jax.ShapeDtypeStruct]]()
    i = 0
    for name, leaf in leaves.items():
        # equinox skips them too
        if not hasattr(leaf, "shape") and not isinstance(leaf, bool | int | float | complex):
            continue
        shape = tuple(np.shape(leaf))
        while i < len(stored) and stored[i] != shape and stored[i] == ():
            i += 1
        if i == len(stored) or stored[i] != shape:
            got = f"one of {stored[i]}" if i < len(stored) else "the end of the file"
            raise ValueError(
                f"{path} must have the leaves of the pytree in their order, array {i + 1} should "
                f"be `{name}` with the "
                f"shape {shape}, got {got}; pass the pytree that was saved as `structure`"
            )
        found[name] = entries[i]
        i += 1
    if rest := [shape for shape in stored[i:] if shape != ()]:
        raise ValueError(
            f"{path} must have the leaves of the pytree, got {len(rest)} more arrays, the first "
            f"with the shape {rest[0]}; pass the pytree that was saved as `structure`"
        )
    return found


def _iterate_arrays(path: Path) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    size = os.stat(path).st_size
    with path.open("rb") as file:
        while (offset := file.tell()) < size:
            try:
                struct = read_header(file, size)
            except Exception as error:  # of NumPy
                raise ValueError(
                    f"{path} is not a complete .eqx file of arrays: {error}"
                ) from error
            file.seek(struct.size * struct.dtype.itemsize, os.SEEK_CUR)
            yield str(offset), struct


def read_eqx(path: Path, offsets: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays from an .eqx file by offset, which stands for a name, one at a time."""
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(int(offset))
            yield offset, as_bfloat16(np.lib.format.read_array(file, allow_pickle=False))


def read_msgpack(path: Path) -> Any:
    """Return the pytree in a file of `flax.serialization.to_bytes`.

    Raises:
      ValueError: another format.
    """
    from flax.serialization import msgpack_restore

    try:
        return msgpack_restore(read_bytes(path, limit=LARGE))
    except Exception as error:  # of msgpack, or of Flax's types in it
        raise ValueError(f"{path} is not a complete msgpack file of Flax: {error}") from error


def _open_safetensors(path: str | os.PathLike[str]) -> Any:
    check_safetensors_installed()
    import safetensors

    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
