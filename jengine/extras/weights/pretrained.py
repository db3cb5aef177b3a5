"""Start from pretrained weights, on disk or in memory, in a model that may differ."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.checkpoint import arrays
from jengine.checkpoint.report import LoadReport
from jengine.config.annotations import checked
from jengine.config.errors import (
    CheckpointMismatchError,
    ConfigError,
    UnknownNameError,
    closest,
    did_you_mean,
)
from jengine.config.paths import flatten
from jengine.extras.weights.array_rules import RuleLike
from jengine.extras.weights.interpolation import Method
from jengine.extras.weights.matching import ITEMS, Assignment, match
from jengine.extras.weights.weight_source import WeightSource, open_weights

PyTree = Any

_ADVICE = (
    "rename=[(old, new)] replaces path prefixes; exclude=[path] keeps the model's own values of "
    "these parameters, strict=False wherever nothing fits."
)


@checked
def load_pretrained(
    weights: Any,
    params: PyTree,
    model_state: PyTree = None,
    *,
    rename: Sequence[RuleLike] | str = (),
    strict: bool = True,
    exclude: Sequence[str] = (),
    interpolate: Sequence[str] = (),
    interpolation: Method = "bicubic",
    item: str | None = None,
    raw: bool = False,
    structure: PyTree = None,
) -> tuple[PyTree, PyTree, LoadReport]:
    """Load weights into a model, which may have other names, other layouts and other position
    embeddings.

    Args:
      weights: a path, or an object in memory; see the table in
        `jengine.extras.weights.weight_source`. Or a `WeightSource`.
      params: the model parameters as a pytree of arrays.
      model_state: running statistics and other state; None for none.
      rename: (old, new) prefixes of stored paths, in whole segments: `("encoder", "backbone")`. An
        empty `old` adds a prefix, an empty `new` removes one. `old` may be a regular expression,
        whose groups `new` may use. The first match is applied. With options, `(old, new,
        dict(stack=0))`, it is a function on the arrays, see `Options` in
        `jengine.extras.weights.array_rules`; `None` for `new` leaves an array out. Or the name of a
        model type of Hugging Face, such as 'gpt2'.
      strict: False keeps the model's values where nothing fits, and ignores arrays that it does not
        have.
      exclude: paths that keep the model's values, such as a new head: prefixes of whole segments,
        or regular expressions. Matching names in the weights are ignored.
      interpolate: paths of position embeddings that are resized if the grid differs.
      interpolation: how they are resized.
      item: dotted path to the weights, if they are not at the top or under `params`: `state.model`.
      raw: whether to take the trained values from a checkpoint that has averages.
      structure: the pytree that an `.eqx` file was written from, with any values; `params` by
        default.

    Returns:
      `params` and `model_state` with the loaded values, in the same structure, dtypes and
      placement; and the report.

    Raises:
      CheckpointMismatchError: `strict`, and something does not match; or the axes of a square
        matrix may be in either order. Nothing was read.
      ValueError: a rule that matches nothing, or another file format. KeyError: the weights do not
        have the item.
      FileNotFoundError, CorruptCheckpointError: as `locate_weights`. TypeError: not a pytree of
        arrays.

    >>> params, _, report = load_pretrained(
    ...     {"fc.weight": np.ones((2, 3))}, {"fc": {"kernel": np.zeros((3, 2))}}
    ... )
    >>> params["fc"]["kernel"].sum(), report.renamed
    (np.float64(6.0), {'fc.kernel': 'fc.weight'})
    """
    source = weights
    if not isinstance(weights, WeightSource):
        source = open_weights(
            weights, raw=raw, structure=params if structure is None else structure
        )
    target = dict(zip(ITEMS, (params, {} if model_state is None else model_state), strict=True))
    values = {name: flatten(tree) for name, tree in target.items()}
    structs = {
        name: {path: arrays.to_struct(leaf) for path, leaf in tree.items()}
        for name, tree in values.items()
    }
    prefix = "" if item is None else f"{item}."
    stored = {
        name.removeprefix(prefix): x
        for name, x in source.structs.items()
        if name.startswith(prefix)
    }
    if not stored and item is not None:
        groups = {name.partition(".")[0] for name in source.structs if "." in name}
        raise UnknownNameError(
            f"{source.label} has no arrays below {item!r}{closest(item, groups)}"
        )
    if isinstance(rename, str):
        rules = find_rules(rename)(stored, structs["params"], source.config)
    else:
        rules = rename or source.find_rules(stored, structs["params"])
    assignments, report = match(stored, structs, rules, exclude, interpolate, interpolation)
    if report.ambiguous or (strict and not report.fits):
        raise CheckpointMismatchError(source.label, report, _ADVICE)
    _read(source, prefix, assignments, values)
    result = [
        jax.tree.unflatten(jax.tree.structure(target[name]), list(values[name].values()))
        for name in ITEMS
    ]
    return result[0], None if model_state is None else result[1], report


def find_rules(name: str) -> Callable[..., Sequence[RuleLike]]:
    """Return the function that makes the rules for a model of Hugging Face.

    Raises:
      ConfigError: there are none with this name.
    """
    from jengine.extras.weights.huggingface import (  # with Flax
        find_family,
        list_model_types,
        make_rules,
    )

    if find_family(name) is None:
        names = ", ".join(map(repr, list_model_types()))
        raise ConfigError(
            f"`rename` must be a list of rules or {names}, got {name!r}"
            f"{did_you_mean(name, list_model_types())}"
        )
    return functools.partial(make_rules, name)


def _read(
    source: WeightSource,
    prefix: str,
    assignments: Sequence[Assignment],
    values: Mapping[str, dict[str, Any]],
) -> None:
    """Read the assigned arrays one parameter at a time, and put each into `values`."""
    # by stored name: a fused `qkv` has three, and is read once
    users: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        if sum(map(len, assignment.piece.names)) == 1:
            users.setdefault(prefix + assignment.piece.names[0][0], []).append(assignment)
        else:
            place = values[assignment.item]
            array = _read_several(
                source, prefix, assignment, arrays.to_struct(place[assignment.path])
            )
            place[assignment.path] = arrays.put_like(array, place[assignment.path])
    wanted = {name: source.structs[name] for name in users}
    for name, (first, *others) in users.items():
        if not others and first.is_plain:  # it can be read onto the devices at once
            wanted[name] = arrays.to_struct(values[first.item][first.path])
    for name, array in source.read(wanted):
        for assignment in users[name]:
            place = values[assignment.item]
            axis = assignment.piece.options.stack
            converted = array
            if not assignment.is_plain:
                converted = assignment.convert([np.asarray(array)])
            if axis is not None:  # a model with one layer
                converted = np.expand_dims(converted, axis)
            place[assignment.path] = arrays.put_like(converted, place[assignment.path])


def _read_several(
    source: WeightSource, prefix: str, assignment: Assignment, struct: jax.ShapeDtypeStruct
) -> np.ndarray:
    """Return a parameter that is stacked or merged from several arrays, with the dtype of the
    parameter.
    """
    axis = assignment.piece.options.stack
    # filled in place: one layer of a stack in memory at a time
    result = np.empty(struct.shape, struct.dtype)
    slices = [result] if axis is None else np.moveaxis(result, axis, 0)  # views
    for place, names in zip(slices, assignment.piece.names, strict=True):
        wanted = {prefix + name: source.structs[prefix + name] for name in names}
        read = dict(source.read(wanted))
        place[...] = assignment.convert([np.asarray(read[prefix + name]) for name in names])
    return result
