"""Parameters to PyTorch and back, as safetensors files."""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jengine.checkpoint import arrays
from jengine.checkpoint.layout import INCOMING, STATE, resolve
from jengine.checkpoint.report import CheckpointMismatchError, compare
from jengine.checkpoint.restore import stored_item
from jengine.checkpoint.torch_layout import (
    STATISTICS,
    TorchForm,
    check_unique,
    is_statistic,
    param_forms,
    shape_of,
    statistic_forms,
)
from jengine.paths import flatten

_DTYPES: dict[str, DTypeLike] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_WRITABLE = frozenset(np.dtype(dtype) for dtype in _DTYPES.values())


def export_params(
    source: Any, path: str | os.PathLike[str], *, item: str = "params", batch_stats: Any = False
) -> dict[str, np.ndarray]:
    """Writes parameters into a safetensors file that a PyTorch model of the same structure can load.

    Args:
      source: a checkpoint, or a work dir for its newest one; or parameters as a pytree of arrays.
      path: the file; one that is there is replaced when the new one is whole.
      item: the dotted path of the parameters in a checkpoint.
      batch_stats: whether the running statistics of batch norms go too. With a checkpoint True, or the dotted path of
        a model state other than `model_state`; with a pytree as `source` the model state itself.

    Returns:
      The tensors as they are in the file, by name.

    Raises:
      KeyError: the checkpoint has no such item. ValueError: two tensors would get the same name; a dtype that the
        file cannot hold; no statistics where they were asked for. TypeError: `batch_stats=True` with a pytree.
      FileNotFoundError, CorruptCheckpointError: the checkpoint does not exist or is incomplete.
      ImportError: safetensors is not installed.
    """
    _check_installed()
    from safetensors.numpy import save_file

    with_statistics, state = batch_stats is not False, {}
    if isinstance(source, str | os.PathLike):
        params = _read_item(source, item)
        state = _read_item(source, "model_state" if batch_stats is True else batch_stats) if with_statistics else {}
    elif batch_stats is True:
        raise TypeError("batch_stats=True reads a checkpoint; with parameters, give the model state as batch_stats")
    else:
        params = flatten(source)
        state = flatten(batch_stats) if with_statistics else {}
    statistics = {path: leaf for path, leaf in state.items() if is_statistic(path)}
    if with_statistics and not statistics:
        raise ValueError("the model state has no running statistics (mean, var); leave batch_stats out")
    pairs = [*zip(params.items(), param_forms(params).values(), strict=True)]
    pairs += zip(statistics.items(), statistic_forms(statistics).values(), strict=True)
    check_unique((path, form) for (path, _), form in pairs)
    tensors = {form.name: form.to_torch(_on_host(path, leaf)) for (path, leaf), form in pairs}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming = target.with_name(target.name + INCOMING)
    incoming.touch()
    mode = incoming.stat().st_mode  # the library's own files are for their owner alone
    save_file(tensors, incoming, metadata={"format": "pt"})
    incoming.chmod(mode)
    incoming.replace(target)
    return tensors


def import_params(path: str | os.PathLike[str], target: Any, *, rename: Sequence[tuple[str, str]] = ()) -> Any:
    """Reads parameters from a safetensors file, one of `export_params` or of a PyTorch model of the same structure.

    Running statistics in the file are left alone; `import_batch_stats` reads them.

    Args:
      path: the file.
      target: the model's parameters, as a pytree of arrays or ShapeDtypeStructs.
      rename: (old, new) prefixes of whole segments of the names in the file; the first that fits is applied.

    Returns:
      A pytree with the structure, dtypes and placement of `target`; float dtypes are cast if they differ.

    Raises:
      CheckpointMismatchError: names, shapes or dtypes do not fit; nothing was read. ValueError: not a safetensors file;
        two parameters of `target` have the same name in PyTorch. ImportError: safetensors is not installed.
    """
    return _read_file(path, target, param_forms(flatten(target)), rename, lambda name: not _is_buffer(name))


def import_batch_stats(path: str | os.PathLike[str], target: Any, *, rename: Sequence[tuple[str, str]] = ()) -> Any:
    """Reads the running statistics of batch norms from a safetensors file into a model state.

    Args:
      path: the file.
      target: the model's state; all but `mean` and `var` stays as it is.
      rename: as in `import_params`.

    Returns:
      The model state with the statistics of the file.

    Raises:
      As `import_params`.
    """
    statistics = {name: leaf for name, leaf in flatten(target).items() if is_statistic(name)}
    return _read_file(path, target, statistic_forms(statistics), rename, _is_statistic_there)


def _on_host(path: str, leaf: Any) -> np.ndarray:
    array = leaf if arrays.is_key(leaf) else np.asarray(leaf)
    if array.dtype not in _WRITABLE:
        raise ValueError(f"{path} is {array.dtype}, which a safetensors file cannot hold")
    return array


def _read_item(source: str | os.PathLike[str], item: str) -> dict[str, np.ndarray]:
    """The arrays of one item of a checkpoint, by the path within it."""
    directory = Path(resolve(source))
    wanted = {f"{item}.{name}": leaf for name, leaf in stored_item(directory, item).items()}
    found = arrays.read_flat(directory / STATE, wanted)
    return {name.removeprefix(f"{item}."): array for name, array in found.items()}


def _read_file(
    path: str | os.PathLike[str],
    target: Any,
    forms: Mapping[str, TorchForm],
    rename: Sequence[tuple[str, str]],
    concerns: Callable[[str], bool],
) -> Any:
    """`target` with the tensors that `forms` name, which must be all those in the file that it `concerns`."""
    _check_installed()
    import safetensors

    check_unique(forms.items())
    leaves = flatten(target)
    wanted = {form.name: jax.ShapeDtypeStruct(form.shape, leaves[p].dtype) for p, form in forms.items()}
    try:
        with safetensors.safe_open(path, framework="np") as file:
            names = [name for name in file.keys() if concerns(name) or name in wanted]  # noqa: SIM118 (it is no dict)
            stored = {name: _struct(file.get_slice(name)) for name in names}
            report = compare(stored, wanted, rename=rename, cast=True)
            if not report.fits:
                raise CheckpointMismatchError(
                    str(path),
                    report,
                    "Names and shapes are those of PyTorch; rename=[(old, new)] maps prefixes of names.",
                )
            found = {
                p: form.to_flax(file.get_tensor(report.matched[form.name]), shape_of(leaves[p]))
                for p, form in forms.items()
            }
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    placed = [_place(found[p], leaf) if p in found else leaf for p, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(target), placed)


def _is_statistic_there(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS.values()


def _is_buffer(name: str) -> bool:
    return _is_statistic_there(name) or name.rpartition(".")[2] == "num_batches_tracked"


def _struct(tensor: Any) -> jax.ShapeDtypeStruct:
    dtype = tensor.get_dtype()
    if dtype not in _DTYPES:
        raise ValueError(f"a tensor of the file is {dtype}; known are {', '.join(_DTYPES)}")
    return jax.ShapeDtypeStruct(tuple(tensor.get_shape()), _DTYPES[dtype])


def _place(array: np.ndarray, like: Any) -> Any:
    """`array` with the dtype of `like`, on its devices; a NumPy array where it is on none."""
    array = array.astype(like.dtype, copy=False)
    sharding = getattr(like, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)


def _check_installed() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("safetensors files need the package safetensors: pip install 'jengine[safetensors]'")
