"""Entry point of the command `jengine`: arguments, processes, and errors as messages with exit
codes.
"""

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence

from jengine.cli.parser import build_parser
from jengine.config.errors import ConfigError
from jengine.config.plugins import load_each, load_provided, provided

_PLACE = "in the config at "
# Errors whose traceback shows only a comparison or a wait for another process
_WITHOUT_CODE = (
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "ProcessError",
    "StorageError",
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
    for explain in load_each("argument_hints"):
        if hint := explain(args, rest):
            args.parser.error(hint)
    unknown = [arg for arg in rest if arg not in overrides]
    if unknown:
        args.parser.error(f"unknown argument {unknown[0]}; --help lists the options")
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
        return _print_error(error, args.runs_code)
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
    is_set = any(setting is not None for setting in settings.values())
    has_launcher = "launch" in provided("jengine.parallel")
    if not is_set and (args.launcher == "none" or (args.launcher is None and not has_launcher)):
        yield
        return
    from jengine.parallel.processes import get_processes

    load_provided("jengine.parallel", "launch")(args.launcher, **settings)
    try:
        yield
    except Exception as error:
        # Before the error leaves: the others wait in a collective and would never hear of it.
        get_processes().fail(error)
        raise


def _print_error(error: Exception, runs_code: bool) -> int:
    """Print an error below the lines of the user's code that it passed; return the exit code."""
    from jengine.config.frames import JAX_NOTES, format_error, own_frames

    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(JAX_NOTES)]
    said = "\n".join(["", *notes])
    # an explanation with the line of the user's call says more than the frames
    is_explained = "\ncalled in " in said
    has_lines = not is_explained and type(error).__name__ not in _WITHOUT_CODE
    is_code = has_lines and bool(own_frames(error))
    in_file = "\nwhile loading the config file" in said
    is_mistake = in_file or (not is_code and _is_about_config(error, notes, runs_code))
    if not _says_enough(error, notes) and (is_code or not is_mistake):
        from jengine.logging.console import log_error

        print(format_error(error, log_error(error)), end="", file=sys.stderr)
    else:
        message = f"jengine: {type(error).__name__}: {error}"
        print("\n  ".join([message, *notes]), file=sys.stderr)
    return 2 if is_mistake else 1


def _is_about_config(error: Exception, notes: Sequence[str], runs_code: bool) -> bool:
    """Return whether an error is about the config, the command line or a file, not about code."""
    if type(error).__name__ in _WITHOUT_CODE:
        return True
    if not runs_code:
        return isinstance(error, OSError | ValueError | KeyError | ImportError)
    in_config = any(note.startswith((_PLACE, "in the argument ")) for note in notes)
    return in_config or isinstance(error, ConfigError | FileNotFoundError)


def _says_enough(error: Exception, notes: Sequence[str]) -> bool:
    """Return whether the message about a run that failed on the device or disk, or about samples,
    needs no traceback.
    """
    # A program other than the step is in code: that of a hook
    enough = re.compile(
        "the device ran out of memory.*, in (?!a program other)|the disk is full|samples of a batch"
    )
    return type(error).__name__ == "NonFiniteLossError" or any(map(enough.match, notes))
