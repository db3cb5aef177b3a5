"""Commands that only call the engine, and what all commands with a config share: loading it, and
building a Runner.
"""

import argparse
import collections
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jengine.config.containers import resolve
from jengine.config.dump import dump_config
from jengine.config.load import load_config
from jengine.config.overrides import apply_overrides
from jengine.config.plugins import load_each, load_provided


def load(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Load the config; the file name sets the defaults of `work_dir` and `experiment_name`."""
    loaded = load_config(args.config, overrides)
    for expand in load_each("shortcuts"):
        loaded = apply_overrides(loaded, expand(args, overrides, loaded))
    cfg = resolve(loaded)
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
# of the command line, by key of the config
_ARGUMENTS = {"load_from": "CHECKPOINT", "resume": "--resume"}


def build_runner(args: argparse.Namespace, overrides: Sequence[str], **settings: Any) -> Any:
    """Build the Runner for a config, with arguments that override it unless they are None."""
    from jengine.runner.runner import Runner

    cfg = load(args, overrides)
    cfg.update({name: value for name, value in settings.items() if value is not None})
    if settings.get("resume") in (True, "must", "exact") and isinstance(cfg.get("load_from"), str):
        # `--resume` means the work dir, as that of MMEngine
        cfg["load_from"] = {"path": cfg["load_from"]}
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
def temporary_runner(cfg: Mapping[str, Any]) -> Iterator[Any]:
    """Build a Runner in a temporary directory, so that the command leaves no files behind, and
    logs only warnings.
    """
    from jengine.runner.runner import Runner

    with tempfile.TemporaryDirectory() as work_dir:
        yield Runner.from_cfg(
            {**cfg, "work_dir": work_dir, "log_level": "WARNING", "resume": False}
        )


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


def choose_checkpoint(args: argparse.Namespace) -> str:
    """Return the checkpoint or work dir in the arguments, or with --best the best checkpoint."""
    if args.best is None:
        return str(args.checkpoint)
    find_best = load_provided("jengine.checkpoint", "find_best_checkpoint")
    return str(find_best(args.checkpoint, args.best))


def test(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Test a checkpoint."""
    build_runner(args, overrides, load_from=choose_checkpoint(args), resume=False).test()


def config(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the resolved config."""
    print(dump_config(load(args, overrides)), end="")


def describe_versions() -> str:
    """Return the versions of jengine, Python and the libraries, and the devices, a line each,
    for bug reports.
    """
    import jax

    from jengine.versions import __version__, describe_device, environment_versions

    try:
        counts = collections.Counter(map(describe_device, jax.local_devices()))
        devices = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    except RuntimeError as error:
        # JAX_PLATFORMS names a platform that is not here, or a driver is missing
        devices = f"none ({error})"
    versions = {"jengine": __version__, **environment_versions(), "devices:": devices}
    return "\n".join(f"{name} {text}" for name, text in versions.items())
