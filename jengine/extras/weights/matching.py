"""Matching of pretrained weights to model parameters, with the conversion that each array needs.

A name is compared as it is stored, after `rename`. If there is no such parameter, module numbers
may be written either way (`layers_3`, `layers.3`), and PyTorch's names are tried. A tensor that is
stored as `weight` has PyTorch's axes: if it becomes a `kernel`, these are permuted.

Linear and convolution weights are permuted only where that is certain. A square matrix fits in both
orders: it is taken to have PyTorch's if other weights of the same source fit only in that order,
and none fits only as it is stored.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.checkpoint.report import LoadReport, describe
from jengine.extras.weights.array_rules import Options, Piece, RuleLike, apply_rules, parse_rules
from jengine.extras.weights.interpolation import Method, find_grids, resize_positions
from jengine.extras.weights.rules import check_patterns, matches
from jengine.extras.weights.torch_layout import Alias, Layout, number_modules, torch_layouts

Structs = Mapping[str, jax.ShapeDtypeStruct]
# the item of a training state, None if the source does not tell, and the path in it
Key = tuple[str | None, str]
# of the axes; "untorch": a `weight` like a `kernel`
Order = Literal["stored", "torch", "either", "untorch", "none"]

ITEMS = ("params", "model_state")


class Assignment(NamedTuple):
    """Stored arrays for a parameter, and how the array that a rule makes of them becomes the
    parameter.
    """

    item: str
    path: str
    piece: Piece
    shape: tuple[int, ...]  # of the parameter, without the axis of a stack
    is_plain: bool = False  # whether the stored array is used as it is, apart from the dtype
    layout: Layout | None = None  # of an array with PyTorch's axes
    method: Method | None = None  # for position embeddings of another grid

    def convert(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the parameter, or one slice of a stack, from the stored arrays for it."""
        array = self.piece.make(arrays)
        if self.method is not None:
            return resize_positions(array, self.shape, self.method)
        if self.layout is not None:
            return self.layout.to_flax(array.reshape(self.layout.shape), self.shape)
        return array.reshape(self.shape)


class _Parameter(NamedTuple):
    item: str
    path: str
    shown: str  # the path in messages
    struct: jax.ShapeDtypeStruct
    aliases: tuple[Alias, ...]


class _Fit(NamedTuple):
    """Comparison of a parameter and the array for it."""

    parameter: _Parameter
    piece: Piece
    source: jax.ShapeDtypeStruct  # the first of the stored arrays
    element: tuple[int, ...]  # the shape that the rule makes, without the axis of a stack
    # of the parameter, without the axis of a stack; None if the stack has another size
    shape: tuple[int, ...] | None
    layout: Layout
    order: Order

    @property
    def has_dtype(self) -> bool:
        """Whether the dtypes are equal, or both floats."""
        dtypes = self.source.dtype, self.parameter.struct.dtype
        return dtypes[0] == dtypes[1] or all(
            jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes
        )

    def assign(self, are_torch: bool, method: Method | None) -> Assignment | None:
        """Return the assignment; None if the array does not fit."""
        piece = self.piece
        shape = self.shape
        if shape is None or not self.has_dtype:
            return None
        assignment = Assignment(self.parameter.item, self.parameter.path, piece, shape)
        # The order of these cases is the rule: exact shapes, then PyTorch's layout, then a resize
        # that the user has asked for.
        if self.order == "stored":
            return assignment._replace(is_plain=piece.is_plain and self.element == shape)
        if self.order == "torch" or (self.order == "either" and are_torch):
            return assignment._replace(layout=self.layout)
        if method is not None and find_grids(self.element, shape):
            return assignment._replace(method=method)
        return None

    def advise(self) -> str:
        """Return what would make the array fit, or which rule made its shape."""
        if not self.has_dtype:
            return ""
        # A square matrix fits both ways, so that a guess would be wrong in silence half of the
        # time.
        if self.order == "either":
            return (
                "it may be (out, in) or (in, out): a rule with transform='transpose' or 'none' "
                "says which"
            )
        if self.order == "untorch":
            return "a rule with transform='none' takes the axes as they are"
        piece = self.piece
        if piece.rule is not None and not piece.is_plain:
            count = f"{len(piece.names)} of " if piece.options.stack is not None else ""
            return f"the rule {piece.rule.shown} makes {count}{self.element} of {piece.label}"
        if (
            "pos" in self.parameter.path
            and self.shape is not None
            and find_grids(self.element, self.shape)
        ):
            return f"interpolate=[{self.parameter.shown!r}] resizes it"
        return ""


