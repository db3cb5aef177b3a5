"""What `jengine convert` writes for a config of iMIX: a call of `from_imix`."""

from collections.abc import Callable, Mapping
from typing import Any

from jengine.config.registry import HOOKS, OPTIMIZERS, PARAM_SCHEDULERS
from jengine.extras.imix.imix_config import KEYS, from_imix

_MARKS = ("lr_config", "total_epochs", "max_iter")
_MOVED = {"model.type": "model.module.type"}


def convert_imix(
    cfg: Mapping[str, Any],
) -> tuple[Callable[..., Any], dict[str, Any], dict[str, list[str]], dict[str, str]] | None:
    """Return how to convert a config; None for one that is not iMIX's.

    Returns:
      `from_imix`, its argument, what a person must do by key, and new paths by old ones.
    """
    if "train_data" not in cfg or not any(mark in cfg for mark in _MARKS):
        return None
    kept = {key: cfg[key] for key in KEYS if key in cfg}
    kept.setdefault("work_dir", "work_dirs/imix")
    kind = kept.get("model", {}).get("type", "MyModel")
    kept["model"] = {
        "type": "LinenModel",
        "module": {"type": f"my_model.{kind}"},
        "loss": {"type": "my_model.loss"},
    }
    todo = {
        "model": [
            f"write a Flax module in place of {kind}, and its loss (outputs, batch) -> losses, in "
            "my_model.py"
        ]
    }
    for name in ("train_data", "test_data"):
        if name in kept:
            data = dict(kept[name])
            kind = dict(data.get("data") or {}).get("type", "MyDataset")
            data["data"] = {"type": f"my_data.{kind}"}
            todo[name] = [
                f"write the dataset my_data.{kind}: `__len__` and `__getitem__` -> a dict of arrays"
            ]
            if name == "test_data":
                data.setdefault("post_processor", {"metrics": [{"type": "my_metrics.MyMetric"}]})
                todo[name].append(
                    "`post_processor` must have jengine's metrics (docs/evaluation.md)"
                )
            kept[name] = data
    if kept.get("load_from"):
        todo["load_from"] = [
            f"weights of {kept.pop('load_from')} for your model's names (docs/pretrained.md)"
        ]
    for key, error in _find_errors(kept):
        todo.setdefault(key, []).append(str(error))
    return from_imix, kept, todo, _MOVED


def _find_errors(cfg: Mapping[str, Any]) -> list[tuple[str, Exception]]:
    """Return the errors in sections of an iMIX config that need no model and no data."""
    # Part by part, so that one error does not hide the others; the whole comes last.
    checks: list[tuple[str, Callable[[], Any]]] = [
        ("optimizer", lambda: OPTIMIZERS.get(cfg["optimizer"]["type"])),
        (
            "lr_config",
            lambda: "lr_config" in cfg and PARAM_SCHEDULERS.get(cfg["lr_config"]["policy"]),
        ),
        (
            "checkpoint_config",
            lambda: HOOKS.check({"type": "CheckPointHook", **cfg.get("checkpoint_config", {})}),
        ),
        ("custom_hooks", lambda: [HOOKS.get(hook["type"]) for hook in cfg.get("custom_hooks", ())]),
        ("work_dir", lambda: from_imix(cfg)),
    ]
    errors: list[tuple[str, Exception]] = []
    for key, check in checks:
        try:
            check()
        except (KeyError, TypeError, ValueError) as error:
            errors.append((key, error))
    return errors
