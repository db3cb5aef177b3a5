"""Run `jengine ckpt`: list, show, remove and export checkpoints."""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jengine.cli import jax_export
from jengine.errors import ConfigError

if TYPE_CHECKING:
    import jax

    from jengine.checkpoint.inventory import CheckpointEntry


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command `ckpt` to `jengine`.

    Args:
      commands: the result of `add_subparsers`.
      common: the parent parser with the options of all commands.
    """
    work_dir = argparse.ArgumentParser(add_help=False)
    work_dir.add_argument("work_dir", metavar="WORK_DIR", help="a run's directory")
    checkpoint = argparse.ArgumentParser(add_help=False)
    checkpoint.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a work dir for its newest one")

    ckpt = commands.add_parser("ckpt", help="list, show, remove or export checkpoints")
    actions = ckpt.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", parents=[work_dir, common], help="list the checkpoints of a run and why each is kept")
    ls.set_defaults(run=_ls)
    show = actions.add_parser("show", parents=[checkpoint, common], help="show the contents of a checkpoint")
    show.set_defaults(run=_show)
    rm = actions.add_parser("rm", parents=[work_dir, common], help="remove checkpoints of a run")
    rm.add_argument("names", nargs="+", metavar="NAME", help="names of the checkpoints, as shown by `jengine ckpt ls`")
    rm.add_argument("--force", action="store_true", help="remove the latest too, from which the run would resume")
    rm.set_defaults(run=_rm)
    export = actions.add_parser(
        "export", parents=[checkpoint, common],
        help="export the parameters for PyTorch, as a safetensors file, or the predictions as a jax.export artifact",
    )  # fmt: skip
    export.add_argument("file", nargs="?", metavar="FILE", help="the file to write, such as model.safetensors")
    params = export.add_mutually_exclusive_group()
    params.add_argument("--ema", action="store_true", help="export the averaged parameters; an error if there are none")
    params.add_argument("--raw", action="store_true", help="export the trained parameters, not their average")
    export.add_argument("--batch-stats", action="store_true", help="export the running statistics of batch norms too")
    jax_export.add_arguments(export)
    export.set_defaults(run=_export)


def _ls(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.checkpoint.inventory import list_checkpoint_entries
    from jengine.checkpoint.lock import is_locked
    from jengine.logging import format_table

    entries = list_checkpoint_entries(args.work_dir)
    training = is_locked(args.work_dir)
    if entries:
        columns = ["checkpoint", "epoch", "iter", "saved", "size", "validation", "kept because", "state"]
        rows = [_make_row(entry, training) for entry in entries]
        print(format_table(columns, rows, align=["left", "right", "right", "left", "right", "left", "left", "left"]))
        print(f"{len(entries)} checkpoints, {_format_size(sum(entry.size for entry in entries))}", end="")
    else:
        print("no checkpoints", end="")
    print(f" in {os.path.abspath(args.work_dir)}" + ("; a run is training there" if training else ""))


def _make_row(entry: "CheckpointEntry", training: bool) -> list[Any]:
    state = "complete" if entry.problem is None else f"corrupt: {entry.problem}"
    if entry.name.endswith(".incoming") and training:
        state = "being saved"
    return [
        entry.name,
        entry.meta.get("epoch"),
        entry.meta.get("iter"),
        entry.meta.get("time"),
        _format_size(entry.size),
        ", ".join(f"{name} {value:.4g}" for name, value in entry.metrics.items()),
        entry.reason,
        state,
    ]


def _show(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.checkpoint import find_checkpoint, list_arrays, read_meta
    from jengine.checkpoint.report import describe
    from jengine.logging import format_table

    path = find_checkpoint(args.checkpoint)
    metadata, stored = read_meta(path), list_arrays(path)
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
    rows = [[name, describe(leaf), _format_size(_count_bytes(leaf))] for name, leaf in stored.items()]
    print(format_table(["array", "type", "size"], rows, align=["left", "left", "right"]))
    items: dict[str, int] = {}
    for name, leaf in stored.items():
        item = name.partition(".")[0]
        items[item] = items.get(item, 0) + _count_bytes(leaf)
    print(f"{len(stored)} arrays: " + ", ".join(f"{item} {_format_size(size)}" for item, size in items.items()))


def _list_contents(metadata: Mapping[str, Any], meta: Mapping[str, Any]) -> list[str]:
    """Return descriptions of the contents of a checkpoint other than arrays and `meta`."""
    contents = [f"the config ({len(meta['cfg'].splitlines())} lines)"] if meta.get("cfg") else []
    for name, value in metadata.items():
        if name == "hooks":
            contents += [f"the state of {hook}" for hook in value]
        elif value and name not in ("iter", "exchanged", "evaluated"):
            contents.append(name)
    return contents


def _rm(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.checkpoint.inventory import remove_checkpoints

    removed = remove_checkpoints(args.work_dir, args.names, force=args.force)
    for entry in removed:
        print(f"removed {entry.path}")
    print(f"freed {_format_size(sum(entry.size for entry in removed))}")


def _export(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.checkpoint import export_params, find_checkpoint, read_meta

    if (args.file is None) == (args.jax_export is None):
        raise ConfigError("`jengine ckpt export` must have either FILE or --jax-export FILE")
    if args.jax_export is not None:
        jax_export.run(args)
        return
    jax_export.check_unused(args)
    path = find_checkpoint(args.checkpoint)
    exchanged = read_meta(path).get("exchanged", {})  # items with averages -> paths of the trained values
    if args.ema and "params" not in exchanged:
        raise ValueError(f"checkpoint {path} has no averaged parameters: the run had no EMAHook; leave out --ema")
    item = exchanged.get("params", "params") if args.raw else "params"
    statistics = exchanged.get("model_state", "model_state") if args.raw else "model_state"
    tensors = export_params(path, args.file, item=item, batch_stats=statistics if args.batch_stats else False)
    kind = "averaged parameters" if "params" in exchanged and not args.raw else "parameters"
    size = _format_size(sum(tensor.nbytes for tensor in tensors.values()))
    print(f"{kind} of {path}: {len(tensors)} tensors, {size}, written to {args.file}")


def _count_bytes(leaf: "jax.ShapeDtypeStruct") -> int:
    return leaf.size * leaf.dtype.itemsize


def _format_size(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} B"
