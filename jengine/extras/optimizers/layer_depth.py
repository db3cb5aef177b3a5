"""The layer of each parameter, by rules for known models or by a regular expression."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.optim.param_groups.modules import Parameter

# Matches the parameters before the first layer: embeddings of patches, tokens and positions, and
# the stem of a CNN.
STEM = r"embed|token|patch|stem|(^|\.)cls$"

# (index of a group in the pattern, matched number), outermost first
LayerKey: TypeAlias = tuple[tuple[int, int], ...]

_TOKENS = ("backbone.cls_token", "backbone.mask_token", "backbone.pos_embed")


class LayerPattern:
    """Numbering of layers: 0 for the stem, then the layers that match the pattern, then everything
    else.

    The pattern is searched in the Flax path and in the torch alias; the first match is used. Each
    group matches a number: `layers_(\\d+)` numbers one series of layers,
    `stages_(\\d+)\\.blocks_(\\d+)` blocks within stages, and with `encoder_(\\d+)|decoder_(\\d+)`
    the first series comes before the second. Layers are counted from the parameters.

    >>> names = ["embed.kernel", "block_0.kernel", "block_1.kernel", "head.kernel"]
    >>> layer_id, layers = LayerPattern(r"block_(\\d+)").number(names)
    >>> list(map(layer_id, names)), layers
    ([0, 1, 2, 3], 4)

    Args:
      pattern: a regular expression with a group around each number.
      stem: a regular expression, not case-sensitive; matching parameters outside the layers belong
        to the stem.

    Raises:
      ConfigError: not a regular expression, or a pattern without a group.
    """

    def __init__(self, pattern: str, stem: str = STEM) -> None:
        self.pattern = pattern
        self._layer = _compile("layer_pattern", pattern)
        self._stem = _compile("stem_pattern", stem, re.IGNORECASE)
        # The number is the group: without it a match would not tell which layer it is.
        if not self._layer.groups:
            raise ConfigError(
                r"`layer_pattern` must have a group around the layer's number, such as "
                rf"'layers_(\d+)', got {pattern!r}"
            )

    def key(self, name: str) -> LayerKey | None:
        """Return the numbers that identify a parameter's layer; None outside the layers."""
        for alias in (name, paths.torch_alias(name)):  # patterns may come from either world
            match = self._layer.search(alias)
            groups = [(i, text) for i, text in enumerate(match.groups()) if text] if match else []
            if groups:
                invalid = next((text for _, text in groups if not text.isdigit()), None)
                if invalid is not None:
                    raise ConfigError(
                        f"each group of `layer_pattern` must match a number, got {invalid!r} in "
                        f"{alias!r}; write (?:...) for a group that is not a number"
                    )
                # The index of the group sorts `encoder_*` before `decoder_*`, whatever the numbers.
                return tuple((i, int(text)) for i, text in groups)
        return None

    def number(self, names: Iterable[str]) -> tuple[Callable[[str], int], int]:
        """Return a function name -> layer for these parameters, and the number of layers,
        including stem and head.
        """
        # Ranks and not the numbers: layers may start from 1, or have gaps.
        keys = sorted({key for name in names if (key := self.key(name)) is not None})
        depth = {key: index for index, key in enumerate(keys, start=1)}

        def layer_id(name: str) -> int:
            """Return the layer of a parameter."""
            key = self.key(name)
            if key is not None:
                return depth[key]
            return 0 if self._stem.search(name) else len(depth) + 1

        return layer_id, len(depth) + 2

    def find_stacked(self, parameters: Mapping[str, Parameter]) -> dict[str, Callable[[int], str]]:
        """Find the parameters in which `nn.scan` stacks all layers.

        A module is stacked if the pattern matches the name followed by a number, and all parameters
        below it have an additional first axis, of equal length.

        Returns:
          Path -> function from i to the name that layer i would have in a model without stacking.
        """
        # path of a module that may be stacked -> separator before the number
        modules = dict(stack for path in parameters if (stack := self._find_stack(path)))
        names: dict[str, Callable[[int], str]] = {}
        for module, separator in modules.items():
            below = {
                path: parameter
                for path, parameter in parameters.items()
                if path.startswith(f"{module}.")
            }
            lengths = {parameter.shape[:1] for parameter in below.values()}
            if other := next(
                (path for path, p in below.items() if p.stacked and not p.has_layer_axis), None
            ):
                raise ConfigError(
                    f"the layers of {other!r} must be stacked along the first axis for layer "
                    f"decay, got axes {below[other].stacked}"
                )
            if len(lengths) == 1 and all(parameter.has_layer_axis for parameter in below.values()):
                for path in below:
                    names[path] = _insert_number(module, separator, path.removeprefix(module))
        return names

    def _find_stack(self, path: str) -> tuple[str, str] | None:
        """Return the module in the path that may be stacked, and the separator before a layer
        number.
        """
        parts = path.split(".")
        for count in range(1, len(parts)):
            module = ".".join(parts[:count])
            suffix = parts[count:]
            for separator in () if suffix[0].isdigit() else ("_", ".", ""):
                # Try a name as it would be without the stack: `layers.kernel` as `layers_0.kernel`
                # and so on.
                match = self._layer.search(".".join([f"{module}{separator}0", *suffix]))
                spans = (
                    [match.span(group) for group in range(1, self._layer.groups + 1)]
                    if match
                    else []
                )
                start = len(module) + len(separator)
                if (start, start + 1) in spans:  # a group matched the inserted number
                    return module, separator
        return None


