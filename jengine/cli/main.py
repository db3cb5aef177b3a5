"""Entry point of the command `jengine`: arguments, processes, and errors as messages with exit
codes.
"""

import argparse
import contextlib
import errno
import importlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

from jengine.cli.parser import build_parser
from jengine.config.errors import ConfigError

_DISK_ADVICE = """\
  Free space, then continue from the last checkpoint with --resume; or elsewhere with \
--resume {} --work-dir DIR."""
_KEEP_FEWER = """
  To keep fewer checkpoints: \
--config.default_hooks.checkpoint="{'type':'CheckpointHook','max_keep_ckpts':%d}"."""
_PLACE = "in the config at "
_LOADER = re.compile(r"in (\w+_dataloader[\w.]*) \(")
# Errors whose traceback shows only a comparison, a wait for another process, or how samples are
# stacked
_WITHOUT_CODE = (
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "ProcessError",
    "StorageError",
    "UnequalSamplesError",
)
_FIRST_ADVICE = (
    "  Free space, or write to another disk with --work-dir DIR, and start again: nothing is "
    "saved yet."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    >>> main(["config", "missing.py"])
    2

    Args:
      argv: the arguments; those of the process by default.

    Returns:
      The exit code: 0; 1 for an error in code and for a plan that does not fit; 2 for a mistake in
        the config or on the
      command line; 130 after an interrupt. If one of several processes fails, its exit code is 1.
    """
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    # the paths of a config are no options that a parser could know
    args, rest = parser.parse_known_args(argv)
    args.argv = argv
    overrides = [arg for arg in rest if arg.startswith("--config.")]
    unknown = [arg for arg in rest if arg not in overrides]
    if unknown:
        settings = "; --config.PATH=VALUE sets a value of the config" if "config" in args else ""
        parser.error(f"unknown argument {unknown[0]}{settings}; --help lists the options")
    if overrides and "config" not in args:
        parser.error(f"{args.command} has no config to override, got {overrides[0]}")
    # A command imports JAX and the engine only when it runs, so that `jengine --help` is fast.
    module, _, function = args.run.partition(":")
    try:
        with _launch_processes(args):
            code: int | None = getattr(importlib.import_module(module), function)(args, overrides)
        sys.stdout.flush()  # here an error is still a message
    except BrokenPipeError:
        # the reader of our output has seen enough: `jengine table work_dirs | head`
        # or Python fails again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if args.traceback:
            raise
        if _is_disk_full(error):
            print(f"jengine: the disk is full: {error}\n{_advise_on_disk(error)}", file=sys.stderr)
            return 1
        is_mistake = _is_user_error(error, args.runs_code)
        if not is_mistake and not _says_enough(error):
            from jengine.cli.tracebacks import format_error
            from jengine.logging.console import log_error

            print(format_error(error, log_error(error)), end="", file=sys.stderr)
            return 1
        _print_error(error, overrides)
        return 2 if is_mistake else 1
    except KeyboardInterrupt:
        print("jengine: interrupted", file=sys.stderr)
        return 130
    return code or 0


@contextlib.contextmanager
def _launch_processes(args: argparse.Namespace) -> Iterator[None]:
    """Connect to the other processes of a run, if there are any.

    An error in one of them then stops all.
    """
    settings = {
        "coordinator": args.coordinator,
        "num_processes": args.num_processes,
        "process_id": args.process_id,
    }
    if args.launcher == "none" and all(setting is None for setting in settings.values()):
        yield
        return
    from jengine.parallel.launchers import launch
    from jengine.parallel.processes import get_processes

    launch(args.launcher, **settings)
    try:
        yield
    except Exception as error:
        # Before the error leaves: the others wait in a collective and would never hear of it.
        get_processes().fail(error)
        raise


def _print_error(error: Exception, overrides: Sequence[str]) -> None:
    from jengine.cli.tracebacks import JAX_NOTES

    print(f"jengine: {type(error).__name__}: {error}", file=sys.stderr)
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(JAX_NOTES)]
    by_path = {
        override.removeprefix("--config.").partition("=")[0]: override for override in overrides
    }
    lines = [
        ", ".join(filter(None, (note, _find_override(error, note, by_path))))
        for note in notes or [""]
    ]
    named = [
        override for path, override in by_path.items() if any(f"`{path}`" in note for note in notes)
    ]
    if named and lines == notes:
        lines.append(f"from the command line: {' '.join(named)}")
    for line in filter(None, lines):
        print(f"  {line}", file=sys.stderr)


def _find_override(error: Exception, note: str, by_path: Mapping[str, str]) -> str:
    """Return which arguments of the command line, by path, set what an error is about, or "".

    It is at the place in the config that a note names, or, without notes, at a key that the message
    quotes.
    """
    quoted = set(re.findall(r"['`.]([\w-]+)['`]", str(error)))
    found = [path for path in by_path if not quoted.isdisjoint(re.split(r"[.\[\]]+", path))]
    if note:
        loader = _LOADER.match(note)
        place = loader[1] if loader else "\n"  # no path has a line end
        place = note.removeprefix(_PLACE).strip("`") if note.startswith(_PLACE) else place
        inside = [path for path in by_path if f"{path}.".startswith((f"{place}.", f"{place}["))]
        around = [path for path in by_path if f"{place}.".startswith((f"{path}.", f"{path}["))]
        found = [path for path in inside if path in found] or inside or around
    return f"from the command line: {' '.join(by_path[path] for path in found)}" if found else ""


def _is_user_error(error: Exception, runs_code: bool) -> bool:
    """Return whether the message alone is enough, because the error is about the config or a
    file, not about code.
    """
    if type(error).__name__ in _WITHOUT_CODE:
        return True
    if not runs_code:
        return isinstance(error, OSError | ValueError | KeyError | ImportError)
    notes = getattr(error, "__notes__", ())
    in_config = any(note.startswith((_PLACE, "in the argument ")) for note in notes)
    return in_config or isinstance(error, ConfigError | FileNotFoundError)


def _says_enough(error: Exception) -> bool:
    """Return whether the message about a run that failed on the device needs no traceback."""
    # A program other than the step is in code: that of a hook
    memory = re.compile("the device ran out of memory.*, in (?!a program other)")
    return type(error).__name__ == "NonFiniteLossError" or any(
        map(memory.match, getattr(error, "__notes__", ()))
    )


def _is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is about a full disk or quota.

    TensorStore has a type of its own.
    """
    while error is not None:
        is_own = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_own or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _advise_on_disk(error: Exception) -> str:
    earlier = getattr(error, "earlier", None)  # of a checkpoint that could not be saved
    if earlier == []:
        return _FIRST_ADVICE
    earlier = earlier or ["CHECKPOINT"]
    # The new checkpoint is written before an old one is removed, so only fewer than now make room
    return _DISK_ADVICE.format(earlier[-1]) + (
        _KEEP_FEWER % (len(earlier) - 1) if len(earlier) > 1 else ""
    )
