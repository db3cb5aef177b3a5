"""Export of a `TransformerLM` as a directory of the Hugging Face Hub: its config, weights, and
tokenizer.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jengine.checkpoint import arrays
from jengine.config.annotations import Range, checked
from jengine.config.errors import CheckpointMismatchError
from jengine.config.storage import check_local_path
from jengine.extras.weights.array_rules import split_sizes
from jengine.extras.weights.export import read_source, write_safetensors
from jengine.extras.weights.huggingface import (
    CONFIG,
    Config,
    list_tensors,
    make_rules,
    require_config,
)
from jengine.extras.weights.matching import Assignment, match
from jengine.extras.weights.sources import HUB_FILES
from jengine.extras.weights.torch_layout import to_torch

_INDEX, _SINGLE = HUB_FILES
# What reads the weights needs these too. Code and other weights are not copied.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)
Dtype = Literal["float32", "bfloat16", "float16"]


@checked
def export_hub(
    source: Any,
    directory: str | os.PathLike[str],
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    item: str = "params",
    dtype: Dtype | None = None,
    shard_bytes: Annotated[int, Range(ge=1)] = 5_000_000_000,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Write the parameters of a `TransformerLM` with the names, layouts and files that
    `transformers` writes.

    Args:
      source: a checkpoint, or a work dir for its newest one; or parameters as a pytree of arrays.
      directory: the directory to write; files with the same names are replaced.
      config: a `config.json` of the model type, read or as the path of its directory. It is written
        with the dtype, and with `tie_word_embeddings` as the model has it. The directory's
        tokenizer, chat template and settings for generation are copied.
      item: the dotted path to the parameters in a checkpoint.
      dtype: of the tensors; None for that of the parameters.
      shard_bytes: the largest size of a file; a larger tensor has a file of its own.

    Returns:
      The shapes and dtypes of the tensors by name.

    Raises:
      CheckpointMismatchError: the parameters are not those of this config; nothing was written.
      FileNotFoundError, CorruptCheckpointError: the checkpoint does not exist or is incomplete, or
        there is no config.
      FileExistsError: the directory has other weights.
    """
    params, _ = read_source(source, item, False)
    origin = Path(config) if isinstance(config, str | os.PathLike) else None
    config = require_config(config)
    # The parameters decide, or `transformers` would drop a head or look for one
    config = {**config, "tie_word_embeddings": "head.kernel" not in params}
    label = str(source) if isinstance(source, str | os.PathLike) else "in memory"
    structs, users = _plan(config, params, label, dtype)
    names = {np.dtype(struct.dtype).name for struct in structs.values()}
    # The key is `dtype` in newer versions of transformers
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = (
        names.pop() if len(names) == 1 else "float32"
    )

    shards = list(_divide(structs, shard_bytes))  # all of them first: file names have their number
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [_SINGLE]
    target = Path(check_local_path("directory", directory))
    written = {*files, *([_INDEX] if len(shards) > 1 else [])}
    if others := sorted(
        file.name for file in target.glob("*.safetensors*") if file.name not in written
    ):
        raise FileExistsError(
            f"{target} must have no other weights, which would be loaded too, got {others[0]}"
        )
    target.mkdir(parents=True, exist_ok=True)
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: _make_tensor(users[name], params, structs[name]) for name in shard}
        write_safetensors(target / file, tensors)
    if origin is not None and origin.resolve() != target.resolve():
        for companion in (
            path for pattern in _COMPANIONS for path in origin.glob(pattern) if path.is_file()
        ):
            copy = target / companion.relative_to(origin)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(companion, copy)
    (target / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if len(shards) > 1:
        weight_map = {
            name: file for file, shard in zip(files, shards, strict=True) for name in shard
        }
        size = sum(_count_bytes(struct) for struct in structs.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return structs


def _plan(
    config: Config, params: Mapping[str, np.ndarray], label: str, dtype: Dtype | None
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, list[tuple[Assignment, int]]]]:
    """Return the tensors to write, and for each the parameters that it is made of, with the
    place in their stack.
    """
    shapes = list_tensors(config)
    targets = {path: arrays.to_struct(leaf) for path, leaf in params.items()}
    # The match needs shapes; any float dtype fits a float parameter
    stored = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    rules = make_rules(config["model_type"], shapes, targets)
    # The import rules run backwards: how a tensor would be read says how to write it
    assignments, report = match(stored, {"params": targets, "model_state": {}}, rules)
    if not report.fits:
        raise CheckpointMismatchError(label, report, "Here `stored` is the layout of the config.")
    users: dict[str, list[tuple[Assignment, int]]] = {}
    # parts are joined in order
    for assignment in sorted(assignments, key=lambda assignment: assignment.piece.part):
        for place, (name,) in enumerate(assignment.piece.names):
            users.setdefault(name, []).append((assignment, place))
    dtypes = {name: dtype or params[users[name][0][0].path].dtype for name in shapes}
    return {
        name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes.items()
    }, users


def _make_tensor(
    users: list[tuple[Assignment, int]],
    params: Mapping[str, np.ndarray],
    struct: jax.ShapeDtypeStruct,
) -> np.ndarray:
    parts = []
    for assignment, place in users:
        array = np.asarray(params[assignment.path])
        options = assignment.piece.options
        # A scanned model has one array for all layers, the file one for each
        array = array if options.stack is None else np.take(array, place, axis=options.stack)
        shape = list(struct.shape)
        if options.split is not None:
            axis, _ = split_sizes(options.split)
            shape[axis] //= len(users)  # the shipped rules split into equal parts
        if assignment.layout is not None:
            array = to_torch(assignment.layout, array).reshape(shape)
        elif options.transform == "transpose":
            array = array.reshape(shape[::-1]).T
        parts.append(array.reshape(shape))
    split = users[0][0].piece.options.split
    tensor = parts[0] if split is None else np.concatenate(parts, axis=split_sizes(split)[0])
    # the file stores raw memory
    return np.asarray(tensor.astype(struct.dtype, copy=False), order="C")


def _divide(structs: Mapping[str, jax.ShapeDtypeStruct], shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name, struct in structs.items():
        # never an empty shard before a large tensor
        if shard and size + _count_bytes(struct) > shard_bytes:
            yield shard
            shard = []
            size = 0
        shard.append(name)
        size += _count_bytes(struct)
    yield shard


def _count_bytes(struct: jax.ShapeDtypeStruct) -> int:
    return int(struct.size) * np.dtype(struct.dtype).itemsize
