"""Start a model from pretrained weights: of this engine, of Flax or PyTorch, on disk or in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.annotations import checked
from jengine.checkpoint import arrays
from jengine.checkpoint.interpolation import Method
from jengine.checkpoint.matching import ITEMS, Assignment, Settings, match
from jengine.checkpoint.report import CheckpointMismatchError, LoadReport
from jengine.checkpoint.sources import Source, open_weights
from jengine.errors import UnknownNameError, closest
from jengine.paths import flatten

PyTree = Any

_ADVICE = (
    "rename=[(old, new)] replaces path prefixes; exclude=[path] keeps the model's own values of these parameters, "
    "strict=False wherever nothing fits."
)


@checked
def load_pretrained(
    weights: Any,
    params: PyTree,
    model_state: PyTree = None,
    *,
    rename: Sequence[tuple[str, str]] = (),
    strict: bool = True,
    exclude: Sequence[str] = (),
    interpolate: Sequence[str] = (),
    interpolation: Method = "bicubic",
    item: str | None = None,
    raw: bool = False,
) -> tuple[PyTree, PyTree, LoadReport]:
    """Load weights into a model, which may have other names, other layouts and other position embeddings.

    Args:
      weights: a path, or an object in memory; see the table of `jengine.checkpoint.sources`. Or an opened `Source`.
      params: the parameters of the model as a pytree of arrays.
      model_state: its state, such as running statistics; None for none.
      rename: (old, new) prefixes of whole segments of the stored paths: `("encoder", "backbone")`. An empty `old` adds
        a prefix, an empty `new` removes one. `old` may be a regular expression, whose groups `new` may use. The first
        match is applied.
      strict: False keeps the values of the model where nothing fits, and ignores arrays that it does not have.
      exclude: paths of parameters that keep their values, such as those of a new head: prefixes of whole segments, or
        regular expressions of them. Matching names of the weights are ignored.
      interpolate: paths of position embeddings that are resized if they are of another grid.
      interpolation: how they are resized.
      item: dotted path of the weights in their tree, if it is not that of the parameters: `state.model`.
      raw: whether to take the trained values from a checkpoint of a run that saved averages.

    Returns:
      `params` and `model_state` with the loaded values, and the structure, dtypes and placement of the arguments; and
      the report.

    Raises:
      CheckpointMismatchError: `strict`, and something does not match; nothing was read.
      ValueError: a rule that matches nothing, or a file of another format. KeyError: the weights do not have the item.
      FileNotFoundError, CorruptCheckpointError: as `locate_weights`. TypeError: not a pytree of arrays.
    """
    source = weights if isinstance(weights, Source) else open_weights(weights, raw=raw)
    target = dict(zip(ITEMS, (params, {} if model_state is None else model_state), strict=True))
    leaves = {name: flatten(tree) for name, tree in target.items()}
    structs = {name: {path: arrays.to_struct(leaf) for path, leaf in tree.items()} for name, tree in leaves.items()}
    prefix = "" if item is None else f"{item}."
    stored = _select_item(source, prefix)
    assignments, report = match(stored, structs, Settings(rename, exclude, interpolate, interpolation))
    if strict and not report.fits:
        raise CheckpointMismatchError(source.label, report, _ADVICE)
    values = {name: dict(tree) for name, tree in leaves.items()}
    _read(source, prefix, assignments, values)
    result = [jax.tree.unflatten(jax.tree.structure(target[name]), list(values[name].values())) for name in ITEMS]
    return result[0], None if model_state is None else result[1], report


def _select_item(source: Source, prefix: str) -> dict[str, jax.ShapeDtypeStruct]:
    stored = {name.removeprefix(prefix): x for name, x in source.structs.items() if name.startswith(prefix)}
    if not stored and prefix:
        tops = {name.partition(".")[0] for name in source.structs}
        raise UnknownNameError(f"{source.label} has no {prefix[:-1]!r}{closest(prefix[:-1], tops)}")
    return stored


def _read(source: Source, prefix: str, assignments: Sequence[Assignment], values: Mapping[str, dict[str, Any]]) -> None:
    """Read the assigned arrays, one at a time, which replace those in `values`."""
    users: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        users.setdefault(prefix + assignment.stored, []).append(assignment)
    wanted = {name: source.structs[name] for name in users}
    for name, (first, *others) in users.items():
        if not others and first.convert is None:  # it can be read onto its devices
            wanted[name] = arrays.to_struct(values[first.item][first.path])
    for name, array in source.read(wanted):
        for assignment in users[name]:
            converted = array if assignment.convert is None else assignment.convert(np.asarray(array))
            place = values[assignment.item]
            place[assignment.path] = _put_like(converted, place[assignment.path])


def _put_like(array: Any, like: Any) -> Any:
    """Return `array` with the dtype of `like` and on its devices; a NumPy array if `like` has no sharding."""
    struct = arrays.to_struct(like)
    array = array.astype(struct.dtype, copy=False)
    if struct.sharding is None:
        return arrays.decode_leaf(np.asarray(array), like)
    if struct.sharding.is_fully_addressable or isinstance(array, jax.Array):
        return arrays.decode_leaf(jax.device_put(array, struct.sharding), like)
    # Each process has the whole array and gives its own parts of it.
    placed = jax.make_array_from_callback(array.shape, struct.sharding, lambda index: array[index])
    return arrays.decode_leaf(placed, like)
