"""The commands that look at a run before it starts or while it trains, and options of `train`."""

import argparse
import re
from typing import Any

from jengine.cli.parser import Commands
from jengine.extras.diagnose.arguments import add_shortcuts

_ROOM = "jengine.extras.diagnose"
_TRAIN = f"{_ROOM}.debug"


class _Overfit(argparse.Action):
    """Option `--overfit N`, which changes what `train` runs."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        namespace.overfit = values
        namespace.run = f"{_TRAIN}:train_overfit"


class _Profile(argparse.Action):
    """Option `--profile FIRST:LAST`, which changes what `train` runs."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        match = re.fullmatch(r"(\d+):(\d+)", values)
        if match is None or int(match[1]) >= int(match[2]):
            parser.error(f"--profile must be FIRST:LAST with FIRST below LAST, got {values!r}")
        namespace.profile = int(match[1]), int(match[2])
        namespace.run = f"{_ROOM}.expensive:train_profile"


def add_commands(commands: Commands) -> None:
    """Add `schedule`, `lr-find`, `coord-check`, `model`, `groups`, `data`, `replay`, `inspect`,
    `profile` and `stacks`, and options of `train`.
    """
    add_shortcuts(commands["train"])
    short = commands["train"].add_mutually_exclusive_group()
    debug = (
        "try everything in three steps: memory, hooks, a validation, a save and a restore; leaves "
        "no files"
    )
    short.add_argument(
        "--debug", action="store_const", dest="run", const=f"{_TRAIN}:train_debug", help=debug
    )
    check = (
        "check each operation of the step (NaN, division by zero, indices out of bounds, "
        "`checkify.check`), recompilations, and what hooks read; slow"
    )
    short.add_argument(
        "--check", action="store_const", dest="run", const=f"{_ROOM}.check:train_check", help=check
    )
    overfit = "train on the first N batches alone, in WORK_DIR_overfit, and print the final loss"
    short.add_argument("--overfit", type=int, metavar="N", action=_Overfit, help=overfit)
    profile = (
        "trace the iterations FIRST to LAST - 1 of this session, and print the ten most expensive "
        "operations by layer"
    )
    short.add_argument("--profile", metavar="FIRST:LAST", action=_Profile, help=profile)
    schedule = commands.add(
        "schedule",
        "jengine.extras.diagnose.schedule:run",
        "draw the schedules over the whole run",
        commands.config,
    )
    schedule.add_argument(
        "--png", metavar="FILE", help="save a PNG file instead of drawing in the terminal"
    )
    length = "iterations per epoch (by default, from the training data)"
    schedule.add_argument("--epoch-length", type=int, metavar="N", help=length)
    rates = commands.add(
        "lr-find",
        "jengine.extras.diagnose.lr_find:run",
        "draw the loss over growing learning rates, and suggest one",
        commands.config,
    )
    rates.add_argument(
        "--min", type=float, default=1e-7, metavar="LR", help="the first rate (default: 1e-7)"
    )
    rates.add_argument(
        "--max", type=float, default=10.0, metavar="LR", help="the last rate (default: 10)"
    )
    rates.add_argument(
        "--steps", type=int, default=100, metavar="N", help="number of iterations (default: 100)"
    )
    rates.add_argument("--png", metavar="FILE", help="also save a PNG file")
    widths = commands.add(
        "coord-check",
        f"{_ROOM}.coord_check:run",
        "print how far activations move in a few steps, over widths",
        commands.config,
    )
    widths.add_argument(
        "--widths",
        required=True,
        metavar="N,N,...",
        help="values of the first path in paramwise_cfg.base.width; the others follow",
    )
    widths.add_argument(
        "--steps", type=int, default=5, metavar="N", help="number of iterations (default: 5)"
    )
    standard = "leave the parametrization out, for comparison"
    widths.add_argument("--standard", action="store_true", help=standard)
    widths.add_argument("--png", metavar="FILE", help="also save a PNG file")
    commands.add(
        "groups",
        "jengine.extras.diagnose.groups:groups",
        "print the table of parameter groups",
        commands.config,
    )
    commands.add(
        "model",
        "jengine.extras.diagnose.model:run",
        "print the layers with shapes, parameters and FLOPs",
        commands.config,
    )
    data = commands.add(
        "data",
        "jengine.extras.diagnose.data:run",
        "draw batches and print their shapes, ranges, speed and source",
        commands.config,
    )
    data.add_argument(
        "--batches",
        type=int,
        default=10,
        metavar="N",
        help="number of batches to draw (default: 10)",
    )
    loader = "the dataloader: train, val or test, of several val.NAME (default: train)"
    data.add_argument("--loader", metavar="LOADER", default="train", help=loader)
    sheet = "write a contact sheet of images as a PNG file (default: CONFIG_LOADER.png)"
    data.add_argument("--sheet", nargs="?", const="", metavar="FILE", help=sheet)
    replay = commands.add(
        "replay",
        "jengine.extras.diagnose.replay_command:run",
        "repeat a dropped step to find its first bad value",
        commands.config,
    )
    replay.add_argument(
        "dump", metavar="DUMP", help="the file named in the error of the numerics guard"
    )
    also = replay.add_mutually_exclusive_group()
    also.add_argument(
        "--check",
        action="store_true",
        help="check each operation, as `jengine train --check` does; print the first that fails",
    )
    also.add_argument(
        "--bisect",
        action="store_true",
        help="also find the examples with which alone the loss or a gradient is not finite",
    )

    inspect = commands.add(
        "inspect",
        f"{_ROOM}.inspect_command:run",
        "print statistics of the values inside the step for one batch",
        commands.config,
    )
    path = (
        "layers, 'grads', 'updates' or 'params', with wildcards (blocks.3.attn.*); several may "
        "follow (default: everything)"
    )
    inspect.add_argument("--path", nargs="+", metavar="PATTERN", help=path)
    inspect.add_argument(
        "--checkpoint", metavar="CHECKPOINT", help="a work dir or checkpoint, for its weights"
    )
    requested = commands.add(
        "profile",
        f"{_ROOM}.profile_command:run",
        "profile some iterations of a run that trains",
        commands.traceback,
        runs_code=False,
    )
    requested.add_argument("work_dir", metavar="WORK_DIR", help="the run's directory")
    requested.add_argument(
        "--steps", type=int, default=5, metavar="N", help="iterations to profile (default: 5)"
    )
    stacks = commands.add(
        "stacks",
        f"{_ROOM}.stacks_command:run",
        "print where the threads of a run that trains, or hangs, are",
        commands.traceback,
        runs_code=False,
    )
    stacks.add_argument("work_dir", metavar="WORK_DIR", help="the run's directory")
    stacks.add_argument(
        "--timeout",
        type=float,
        default=60,
        metavar="SECONDS",
        help="how long to wait for the answer (default: 60)",
    )
