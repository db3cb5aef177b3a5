"""`jengine ckpt`: what checkpoints a run has, what is in one, and getting rid of some."""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from jengine.checkpoint.inventory import CheckpointEntry


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command to those of `jengine`.

    Args:
      commands: what `add_subparsers` gave.
      common: the parent parser with the options that every command has.
    """
    work_dir = argparse.ArgumentParser(add_help=False)
    work_dir.add_argument("work_dir", metavar="WORK_DIR", help="a run's directory")
    checkpoint = argparse.ArgumentParser(add_help=False)
    checkpoint.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a work dir for its newest one")

    ckpt = commands.add_parser("ckpt", help="list, show, remove or export checkpoints")
    actions = ckpt.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser(
        "ls", parents=[work_dir, common], help="list the checkpoints of a run, and why each is kept"
    )
    ls.set_defaults(run=_ls)
    show = actions.add_parser("show", parents=[checkpoint, common], help="show what is in a checkpoint")
    show.set_defaults(run=_show)
    rm = actions.add_parser("rm", parents=[work_dir, common], help="remove checkpoints of a run")
    rm.add_argument("names", nargs="+", metavar="NAME", help="the checkpoints, as `jengine ckpt ls` names them")
    rm.add_argument("--force", action="store_true", help="remove even the latest, from which the run would resume")
    rm.set_defaults(run=_rm)
    export = actions.add_parser(
        "export", parents=[checkpoint, common], help="write the parameters for PyTorch, as a safetensors file"
    )
    export.add_argument("file", metavar="FILE", help="the file to write, as model.safetensors")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--ema", action="store_true", help="the averaged parameters; an error where there are none")
    which.add_argument("--raw", action="store_true", help="the parameters that were trained, not their average")
    export.add_argument("--batch-stats", action="store_true", help="the running statistics of batch norms too")
    export.set_defaults(run=_export)


def _ls(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.checkpoint.inventory import read_inventory
    from jengine.checkpoint.lock import is_locked
    from jengine.logging import format_table

    entries = read_inventory(args.work_dir)
    training = is_locked(args.work_dir)
    if entries:
        columns = ["checkpoint", "epoch", "iter", "saved", "size", "validation", "kept because", "state"]
        rows = [_row(entry, training) for entry in entries]
        print(format_table(columns, rows, align=["left", "right", "right", "left", "right", "left", "left", "left"]))
        print(f"{len(entries)} checkpoints, {_size(sum(entry.size for entry in entries))}", end="")
    else:
        print("no checkpoints", end="")
    print(f" in {os.path.abspath(args.work_dir)}" + ("; a run is training there" if training else ""))


def _row(entry: "CheckpointEntry", training: bool) -> list[Any]:
    state = "whole" if entry.fault is None else "torn: " + entry.fault
    if entry.name.endswith(".incoming") and training:
        state = "being saved"
    return [
        entry.name,
        entry.meta.get("epoch"),
        entry.meta.get("iter"),
        entry.meta.get("time"),
        _size(entry.size),
        ", ".join(f"{name} {value:.4g}" for name, value in entry.metrics.items()),
        entry.reason,
        state,
    ]


def _show(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.checkpoint import read_meta, resolve, stored_arrays
    from jengine.checkpoint.report import describe
    from jengine.logging import format_table

    path = resolve(args.checkpoint)
    rest, stored = read_meta(path), stored_arrays(path)
    meta = rest.pop("meta", {})
    print(path)
    for name, value in meta.items():
        if name == "versions":
            value = ", ".join(f"{package} {version}" for package, version in value.items())
        if name != "cfg":
            print(f"  {name:<16} {value}")
    print(f"  {'also holds':<16} {', '.join(_contents(rest, meta)) or 'nothing'}")
    for item, place in rest.get("exchanged", {}).items():
        print(f"  {item} are averages; those that were trained lie in {place}")
    rows = [[name, describe(leaf), _size(_bytes(leaf))] for name, leaf in stored.items()]
    print(format_table(["array", "type", "size"], rows, align=["left", "left", "right"]))
    items: dict[str, int] = {}
    for name, leaf in stored.items():
        item = name.partition(".")[0]
        items[item] = items.get(item, 0) + _bytes(leaf)
    print(f"{len(stored)} arrays: " + ", ".join(f"{item} {_size(size)}" for item, size in items.items()))


def _contents(rest: Mapping[str, Any], meta: Mapping[str, Any]) -> list[str]:
    """What a checkpoint has beside its arrays and `meta`, in words."""
    found = [f"the config ({len(meta['cfg'].splitlines())} lines)"] if meta.get("cfg") else []
    for name, value in rest.items():
        if name == "hooks":
            found += [f"the state of {hook}" for hook in value]
        elif value and name not in ("iter", "exchanged"):
            found.append(name)
    return found


def _rm(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.checkpoint.inventory import remove

    removed = remove(args.work_dir, args.names, force=args.force)
    for entry in removed:
        print(f"removed {entry.path}")
    print(f"freed {_size(sum(entry.size for entry in removed))}")


def _export(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.checkpoint import export_params, read_meta, resolve

    path = resolve(args.checkpoint)
    exchanged = read_meta(path).get("exchanged", {})  # items that are averages -> where the trained ones lie
    if args.ema and "params" not in exchanged:
        raise ValueError(f"checkpoint {path} has no averaged parameters: the run had no EMAHook; leave --ema out")
    item = exchanged.get("params", "params") if args.raw else "params"
    statistics = exchanged.get("model_state", "model_state") if args.raw else "model_state"
    tensors = export_params(path, args.file, item=item, batch_stats=statistics if args.batch_stats else False)
    kind = "averaged parameters" if "params" in exchanged and not args.raw else "parameters"
    size = _size(sum(tensor.nbytes for tensor in tensors.values()))
    print(f"{kind} of {path}: {len(tensors)} tensors, {size}, written to {args.file}")


def _bytes(leaf: "jax.ShapeDtypeStruct") -> int:
    return leaf.size * leaf.dtype.itemsize


def _size(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} B"
