"""Readers for safetensors and .npz files, which never load the whole file."""

import importlib.util
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jengine.errors import MissingPackageError
from jengine.json_codec import decode

SAFETENSORS_DTYPES: dict[str, DTypeLike] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_VERSIONS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_BFLOAT16 = np.dtype("V2")  # what NumPy stores for an array of ml_dtypes' bfloat16


def check_safetensors_installed() -> None:
    """Raise ImportError if the package safetensors is missing."""
    if importlib.util.find_spec("safetensors") is None:
        raise MissingPackageError("safetensors files require safetensors: pip install 'jengine[safetensors]'")


def list_safetensors(path: str | os.PathLike[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each tensor in a safetensors file by name.

    Raises:
      ValueError: not a safetensors file, or a dtype that NumPy does not have. ImportError: safetensors is missing.
    """
    structs = {}
    with _open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensor = file.get_slice(name)
            if (dtype := tensor.get_dtype()) not in SAFETENSORS_DTYPES:
                raise ValueError(f"`{name}` must have one of the dtypes {', '.join(SAFETENSORS_DTYPES)}, got {dtype}")
            structs[name] = jax.ShapeDtypeStruct(tuple(tensor.get_shape()), SAFETENSORS_DTYPES[dtype])
    return structs


def read_safetensors(path: str | os.PathLike[str], names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors from a safetensors file by name, one at a time."""
    with _open_safetensors(path) as file:
        for name in names:
            yield name, file.get_tensor(name)


def read_index(path: Path) -> dict[str, list[str]]:
    """Return the tensor names in each shard that a `model.safetensors.index.json` lists, by file name.

    Raises:
      ValueError: the file is not such an index, or a shard is missing or not next to it.
    """
    try:
        weight_map = decode(path.read_text())["weight_map"]
        shards: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            shards.setdefault(str(file), []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: it has no `weight_map`") from error
    for file in shards:
        if os.path.basename(file) != file or not (path.parent / file).is_file():  # a name is data: never a path
            raise ValueError(f"{path} must list files next to it, got {file!r}, which is not there")
    return shards


def list_npz(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each array in an .npz file by name, from the headers.

    Raises:
      ValueError: not an .npz file.
    """
    try:
        structs = {}
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    shape, _, dtype = _VERSIONS[np.lib.format.read_magic(file)](file)
                struct = jax.ShapeDtypeStruct(shape, jnp.bfloat16 if dtype == _BFLOAT16 else dtype)
                structs[name.removesuffix(".npy")] = struct
        return structs
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a complete .npz file of arrays: {error}") from error


def read_npz(path: Path, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays from an .npz file by name, one at a time; pickled objects are refused."""
    with np.load(path, allow_pickle=False) as file:
        for name in names:
            array = file[name]
            yield name, array.view(jnp.bfloat16) if array.dtype == _BFLOAT16 else array


def _open_safetensors(path: str | os.PathLike[str]) -> Any:
    check_safetensors_installed()
    import safetensors

    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
