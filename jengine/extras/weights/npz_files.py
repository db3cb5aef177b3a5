"""Reader for .npz files of any origin, one array at a time, without pickles."""

import math
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import jax
import jax.numpy as jnp
import numpy as np

# NumPy writes version 3 only for structured dtypes, which no weights have
_VERSIONS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_BFLOAT16 = np.dtype("V2")  # what NumPy stores for an array of ml_dtypes' bfloat16


def list_npz(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each array in an .npz file by name, from the headers.

    Raises:
      ValueError: not an .npz file.
    """
    try:
        structs = {}
        with zipfile.ZipFile(path) as archive:  # `np.load` would read each array to tell its shape
            for member in archive.infolist():
                with archive.open(member) as file:
                    structs[member.filename.removesuffix(".npy")] = read_header(
                        file, member.file_size
                    )
        return structs
    except OSError:
        raise
    except Exception as error:  # of zipfile, zlib or NumPy
        raise ValueError(f"{path} is not a complete .npz file of arrays: {error}") from error


def read_npz(path: Path, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays from an .npz file by name, one at a time; pickled objects are refused."""
    with np.load(path, allow_pickle=False) as file:
        for name in names:
            try:
                array = as_bfloat16(file[name])
            except Exception as error:  # of zipfile, zlib or NumPy
                raise ValueError(f"{path} is damaged at {name!r}: {error}") from error
            yield name, array


def read_header(file: IO[bytes], end: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array that begins here.

    Raise ValueError if it does not fit before `end`.
    """
    version = np.lib.format.read_magic(file)
    if version not in _VERSIONS:
        raise ValueError(f"an array must be in version 1 or 2 of NumPy's format, got {version}")
    shape, _, dtype = _VERSIONS[version](file)
    if dtype.hasobject:
        raise ValueError("an array must have no Python objects, whose pickles may run any code")
    # NumPy would allocate what the header says before it reads the bytes.
    if min(shape, default=0) < 0 or file.tell() + math.prod(shape) * dtype.itemsize > end:
        raise ValueError(
            f"an array with the shape {shape} must have {dtype} values for it, but the file ends "
            "before"
        )
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16 if dtype == _BFLOAT16 else dtype)


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """Return the array with the dtype bfloat16 where NumPy has stored that as bytes."""
    return array.view(jnp.bfloat16) if array.dtype == _BFLOAT16 else array
