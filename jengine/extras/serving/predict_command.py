"""`jengine predict`: predictions from a checkpoint, written to an .npz file.

Or generated text, to a .jsonl file.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jengine.cli.commands import build_runner, choose_checkpoint
from jengine.config.errors import ConfigError
from jengine.config.json_codec import encode
from jengine.config.plugins import load_provided
from jengine.config.storage import file_name, local_copy, storage_path, write_bytes
from jengine.evaluation.sections import list_dataloaders, loader_path
from jengine.extras.serving.dump import write_arrays
from jengine.model.model import ModelWrapper
from jengine.runner.runner import Runner

_MODES = ("test", "val", "train")
_PROMPTS = (".jsonl", ".txt")


@runtime_checkable
class _TextGenerator(Protocol):
    """Model whose predictions for prompts are texts, such as `TextGenerator`."""

    def make_prompts(self, source: str) -> Any:
        """Return a dataset with the prompts in a file, whose `texts` are these."""

    def decode(self, tokens: Any) -> list[str]:
        """Return the texts for predictions."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Predict and write the file; nested prediction names are joined by dots."""
    # Checked before anything is built.
    if not args.out.endswith((".npz", ".jsonl")):
        raise ConfigError(
            f"`--out` must be an .npz file, or .jsonl for generated text, got {args.out!r}"
        )
    storage_path("--out", args.out)
    name = "" if args.data is None else file_name(args.data)
    is_file = name.endswith((".npz", *_PROMPTS))
    if args.data is not None and args.data.partition(".")[0] not in _MODES and not is_file:
        raise ConfigError(
            f"`--data` must be one of {', '.join(_MODES)}, an .npz file, or a .jsonl or .txt file "
            f"of prompts, got {args.data!r}"
        )
    if args.out.endswith(".jsonl") != name.endswith(_PROMPTS):
        raise ConfigError(
            "`--out` must be a .jsonl file for a .jsonl or .txt file of prompts in `--data`, and "
            f"else an .npz file, got {args.out!r} for {args.data or 'the data of the config'}"
        )
    runner = build_runner(args, overrides, load_from=choose_checkpoint(args), resume=False)
    if args.out.endswith(".jsonl"):
        _write_texts(args, runner)
        return
    data, batch_size = _load_data(args, runner.cfg)
    predictions = runner.predict(data, batch_size)
    if not runner.is_main_process:
        return
    arrays = write_arrays(args.out, predictions)
    shapes = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items())
    print(f"predictions of {args.checkpoint}: {shapes}, written to {args.out}")


def _write_texts(args: argparse.Namespace, runner: Runner) -> None:
    """Continue the prompts of a file, and write a line of JSON for each."""
    generator = runner.model
    while isinstance(generator, ModelWrapper) and not isinstance(generator, _TextGenerator):
        generator = generator.model
    if not isinstance(generator, _TextGenerator):
        raise ConfigError(
            "`model` must be a TextGenerator, dict(type='TextGenerator', model=..., "
            f"tokenizer=...), for --out .jsonl, got {type(runner.model).__name__}"
        )
    try:
        prompts = generator.make_prompts(args.data)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`--data` must be a file of prompts: {error}") from error
    texts = generator.decode(runner.predict(prompts, args.batch_size))
    # All processes predict together, one writes.
    if runner.is_main_process:
        lines = [
            encode({"prompt": prompt, "text": text})
            for prompt, text in zip(prompts.texts, texts, strict=True)
        ]
        write_bytes(
            storage_path("--out", args.out), "".join(f"{line}\n" for line in lines).encode()
        )
        print(f"{len(texts)} texts of {args.checkpoint}, written to {args.out}")


def _read_npz(path: str) -> dict[str, np.ndarray]:
    """Return the arrays in a file, which may be from anyone."""
    file = local_copy(path)
    try:
        list_npz = load_provided("array_files", "list_npz")
        arrays = dict(load_provided("array_files", "read_npz")(file, list_npz(file)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`--data` must be a readable file: {error}") from None
    for name, array in arrays.items():
        if array.dtype.kind not in "biufcV" or array.dtype.names is not None:
            raise ConfigError(
                f"`--data` must have arrays of numbers, got {array.dtype} for {name!r} in {path}"
            )
    lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    if not arrays or len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise ConfigError(
            f"`--data` must have arrays with one length, the number of examples, got {lengths} in "
            f"{path}"
        )
    return arrays


def _load_data(args: argparse.Namespace, cfg: Mapping[str, Any]) -> tuple[Any, int | None]:
    """Return the data to predict and the batch size for data that are not in batches."""
    if args.data is not None and file_name(args.data).endswith(".npz"):
        return _read_npz(args.data), args.batch_size
    loaders = list_dataloaders(cfg, _MODES)
    modes = ("test", "val") if args.data is None else (args.data,)
    mode = next((mode for mode in modes if cfg.get(f"{mode}_dataloader") is not None), modes[0])
    loader = loaders.get(mode)
    if loader is None:
        names = " or ".join(loader_path(*mode.partition(".")[::2]) for mode in modes)
        raise ConfigError(
            f"the config must have {names}, got data for: {', '.join(loaders) or 'none'}; choose "
            "with --data, or pass an .npz file"
        )
    if not hasattr(loader, "items"):
        if args.batch_size is not None:
            raise ConfigError(
                "`--batch-size` must be left out if the dataloader of the config is an object"
            )
        return loader, None
    # each example once, in the order of the dataset
    ordered = {**loader, "sampler": None, "drop_last": False}
    return ordered if args.batch_size is None else {**ordered, "batch_size": args.batch_size}, None
