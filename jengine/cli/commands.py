"""Commands that only call the engine, and what all commands with a config share: loading it, and building a Runner."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from jengine.config import dump_config, load_config, resolve
from jengine.errors import ConfigError


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


def build_runner(args: argparse.Namespace, overrides: Sequence[str], **settings: Any) -> Any:
    """Build the Runner for a config, with arguments that override it unless they are None."""
    from jengine.runner import Runner

    cfg = load(args, overrides)
    cfg.update({name: value for name, value in settings.items() if value is not None})
    if settings.get("resume") in (True, "must") and isinstance(cfg.get("load_from"), str):
        cfg["load_from"] = {"path": cfg["load_from"]}  # `--resume` means the work dir, as that of MMEngine
    return Runner.from_cfg(cfg)


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
    import tempfile

    from jengine.runner import Runner
    from jengine.runner.session import format_groups

    with tempfile.TemporaryDirectory() as work_dir:  # the command leaves no files behind
        runner = Runner.from_cfg({**load(args, overrides), "work_dir": work_dir, "log_level": "WARNING"})
        if not runner.is_training_configured:
            raise ConfigError("there are no parameter groups: the config has no optim_wrapper")
        print(format_groups(*runner.build_optimizer().group_table()))