def vit_layer_id(name: str, layers: int) -> int:
    """Return the vision transformer layer: 0 for the stem, i + 1 for block i, `layers - 1` for
    the rest.
    """
    if name in _TOKENS or name.startswith("backbone.patch_embed"):
        return 0
    block = _parse_number(name, "backbone.layers")
    return layers - 1 if block is None else block + 1


def swin_layer_id(name: str, depths: Sequence[int]) -> int:
    """Return the Swin transformer layer: 0 for the stem, then the blocks.

    A downsampling is in the last block.
    """
    is_stem = "mask_token" in name or "patch_embed" in name
    return 0 if is_stem else 1 + _block_index(name, "backbone.stages", depths, head=sum(depths))


def mixmim_layer_id(name: str, depths: Sequence[int]) -> int:
    """Return the MixMIM layer: -1 for the stem, then the blocks from 0.

    The head is in the last block.
    """
    is_stem = "patch_embed" in name or "pos_embed" in name
    return -1 if is_stem else _block_index(name, "backbone.layers", depths, head=sum(depths) - 1)


def convnext_layer_id(name: str, layers: int) -> int:
    """Return the ConvNeXt layer: every three blocks in the third stage are a layer, the last stage
    is `layers`.

    `layers` is 12 for models with 27 blocks in the third stage, 6 for models with 9.
    """
    if name in _TOKENS:
        return 0
    downsampling = _parse_number(name, "backbone.downsample_layers")
    if downsampling is not None:
        # MMSegmentation's tables, here and below: a downsampling belongs to the layer after it.
        return (0, 2, 3, layers)[downsampling]
    stage = _parse_number(name, "backbone.stages")
    if stage is None:
        return layers + 1
    if stage == 2:
        block = re.match(r"backbone\.stages[._]2\D+(\d+)", name)
        return 3 + (int(block[1]) if block else 0) // 3
    return (1, 2, 3, layers)[stage]


def convnext_stage_id(name: str, layers: int) -> int:
    """Return the ConvNeXt stage: 0 for stem and downsamplings, s + 1 for stage s, `layers - 1`
    for the rest.
    """
    if name in _TOKENS or name.startswith("backbone.downsample_layers"):
        return 0
    stage = _parse_number(name, "backbone.stages")
    return layers - 1 if stage is None else stage + 1


def count_below(names: Iterable[str], prefix: str) -> int:
    """Return how many numbered modules are below `prefix`: 2 for `layers.0.w`, `layers.1.w`."""
    matches = (re.match(rf"{re.escape(prefix)}\.(\d+)(\.|$)", name) for name in names)
    return len({match[1] for match in matches if match})


def stage_depths(names: Sequence[str], prefix: str) -> list[int]:
    """Return how many blocks each stage has, for names such as `stages.0.blocks.1.w`."""
    return [count_below(names, f"{prefix}.{s}.blocks") for s in range(count_below(names, prefix))]


def _parse_number(name: str, prefix: str) -> int | None:
    match = re.match(rf"{re.escape(prefix)}[._](\d+)", name)
    return int(match[1]) if match else None


def _block_index(name: str, prefix: str, depths: Sequence[int], head: int) -> int:
    """Return the index of a block over all stages.

    That of the last block for other parts of a stage, else `head`.
    """
    stage = _parse_number(name, prefix)
    if stage is None:
        return head
    block = name.split(".")[4:5]  # after backbone, stages, 0, blocks
    is_block = bool(block) and block[0].isdigit()
    return sum(depths[:stage]) + int(block[0]) if is_block else sum(depths[: stage + 1]) - 1


def _compile(name: str, pattern: object, flags: int = 0) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)  # type: ignore[call-overload]  # checked here
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"`{name}` must be a regular expression, got {pattern!r}: {error}"
        ) from None


def _insert_number(module: str, separator: str, suffix: str) -> Callable[[int], str]:
    return lambda layer: f"{module}{separator}{layer}{suffix}"