def match(
    stored: Structs,
    target: Mapping[str, Structs],
    rename: Sequence[RuleLike] = (),
    exclude: Sequence[str] = (),
    interpolate: Sequence[str] = (),
    interpolation: Method = "bicubic",
) -> tuple[list[Assignment], LoadReport]:
    """Match stored arrays to parameters.

    Args:
      stored: by name.
      target: the parameters by item ('params' and 'model_state') and path.
      rename, exclude, interpolate, interpolation: see `load_pretrained`.

    Returns:
      The assignments, and the report with paths below the item.

    Raises:
      ValueError: a rule matches nothing, cannot be applied, or makes two names equal.
    """
    keys, ignored = _find_items(stored, target)
    pieces, dropped = apply_rules(keys, stored, parse_rules(rename))
    parameters = list(_list_parameters(target))
    check_patterns(
        "exclude", exclude, [*(p.path for p in parameters), *(path for _, path in pieces)]
    )
    check_patterns("interpolate", interpolate, [p.path for p in parameters])
    found = _find_pieces(parameters, pieces)
    excluded = dict.fromkeys(p.shown for p in parameters if matches(p.path, *exclude))
    fits = [fit for fit in _find_fits(found, stored, target) if fit.parameter.shown not in excluded]
    are_torch = _are_torch(fits)  # of all weights together: a square one does not tell on its own

    assignments = []
    matched = {}
    mismatched = {}
    reshaped = {}
    cast = {}
    notes = {}
    ambiguous = list[str]()
    for fit in fits:
        shown = fit.parameter.shown
        source = fit.source
        expected = fit.parameter.struct
        count = f"{len(fit.piece.names)} x " if len(fit.piece.names) > 1 else ""
        method = interpolation if matches(fit.parameter.path, *interpolate) else None
        assignment = fit.assign(are_torch, method)
        if assignment is None:
            mismatched[shown] = f"{count}{describe(source)}", describe(expected)
            notes[shown] = fit.advise()
            ambiguous += [shown] * (fit.order == "either" and fit.has_dtype)
            continue
        assignments.append(assignment)
        names = [keys[name][1] for name in (fit.piece.names[0][0], fit.piece.names[-1][-1])]
        matched[shown] = " … ".join(dict.fromkeys(names))
        if not assignment.is_plain:
            reshaped[shown] = f"{count}{source.shape}", str(expected.shape)
        elif source.dtype != expected.dtype:
            cast[shown] = describe(source), describe(expected)
    # also those of excluded parameters: they are not unexpected
    used = {key for _, key, _ in found}
    rest = [(path, piece) for (item, path), piece in pieces.items() if (item, path) not in used]
    known = {*excluded, *(parameter.shown for parameter, _, _ in found)}
    return assignments, LoadReport(
        matched=matched,
        missing=tuple(p.shown for p in parameters if p.shown not in known),
        unexpected=tuple(
            path for path, _ in rest if not _is_counter(path) and not matches(path, *exclude)
        ),
        mismatched=mismatched,
        cast=cast,
        reshaped=reshaped,
        excluded=tuple(excluded),
        ignored=(
            *(piece.names[0][0] for path, piece in rest if _is_counter(path)),
            *dropped,
            *ignored,
        ),
        notes=notes,
        ambiguous=tuple(ambiguous),
    )


def _is_counter(path: str) -> bool:
    return path.rpartition(".")[2] == "num_batches_tracked"  # a buffer of PyTorch's batch norms


def _find_pieces(
    parameters: Sequence[_Parameter], pieces: Mapping[Key, Piece]
) -> list[tuple[_Parameter, Key, Piece]]:
    """Return the parameters that have an array with the same name, or with one of their other
    names.
    """
    aliases: dict[Key, Key | None] = {}  # None where several arrays have the same alias
    for item, path in pieces:
        alias = (item, number_modules(path))
        aliases[alias] = None if alias in aliases else (item, path)

    def find(parameter: _Parameter) -> tuple[Key, Piece] | None:
        scopes = (parameter.item, None)  # None: the source does not tell parameters from state
        for scope in scopes:
            # Orbax has the levels of Flax's wrappers
            for path in (parameter.path, f"{parameter.path}.value"):
                if (scope, path) in pieces:
                    return (scope, path), pieces[scope, path]
        for alias, third in parameter.aliases:
            for scope in scopes:
                if (key := aliases.get((scope, alias))) is None:
                    continue
                piece = pieces[key]
                if third is None:
                    return key, piece
                if piece.is_plain:
                    return key, piece._replace(options=Options(split=0), part=third, parts=3)
        return None

    return [
        (parameter, *entry) for parameter in parameters if (entry := find(parameter)) is not None
    ]


