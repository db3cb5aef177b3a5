"""Commands and options of `jengine`; what they import when they run is not imported here."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

from jengine.config.errors import closest

_EPILOG = """Set any value of the config with --config.PATH=VALUE:
  jengine train configs/digits_cnn.py --config.optim_wrapper.optimizer.lr=0.01 --config.custom_hooks[0].interval=5
"""
_COMPLETION_EPILOG = """To complete `jengine` in new shells:
  bash:  jengine completion bash > ~/.local/share/bash-completion/completions/jengine
  zsh:   jengine completion zsh > ~/.zfunc/_jengine, with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  fish:  jengine completion fish > ~/.config/fish/completions/jengine.fish
"""
_CHECKPOINT = "a checkpoint, or a work dir for its newest one"

Commands: TypeAlias = "argparse._SubParsersAction[Any]"


class _Parser(argparse.ArgumentParser):
    """Parser that suggests a name for a misspelled one."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        if match := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message = message.partition(" (choose from")[0] + closest(
                match[1], re.findall(r"[\w-]+", match[2])
            )
        super().error(message)


class _VersionAction(argparse.Action):
    """Option that prints the versions of jengine and of what it runs on, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs=0,
            help="print versions and devices, for bug reports",
            **settings,
        )

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        from jengine.cli.commands import describe_versions

        print(describe_versions())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser for all commands; `run` in the parsed arguments names the function below
    `jengine.cli`.

    >>> build_parser().parse_args(["ckpt", "ls", "work_dirs/digits"]).run
    'ckpt.ls'
    """
    traceback = argparse.ArgumentParser(add_help=False)
    traceback.add_argument(
        "--traceback", action="store_true", help="show the full traceback of an error"
    )
    common = argparse.ArgumentParser(add_help=False, parents=[traceback])
    common.add_argument("config", metavar="CONFIG", help="a Python file with get_config()")

    parser = _Parser(
        prog="jengine",
        description="Train JAX models from config files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_VersionAction)
    # for commands without these options
    parser.set_defaults(
        work_dir=None, launcher="none", coordinator=None, num_processes=None, process_id=None
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_run_commands(commands, common)
    _add_sweep(commands, common)
    _add_config_commands(commands, common)
    _add_plan(commands, common)
    _add_report(commands, traceback)
    _add_table(commands, traceback)
    profile = _add(
        commands,
        "profile",
        "commands.profile",
        "profile some iterations of a run that trains",
        traceback,
    )
    profile.add_argument("work_dir", metavar="WORK_DIR", help="the run's directory")
    profile.add_argument(
        "--steps", type=int, default=5, metavar="N", help="iterations to profile (default: 5)"
    )
    _add_ckpt(commands, traceback)
    convert = _add(
        commands, "convert", "convert.run", "convert a config of MMEngine or iMIX", traceback
    )
    convert.add_argument(
        "mmengine_config", metavar="MMENGINE_CONFIG", help="a flat Python file, with its base files"
    )
    convert.add_argument(
        "-o", "--out", metavar="FILE", help="the file to write (default: standard output)"
    )
    completion = _add(
        commands, "completion", "completion.run", "print a shell's completion script", traceback
    )
    completion.epilog = _COMPLETION_EPILOG
    completion.formatter_class = argparse.RawDescriptionHelpFormatter
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    return parser


def _add(
    commands: Commands, name: str, run: str, text: str, *parents: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, parents=parents, help=text)
    parser.set_defaults(run=run)
    return parser


def _add_run_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    run = argparse.ArgumentParser(add_help=False, parents=[common])
    run.add_argument(
        "--work-dir",
        metavar="DIR",
        help="directory for checkpoints and logs (default: work_dirs/CONFIG)",
    )
    processes = run.add_argument_group("several processes")
    launchers = (
        "none, slurm, mpi, kubernetes, tpu or auto (default: that in whose environment the "
        "process runs)"
    )
    processes.add_argument("--launcher", metavar="NAME", help=launchers)
    processes.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    processes.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    processes.add_argument(
        "--process-id", type=int, metavar="I", help="index of this process, from 0"
    )

    train = _add(commands, "train", "train.run", "train the model of a config", run)
    resume = (
        "continue from the newest checkpoint of the work dir ('must': or fail; 'exact': the same "
        "config), or PATH"
    )
    train.add_argument("--resume", nargs="?", const=True, metavar="PATH", help=resume)
    short = train.add_mutually_exclusive_group()
    debug = (
        "try everything in three steps: memory, hooks, a validation, a save and a restore; leaves "
        "no files"
    )
    short.add_argument("--debug", action="store_true", help=debug)
    overfit = "train on the first N batches alone, in WORK_DIR_overfit, and print the final loss"
    short.add_argument("--overfit", type=int, metavar="N", help=overfit)
    test = _add(commands, "test", "commands.test", "test a checkpoint", run)
    test.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)
    predict = _add(
        commands, "predict", "predict.run", "write predictions of a checkpoint to a file", run
    )
    predict.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)
    predict.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the .npz file to write, or .jsonl for generated text",
    )
    data = (
        "test, val or train for the data of the config, in order (of several: val.NAME), an .npz "
        "file of arrays, or a "
        ".jsonl or .txt file of prompts (default: test, or val without test data)"
    )
    predict.add_argument("--data", metavar="DATA", help=data)
    predict.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="examples per batch (default: that of the config)",
    )


