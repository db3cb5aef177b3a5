"""Commands that only call the engine, and what all commands with a config share: loading it, and building a Runner."""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jengine.config import dump_config, load_config, resolve
from jengine.errors import ConfigError, require_extra

if TYPE_CHECKING:
    from jengine.runner import Runner  # imported when a command needs one, since it takes a second


def load(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Load the config; the file name sets the defaults of `work_dir` and `experiment_name`."""
    cfg = resolve(load_config(args.config, overrides))
    stem = config_name(args)
    if args.work_dir:
        cfg["work_dir"] = args.work_dir
    cfg.setdefault("work_dir", os.path.join("work_dirs", stem))
    cfg.setdefault("experiment_name", stem)
    return cfg


def config_name(args: argparse.Namespace) -> str:
    """Return the config file name without directory and suffix.

    >>> config_name(argparse.Namespace(config="configs/digits_cnn.py"))
    'digits_cnn'
    """
    return os.path.splitext(os.path.basename(args.config.partition(".py:")[0]))[0]


_PLACE = "in the config at `{}`"
_ARGUMENTS = {"load_from": "CHECKPOINT", "resume": "--resume"}  # of the command line, by key of the config


def build_runner(args: argparse.Namespace, overrides: Sequence[str], **settings: Any) -> Any:
    """Build the Runner for a config, with arguments that override it unless they are None."""
    from jengine.runner import Runner

    cfg = load(args, overrides)
    cfg.update({name: value for name, value in settings.items() if value is not None})
    if settings.get("resume") in (True, "must") and isinstance(cfg.get("load_from"), str):
        cfg["load_from"] = {"path": cfg["load_from"]}  # `--resume` means the work dir, as that of MMEngine
    try:
        return Runner.from_cfg(cfg)
    except Exception as error:
        given = {
            _PLACE.format(name): f"in the argument {argument} of the command line"
            for name, argument in _ARGUMENTS.items()
            if settings.get(name) is not None  # else it is in the config
        }
        error.__notes__ = [given.get(note, note) for note in getattr(error, "__notes__", ())]
        raise


@contextlib.contextmanager
def temporary_runner(cfg: Mapping[str, Any]) -> "Iterator[Runner]":
    """Build a Runner in a temporary directory, so that the command leaves no files behind, and logs only warnings."""
    from jengine.runner import Runner

    with tempfile.TemporaryDirectory() as work_dir:
        yield Runner.from_cfg({**cfg, "work_dir": work_dir, "log_level": "WARNING", "resume": False})


@contextlib.contextmanager
def save_figure(path: str, rows: int = 1, **options: Any) -> Iterator[Any]:
    """Draw with matplotlib: yield the axes in `rows`, one below the other, and write them to an image file.

    `options` are those of `pyplot.subplots`.
    """
    with require_extra("plot", "--png requires matplotlib"):
        import matplotlib
    # Before pyplot is imported: the default backend opens a window, or fails without a display.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, 1, squeeze=False, **options)
    yield axes[:, 0]
    figure.tight_layout()
    figure.savefig(path)
    # pyplot keeps every figure until it is closed.
    pyplot.close(figure)


def format_bytes(number: float, digits: int = 2) -> str:
    """Return a number of bytes with a suitable unit.

    >>> format_bytes(1536)
    '1.50 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:,.0f} B" if unit == "B" else f"{number:,.{digits}f} {unit}"


def test(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Test a checkpoint."""
    build_runner(args, overrides, load_from=args.checkpoint, resume=False).test()


def config(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the resolved config."""
    print(dump_config(load(args, overrides)), end="")


def groups(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the parameter group table."""
    from jengine.runner.session import format_groups

    with temporary_runner(load(args, overrides)) as runner:
        if not runner.is_training_configured:
            raise ConfigError("there are no parameter groups: the config has no optim_wrapper")
        print(format_groups(*runner.build_optimizer().group_table()))
