"""The commands of `jengine`: the engine from the command line."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jengine.cli import ckpt, plan
from jengine.errors import ConfigError, closest

# `optim_wrapper.optimizer.lr=0.1`, `max_epochs=2`, `--train_cfg.max_epochs=2`: not `--resumee=x`, a misspelt option
_PLACE_IN_CONFIG = re.compile(r"(?:--(?=\w+[.\[]))?(\w+(?:\.\w+|\[\d+\])*=.*)", re.DOTALL)
_EPILOG = """Any value of the config can be set with --config.PATH=VALUE:
  jengine train configs/digits_cnn.py --config.optim_wrapper.optimizer.lr=0.01 --config.custom_hooks[0].interval=5
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments, those of the process by default.

    Returns:
      The exit code: 0, or 2 for a mistake in the config or on the command line. A process that ends because of an
      error when there are others ends with 1.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    overrides = [arg for arg in rest if arg.startswith("--config.")]
    unknown = [arg for arg in rest if arg not in overrides]
    if unknown:
        parser.error(f"unknown argument {unknown[0]}{_meant(unknown, parser, args)}")
    if overrides and "config" not in args:
        parser.error(f"{args.command} reads no config: there is nothing for {overrides[0]} to change")
    try:
        with _launched(args):
            args.run(args, overrides)
    except Exception as error:
        if args.traceback or not _is_users_mistake(error, args.command):
            raise
        print(f"jengine: {type(error).__name__}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jengine: interrupted", file=sys.stderr)
        return 130
    return 0


@contextlib.contextmanager
def _launched(args: argparse.Namespace) -> Iterator[None]:
    """Runs a command as one of the processes of a run, if it is one: then an error of one of them ends all."""
    settings: dict[str, Any] = {
        name: getattr(args, name, None) for name in ("coordinator", "num_processes", "process_id")
    }
    if getattr(args, "launcher", "none") == "none" and all(setting is None for setting in settings.values()):
        yield
        return
    from jengine.distributed import get_processes, launch

    launch(args.launcher, **settings)
    try:
        yield
    except Exception as error:
        get_processes().fail(error)
        raise


def _train(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.hooks import ProgressHook

    runner = _runner(args, overrides, resume=args.resume)
    progress = ProgressHook()
    if sys.stdout.isatty():
        runner.register_hook(progress)
    try:
        runner.train()
    finally:
        progress.close()


def _test(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    _runner(args, overrides, load_from=args.checkpoint).test()


def _config(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.config import dump_config

    print(dump_config(_load(args, overrides)), end="")


def _groups(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    import tempfile

    from jengine.runner import Runner
    from jengine.runner.report import group_table

    with tempfile.TemporaryDirectory() as work_dir:  # a look at the groups leaves nothing behind
        runner = Runner.from_cfg({**_load(args, overrides), "work_dir": work_dir, "log_level": "WARNING"})
        if runner.is_training_configured:
            print(group_table(runner.build_optimizer()))
        else:
            raise ConfigError("there are no parameter groups: the config has no optim_wrapper")


def _schedule(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.cli.schedule import run

    run(args, _load(args, overrides))


def _replay(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.cli.replay import run

    run(args, _load(args, overrides))


def _plan(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    plan.run(args, _load(args, overrides))


def _runner(args: argparse.Namespace, overrides: Sequence[str], **settings: Any) -> Any:
    """The Runner of a config, with the name and work dir that its file suggests."""
    from jengine.runner import Runner

    cfg = _load(args, overrides)
    cfg.update({name: value for name, value in settings.items() if value is not None})
    return Runner.from_cfg(cfg)


def _load(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    from jengine.config import load_config, resolve

    cfg = resolve(load_config(args.config, overrides))
    stem = os.path.splitext(os.path.basename(args.config.split(":")[0]))[0]
    if getattr(args, "work_dir", None):
        cfg["work_dir"] = args.work_dir
    cfg.setdefault("work_dir", os.path.join("work_dirs", stem))
    cfg.setdefault("experiment_name", stem)
    return cfg


def _is_users_mistake(error: Exception, command: str) -> bool:
    """Whether the message alone tells what to do: it is about the config or a file, not about code."""
    if command == "ckpt":  # runs no code of the user's
        return isinstance(error, OSError | ValueError | KeyError | ImportError)
    if type(error).__name__ == "ProcessError":  # its traceback is that of a wait for another process
        return True
    placed = any(note.startswith("in the config at ") for note in getattr(error, "__notes__", ()))
    return placed or isinstance(error, ConfigError | FileNotFoundError)


def _parser() -> argparse.ArgumentParser:
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("--traceback", action="store_true", help="show the whole traceback of a mistake")
    several = argparse.ArgumentParser(add_help=False)
    processes = several.add_argument_group("several processes")
    processes.add_argument(
        "--launcher", default="none", metavar="NAME", help="what started them: auto, slurm, mpi, kubernetes, tpu"
    )
    processes.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    processes.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    processes.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")
    common = argparse.ArgumentParser(add_help=False, parents=[every])
    common.add_argument("config", metavar="CONFIG", help="a Python file with get_config()")
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--work-dir", metavar="DIR", help="where checkpoints and logs go (work_dirs/CONFIG by default)")

    parser = argparse.ArgumentParser(
        prog="jengine", description="Train JAX models from config files.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", parents=[common, run, several], help="train the config's model")
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="PATH",
        help="continue from the newest checkpoint of the work dir, or from PATH",
    )
    train.set_defaults(run=_train)
    test = commands.add_parser("test", parents=[common, run, several], help="test a checkpoint")
    test.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a work dir for its newest one")
    test.set_defaults(run=_test)
    show = commands.add_parser("config", parents=[common], help="print the resolved config")
    show.set_defaults(run=_config)
    groups = commands.add_parser("groups", parents=[common], help="print the table of parameter groups")
    groups.set_defaults(run=_groups)
    schedule = commands.add_parser("schedule", parents=[common], help="draw the schedules over the whole run")
    schedule.add_argument("--png", metavar="FILE", help="draw into a picture instead of the terminal")
    schedule.add_argument(
        "--epoch-length", type=int, metavar="N", help="iterations in an epoch (that of the training data by default)"
    )
    schedule.set_defaults(run=_schedule)
    replay = commands.add_parser("replay", parents=[common], help="run a step that was dropped again, and look into it")
    replay.add_argument("dump", metavar="DUMP", help="the file that the error of the numerics guard names")
    replay.set_defaults(run=_replay)
    planned = commands.add_parser("plan", parents=[common], help="what each of many devices would hold and exchange")
    plan.add_arguments(planned)
    planned.set_defaults(run=_plan)
    ckpt.add_parser(commands, every)
    return parser


def _meant(unknown: Sequence[str], parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """What to type instead: overrides if all that is unknown names places in the config, else the closest option."""
    places = [_PLACE_IN_CONFIG.fullmatch(arg) for arg in unknown if arg != "--cfg-options"]  # MMEngine's option
    if places and all(places) and "config" in args:
        return f"; did you mean {' '.join(f'--config.{place[1]}' for place in places if place)}?"
    return closest(unknown[0].split("=")[0], _options(parser, args))


def _options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """What could have been meant by an unknown argument: the options of the command given."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _options(action.choices[getattr(args, action.dest)], args)
    options = [option for action in parser._actions for option in action.option_strings]
    return [*options, "--config.PATH=VALUE"] if "config" in args else options
