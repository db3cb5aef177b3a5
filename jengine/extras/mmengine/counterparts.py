"""Counterparts of MMEngine's losses and augmentations, whose names and arguments differ here.

Each function returns None for a part with an argument that has no counterpart: to convert only some
arguments would train something else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Part = Mapping[str, Any]

# Arguments of losses with the values that change nothing here
_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "loss_weight": (1.0,),
    "reduction": ("mean",),
    "use_sigmoid": (False, None),
    "use_mask": (False,),
    "class_weight": (None,),
    "pos_weight": (None,),
    "avg_non_ignore": (True,),
}


def convert_loss(cfg: Part, ignore_index: int | None = None) -> dict[str, Any] | None:
    """Return the loss for a classifier's or a segmentation head's.

    >>> convert_loss({"type": "LabelSmoothLoss", "label_smooth_val": 0.1, "mode": "original"})
    {'type': 'CrossEntropy', 'label_smoothing': 0.1}

    Args:
      cfg: the config.
      ignore_index: the label that the head leaves out.
    """
    rest = {
        key: value
        for key, value in cfg.items()
        if key != "type" and value not in _NO_EFFECT.get(key, ())
    }
    result: dict[str, Any]
    match cfg["type"]:
        case "CrossEntropyLoss":
            result = {"type": "CrossEntropy"}
            ignore_index = rest.pop("ignore_index", ignore_index)
            rest.pop("use_soft", None)  # labels of both kinds are accepted
        case "LabelSmoothLoss":
            value = rest.pop("label_smooth_val", 0.0)
            mode = rest.pop("mode", "original")
            if mode not in ("original", "classy_vision"):
                return None
            # ClassyVision divides (1 for the class, value / C for all) by 1 + value.
            result = {
                "type": "CrossEntropy",
                "label_smoothing": value / (1 + value) if mode != "original" else value,
            }
            rest.pop("num_classes", None)  # the outputs have them
        case "MSELoss":
            result = {"type": "MeanSquaredError"}
        case _:
            return None
    if "loss_name" in rest:
        result["name"] = rest.pop("loss_name")
    if ignore_index is not None and result["type"] == "CrossEntropy":
        result["ignore_index"] = ignore_index
    return None if rest else result


def convert_augments(cfg: Part) -> dict[str, Any] | None:
    """Return the BatchAugmentHook entry for a `train_cfg` with MixUp and CutMix.

    >>> convert_augments({"augments": {"type": "Mixup", "alpha": 0.2}})
    {'augments': [{'type': 'MixUp', 'alpha': 0.2}]}
    """
    given = cfg["augments"]
    augments = []
    for augment in given if isinstance(given, list | tuple) else [given]:
        rest = dict(augment)
        kind = {"mixup": "MixUp", "cutmix": "CutMix"}.get(
            rest.pop("type").lower().removeprefix("batch")
        )
        kept = {key: rest.pop(key) for key in ("alpha", "prob") if key in rest}
        rest.pop("num_classes", None)  # `SoftLabels` has it
        if rest.get("correct_lam", True):  # the share is always that of the area
            rest.pop("correct_lam", None)
        if kind is None or any(value is not None for value in rest.values()) or "alpha" not in kept:
            return None
        augments.append({"type": kind, **kept})
    probs = cfg.get("probs")
    return {
        "augments": augments,
        **({} if probs is None else {"probs": [probs] if isinstance(probs, float) else probs}),
    }


def find_num_classes(*parts: Any) -> int | None:
    """Return the first `num_classes` in configs, or in lists of these."""
    for part in parts:
        if isinstance(part, Mapping) and isinstance(part.get("num_classes"), int):
            return int(part["num_classes"])
        if (
            isinstance(part, Sequence)
            and not isinstance(part, str)
            and (found := find_num_classes(*part)) is not None
        ):
            return found
    return None


def convert_erasing(cfg: Part) -> dict[str, Any] | None:
    """Return the batch augmentation for a RandomErasing of images before they are normalized.

    >>> convert_erasing({"type": "RandomErasing", "mode": "rand", "fill_std": [58.0]})["fill"]
    'pixels'
    """
    rest = {key: value for key, value in cfg.items() if key != "type"}
    low = rest.pop("min_area_ratio", 0.02)
    high = rest.pop("max_area_ratio", 0.4)
    ratio = rest.pop("aspect_range", (0.3, 10 / 3))
    ratio = (
        (min(ratio, 1 / ratio), max(ratio, 1 / ratio)) if isinstance(ratio, float) else tuple(ratio)
    )
    # The fill is the dataset's mean, or noise with its deviation: 0 and 1 after the normalization.
    fill = "pixels" if rest.pop("mode", "const") == "rand" else "zeros"
    result = {
        "type": "RandomErasing",
        "prob": rest.pop("erase_prob", 0.5),
        "area": (low, high),
        "aspect_ratio": ratio,
    }
    rest = {key: value for key, value in rest.items() if key not in ("fill_color", "fill_std")}
    return None if rest else {**result, "fill": fill}
