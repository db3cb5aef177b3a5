"""Rules for loaded arrays: `(old, new)`, or `(old, new, options)` with functions on the arrays.

The options are applied in this order: `merge`, `reshape`, `split` or `unstack`, `transform`,
`stack`.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jengine.checkpoint.report import list_prefixes
from jengine.config.annotations import is_mapping
from jengine.config.errors import UnknownNameError, closest, config_path
from jengine.config.registry import check_arguments
from jengine.extras.weights.rules import compile_pattern, replace_prefix

Transform = Callable[[np.ndarray], np.ndarray]
Names = str | Sequence[str]
# As users write it; `None` in the place of `new` leaves the array out.
RuleLike = tuple[Names, Names | None] | tuple[Names, Names | None, Mapping[str, Any]]

_GROUP_REFERENCE = re.compile(r"\\(?:g<(\w+)>|(\d+))")
_NUMBER = "{}"  # stands for the index in the new names of an unstacked array
_AXES = re.compile(r"\(([^()]*)\)|(\w+)")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is done with the arrays of a rule.

    Attributes:
      transform: 'transpose' for (out, in, *window) to (*window, in, out), 'none' for the axes as
        they are stored, or a function on the array, or an import path. Without `transform` and
        `reshape`, the axes of a PyTorch `weight` are permuted for a `kernel`.
      reshape: the axes by name, before and after: `"(h k) d -> d h k"`.
      sizes: sizes of these axes by name, where they do not follow from the stored shape.
      merge: the axis along which the arrays of several old names are joined.
      split: the axis along which an array is divided between several new names; or `dict(axis=,
        sizes=[...])` for parts of different sizes.
      stack: the new axis along which the arrays of a numbered name are stacked: the number is a
        group of the old name that the new one does not use.
      unstack: the axis that is divided into arrays with numbered names: the new name has `{}` for
        the number.
    """

    transform: str | Callable[..., Any] | None = None
    reshape: str | None = None
    sizes: Mapping[str, int] | None = None
    merge: int | None = None
    split: int | Mapping[str, Any] | None = None
    stack: int | None = None
    unstack: int | None = None

    @property
    def says_axes(self) -> bool:
        """Whether the rule says where the axes of an array go, so no layout is inferred."""
        return self.transform is not None or self.reshape is not None


class RenameRule(NamedTuple):
    """Rule of `rename`, with one or more old and new names."""

    old: tuple[str, ...]
    new: tuple[str, ...]  # () leaves the array out
    options: Options
    shown: str  # as in messages


NO_OPTIONS = Options()