def _add_sweep(commands: Commands, common: argparse.ArgumentParser) -> None:
    sweep = _add(
        commands, "sweep", "sweep.run", "train many variants of a config, and compare them", common
    )
    text = "values of one path; all combinations are run. The path may be shortened: lr=1e-3,1e-2"
    sweep.add_argument(
        "--grid", nargs="+", action="extend", default=[], metavar="PATH=A,B,...", help=text
    )
    text = (
        "range of a number, for --random and --search, such as lr=1e-4..1e-1:log; with :int for "
        "integers"
    )
    sweep.add_argument(
        "--range", nargs="+", action="extend", default=[], metavar="PATH=LOW..HIGH", help=text
    )
    number = sweep.add_mutually_exclusive_group()
    number.add_argument(
        "--random", type=int, default=0, metavar="N", help="draw N settings at random"
    )
    number.add_argument(
        "--search", type=int, default=0, metavar="N", help="let Optuna choose N settings"
    )
    sweep.add_argument(
        "--seeds", type=int, default=0, metavar="N", help="run each setting with the seeds 0 to N-1"
    )
    sweep.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at the same time (default: 1)"
    )
    text = (
        "end a run that takes longer, such as 90m: it is saved, and counts as failed (default: no "
        "limit)"
    )
    sweep.add_argument("--max-time", metavar="TIME", help=text)
    text = "the metric to search for (default: the first of save_best)"
    sweep.add_argument("--metric", metavar="NAME", help=text)
    sweep.add_argument(
        "--work-dir", metavar="DIR", help="the sweep's directory (default: work_dirs/CONFIG_sweep)"
    )
    text = "where the runs are: local (default), submitit (SLURM arrays) or ray"
    sweep.add_argument(
        "--launcher", dest="sweep_launcher", default="local", metavar="NAME", help=text
    )
    text = "an option of the launcher, such as slurm_partition=gpu or num_gpus=1; may be repeated"
    sweep.add_argument(
        "--launcher-option", action="append", default=[], metavar="NAME=VALUE", help=text
    )


