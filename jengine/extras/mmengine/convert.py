"""`jengine convert`: an MMEngine project's config, written as one for jengine."""

import argparse
import pathlib
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jengine.config.containers import iter_nodes, resolve
from jengine.config.dump import format_literal
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS, OPTIMIZERS, PARAM_SCHEDULERS
from jengine.extras.imix.imix_config import KEYS, from_imix
from jengine.extras.mmengine.conversion import Conversion
from jengine.extras.mmengine.conversion_rows import Row, describe, list_lost
from jengine.extras.mmengine.flat import load_flat
from jengine.logging.tables import format_table

_IMIX_MARKS = ("train_data", "lr_config", "total_epochs", "max_iter")
_OLD_MARKS = ("data", "runner", "lr_config", "optimizer_config")
_WIDTH = 70  # columns of the text in the table
_ORDER = ("taken over", "changed", "dropped", "to be done")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Convert a config, and print what happened to each key as a table."""
    path = pathlib.Path(args.mmengine_config)
    if not path.is_file():
        raise FileNotFoundError(f"the config file {str(path)!r} does not exist")
    # The file is meant to be edited by hand afterwards: a second conversion must not undo that.
    if args.out and pathlib.Path(args.out).exists():
        raise ConfigError(f"`--out` must be a new file, got {args.out!r}, which exists")
    text, table = _convert_file(path)
    if args.out:
        pathlib.Path(args.out).write_text(text, encoding="utf-8")
        print(table)
        print(f"wrote {args.out}; search it for TODO")
    else:
        print(text, end="")
        print(table, file=sys.stderr)


def _convert_file(path: pathlib.Path) -> tuple[str, str]:
    """Return the text of the new config file, and a table of what happened and what a person
    must do.
    """
    path = path.resolve()  # base files are relative to the file itself, not to a link to it
    flat = load_flat(path, types.ModuleType("_jengine_converted"))
    cfg = resolve(flat.values)
    if "train_data" in cfg and any(mark in cfg for mark in _IMIX_MARKS[1:]):
        body, rows = _convert_imix(cfg)
    elif any(mark in cfg for mark in _OLD_MARKS) and "train_dataloader" not in cfg:
        raise ConfigError(
            f"{str(path)!r} must be a config of MMEngine (train_dataloader, optim_wrapper, ...) "
            "or iMIX (train_data), "
            "got the older form of MMCV 1.x"
        )
    else:
        conversion = Conversion(cfg, flat.read)
        body = _format(conversion.result, conversion.todo, "{}")
        rows = conversion.rows
    lines: list[tuple[str, str, str]] = []
    for row in sorted(rows, key=lambda row: _ORDER.index(row.status)):
        first, *others = textwrap.wrap(row.text, _WIDTH) or [""]
        lines += [(row.status, row.path, first), *(("", "", other) for other in others)]
    return f'"""Converted from {path.name} by `jengine convert`."""\n{body}', format_table(
        ("", "key", "what"), lines
    )


def _convert_imix(cfg: Mapping[str, Any]) -> tuple[str, list[Row]]:
    """Return the code of `from_imix(...)` for an iMIX config, and the table rows."""
    kept = {key: cfg[key] for key in KEYS if key in cfg}
    replaced = ("model", "train_data", "test_data", "load_from")
    rows = [Row("taken over", key, "") for key in kept if key not in replaced]
    rows += [
        Row("dropped", key, f"not a key of `from_imix`, {describe(cfg[key])}", is_whole=True)
        for key in cfg
        if key not in kept
    ]
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
    for key, error in _check_imix(kept):
        todo.setdefault(key, []).append(str(error))
    rows += [
        Row("to be done", key, text, key == "load_from")
        for key, texts in todo.items()
        for text in texts
    ]
    rows += list_lost(cfg, kept, rows, {"model.type": "model.module.type"})
    body = "\nfrom jengine.extras.imix import from_imix\n" + _format(
        kept, todo, "from_imix(\n        {}\n    )"
    )
    return body, rows


def _check_imix(cfg: Mapping[str, Any]) -> list[tuple[str, Exception]]:
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


def _format(cfg: Mapping[str, Any], todo: Mapping[str, Sequence[str]], call: str) -> str:
    """Return the code of `get_config()`, with comments above the keys that a person must
    complete.
    """
    paths = {path for path, _ in iter_nodes(cfg)}
    absent = [
        f"    # TODO {path}: {text}\n"
        for path, texts in todo.items()
        if path not in paths
        for text in texts
    ]
    literal = format_literal(cfg, todo, indent=4 if call == "{}" else 8)
    return f"\n\ndef get_config() -> dict:\n{''.join(absent)}    return {call.format(literal)}\n"
