"""Search spaces: lists of values, ranges, and the settings that a sweep runs."""

import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jengine.config.errors import ConfigError
from jengine.config.overrides import parse_value

SEED = "randomness.seed"
_RANGE = re.compile(r"(?P<low>[^:]+)\.\.(?P<high>[^:]+?)(?P<log>:log)?(?P<int>:int)?")
_DIGITS = 4  # of a drawn number: enough for a hyperparameter, and short in names

Setting: TypeAlias = dict[str, Any]
"""Values by config path."""


class ValueRange(NamedTuple):
    """Range of a number, from `low` to `high`, both included.

    >>> ValueRange(1e-4, 1e-1, log=True).draw(random.Random(0))
    0.03414
    """

    low: float
    high: float
    log: bool = False  # whether all magnitudes are equally likely, instead of all values
    is_int: bool = False  # whether to draw integers

    def draw(self, generator: random.Random) -> float:
        """Return a random value, a float with four significant digits."""
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        if self.is_int:
            return min(max(round(value), math.ceil(self.low)), math.floor(self.high))
        return min(max(round_number(value), self.low), self.high)


def round_number(value: float) -> float:
    """Return a number with four significant digits.

    >>> round_number(0.00123456)
    0.001235
    """
    return float(f"{value:.{_DIGITS}g}")


def check_range(path: str, limits: ValueRange | Sequence[Any]) -> ValueRange:
    """Return a range from `(low, high)`, perhaps with 'log' and 'int' after them.

    >>> check_range("lr", (1e-4, 1e-1, "log"))
    ValueRange(low=0.0001, high=0.1, log=True, is_int=False)

    Raises:
      ConfigError: another form, or limits in the wrong order.
    """
    if isinstance(limits, ValueRange):  # of `parse_ranges`
        return limits
    low, high, *flags = (
        (math.nan, math.nan) if isinstance(limits, str) or len(limits) < 2 else limits
    )
    result = ValueRange(low, high, "log" in flags, "int" in flags)
    numbers = [
        value for value in result[:2] if isinstance(value, int | float) and math.isfinite(value)
    ]
    is_known = set(flags) <= {"log", "int"}
    is_integer = not result.is_int or all(value == round(value) for value in numbers)
    is_above = not result.log or result.low > 0
    if (
        len(numbers) < 2
        or not is_known
        or not result.low < result.high
        or not is_above
        or not is_integer
    ):
        kind = (
            f"{'integers ' if result.is_int else ''}low and high{' above 0' if result.log else ''}"
        )
        raise ConfigError(
            f"the range of `{path}` must be {kind}, perhaps with log or int, such as "
            f"1e-4..1e-1:log, got {limits!r}"
        )
    return result


def parse_grid(arguments: Iterable[str]) -> dict[str, list[Any]]:
    """Return the values by path from the arguments of `--grid`.

    >>> parse_grid(["optim_wrapper.optimizer.lr=1e-3,1e-2", "model.module.widths=(8,16),(16,32)"])
    {'optim_wrapper.optimizer.lr': [0.001, 0.01], 'model.module.widths': [(8, 16), (16, 32)]}
    """
    grid = {}
    for path, values in _pairs("--grid", arguments):
        texts = [text.strip() for text in _split(values)]
        if not all(texts):
            raise ConfigError(
                f"`--grid` must have a value between two commas, got {path}={values}; write '' "
                "for no text"
            )
        grid[path] = [parse_value(text) for text in texts]
    return grid


def parse_ranges(arguments: Iterable[str]) -> dict[str, ValueRange]:
    """Return the ranges by path from the arguments of `--range`.

    >>> parse_ranges(["lr=1e-4..1e-1:log", "depth=2..8:int"])["depth"]
    ValueRange(low=2, high=8, log=False, is_int=True)
    """
    ranges = {}
    for path, text in _pairs("--range", arguments):
        match = _RANGE.fullmatch(text)
        if match is None:
            check_range(path, text)  # raises
            continue
        limits = [parse_value(match[name]) for name in ("low", "high")]
        ranges[path] = check_range(
            path, (*limits, *(name for name in ("log", "int") if match[name]))
        )
    return ranges


def list_settings(
    settings: Sequence[Setting] | None,
    grid: Mapping[str, Sequence[Any]],
    ranges: Mapping[str, ValueRange],
    draws: int,
    seeds: Sequence[int],
) -> list[Setting]:
    """Return the settings of all runs, those of the first seed first.

    >>> list_settings(None, {"lr": [0.1, 0.2]}, {}, 0, [0, 1])[:3]
    [{'lr': 0.1, 'randomness.seed': 0}, {'lr': 0.2, 'randomness.seed': 0}, {'lr': 0.1,
    'randomness.seed': 1}]

    Args:
      settings: of `get_sweep()`; each is combined with the others.
      grid: lists of values by path: all combinations, or with `draws` one of each list at random.
      ranges: to draw from.
      draws: number of random settings; 0 for all combinations.
      seeds: random seeds for each setting; empty for that of the config.
    """
    if draws:
        drawn: list[Setting] = [_draw(grid, ranges, index) for index in range(draws)]
    else:
        drawn = [
            dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
        ]
    combined = [{**setting, **values} for setting in settings or [{}] for values in drawn]
    seeded = (
        [{**setting, SEED: seed} for seed in seeds for setting in combined] if seeds else combined
    )
    return list({repr(sorted(setting.items())): setting for setting in seeded}.values())


def format_override(path: str, value: Any) -> str:
    """Return an override, as `apply_overrides` reads it.

    >>> format_override("model.act", "gelu")
    "model.act='gelu'"
    """
    return f"{path}={value!r}"


def _draw(
    grid: Mapping[str, Sequence[Any]], ranges: Mapping[str, ValueRange], index: int
) -> Setting:
    # A generator for each index: a sweep with more draws begins with the same ones
    generator = random.Random(index)
    drawn = {path: limits.draw(generator) for path, limits in ranges.items()}
    return {**drawn, **{path: generator.choice(values) for path, values in grid.items()}}


def _pairs(option: str, arguments: Iterable[str]) -> list[tuple[str, str]]:
    pairs: dict[str, str] = {}
    for argument in arguments:
        path, equals, text = argument.partition("=")
        if not (path and equals and text):
            raise ConfigError(f"`{option}` must be PATH=VALUES, got {argument!r}")
        if option == "--grid" and re.search(r"\d\.\.[-\d]", text):
            raise ConfigError(
                f"`--grid` must be PATH=A,B,..., got {argument!r}: for a range write "
                f"--random 8 --range {argument}"
            )
        path = path.removeprefix("--").removeprefix("config.")
        if path in pairs:
            raise ConfigError(
                f"`{option}` must have each path once, got {path}={pairs[path]} and {path}={text}"
            )
        pairs[path] = text
    return list(pairs.items())


def _split(text: str) -> list[str]:
    """Split a text at its commas outside brackets and quotes.

    >>> _split("1,(2,3),'a,b'")
    ['1', '(2,3)', "'a,b'"]
    """
    parts = [""]
    depth = 0
    quote = ""
    for char in text:
        if char == "," and not depth and not quote:
            parts.append("")
            continue
        if char in "'\"":
            quote = "" if char == quote else quote or char
        elif not quote:
            depth += (char in "([{") - (char in ")]}")
        parts[-1] += char
    return parts
