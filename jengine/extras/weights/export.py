"""Parameter exchange with PyTorch, as safetensors files."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jengine.checkpoint import arrays, orbax
from jengine.checkpoint.layout import INCOMING, STATE, find_checkpoint, read_meta
from jengine.checkpoint.report import compare
from jengine.checkpoint.restore import list_arrays, list_item_arrays
from jengine.config.errors import CheckpointMismatchError
from jengine.config.paths import flatten
from jengine.config.plugins import load_provided
from jengine.config.storage import is_url, storage_path
from jengine.extras.networks.lora import add_updates
from jengine.extras.weights.files import (
    SAFETENSORS_DTYPES,
    check_safetensors_installed,
    list_safetensors,
    read_safetensors,
)
from jengine.extras.weights.matching import Layout
from jengine.extras.weights.torch_layout import (
    STATISTICS,
    check_unique,
    is_statistic,
    param_layouts,
    statistic_layouts,
    to_torch,
)
from jengine.model.model import FROZEN

_WRITABLE = frozenset(np.dtype(dtype) for dtype in SAFETENSORS_DTYPES.values())


def export_params(
    source: Any, path: str | os.PathLike[str], *, item: str = "params", batch_stats: Any = False
) -> dict[str, np.ndarray]:
    """Write parameters to a safetensors file that a PyTorch model with the same structure can load.

    Args:
      source: a checkpoint, or a work dir for its newest one; or parameters as a pytree of arrays.
        Frozen parameters are included, and the low-rank updates in a `LoRA` checkpoint are added to
        the kernels.
      path: the file to write; an existing one is replaced once the new one is complete.
      item: the dotted path to the parameters in a checkpoint.
      batch_stats: whether to export batch-norm statistics too. With a checkpoint: True, or the
        dotted path to a model state other than `model_state`. With a pytree as `source`: the model
        state itself.

    Returns:
      The tensors in the file by name.

    Raises:
      KeyError: the checkpoint does not have the item. ValueError: two tensors would get the same
        name, a dtype that the file format does not support, or no statistics with `batch_stats`.
        TypeError: `batch_stats=True` with a pytree.
      FileNotFoundError, CorruptCheckpointError: the checkpoint does not exist or is incomplete.
      ImportError: safetensors is not installed.
    """
    check_safetensors_installed()
    params, statistics = read_source(source, item, batch_stats)
    pairs = [*zip(params.items(), param_layouts(params).values(), strict=True)]
    pairs += zip(statistics.items(), statistic_layouts(statistics).values(), strict=True)
    check_unique((path, layout) for (path, _), layout in pairs)
    tensors = {}
    for (name, leaf), layout in pairs:
        # NumPy has no typed keys: the dtype check refuses them by name
        array = leaf if arrays.is_key(leaf) else np.asarray(leaf)
        if array.dtype not in _WRITABLE:
            raise ValueError(
                f"`{name}` must have a dtype that safetensors supports, got {array.dtype}"
            )
        tensors[layout.name] = to_torch(layout, array)
    write_safetensors(path, tensors)
    return tensors


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file, or one at a URL, atomically: an interrupted export leaves the
    old one.
    """
    check_safetensors_installed()
    from safetensors.numpy import save_file

    if is_url(path):
        with tempfile.TemporaryDirectory() as directory:
            write_safetensors(os.path.join(directory, "model.safetensors"), tensors)
            upload_file = load_provided("url_files", "upload_file")
            upload_file(os.path.join(directory, "model.safetensors"), storage_path("path", path))
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming = target.with_name(target.name + INCOMING)
    incoming.touch()
    mode = incoming.stat().st_mode  # safetensors would write a file that only its owner can read
    # transformers asks for the format
    save_file(dict(tensors), incoming, metadata={"format": "pt"})
    incoming.chmod(mode)
    incoming.replace(target)


def import_params(
    path: str | os.PathLike[str], target: Any, *, rename: Sequence[tuple[str, str]] = ()
) -> Any:
    """Read parameters from a safetensors file that `export_params` or PyTorch wrote for the same
    model structure.

    Running statistics in the file are ignored; `import_batch_stats` reads them.

    Args:
      path: the file.
      target: the model parameters, as a pytree of arrays or ShapeDtypeStructs.
      rename: (old, new) prefixes of the names in the file, in whole segments; the first match is
        applied.

    Returns:
      A pytree like `target`, with the same dtypes and placement; float dtypes are cast if they
      differ.

    Raises:
      CheckpointMismatchError: names, shapes or dtypes do not match; nothing was read. ValueError:
        not a safetensors file, or two parameters of `target` have the same name in PyTorch.
        ImportError: safetensors is not installed.
    """
    # PyTorch has them next to the parameters
    buffers = (*STATISTICS.values(), "num_batches_tracked")
    return _read_file(
        path, target, param_layouts(flatten(target)), rename, lambda kind: kind not in buffers
    )


