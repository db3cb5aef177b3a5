"""Define the commands of `jengine`."""

import argparse
import contextlib
import functools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jengine.cli import ckpt, completion, convert, data, plan, predict, report
from jengine.cli.version import VersionAction
from jengine.errors import ConfigError, closest

# `optim_wrapper.optimizer.lr=0.1`, `max_epochs=2`, `--train_cfg.max_epochs=2`; not `--resumee=x`, a misspelled option
_OVERRIDE = re.compile(r"(?:--(?=\w+[.\[]))?(\w+(?:\.\w+|\[\d+\])*=.*)", re.DOTALL)
_EPILOG = """Set any value of the config with --config.PATH=VALUE:
  jengine train configs/digits_cnn.py --config.optim_wrapper.optimizer.lr=0.01 --config.custom_hooks[0].interval=5
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the arguments; those of the process by default.

    Returns:
      The exit code: 0; 1 for an error in code and for a plan that does not fit; 2 for a mistake in the config or on the
      command line; 130 after an interrupt. If one of several processes fails, its exit code is 1.
    """
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    args, rest = parser.parse_known_args(argv)
    args.argv = argv
    overrides = [arg for arg in rest if arg.startswith("--config.")]
    unknown = [arg for arg in rest if arg not in overrides]
    if unknown:
        parser.error(f"unknown argument {unknown[0]}{_suggest(unknown, parser, args)}")
    if overrides and "config" not in args:
        parser.error(f"{args.command} has no config to override, got {overrides[0]}")
    try:
        with _launch_processes(args):
            code: int | None = args.run(args, overrides)
    except Exception as error:
        if args.traceback:
            raise
        if not _is_user_error(error, args.command):
            from jengine.cli.tracebacks import format_error
            from jengine.logging import log_error

            print(format_error(error, log_error(error)), end="", file=sys.stderr)
            return 1
        print(f"jengine: {type(error).__name__}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jengine: interrupted", file=sys.stderr)
        return 130
    return code or 0


@contextlib.contextmanager
def _launch_processes(args: argparse.Namespace) -> Iterator[None]:
    """Connect to the other processes of a run, if there are any; an error in one of them then stops all."""
    settings = {"coordinator": args.coordinator, "num_processes": args.num_processes, "process_id": args.process_id}
    if args.launcher == "none" and all(setting is None for setting in settings.values()):
        yield
        return
    from jengine.distributed import get_processes, launch

    launch(args.launcher, **settings)
    try:
        yield
    except Exception as error:
        get_processes().fail(error)
        raise


