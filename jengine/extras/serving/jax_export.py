"""Export of a loaded model as a `jax.export` artifact, which runs without the model's code."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jengine.config.errors import ConfigError, require_extra
from jengine.config.storage import write_bytes
from jengine.data.batch_check import Batch
from jengine.data.collate import count_examples
from jengine.extras.serving.loaded_model import LoadedModel
from jengine.model.model import predict_with_key, prediction_key

PyTree = Any

PLATFORMS = ("cpu", "cuda", "tpu")


def export_model(
    model: LoadedModel,
    batch: Batch,
    path: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    platforms: Sequence[str] = PLATFORMS,
) -> Any:
    """Write a model and weights as a serialized `jax.export.Exported`.

    `jax.export.deserialize(data).call(batch)` predicts batches like `batch`, without the entries
    that do not affect the predictions.

    Args:
      model: from `load_model`.
      batch: an example with the structure, shapes and dtypes of all batches; may have
        `jax.ShapeDtypeStruct`s.
      path: the file to write; an existing one is replaced.
      batch_size: the only batch size that the artifact accepts; None for any.
      platforms: the device kinds on which it can run.

    Returns:
      The `jax.export.Exported`.

    Raises:
      ConfigError: the model cannot be traced with a symbolic batch size, so that `batch_size` must
        be set.
      ImportError: flatbuffers is not installed.
    """
    from jax import export

    with require_extra("export", "jax.export files require the package flatbuffers"):
        import flatbuffers  # noqa: F401
    size = count_examples(batch) if batch_size is None else batch_size
    shapes = _set_batch_size(batch, size)
    params, model_state = jax.device_get(model.load(shapes))  # constants of the artifact

    def predict(batch: Batch) -> PyTree:
        # One key for all calls: the artifact has no input for another
        return predict_with_key(model.model, params, model_state, batch, prediction_key(0, 0))

    inputs = _drop_unused(predict, shapes)
    call = jax.jit(lambda inputs: predict(_fill_unused(inputs, shapes)))

    def export_for(size: Any) -> Any:
        return export.export(call, platforms=tuple(platforms))(_set_batch_size(inputs, size))

    try:
        exported = export_for(
            export.symbolic_shape("batch")[0] if batch_size is None else batch_size
        )
    except Exception as error:
        if batch_size is not None:
            raise
        export_for(size)  # raises if the symbolic size is not the cause
        raise ConfigError(
            "the model cannot be exported for any batch size; set one, with --batch-size N "
            f"(`batch_size=`): {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, exported.serialize())  # atomic: no reader sees half a file
    return exported


def _set_batch_size(batch: Batch, size: Any) -> PyTree:
    """Return structs with this batch size, which may be symbolic, in the dtypes that JAX
    computes with.
    """

    def struct(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (size, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype)
        )

    return jax.tree.map(struct, batch)


def _drop_unused(predict: Callable[[Batch], PyTree], batch: Batch) -> PyTree:
    """Return the batch without the entries, such as labels, that do not affect the predictions."""
    from jax.interpreters import partial_eval

    if not isinstance(batch, Mapping):
        return batch
    jaxpr = jax.make_jaxpr(predict)(batch).jaxpr
    # Who calls the artifact should not need labels
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    is_used = jax.tree.unflatten(jax.tree.structure(batch), used)
    inputs = {name: entry for name, entry in batch.items() if any(jax.tree.leaves(is_used[name]))}
    return inputs or dict(batch)  # the batch size has to come from some entry


def _fill_unused(inputs: PyTree, shapes: PyTree) -> PyTree:
    """Return a whole batch for the model, with zeros for the entries that `_drop_unused` has
    left out.
    """
    if not isinstance(shapes, Mapping):
        return inputs
    size = jax.tree.leaves(inputs)[0].shape[0]
    zeros = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape[1:]), leaf.dtype), dict(shapes))
    return {**zeros, **inputs}
