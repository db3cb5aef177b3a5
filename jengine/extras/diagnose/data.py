"""`jengine data`: batches from a dataloader, drawn on the host, with shapes, ranges, speed and
source.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.cli.commands import config_name, load
from jengine.config.errors import ConfigError, config_path, did_you_mean
from jengine.data.batch_check import describe_batch
from jengine.data.build import build_dataloader
from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.evaluation.sections import list_dataloaders, loader_path
from jengine.extras.diagnose.contact_sheet import write_contact_sheet
from jengine.extras.diagnose.drawn_batches import (
    HOST_REASONS,
    DrawnBatches,
    describe_entry,
    draw_batches,
)
from jengine.logging.console import write_line
from jengine.logging.convert import import_pillow
from jengine.logging.tables import format_table
from jengine.runner.config_checks import adapt_config

_MAX_IMAGES = 64
_POSITION = {
    "exact": "a resumed run continues with the same examples",
    "replayed": "it is not saved; a resumed run reads and drops the batches before it, so it is "
    "exact only if the data repeat their order",
    "lost": "it is not saved; a resumed run continues with what the data yield next",
}


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Draw batches and print the report. Neither the model nor an array on a device is created."""
    cfg, _ = adapt_config(load(args, overrides))
    mode, _, name = args.loader.partition(".")
    section = loader_path(mode, name)
    loaders = list_dataloaders(cfg)
    sheet = (
        f"{config_name(args)}_{args.loader.replace('.', '_')}.png"
        if args.sheet == ""
        else args.sheet
    )
    if args.batches < 1:
        raise ConfigError(f"`--batches` must be at least 1, got {args.batches}")
    if sheet is not None:
        if not sheet.endswith(".png"):
            raise ConfigError(f"`--sheet` must be a .png file, got {sheet!r}")
        import_pillow("--sheet")
    if args.loader not in loaders:
        given = ", ".join(loaders) or "none"
        advice = did_you_mean(section, cfg) if given == "none" else "; choose with --loader"
        raise ConfigError(f"the config must have {section}, got data for: {given}{advice}")
    seed = (cfg.get("randomness") or {}).get("seed") or 0
    with config_path(section):
        loader = build_dataloader(loaders[args.loader], train=mode == "train", seed=seed)
    try:
        drawn = draw_batches(loader, args.batches, section)
    finally:
        loader.close()  # worker processes would outlive an error
    print(f"{section}: {loader.kind}")
    loop = cfg.get(f"{mode}_cfg") or {}
    settings = {**loop, **loop.get(name, {})} if isinstance(loop, Mapping) else {}
    for label, text in _describe_loader(loader, drawn, args, settings.get("epoch_length")):
        print(f"  {label:<20} {text}")
    write_line(f"\n{_format_entries(drawn)}")
    if sheet is not None:
        print(f"\n{_write_sheet(drawn, loader.metainfo, sheet)}")


def _describe_loader(
    loader: DataLoader | IterableLoader,
    drawn: DrawnBatches,
    args: argparse.Namespace,
    given: int | None,
) -> list[tuple[str, str]]:
    lines = []
    if loader.dataset_size is not None and loader.dataset_size >= 0:
        lines.append(("examples", f"{loader.dataset_size:,}"))
    size = "unknown: batch_axis=None" if loader.batch_size is None else f"{loader.batch_size:,}"
    lines.append(("batch size", size))
    setting = f"{args.loader.partition('.')[0]}_cfg.epoch_length"
    length = f"unknown; `{setting}` sets it" if loader.length is None else f"{loader.length:,}"
    lines.append(("batches per epoch", length if given is None else f"{given:,}, from `{setting}`"))
    if drawn.count < args.batches:
        lines.append(
            ("", f"the pass over the data ended after {drawn.count} of {args.batches} batches")
        )
    lines.append(("position", f"{loader.resume}: {_POSITION[loader.resume]}"))
    if loader.advice and loader.resume != "exact":
        lines.append(("", f"for an exact position: {loader.advice}"))
    # Apart from the others: starting workers takes seconds, and would make the rate of a short look
    # meaningless.
    lines.append(
        ("first batch", f"{drawn.seconds[0]:.3g} s, start of threads and workers included")
    )
    if drawn.count > 1:
        examples = sum(drawn.examples[1:])
        seconds = sum(drawn.seconds[1:])
        rate = examples / max(seconds, 1e-9)
        lines.append(
            (
                "speed after it",
                f"{rate:,.0f} examples/s on the host ({examples:,} in {seconds:.3g} s)",
            )
        )
    labels = drawn.find_labels()
    if labels is not None:
        lines.append((f"labels `{labels}`", _describe_labels(drawn, labels)))
    return lines


def _describe_labels(drawn: DrawnBatches, path: str) -> str:
    classes, counts = np.unique(np.stack(list(drawn.iterate(path))), return_counts=True)
    rare = counts.argmin()
    frequent = counts.argmax()
    return (
        f"{len(classes)} classes in {counts.sum():,} examples, {classes[0]} to {classes[-1]}; "
        f"fewest: {counts[rare]:,} "
        f"of class {classes[rare]}, most: {counts[frequent]:,} of class {classes[frequent]}"
    )


def _format_entries(drawn: DrawnBatches) -> str:
    """Return the table with the batch entries, and what stays on the host."""
    rows = [[path or "batch", *describe_entry(leaves)] for path, leaves in drawn.entries.items()]
    kept = len(drawn.masks)
    title = f"Entries of {kept} batch{'es' * (kept > 1)}"
    if kept < drawn.count:
        title += f", the first of {drawn.count}: more are not kept in memory"
    lines = [format_table(["entry", "dtype", "shape", "values", "goes to"], rows, title=title)]
    # Seen here before a run compiles for an hour.
    if drawn.varies():
        lines.append("Shapes vary between batches: the step is compiled for each shape.")
    for path, kind in drawn.host_entries.items():
        lines.append(
            f"`{path}` stays on the host, for hooks and host metrics: {HOST_REASONS[kind]}."
        )
    return "\n".join(lines)


def _write_sheet(drawn: DrawnBatches, metainfo: Mapping[str, Any] | None, file: str) -> str:
    path = drawn.find_images()
    if path is None:
        entries = describe_batch({path: leaves[0] for path, leaves in drawn.entries.items()})
        raise ConfigError(
            "`--sheet` must be given for data with images, uint8 or float [B, H, W, C] with 1, 3 "
            f"or 4 channels, got {entries}"
        )
    # Bounded: a sheet of a whole batch of 4,096 images would be a picture that no viewer opens.
    images = list(itertools.islice(drawn.iterate(path), _MAX_IMAGES))
    captions = drawn.list_captions(metainfo)[: len(images)] or [""] * len(images)
    write_contact_sheet(file, images, captions)
    return f"{len(images)} images of `{path}` written to {file}"
