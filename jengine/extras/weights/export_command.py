"""`jengine ckpt export`: parameters for other libraries."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.checkpoint.layout import find_checkpoint, read_meta
from jengine.cli.commands import choose_checkpoint, format_bytes
from jengine.config.annotations import is_mapping
from jengine.config.containers import iter_nodes
from jengine.config.dump import parse_config
from jengine.config.errors import ConfigError
from jengine.extras.networks.transformer import TransformerLM
from jengine.extras.weights.export import export_params
from jengine.extras.weights.hub import export_hub
from jengine.extras.weights.huggingface import read_config
from jengine.extras.weights.language_models import make_config
from jengine.extras.weights.sources import PICKLES


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Export parameters."""
    if args.file is None:
        raise ConfigError("`jengine ckpt export` must have a FILE to write")
    if args.to is None and args.file.endswith(PICKLES):
        raise ConfigError(
            "FILE must end in .safetensors, which safetensors.torch.load_file reads, got "
            f"{args.file!r}"
        )
    path = find_checkpoint(choose_checkpoint(args))
    # items with averages -> paths of the trained values
    exchanged = read_meta(path).get("exchanged", {})
    if args.ema and "params" not in exchanged:
        raise ValueError(
            f"checkpoint {path} has no averaged parameters: the run had no EMAHook; leave out --ema"
        )
    item = exchanged.get("params", "params") if args.raw else "params"
    statistics = exchanged.get("model_state", "model_state") if args.raw else "model_state"
    if args.like is not None and args.to is None:
        raise ConfigError("`--like` must be given with --to safetensors")
    if args.to is not None and args.batch_stats:
        raise ConfigError("`--batch-stats` must be left out with --to: a TransformerLM has none")
    tensors: Mapping[str, Any]
    if args.to is not None:
        tensors = export_hub(path, args.file, args.like or _find_config(path), item=item)
    else:
        tensors = export_params(
            path, args.file, item=item, batch_stats=statistics if args.batch_stats else False
        )
    kind = "averaged parameters" if "params" in exchanged and not args.raw else "parameters"
    size = format_bytes(sum(x.size * x.dtype.itemsize for x in tensors.values()), digits=1)
    print(f"{kind} of {path}: {len(tensors)} tensors, {size}, written to {args.file}")


def _find_config(path: str) -> str | dict[str, Any]:
    """Return the directory of the weights that a checkpoint's run has started from, or else the
    `config.json` of its network.
    """
    text = read_meta(path)["meta"].get("cfg")
    cfg = parse_config(text) if text else {}
    load_from: Any = cfg.get("load_from")
    origin = load_from.get("path") if is_mapping(load_from) else load_from
    # A run that was fine-tuned from a Hub directory knows it, with tokenizer and chat template.
    if isinstance(origin, str) and read_config(origin):
        return origin
    for _, node in iter_nodes(cfg.get("model")):
        if is_mapping(node) and str(node.get("type")).endswith("TransformerLM"):
            settings = {name: value for name, value in node.items() if name != "type"}
            return make_config(TransformerLM(**settings))
    raise ConfigError(
        f"`--like` must be a directory with the config.json to write: the run of {path} has no "
        "TransformerLM in its config"
    )
