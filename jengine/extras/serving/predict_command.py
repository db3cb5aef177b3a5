"""`jengine predict`: predictions from a checkpoint, or generated text, as a table and a file."""

import argparse
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jengine.cli.commands import build_runner, choose_checkpoint
from jengine.config.errors import ConfigError
from jengine.config.plugins import load_provided
from jengine.config.storage import file_name, is_url, local_copy, storage_path, write_bytes
from jengine.evaluation.sections import list_dataloaders, loader_path
from jengine.extras.serving.dump import write_arrays
from jengine.extras.serving.shown import add_classes, format_predictions, write_rows
from jengine.model.model import ModelWrapper
from jengine.runner.runner import Runner

_MODES = ("test", "val", "train")
_PROMPTS = (".jsonl", ".txt")
_ENDINGS = (".csv", ".jsonl", ".npz")
_own_data = functools.partial(load_provided, "own_data")  # functions of an extra


@runtime_checkable
class _TextGenerator(Protocol):
    """Model whose predictions for prompts are texts, such as `TextGenerator`."""

    def make_prompts(self, source: Any) -> Any:
        """Return a dataset with the prompts in a file or in records, whose `texts` are these."""

    def decode(self, tokens: Any) -> list[str]:
        """Return the texts for predictions."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Predict, print a table, and write the file; nested prediction names are joined by dots."""
    # Checked before anything is built.
    if args.out is not None:
        if not args.out.endswith(_ENDINGS):
            raise ConfigError(f"`--out` must be a .csv, .jsonl or .npz file, got {args.out!r}")
        storage_path("--out", args.out)
    name = "" if args.data is None else file_name(args.data)
    is_known = args.data is None or args.data.partition(".")[0] in _MODES
    if (
        not is_known
        and not name.endswith((".npz", *_PROMPTS))
        and not _own_data("is_inputs")(args.data)
    ):
        hint = "" if os.path.exists(args.data) else ", which does not exist"
        raise ConfigError(
            f"`--data` must be one of {', '.join(_MODES)}, a directory of images, an image or a "
            "pattern such as 'new/*.png', a .csv or .jsonl file of rows, an .npz file, or a .jsonl "
            f"or .txt file of prompts, got {args.data!r}{hint}"
        )
    runner = build_runner(args, overrides, load_from=choose_checkpoint(args), resume=False)
    generator = _find_generator(runner)
    if generator is not None and name.endswith((*_PROMPTS, ".csv")):
        _write_texts(args, runner, generator)
        return
    if name.endswith(".txt"):
        raise ConfigError(
            "`model` must be a TextGenerator, dict(type='TextGenerator', model=..., "
            f"tokenizer=...), for --data .txt, got {type(runner.model).__name__}"
        )
    rows: Sequence[Mapping[str, Any]] | None = None
    if args.data is not None and not is_known and not name.endswith(".npz"):
        inputs = _own_data("open_inputs")(args.data, runner.cfg)
        if inputs.note and runner.is_main_process:
            print(inputs.note)
        rows = inputs.rows
        data = inputs.dataset
        batch_size = args.batch_size
    else:
        data, batch_size = _load_data(args, runner.cfg)
    predictions = runner.predict(data, batch_size)
    # All processes predict together, one writes.
    if runner.is_main_process:
        _show(args, runner, predictions, rows)


def _show(
    args: argparse.Namespace,
    runner: Runner,
    predictions: Any,
    rows: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Print a table of the predictions, and write the file if there is one."""
    origin = f"predictions of {_checkpoint(args, runner)}"
    if not isinstance(predictions, list):  # as whole batches have it
        count = len(jax.tree.leaves(predictions)[0])
        rows = [{"example": i} for i in range(count)] if rows is None else rows
        metainfo = _own_data("find_metainfo")(runner.cfg)
        found = add_classes(predictions, runner.cfg, metainfo.get("classes"))
        print(format_predictions(rows, found, predictions))
    if args.out is None:
        print(f"{origin}; --out FILE.csv, .jsonl or .npz writes all of them")
        return
    if args.out.endswith(".npz"):
        arrays = write_arrays(args.out, predictions)
        origin += f": {', '.join(f'{name} {x.dtype}{list(x.shape)}' for name, x in arrays.items())}"
    elif isinstance(predictions, list) or rows is None:
        raise ConfigError(f"`--out` must be an .npz file for whole batches, got {args.out!r}")
    else:
        _write(args.out, write_rows(rows, found, predictions, args.out.rpartition(".")[2]))
    print(f"{origin}, written to {args.out}")


def _checkpoint(args: argparse.Namespace, runner: Runner) -> str:
    """Return the path of the checkpoint, also for a work dir."""
    return str(args.checkpoint if runner.load_from is None else runner.load_from.path)


def _write(path: str, content: bytes) -> None:
    target = storage_path("--out", path)
    if not is_url(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, content)


def _find_generator(runner: Runner) -> _TextGenerator | None:
    """Return the model that generates text, if the run's model is or wraps one."""
    generator = runner.model
    while isinstance(generator, ModelWrapper) and not isinstance(generator, _TextGenerator):
        generator = generator.model
    return generator if isinstance(generator, _TextGenerator) else None


def _write_texts(args: argparse.Namespace, runner: Runner, generator: _TextGenerator) -> None:
    """Continue the prompts of a file, print them, and write a row for each."""
    if args.out is not None and args.out.endswith(".npz"):
        raise ConfigError(f"`--out` must be a .csv or .jsonl file for text, got {args.out!r}")
    source = _own_data("read_rows")(args.data) if args.data.endswith(".csv") else args.data
    try:
        prompts = generator.make_prompts(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`--data` must be a file of prompts: {error}") from error
    texts = generator.decode(runner.predict(prompts, args.batch_size))
    if not runner.is_main_process:
        return
    rows = [
        {"prompt": prompt, "text": text} for prompt, text in zip(prompts.texts, texts, strict=True)
    ]
    found: list[dict[str, Any]] = [{}] * len(rows)
    print(format_predictions(rows, found, {}))
    if args.out is not None:
        _write(args.out, write_rows(rows, found, {}, args.out.rpartition(".")[2]))
    end = "" if args.out is None else f", written to {args.out}"
    print(f"{len(texts)} texts of {_checkpoint(args, runner)}{end}")


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