def _find_fits(
    found: Sequence[tuple[_Parameter, Key, Piece]], stored: Structs, target: Mapping[str, Structs]
) -> Iterator[_Fit]:
    shapes = {
        item: {path: tuple(leaf.shape) for path, leaf in target[item].items()} for item in ITEMS
    }
    slices: dict[str, dict[str, tuple[int, ...] | None]] = {
        item: {**shapes[item]} for item in ITEMS
    }
    # Layouts are those of one layer of a stack, and an attention is recognized by the shapes of all
    # its parameters.
    for parameter, _, piece in found:
        axis = piece.options.stack
        shape = parameter.struct.shape
        if axis is None:
            continue
        sizes = list(shape)
        has_size = -len(sizes) <= axis < len(sizes) and sizes.pop(axis) == len(piece.names)
        slices[parameter.item][parameter.path] = tuple(sizes) if has_size else None
    layouts = {
        item: torch_layouts(item, {path: shape or () for path, shape in slices[item].items()})
        for item in ITEMS
    }
    for parameter, _, piece in found:
        source = stored[piece.names[0][0]]
        layout = layouts[parameter.item][parameter.path]
        shape = slices[parameter.item][parameter.path]
        try:
            element = piece.infer_shape(stored)
        except ValueError:
            if piece.rule is not None:
                raise
            element = None  # an array that is not three projections
        order = (
            "none"
            if shape is None or element is None
            else _find_order(piece, element, shape, layout)
        )
        yield _Fit(parameter, piece, source, element or source.shape, shape, layout, order)


def _find_order(
    piece: Piece, element: tuple[int, ...], shape: tuple[int, ...], layout: Layout
) -> Order:
    """Return in which order of the axes an array fits a parameter."""
    squeezed = _squeeze(element)
    as_torch = squeezed == _squeeze(layout.shape)
    as_stored = squeezed in (_squeeze(layout.merged), _squeeze(shape))
    if piece.options.says_axes:
        # Heads may still be divided from their size, as (in, heads * size) into (in, heads, size):
        # there is one way.
        return "stored" if _divides(element, shape) else "none"
    if not layout.is_permuted:
        return "stored" if as_torch or as_stored else "none"
    # the name in the file: a rule may have changed it to `kernel`
    if not piece.names[0][0].endswith("weight"):
        return "stored" if squeezed == _squeeze(shape) else "none"
    # parts along the first axis are parts of the outputs, so these come first
    if as_torch and as_stored:
        return "torch" if len(squeezed) < 2 or piece.options.split == 0 else "either"
    return "torch" if as_torch else "untorch" if as_stored else "none"


def _are_torch(fits: Iterable[_Fit]) -> bool:
    """Return whether the weights of a source that fit in one order only have PyTorch's."""
    # A rule that says 'none' for one weight shows that the file has layers in (in, out), as GPT-2
    # beside Linear ones
    weights = [
        fit for fit in fits if fit.layout.is_permuted and fit.piece.names[0][0].endswith("weight")
    ]
    orders = {
        fit.order
        for fit in weights
        if not fit.piece.options.says_axes and len(_squeeze(fit.element)) > 1
    }
    are_named = any(
        fit.piece.options.says_axes and fit.piece.options.transform != "transpose"
        for fit in weights
    )
    return "torch" in orders and "untorch" not in orders and not are_named


def _find_items(
    names: Iterable[str], target: Mapping[str, Structs]
) -> tuple[dict[str, Key], list[str]]:
    """Return the key of each weight by name, and the names that are not weights, such as
    optimizer state.
    """
    tops = {item: {path.partition(".")[0] for path in target[item]} for item in ITEMS}
    collections = {*tops["model_state"], "batch_stats"}
    split = [(name, *name.partition(".")[::2]) for name in names]
    # A module may itself be called `params`: then the first name is no collection.
    if "params" in tops["params"] or all(top != "params" for _, top, _ in split):
        return {name: (None, name) for name, _, _ in split}, []
    keys: dict[str, Key] = {}
    ignored = []
    for name, top, rest in split:
        if top in ITEMS:
            keys[name] = (top, rest)
        elif top in collections:
            keys[name] = ("model_state", name)
        else:
            ignored.append(name)
    return keys, ignored


def _list_parameters(target: Mapping[str, Structs]) -> Iterator[_Parameter]:
    for item in ITEMS:
        leaves = target[item]
        layouts = torch_layouts(item, {path: tuple(leaf.shape) for path, leaf in leaves.items()})
        for path, struct in leaves.items():
            shown = path if item == "params" or path not in target["params"] else f"{item}.{path}"
            aliases = (
                (number_modules(path), None),
                (layouts[path].name, None),
                *layouts[path].aliases,
            )
            yield _Parameter(item, path, shown, struct, aliases)


def _divides(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return whether shapes differ only by axes of size 1, and by axes that are divided into
    several or joined.

    >>> _divides((6, 4), (2, 3, 4)), _divides((6, 4), (4, 6)), _divides((4, 1), (4,))
    (True, False, True)
    """
    left = list(_squeeze(first))
    right = list(_squeeze(second))
    # Axes may be merged or split in order (heads x width), never permuted: only then a reshape
    # keeps the meaning.
    while left and right:
        one, other = (left, right) if left[0] >= right[0] else (right, left)
        size = one.pop(0)
        product = other.pop(0)
        while product < size and other:
            product *= other.pop(0)
        if product != size:
            return False
    return not left and not right


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