def _add_config_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    _add(commands, "config", "commands.config", "print the resolved config", common)
    diff = _add(
        commands,
        "diff",
        "commands.diff",
        "print the values that differ between two configs",
        common,
    )
    diff.add_argument(
        "other", metavar="OTHER", help="a config file, a work dir or a checkpoint, as CONFIG may be"
    )
    _add(commands, "groups", "commands.groups", "print the table of parameter groups", common)
    schedule = _add(
        commands, "schedule", "schedule.run", "draw the schedules over the whole run", common
    )
    schedule.add_argument(
        "--png", metavar="FILE", help="save a PNG file instead of drawing in the terminal"
    )
    length = "iterations per epoch (by default, from the training data)"
    schedule.add_argument("--epoch-length", type=int, metavar="N", help=length)
    rates = _add(
        commands,
        "lr-find",
        "lr_find.run",
        "draw the loss over growing learning rates, and suggest one",
        common,
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
    _add(
        commands, "model", "model.run", "print the layers with shapes, parameters and FLOPs", common
    )
    data = _add(
        commands,
        "data",
        "data.run",
        "draw batches and print their shapes, ranges, speed and source",
        common,
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
    replay = _add(
        commands,
        "replay",
        "replay.run",
        "repeat a dropped step to find its first bad value",
        common,
    )
    replay.add_argument(
        "dump", metavar="DUMP", help="the file named in the error of the numerics guard"
    )


def _add_plan(commands: Commands, common: argparse.ArgumentParser) -> None:
    text = "print memory, sharding, collectives and estimated time on many devices"
    plan = _add(commands, "plan", "plan.run", text, common)
    devices = plan.add_mutually_exclusive_group(required=True)
    devices.add_argument(
        "--devices", type=int, metavar="N", help="number of CPU devices to compile for"
    )
    chips = "chips to compile for: v5e:16x16, v5p:2x2x1, v6e:2x2, h100:8, a100:8, b200:8"
    devices.add_argument("--topology", metavar="CHIP:SHAPE", help=chips)
    plan.add_argument(
        "--slices", type=int, metavar="N", help="number of TPU slices of --topology (default: 1)"
    )
    mesh = (
        "number of devices along data, fsdp, expert, context, tensor, or axes of the config; "
        "slices.AXIS=N: of slices"
    )
    plan.add_argument("--mesh", metavar="AXIS=N,...", help=mesh)
    processes = (
        "number of processes, each of which reads batch_size examples (default: the hosts of the "
        "topology, or 1)"
    )
    plan.add_argument("--processes", type=int, metavar="P", help=processes)
    search = (
        "try meshes, rematerialization and batch sizes on the chips of --topology, and rank those "
        "that fit; 'batch': "
        "only batch sizes, for the largest that fits"
    )
    plan.add_argument("--search", nargs="?", const="all", choices=("all", "batch"), help=search)
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_report(commands: Commands, traceback: argparse.ArgumentParser) -> None:
    report = _add(
        commands,
        "report",
        "report.run",
        "write or serve a page about one or several runs",
        traceback,
    )
    work_dirs = (
        "a work dir, for its newest run; one of its directories WORK_DIR/TIMESTAMP; or a "
        "directory of work dirs"
    )
    report.add_argument("work_dirs", nargs="+", metavar="WORK_DIR", help=work_dirs)
    report.add_argument(
        "--out",
        default="report.html",
        metavar="FILE",
        help="the page to write (default: report.html)",
    )
    report.add_argument(
        "--images",
        type=int,
        metavar="N",
        help="steps to show of each image (default: 8; 1 of over 8 runs)",
    )
    report.add_argument(
        "--serve",
        action="store_true",
        help="serve the page and follow the runs instead of writing it",
    )
    report.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to serve on (default: 127.0.0.1)",
    )
    report.add_argument(
        "--port",
        type=int,
        default=8080,
        metavar="PORT",
        help="port to serve on; 0 for any free one",
    )


def _add_table(commands: Commands, traceback: argparse.ArgumentParser) -> None:
    text = "print runs with the hyperparameters that differ and their metrics"
    table = _add(commands, "table", "commands.table", text, traceback)
    work_dirs = (
        "a work dir, for its newest run; one of its directories WORK_DIR/TIMESTAMP; or a sweep's "
        "directory"
    )
    table.add_argument("work_dirs", nargs="+", metavar="WORK_DIR", help=work_dirs)
    table.add_argument(
        "--group", action="store_true", help="one row for the seeds of equal runs: mean ± deviation"
    )
    table.add_argument(
        "--sort",
        metavar="COLUMN",
        help="sort by a column, named as in the table (default: best first)",
    )
    table.add_argument("--reverse", action="store_true", help="reverse the order of the rows")
    styles = table.add_mutually_exclusive_group()
    for style in ("csv", "markdown", "latex"):
        styles.add_argument(
            f"--{style}", dest="style", action="store_const", const=style, help=f"print {style}"
        )
    table.set_defaults(style="text")


def _add_ckpt(commands: Commands, traceback: argparse.ArgumentParser) -> None:
    work_dir = argparse.ArgumentParser(add_help=False)
    work_dir.add_argument("work_dir", metavar="WORK_DIR", help="a run's directory")
    checkpoint = argparse.ArgumentParser(add_help=False)
    checkpoint.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)

    ckpt = commands.add_parser("ckpt", help="list, show, remove or export checkpoints")
    actions = ckpt.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add(
        actions,
        "ls",
        "ckpt.ls",
        "list the checkpoints of a run and why each is kept",
        work_dir,
        traceback,
    )
    _add(actions, "show", "ckpt.show", "show the contents of a checkpoint", checkpoint, traceback)
    rm = _add(actions, "rm", "ckpt.rm", "remove checkpoints of a run", work_dir, traceback)
    rm.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="names of the checkpoints, as shown by `jengine ckpt ls`",
    )
    rm.add_argument(
        "--force",
        action="store_true",
        help="remove the latest too, from which the run would resume",
    )
    text = (
        "export the parameters for PyTorch, as a safetensors file, or the predictions as a "
        "jax.export artifact"
    )
    export = _add(actions, "export", "ckpt.export", text, checkpoint, traceback)
    export.add_argument(
        "file", nargs="?", metavar="FILE", help="the file to write, such as model.safetensors"
    )
    params = export.add_mutually_exclusive_group()
    params.add_argument(
        "--ema",
        action="store_true",
        help="export the averaged parameters; an error if there are none",
    )
    params.add_argument(
        "--raw", action="store_true", help="export the trained parameters, not their average"
    )
    text = (
        "write a directory as on the Hugging Face Hub: config.json and safetensors files (a "
        "TransformerLM only)"
    )
    export.add_argument("--to", choices=["safetensors"], help=text)
    text = (
        "with --to: the directory with the config.json (default: the one that the run's load_from "
        "names)"
    )
    export.add_argument("--like", metavar="DIR", help=text)
    export.add_argument(
        "--batch-stats",
        action="store_true",
        help="export the running statistics of batch norms too",
    )

    group = export.add_argument_group("an artifact that predicts without the model's code")
    group.add_argument(
        "--jax-export",
        metavar="FILE",
        help="write a serialized jax.export artifact instead of FILE",
    )
    inputs = (
        "an entry of a batch, without the batch axis, such as image=float32[8,8,1] (default: the "
        "entries of the "
        "config's data)"
    )
    group.add_argument("--input", action="append", metavar="NAME=DTYPE[SHAPE]", help=inputs)
    group.add_argument(
        "--batch-size", type=int, metavar="N", help="the only batch size (default: any)"
    )
    group.add_argument(
        "--trust",
        action="store_true",
        help="let the checkpoint's config run any code that it names",
    )
    group.add_argument(
        "--platforms", metavar="LIST", help="devices on which it can run (default: cpu,cuda,tpu)"
    )
