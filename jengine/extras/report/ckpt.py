"""`jengine ckpt`: list, show, remove and export checkpoints."""

import argparse
import collections
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.checkpoint.identity import TIMESTAMP
from jengine.checkpoint.layout import find_checkpoint, read_meta
from jengine.checkpoint.lock import is_locked
from jengine.checkpoint.report import describe
from jengine.checkpoint.restore import list_arrays
from jengine.cli.commands import format_bytes
from jengine.config.json_codec import decode_object
from jengine.config.storage import read_text, storage_path
from jengine.extras.report.inventory import (
    CheckpointEntry,
    list_checkpoint_entries,
    remove_checkpoints,
)
from jengine.extras.report.table_format import count
from jengine.logging.console import write_line
from jengine.logging.tables import format_table

_NO_METRICS = ("step", "iter", "epoch", "mode", "time", "data_time")  # in a line of the log


def ls(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """List a run's checkpoints."""
    entries = list_checkpoint_entries(args.work_dir)
    training = is_locked(args.work_dir)
    if entries:
        columns = [
            "checkpoint",
            "epoch",
            "iter",
            "saved",
            "size",
            "validation",
            "kept because",
            "state",
        ]
        last = max(entries, key=lambda entry: entry.meta.get("iter", -1)).meta
        logged = _read_last_validation(args.work_dir, last)
        rows = [
            _make_row(entry, training, logged if entry.meta.get("iter") == last.get("iter") else {})
            for entry in entries
        ]
        write_line(
            format_table(
                columns,
                rows,
                align=["left", "right", "right", "left", "right", "left", "left", "left"],
            )
        )
        print(
            f"{count(len(entries), 'checkpoint')}, "
            f"{format_bytes(sum(entry.size for entry in entries), digits=1)}",
            end="",
        )
    else:
        print("no checkpoints", end="")
    print(
        f" in {storage_path('WORK_DIR', args.work_dir)}"
        + ("; a run is training there" if training else "")
    )


def _read_last_validation(work_dir: str, last: Mapping[str, Any]) -> dict[str, float]:
    """Return the validation metrics at the iteration of the last checkpoint, from the run's log.

    Checkpoints have the validations before them, but the last one is saved before its own.

    Args:
      work_dir: directory or URL.
      last: `meta` of the checkpoint.
    """
    timestamp = str(last.get("timestamp", ""))
    metrics: dict[str, float] = {}
    # it may be from anyone, and names a directory
    if "iter" not in last or not TIMESTAMP.fullmatch(timestamp):
        return metrics
    path = storage_path("WORK_DIR", work_dir) / timestamp / "vis_data" / "scalars.json"
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError):  # not there, or not a text file
        return metrics
    for line in lines:
        try:
            row = decode_object(line)
        except ValueError:  # incomplete while the run writes it
            continue
        if row.get("mode") == "val" and row.get("iter") == last["iter"]:
            for name, value in row.items():
                # numbers, and the texts that stand for NaN and infinity
                with contextlib.suppress(TypeError, ValueError, OverflowError):
                    if name not in _NO_METRICS:
                        metrics[name] = float(value)
    return metrics


def _make_row(entry: CheckpointEntry, training: bool, logged: Mapping[str, float]) -> list[Any]:
    state = "complete" if entry.problem is None else f"corrupt: {entry.problem}"
    if entry.name.endswith(".incoming") and training:
        state = "being saved"
    progress = [entry.meta.get(name) for name in ("epoch", "iter", "time")]
    metrics = ", ".join(
        f"{name} {value:.4g}" for name, value in {**logged, **entry.metrics}.items()
    )
    return [entry.name, *progress, format_bytes(entry.size, digits=1), metrics, entry.reason, state]


def show(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Show what a checkpoint contains."""
    path = find_checkpoint(args.checkpoint)
    # Metadata and shapes only: a checkpoint of any size is shown without reading an array.
    metadata = read_meta(path)
    stored = list_arrays(path)
    meta = metadata.pop("meta", {})
    print(path)
    for name, value in meta.items():
        if name == "versions":
            value = ", ".join(f"{package} {version}" for package, version in value.items())
        if name != "cfg":
            print(f"  {name:<16} {value}")
    print(f"  {'also contains':<16} {', '.join(_list_contents(metadata, meta)) or 'nothing'}")
    for item, trained_path in metadata.get("exchanged", {}).items():
        print(f"  {item} contains averages; the trained values are in {trained_path}")
    sizes = {name: leaf.size * leaf.dtype.itemsize for name, leaf in stored.items()}
    rows = [
        [name, describe(leaf), format_bytes(sizes[name], digits=1)] for name, leaf in stored.items()
    ]
    write_line(format_table(["array", "type", "size"], rows, align=["left", "left", "right"]))
    items: collections.Counter[str] = collections.Counter()
    for name, size in sizes.items():
        items[name.partition(".")[0]] += size
    totals = ", ".join(f"{item} {format_bytes(size, digits=1)}" for item, size in items.items())
    print(f"{count(len(stored), 'array')}: {totals}")


def _list_contents(metadata: Mapping[str, Any], meta: Mapping[str, Any]) -> list[str]:
    """Return descriptions of what a checkpoint contains besides arrays and `meta`."""
    contents = [f"the config ({len(meta['cfg'].splitlines())} lines)"] if meta.get("cfg") else []
    for name, value in metadata.items():
        if name == "hooks":
            contents += [f"the state of {hook}" for hook in value]
        elif value and name not in ("iter", "exchanged", "evaluated"):
            contents.append(name)
    return contents


def rm(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Remove checkpoints."""
    removed = remove_checkpoints(args.work_dir, args.names, force=args.force)
    for entry in removed:
        print(f"removed {entry.path}")
    print(f"freed {format_bytes(sum(entry.size for entry in removed), digits=1)}")
