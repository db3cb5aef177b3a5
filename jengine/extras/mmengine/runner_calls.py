"""What scripts call on MMEngine's Runner after it is built, as functions of the runner."""

import os
from collections.abc import Sequence
from typing import Any

from jengine.checkpoint.layout import find_checkpoint, read_meta
from jengine.checkpoint.start_from import parse_load_from
from jengine.config.errors import ConfigError
from jengine.runner.runner import Runner


def resume(runner: Runner, filename: str | os.PathLike[str]) -> None:
    """Continue from a checkpoint when `train` is called.

    The constructor's `resume` also continues its logs.

    Raises:
      ConfigError: the run has begun, or the checkpoint is of a run with another seed.
    """
    path = find_checkpoint(filename, checksums=True, processes=runner.processes)
    if runner.state is not None or read_meta(path)["meta"]["seed"] != runner.seed:
        got = "a call after the first" if runner.state is not None else f"another seed in {path}"
        raise ConfigError(
            f"`resume` must come before `train`, with the same seed, got {got}; pass resume=... to "
            "the constructor, which takes over the seed"
        )
    runner.load_from = None
    runner.resume_from = path


def load_checkpoint(
    runner: Runner,
    filename: Any,
    strict: bool = False,
    revise_keys: Sequence[tuple[str, str]] = (),
) -> None:
    """Load weights, now or when the run begins.

    The arguments are `path`, `strict` and `rename` of `load_from`.

    `revise_keys` may be those of MMEngine, `(r"^backbone\\.", "")`.
    """
    cfg: dict[str, Any] = {"path": filename, "strict": strict}
    if revise_keys:
        cfg["rename"] = [(_as_prefix(old), new.rstrip(".")) for old, new in revise_keys]
    runner.load_from = parse_load_from(cfg, runner.processes)
    runner.resume_from = None
    runner.is_loaded = False
    if runner.state is not None:
        runner.load_or_resume()


def _as_prefix(pattern: str) -> str:
    """Return the prefix that a regular expression such as `^backbone\\.` matches."""
    return pattern.removeprefix("^").removesuffix(".").removesuffix("\\").replace(r"\.", ".")
