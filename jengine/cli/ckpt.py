"""`jengine ckpt`: list, show, remove and export checkpoints."""

import argparse
import collections
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.checkpoint.inventory import (
    CheckpointEntry,
    list_checkpoint_entries,
    remove_checkpoints,
)
from jengine.checkpoint.layout import find_checkpoint, read_meta
from jengine.checkpoint.lock import is_locked
from jengine.checkpoint.report import describe
from jengine.checkpoint.restore import list_arrays
from jengine.cli.commands import format_bytes
from jengine.config.storage import storage_path
from jengine.extras.report.remote import TIMESTAMP, fetch_runs
from jengine.extras.report.run_files import read_run
from jengine.logging.tables import format_table


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
        logged = _read_last_validation(args.work_dir, entries)
        rows = [
            _make_row(entry, training, logged.get(entry.meta.get("iter", -1), {}))
            for entry in entries
        ]
        print(
            format_table(
                columns,
                rows,
                align=["left", "right", "right", "left", "right", "left", "left", "left"],
            )
        )
        print(
            f"{len(entries)} checkpoints, "
            f"{format_bytes(sum(entry.size for entry in entries), digits=1)}",
            end="",
        )
    else:
        print("no checkpoints", end="")
    print(
        f" in {storage_path('WORK_DIR', args.work_dir)}"
        + ("; a run is training there" if training else "")
    )


def _read_last_validation(
    work_dir: str, entries: Sequence[CheckpointEntry]
) -> dict[int, dict[str, float]]:
    """Return the metrics at the last iteration, by iteration, from the run's log.

    Checkpoints have the validations before them, but the last one is saved before its own.
    """
    last = max(entries, key=lambda entry: entry.meta.get("iter", -1)).meta
    if "iter" not in last or not TIMESTAMP.fullmatch(str(last.get("timestamp", ""))):
        return {}
    run = read_run(fetch_runs(f"{storage_path('work_dir', work_dir)}/{last['timestamp']}", ()))
    points = {
        name: dict(zip(*curve, strict=True))
        for (mode, name), curve in run.curves[0].items()
        if mode == "val"
    }
    return {
        last["iter"]: {
            name: found[last["iter"]] for name, found in points.items() if last["iter"] in found
        }
    }


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
    print(format_table(["array", "type", "size"], rows, align=["left", "left", "right"]))
    items: collections.Counter[str] = collections.Counter()
    for name, size in sizes.items():
        items[name.partition(".")[0]] += size
    totals = ", ".join(f"{item} {format_bytes(size, digits=1)}" for item, size in items.items())
    print(f"{len(stored)} arrays: {totals}")


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