def import_batch_stats(
    path: str | os.PathLike[str], target: Any, *, rename: Sequence[tuple[str, str]] = ()
) -> Any:
    """Read batch-norm statistics from a safetensors file into a model state.

    Args:
      path, rename: as in `import_params`.
      target: the model state; everything but `mean` and `var` is kept.

    Raises:
      CheckpointMismatchError: as for `import_params`.
    """
    statistics = {name: leaf for name, leaf in flatten(target).items() if is_statistic(name)}
    return _read_file(
        path,
        target,
        statistic_layouts(statistics),
        rename,
        lambda kind: kind in STATISTICS.values(),
    )


def read_source(source: Any, item: str, batch_stats: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and the running statistics to export, by path."""
    # a model state may be empty, and so false
    with_statistics = batch_stats is not False
    state = {}
    if isinstance(source, str | os.PathLike):
        # once: a run that saves meanwhile must not mix two checkpoints
        directory = find_checkpoint(source)
        params = _read_item(directory, item)
        state = (
            _read_item(directory, "model_state" if batch_stats is True else batch_stats)
            if with_statistics
            else {}
        )
        items = {".".join(name.split(".")[:2]) for name in list_arrays(directory)}
        # from a `LoRA`: PyTorch needs the sum of kernel and update
        if f"model_state.{FROZEN}" in items:
            frozen = _read_item(directory, f"model_state.{FROZEN}")
            scales = (
                _read_item(directory, "model_state.scale") if "model_state.scale" in items else {}
            )
            if read_meta(directory).get("replicas") is not None:  # each replica has the same values
                scales = {path: leaf[0] for path, leaf in scales.items()}
            params = {
                path: np.asarray(leaf) for path, leaf in add_updates(params, frozen, scales).items()
            }
            state = {
                path.removeprefix("state."): leaf
                for path, leaf in state.items()
                if path.startswith("state.")
            }
    elif batch_stats is True:
        raise TypeError("`batch_stats` must be the model state when `source` is a pytree, got True")
    else:
        params = flatten(source)
        state = flatten(batch_stats) if with_statistics else {}
    statistics = {path: leaf for path, leaf in state.items() if is_statistic(path)}
    if with_statistics and not statistics:
        raise ValueError(
            "the model state has no running statistics (mean, var); leave batch_stats out"
        )
    return params, statistics


def _read_item(directory: str, item: str) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint item by path below it."""
    structs = {f"{item}.{name}": leaf for name, leaf in list_item_arrays(directory, item).items()}
    loaded = orbax.read(storage_path("path", directory) / STATE, structs)
    return {name.removeprefix(f"{item}."): array for name, array in loaded.items()}


def _read_file(
    path: str | os.PathLike[str],
    target: Any,
    layouts: Mapping[str, Layout],
    rename: Sequence[tuple[str, str]],
    is_relevant: Callable[[str], bool],
) -> Any:
    """Return `target` with the tensors in `layouts`.

    The file must have no others whose last segment is relevant.
    """
    check_unique(layouts.items())
    leaves = flatten(target)
    expected = {
        layout.name: jax.ShapeDtypeStruct(layout.shape, leaves[name].dtype)
        for name, layout in layouts.items()
    }
    tensors = list_safetensors(path)
    stored = {
        name: x
        for name, x in tensors.items()
        if name in expected or is_relevant(name.rpartition(".")[2])
    }
    report = compare(stored, expected, rename=rename, cast=True)
    if not report.fits:
        raise CheckpointMismatchError(
            str(path),
            report,
            "Names and shapes are PyTorch's; rename=[(old, new)] replaces prefixes of names.",
        )
    users = {report.matched[layout.name]: name for name, layout in layouts.items()}
    # one tensor in memory at a time
    for stored_name, tensor in read_safetensors(path, tuple(users)):
        name = users[stored_name]
        leaves[name] = arrays.put_like(
            layouts[name].to_flax(tensor, np.shape(leaves[name])), leaves[name]
        )
    return jax.tree.unflatten(jax.tree.structure(target), list(leaves.values()))