def _train(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    from jengine.hooks import ProgressHook

    runner = _build_runner(args, overrides, resume=args.resume)
    runner.resume_command = functools.partial(_resume_command, args.argv)
    progress = ProgressHook()
    if sys.stdout.isatty():
        runner.register_hook(progress)
    try:
        runner.train()
    except KeyboardInterrupt:
        if runner.interrupts.signum is None:  # before the first iteration: nothing was logged
            raise
        return 128 + runner.interrupts.signum
    finally:
        progress.close()
    return 0


def _resume_command(argv: Sequence[str], path: str | None, *, guard: bool = False) -> str:
    """Return the command that continues the run of the arguments `argv`; see `default_resume_command`."""
    kept = [
        arg for i, arg in enumerate(argv)
        if not arg.startswith("--resume") and not (argv[i - 1] == "--resume" and not arg.startswith("-"))
    ]  # fmt: skip
    resume = [] if path == "" else ["--resume", *([path] if path else [])]
    hooks = ["--config.default_hooks.guard.type=NumericsGuardHook"] if guard else []
    return shlex.join(["jengine", *kept, *hooks, *resume])


def _test(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    _build_runner(args, overrides, load_from=args.checkpoint, resume=False).test()


def _predict(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    predict.check(args)
    predict.run(args, _build_runner(args, overrides, load_from=args.checkpoint, resume=False))


def _config(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.config import dump_config

    print(dump_config(_load_config(args, overrides)), end="")


def _groups(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    import tempfile

    from jengine.runner import Runner
    from jengine.runner.session import format_groups

    with tempfile.TemporaryDirectory() as work_dir:  # the command leaves no files behind
        cfg = _load_config(args, overrides)
        runner = Runner.from_cfg({**cfg, "work_dir": work_dir, "log_level": "WARNING"})
        if not runner.is_training_configured:
            raise ConfigError("there are no parameter groups: the config has no optim_wrapper")
        print(format_groups(*runner.build_optimizer().group_table()))


def _schedule(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.cli.schedule import run

    run(args, _load_config(args, overrides))


def _replay(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    from jengine.cli.replay import run

    run(args, _load_config(args, overrides))


def _data(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    data.run(args, _load_config(args, overrides), _config_name(args))


def _plan(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    return plan.run(args, overrides)


def _completion(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    completion.print_script(args.shell, build_parser())


def _build_runner(args: argparse.Namespace, overrides: Sequence[str], **settings: Any) -> Any:
    """Build the Runner of a config, with arguments that override it unless they are None."""
    from jengine.runner import Runner

    cfg = _load_config(args, overrides)
    cfg.update({name: value for name, value in settings.items() if value is not None})
    if settings.get("resume") in (True, "must") and isinstance(cfg.get("load_from"), str):
        cfg["load_from"] = {"path": cfg["load_from"]}  # `--resume` means the work dir, as that of MMEngine
    return Runner.from_cfg(cfg)


def _load_config(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Load the config; its file name sets the defaults of `work_dir` and `experiment_name`."""
    from jengine.config import load_config, resolve

    cfg = resolve(load_config(args.config, overrides))
    stem = _config_name(args)
    if args.work_dir:
        cfg["work_dir"] = args.work_dir
    cfg.setdefault("work_dir", os.path.join("work_dirs", stem))
    cfg.setdefault("experiment_name", stem)
    return cfg


def _config_name(args: argparse.Namespace) -> str:
    """Return the name of the config file without directory and suffix."""
    return os.path.splitext(os.path.basename(args.config.split(":")[0]))[0]


def _is_user_error(error: Exception, command: str) -> bool:
    """Return whether the message alone is enough, because the error is about the config or a file, not about code."""
    if command in ("ckpt", "report"):  # run no user code
        return isinstance(error, OSError | ValueError | KeyError | ImportError)
    if type(error).__name__ in ("ProcessError", "PlanError"):  # the traceback only shows a wait for another process
        return True
    in_config = any(note.startswith("in the config at ") for note in getattr(error, "__notes__", ()))
    return in_config or isinstance(error, ConfigError | FileNotFoundError)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    traceback = argparse.ArgumentParser(add_help=False)
    traceback.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    common = argparse.ArgumentParser(add_help=False, parents=[traceback])
    common.add_argument("config", metavar="CONFIG", help="a Python file with get_config()")

    parser = argparse.ArgumentParser(
        prog="jengine", description="Train JAX models from config files.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action=VersionAction)
    # for commands without these options
    parser.set_defaults(work_dir=None, launcher="none", coordinator=None, num_processes=None, process_id=None)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_run_commands(commands, common)
    show = commands.add_parser("config", parents=[common], help="print the resolved config")
    show.set_defaults(run=_config)
    groups = commands.add_parser("groups", parents=[common], help="print the table of parameter groups")
    groups.set_defaults(run=_groups)
    schedule = commands.add_parser("schedule", parents=[common], help="draw the schedules over the whole run")
    schedule.add_argument("--png", metavar="FILE", help="save a PNG file instead of drawing in the terminal")
    schedule.add_argument(
        "--epoch-length", type=int, metavar="N", help="iterations per epoch (by default, from the training data)"
    )
    schedule.set_defaults(run=_schedule)
    data_parser = commands.add_parser(
        "data", parents=[common], help="draw batches and print their shapes, ranges, speed and source"
    )
    data.add_arguments(data_parser)
    data_parser.set_defaults(run=_data)
    replay = commands.add_parser("replay", parents=[common], help="repeat a dropped step to find its first bad value")
    replay.add_argument("dump", metavar="DUMP", help="the file named in the error of the numerics guard")
    replay.set_defaults(run=_replay)
    plan_parser = commands.add_parser(
        "plan", parents=[common], help="print memory, sharding, collectives and estimated time on many devices"
    )
    plan.add_arguments(plan_parser)
    plan_parser.set_defaults(run=_plan)
    report.add_parser(commands, traceback)
    ckpt.add_parser(commands, traceback)
    convert.add_parser(commands, traceback)
    completion.add_parser(commands, traceback).set_defaults(run=_completion)
    return parser


def _add_run_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `train`, `test` and `predict`."""
    run = argparse.ArgumentParser(add_help=False, parents=[common])
    run.add_argument("--work-dir", metavar="DIR", help="directory for checkpoints and logs (default: work_dirs/CONFIG)")
    processes = run.add_argument_group("several processes")
    processes.add_argument(
        "--launcher",
        default="none",
        metavar="NAME",
        help="the launcher of the processes: auto, slurm, mpi, kubernetes, tpu",
    )
    processes.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    processes.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    processes.add_argument("--process-id", type=int, metavar="I", help="index of this process, from 0")

    train = commands.add_parser("train", parents=[run], help="train the model of a config")
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="PATH",
        help="continue from the newest checkpoint of the work dir ('must': or fail), or from PATH",
    )
    train.set_defaults(run=_train)
    test = commands.add_parser("test", parents=[run], help="test a checkpoint")
    test.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a work dir for its newest one")
    test.set_defaults(run=_test)
    predict_parser = commands.add_parser("predict", parents=[run], help="write predictions of a checkpoint to a file")
    predict.add_arguments(predict_parser)
    predict_parser.set_defaults(run=_predict)


def _suggest(unknown: Sequence[str], parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return a hint: overrides if all unknown arguments look like config paths, else the closest option."""
    matches = [_OVERRIDE.fullmatch(arg) for arg in unknown if arg != "--cfg-options"]  # MMEngine's option
    if matches and all(matches) and "config" in args:
        return f"; did you mean {' '.join(f'--config.{match[1]}' for match in matches if match)}?"
    return closest(unknown[0].split("=")[0], _list_options(parser, args))


def _list_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the options of the given command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _list_options(action.choices[getattr(args, action.dest)], args)
    options = [option for action in parser._actions for option in action.option_strings]
    return [*options, "--config.PATH=VALUE"] if "config" in args else options