class Piece(NamedTuple):
    """Array that is made from stored ones, for one parameter."""

    # of the stored arrays: by place in the stack, and by part of the merged array
    names: tuple[tuple[str, ...], ...]
    rule: RenameRule | None = None
    options: Options = NO_OPTIONS
    part: int = 0  # of a split or unstacked array
    parts: int = 1

    @property
    def label(self) -> str:
        """The stored names for messages: the first and the last one."""
        first = self.names[0][0]
        last = self.names[-1][-1]
        return first if first == last else f"{first} … {last}"

    @property
    def is_plain(self) -> bool:
        """Whether this is one stored array as it is."""
        return self.options == NO_OPTIONS

    def infer_shape(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[int, ...]:
        """Return the shape that `make` returns, without reading any array.

        Raises:
          ValueError: the arrays of a stack have different shapes; or see `make`.
        """
        for names in self.names[1:]:
            for name, first in zip(names, self.names[0], strict=True):
                if (
                    structs[name].shape != structs[first].shape
                    or structs[name].dtype != structs[first].dtype
                ):
                    shapes = " and ".join(
                        f"{x!r} {structs[x].dtype}{structs[x].shape}" for x in (first, name)
                    )
                    shown = self.rule.shown if self.rule else ""
                    raise ValueError(
                        f"`rename` must stack equal shapes and dtypes, got {shapes} by the rule "
                        f"{shown}"
                    )
        # Without strides they take no memory, whatever the shape; a transform may be any function.
        arrays = [
            np.broadcast_to(np.zeros((), x.dtype), x.shape)
            for x in (structs[name] for name in self.names[0])
        ]
        return self.make(arrays).shape

    def make(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the array at one place of the stack from the stored arrays for it.

        Raises:
          ValueError: the rule cannot be applied to these shapes; the message has the rule, the name
            and the shapes.
        """
        options = self.options
        try:
            array = (
                arrays[0] if options.merge is None else np.concatenate(arrays, axis=options.merge)
            )
            if options.reshape is not None:
                array = rearrange(array, options.reshape, options.sizes or {})
            if options.split is not None:
                array = _split(array, options.split, self.part, self.parts)
            if options.unstack is not None:
                array = np.take(array, self.part, axis=options.unstack)
            # A user's function may return a JAX array
            return (
                array
                if options.transform is None
                else np.asarray(_find_transform(options.transform)(array))
            )
        except Exception as error:  # of any type: a transform is the user's
            if self.rule is None:
                raise
            shapes = ", ".join(str(tuple(array.shape)) for array in arrays)
            message = (
                f"`rename` has the rule {self.rule.shown}, which cannot be applied to "
                f"{self.label} {shapes}"
            )
            raise ValueError(f"{message}: {error}") from error


def parse_rules(rename: Sequence[RuleLike]) -> list[RenameRule]:
    """Return the rules, with the options checked.

    Raises:
      ValueError, TypeError: a rule or an option that has another form; an option without the names
        that it needs.
    """
    rules = []
    for i, rule in enumerate(rename):
        with config_path("rename", i):
            rules.append(_parse_rule(rule))
    return rules


def _parse_rule(rule: RuleLike) -> RenameRule:
    values: tuple[Any, ...] = tuple(rule)
    shown = f"({', '.join(map(repr, values))})"
    if len(values) not in (2, 3) or (len(values) == 3 and not is_mapping(values[2])):
        raise ValueError(
            f"a rule of `rename` must be (old, new) or (old, new, dict of options), got {shown}"
        )
    given = dict(values[2].items()) if len(values) == 3 else {}
    check_arguments(Options, given)
    options = Options(**given)
    old, new = (() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in values[:2])
    needs = {
        "`old` as a list with `merge`, and only then": (len(old) > 1)
        == (options.merge is not None),
        "`new` as a list with `split`": len(new) > 1 or options.split is None,
        "either `stack` or `unstack`": options.stack is None or options.unstack is None,
        "`{}` in `new` for the number with `unstack`": options.unstack is None
        or all(_NUMBER in name for name in new),
        "either `split` or `unstack`": options.split is None or options.unstack is None,
        "`sizes` with `reshape`": options.sizes is None or options.reshape is not None,
        "an `old` name": bool(old),
        "no options where `new` is None": bool(new) or not given,
    }
    for need, is_met in needs.items():
        if not is_met:
            raise ValueError(f"a rule of `rename` must have {need}, got {shown}")
    if options.transform is not None:
        _find_transform(options.transform)  # an unknown name is found before anything is read
    return RenameRule(old, new, options, shown)


def apply_rules(
    keys: Mapping[str, tuple[str | None, str]],
    structs: Mapping[str, jax.ShapeDtypeStruct],
    rules: Sequence[RenameRule],
) -> tuple[dict[tuple[str | None, str], Piece], list[str]]:
    """Return the piece for each new path, and the names that a rule leaves out.

    The first rule that matches a path is applied to it.

    Args:
      keys: (item, dotted path) by stored name.
      structs: the stored arrays by name.
      rules: see `parse_rules`.

    Raises:
      ValueError: a rule matches no path, two arrays have the same new path, or a number of a stack
        is missing.
    """
    found: dict[
        tuple[str | None, str], tuple[RenameRule | None, int, int, dict[tuple[int, int], str]]
    ] = {}
    dropped = []
    used = set()
    for name, (item, path) in keys.items():
        rule, targets = _apply_first(path, structs[name], rules)
        if rule is not None:
            used.add(id(rule))  # options with dicts are not hashable
        if not targets:
            dropped.append(name)
        for target in targets:
            other, *_, places = found.setdefault(
                (item, target.path), (rule, target.part, target.parts, {})
            )
            place = target.number, target.member
            # One rule may fill several places of a stack or a merge; two rules must not meet at one
            # path
            if other is not rule or place in places:
                taken = places.get(place) or next(iter(places.values()))
                raise ValueError(
                    f"`rename` must keep paths distinct, got {target.path!r} for both {taken!r} "
                    f"and {name!r}"
                )
            places[place] = name
    for rule in rules:
        if id(rule) not in used:
            hint = closest(rule.old[0], list_prefixes(path for _, path in keys.values()))
            raise ValueError(
                f"`rename` must start with a prefix of a stored path, got {rule.shown}{hint}"
            )
    return {key: _make_piece(key[1], *entry) for key, entry in found.items()}, dropped


class _Target(NamedTuple):
    """New path of a stored array, and the place there."""

    path: str
    number: int = 0  # in the stack
    member: int = 0  # of the merged arrays
    part: int = 0
    parts: int = 1


def _apply_first(
    path: str, struct: jax.ShapeDtypeStruct, rules: Sequence[RenameRule]
) -> tuple[RenameRule | None, list[_Target]]:
    """Return the first rule that matches a path, and the new paths that it gives it."""
    for rule in rules:
        for member, old in enumerate(rule.old):
            match = compile_pattern(old).match(path) if old else None
            if match is not None or not old:
                return rule, list(_list_targets(path, struct, rule, member, match))
    return None, [_Target(path)]


def _list_targets(
    path: str,
    struct: jax.ShapeDtypeStruct,
    rule: RenameRule,
    member: int,
    match: re.Match[str] | None,
) -> Iterator[_Target]:
    options = rule.options
    number = 0
    if options.stack is not None:
        numbers = [] if match is None else _unused_numbers(match, rule.new)
        if len(numbers) != 1:
            raise ValueError(
                "`rename` must have one group of `old` with the number for `stack` that `new` "
                f"does not use, got {len(numbers)} in {rule.shown} for {path!r}"
            )
        number = numbers[0]
    for part, new in enumerate(rule.new):
        renamed = replace_prefix(path, rule.old[member], new, match)
        if options.unstack is None:
            yield _Target(renamed, number, member, part, len(rule.new))
            continue
        if not -len(struct.shape) <= options.unstack < len(struct.shape):
            raise ValueError(
                f"`rename` has the rule {rule.shown}, but {path!r} has the shape {struct.shape}"
            )
        count = struct.shape[options.unstack]
        # Not `str.format`: a name may have other braces
        yield from (
            _Target(renamed.replace(_NUMBER, str(i)), part=i, parts=count) for i in range(count)
        )


def _unused_numbers(match: re.Match[str], new: Sequence[str]) -> list[int]:
    """Return the groups that are numbers, without those that the new names refer to."""
    references = {number or name for text in new for name, number in _GROUP_REFERENCE.findall(text)}
    names = {index: name for name, index in match.re.groupindex.items()}
    groups = enumerate(match.groups(), start=1)
    return [
        int(x) for i, x in groups if (x or "").isdigit() and not {str(i), names.get(i)} & references
    ]


def _make_piece(
    path: str, rule: RenameRule | None, part: int, parts: int, places: Mapping[tuple[int, int], str]
) -> Piece:
    if rule is None:
        return Piece(((places[0, 0],),))
    present = {number for number, _ in places}
    members = len(rule.old)
    numbers = range(max(present) + 1)
    if len(present) < len(numbers):  # the numbers are data: they may be too large to list
        missing = list(
            itertools.islice((number for number in numbers if number not in present), 11)
        )
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        raise ValueError(
            f"`rename` must find the numbers 0 to {numbers[-1]} for {path!r}, got none for "
            f"{shown}, by the rule {rule.shown}"
        )
    for number in numbers:
        for member, old in enumerate(rule.old):
            if (number, member) not in places:
                raise ValueError(
                    f"`rename` must find {old!r} for {path!r}, got none, by the rule {rule.shown}"
                )
    names = tuple(tuple(places[number, member] for member in range(members)) for number in numbers)
    return Piece(names, rule, rule.options, part, parts)


def rearrange(array: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Return `array` with the axes named in `pattern` divided, permuted and joined.

    Args:
      array: the array.
      pattern: the axes before and after, with those that are one axis in parentheses.
      sizes: sizes by name; one in each pair of parentheses may be left out.

    Raises:
      ValueError: the pattern has another form, or does not fit the shape.

    >>> rearrange(np.zeros((6, 5)), "(h k) d -> d h k", {"h": 3}).shape
    (5, 3, 2)
    """
    sides = [
        [(group or name).split() for group, name in _AXES.findall(side)]
        for side in pattern.split("->")
    ]
    names, new_names = (
        [name for group in side for name in group] for side in (sides[0], sides[-1])
    )
    if len(sides) != 2 or sorted(names) != sorted(new_names):
        raise ValueError(
            f"the axes must be named before and after as 'a (b c) -> a b c', got {pattern!r}"
        )
    before, after = sides
    if len(set(names)) != len(names) or len(before) != array.ndim:
        raise ValueError(f"{pattern!r} must name each axis of the shape {array.shape} once")
    known = dict(sizes)
    for size, group in zip(array.shape, before, strict=True):
        unknown = [name for name in group if name not in known]
        rest = math.prod(known[name] for name in group if name in known)
        if len(unknown) > 1:
            raise ValueError(
                f"`sizes` must have all but one of {group} in {pattern!r}, got {dict(sizes)}"
            )
        if size % rest or (not unknown and size != rest):
            raise ValueError(
                f"an axis of {size} is not {' * '.join(group)} with the sizes {dict(sizes)}"
            )
        known |= dict.fromkeys(unknown, size // rest)  # one name at most, checked above
    divided = array.reshape([known[name] for name in names])
    permuted = divided.transpose([names.index(name) for name in new_names])
    return permuted.reshape([math.prod(known[name] for name in group) for group in after])


def _split(array: np.ndarray, split: int | Mapping[str, Any], part: int, parts: int) -> np.ndarray:
    axis, sizes = split_sizes(split)
    if sizes is None:
        return np.split(array, parts, axis=axis)[part]
    if len(sizes) != parts or sum(sizes) != array.shape[axis]:
        raise ValueError(
            f"`split` must have {parts} sizes with the sum {array.shape[axis]}, got {sizes}"
        )
    # Views: a part is copied only when it is placed, so that large tensors are not held twice.
    return np.split(array, np.cumsum(sizes)[:-1], axis=axis)[part]


def split_sizes(split: int | Mapping[str, Any]) -> tuple[int, list[int] | None]:
    """Return the axis and the sizes of a `split`; None for equal ones."""
    if isinstance(split, int):
        return split, None
    options = dict(split.items())
    if set(options) != {"axis", "sizes"}:
        raise ValueError(f"`split` must be an axis or dict(axis=, sizes=[...]), got {options}")
    return options["axis"], list(options["sizes"])


def _transpose(array: np.ndarray) -> np.ndarray:
    # (out, in, *window) to (*window, in, out)
    return array if array.ndim < 2 else array.transpose(*range(2, array.ndim), 1, 0)


def _find_transform(transform: str | Transform) -> Transform:
    if not isinstance(transform, str):
        return transform
    if transform in _TRANSFORMS:
        return _TRANSFORMS[transform]
    from jengine.config.modules import import_attribute

    try:
        return import_attribute(transform)
    except UnknownNameError as error:
        raise UnknownNameError(
            "`transform` must be 'transpose', 'none', a function or its import path, got "
            f"{transform!r}: {error}"
        ) from None


_TRANSFORMS: dict[str, Transform] = {"none": lambda array: array, "transpose": _transpose}
