"""Number the layers of known models by the names of their parameters, for layer-wise learning rates.

Names are PyTorch's (`backbone.layers.3.attn.weight`), see `jengine.paths.torch_alias`. All functions are pure.
"""

import re
from collections.abc import Iterable, Sequence

_TOKENS = ("backbone.cls_token", "backbone.mask_token", "backbone.pos_embed")


def count_below(names: Iterable[str], prefix: str) -> int:
    """Return how many numbered modules there are below `prefix`: 2 for `layers.0.w`, `layers.1.w`."""
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)(\.|$)", name) for name in names)
    return len({match[1] for match in found if match})


def stage_depths(names: Sequence[str], prefix: str) -> list[int]:
    """Return the number of blocks in each stage: of `stages.0.blocks.1.w` and so on."""
    return [count_below(names, f"{prefix}.{s}.blocks") for s in range(count_below(names, prefix))]


def _number(name: str, prefix: str) -> int | None:
    match = re.match(rf"{re.escape(prefix)}[._](\d+)", name)
    return int(match[1]) if match else None


def _block(name: str) -> int | None:
    """Return i of `backbone.stages.0.blocks.i`; None for what a stage has besides blocks, such as a downsampling."""
    block = name.split(".")[4:5]
    return int(block[0]) if block and block[0].isdigit() else None


def vit_id(name: str, layers: int) -> int:
    """Return the layer of a vision transformer: 0 the stem, i + 1 block i, `layers - 1` everything behind."""
    if name in _TOKENS or name.startswith("backbone.patch_embed"):
        return 0
    block = _number(name, "backbone.layers")
    return layers - 1 if block is None else block + 1


def swin_id(name: str, depths: Sequence[int]) -> int:
    """Return the layer of a Swin transformer: 0 the stem, then the blocks, a downsampling as the last before it."""
    if "mask_token" in name or "patch_embed" in name:
        return 0
    stage = _number(name, "backbone.stages")
    if stage is None:
        return sum(depths) + 1
    block = _block(name)
    return sum(depths[: stage + 1]) if block is None else sum(depths[:stage]) + block + 1


def mixmim_id(name: str, depths: Sequence[int]) -> int:
    """Return the layer of MixMIM: -1 the stem, blocks from 0; the head counts as the layer before the last."""
    if any(part in name for part in ("patch_embed", "absolute_pos_embed", "pos_embed")):
        return -1
    stage = _number(name, "backbone.layers")
    if stage is None:
        return sum(depths) - 1
    block = _block(name)
    return sum(depths[: stage + 1]) - 1 if block is None else sum(depths[:stage]) + block


def convnext_layer_id(name: str, layers: int) -> int:
    """Return the layer of a ConvNeXt: its third stage is divided into threes, its last has number `layers`.

    Args:
      name: the parameter's name.
      layers: 12 for the models with 27 blocks in the third stage, 6 for those with 9.
    """
    if name in _TOKENS:
        return 0
    downsampling = _number(name, "backbone.downsample_layers")
    if downsampling is not None:
        return (0, 2, 3, layers)[downsampling]
    stage = _number(name, "backbone.stages")
    if stage is None:
        return layers + 1
    if stage == 2:
        block = re.match(r"backbone\.stages[._]2\D+(\d+)", name)
        return 3 + (int(block[1]) if block else 0) // 3
    return (1, 2, 3, layers)[stage]


def convnext_stage_id(name: str, layers: int) -> int:
    """Return the stage of a ConvNeXt: 0 the stem and all downsamplings, s + 1 stage s, `layers - 1` everything else."""
    if name in _TOKENS or name.startswith("backbone.downsample_layers"):
        return 0
    stage = _number(name, "backbone.stages")
    return layers - 1 if stage is None else stage + 1
