"""`jengine ckpt export --jax-export`: predictions as an artifact that runs without the model's
code.
"""

import argparse
import importlib
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jengine.cli.commands import choose_checkpoint
from jengine.config import paths
from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError
from jengine.data.build import build_dataloader
from jengine.evaluation.sections import list_dataloaders
from jengine.extras.serving.jax_export import PLATFORMS, export_model
from jengine.extras.serving.loaded_model import LoadedModel, load_model
from jengine.extras.serving.trust import only_known_classes

_KNOWN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_INPUT = re.compile(r"(\w+)=(\w+)\[([\d, ]*)\]")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int | None:
    """Write the artifact and print the inputs and outputs.

    Without `--jax-export`, run the command of the extra that exports parameters.
    """
    file = getattr(args, "file", None)  # and other options of that extra
    if (file is None) == (args.jax_export is None):
        raise ConfigError("`jengine ckpt export` must have either FILE or --jax-export FILE")
    if args.jax_export is None:
        for name in ("input", "batch_size", "platforms", "trust"):
            if getattr(args, name) not in (None, False):
                raise ConfigError(f"`--{name.replace('_', '-')}` must be given with --jax-export")
        module, _, function = args.run_other.partition(":")
        return getattr(importlib.import_module(module), function)(args, overrides)
    for name in ("to", "like", "batch_stats"):
        if getattr(args, name, None):
            raise ConfigError(
                f"`--{name.replace('_', '-')}` must be left out with --jax-export, which contains "
                "all that the model needs"
            )
    platforms = PLATFORMS if args.platforms is None else args.platforms.split(",")
    for platform in platforms:
        if platform not in _KNOWN_PLATFORMS:
            raise ConfigError(
                f"`--platforms` must be of {', '.join(_KNOWN_PLATFORMS)}, got {platform!r}"
            )
    weights: Literal["averaged", "trained", "evaluated"] = (
        "averaged" if args.ema else "trained" if args.raw else "evaluated"
    )
    model = load_model(choose_checkpoint(args), weights=weights, trust=args.trust)
    batch = _first_batch(model) if args.input is None else dict(map(_parse_input, args.input))
    exported = export_model(
        model, batch, args.jax_export, batch_size=args.batch_size, platforms=platforms
    )
    inputs = exported.in_tree.unflatten(exported.in_avals)[0][0]
    outputs = exported.out_tree.unflatten(exported.out_avals)
    size = os.path.getsize(args.jax_export)
    print(f"{_describe(inputs, 'batch')} -> {_describe(outputs, 'predictions')}")
    print(
        f"predictions of {model.path} on {', '.join(platforms)}: {size:,} bytes, written to "
        f"{args.jax_export}"
    )
    return None


def _first_batch(model: LoadedModel) -> Any:
    loaders = list_dataloaders(model.cfg, ("test", "val", "train"))
    if not loaders:
        raise ConfigError(
            "`--input` must be given, because the config in the checkpoint has no data"
        )
    name, loader = next(iter(loaders.items()))
    # in other threads and processes nothing would be restricted
    if not model.trust and is_mapping(loader):
        loader = {
            key: 0 if key in ("num_workers", "num_threads") else value
            for key, value in loader.items()
        }
    try:
        # The config is data from a checkpoint: its dataset may name any code and any file.
        with only_known_classes(None if model.trust else model.path):
            return next(iter(build_dataloader(loader, train=False)))
    except Exception as error:
        error.add_note(
            f"while reading a batch of the {name} data, for its shapes; give them with --input "
            "instead"
        )
        raise


def _parse_input(text: str) -> tuple[str, Any]:
    """Return an entry's name and struct, for a batch with two examples, from
    `image=float32[8,8,1]`.
    """
    match = _INPUT.fullmatch(text)
    try:
        if match is None:
            raise TypeError(text)
        # Two examples, for shapes only: 1 is a size that a model may treat in a special way.
        shape = (2, *(int(size) for size in match[3].split(",") if size.strip()))
        return match[1], jax.ShapeDtypeStruct(shape, jnp.dtype(match[2]))
    except TypeError as error:
        raise ConfigError(
            f"`--input` must be NAME=DTYPE[SHAPE], such as image=float32[8,8,1], got {text!r}"
        ) from error


def _describe(tree: Any, name: str) -> str:
    """Return names, dtypes and shapes in a pytree; a single array is called `name`."""
    arrays = ((path or name, array) for path, array in paths.flatten(tree).items())
    return ", ".join(
        f"{path} {array.dtype}[{','.join(map(str, array.shape))}]" for path, array in arrays
    )
