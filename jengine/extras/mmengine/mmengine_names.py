"""Methods and properties of the Runner that only code written for MMEngine's Runner needs."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from jengine.checkpoint.layout import find_checkpoint, read_meta
from jengine.checkpoint.start_from import LoadFrom, parse_load_from
from jengine.config.errors import ConfigError
from jengine.logging.console import build_logger
from jengine.logging.message_hub import MessageHub
from jengine.logging.visualizer import Visualizer
from jengine.parallel.processes import ProcessGroup
from jengine.runner import bundle, components


class MMEngineNames:
    """Base class of the Runner, with MMEngine's names for what the constructor and `train` do."""

    processes: ProcessGroup
    state: Any
    train_loop: Any
    seed: int
    experiment_name: str
    log_dir: str
    _sections: dict[str, Any]
    _load_from: LoadFrom | None
    _resume_from: str | None
    _is_loaded = False  # whether the state is from the checkpoint to resume or to load

    def build_logger(
        self, log_level: int | str = "INFO", log_file: str | None = None
    ) -> logging.Logger:
        """Return the logger; a subclass may return another."""
        # a refused run leaves no file
        return build_logger(log_file=log_file, level=log_level, wait=True)

    def build_message_hub(self) -> MessageHub:
        """Return the message hub, named like the experiment."""
        return MessageHub.new_instance(self.experiment_name)

    def build_visualizer(self, visualizer: Any = None) -> Visualizer:
        """Return the visualizer for an instance or a config; None for JSON lines and PNG files."""
        return components.build_visualizer(visualizer, self.log_dir)

    def load_or_resume(self) -> None:
        """Load the weights of `load_from`, or continue from the checkpoint of `resume`, unless
        that is done.
        """
        if not self._is_loaded:
            self._is_loaded = True
            bundle.load_or_resume(self, self._load_from, self._resume_from)  # type: ignore[arg-type]

    def resume(self, filename: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint when `train` is called; the constructor's `resume` also
        continues its logs.
        """
        path = find_checkpoint(filename, checksums=True, processes=self.processes)
        if self.state is not None or read_meta(path)["meta"]["seed"] != self.seed:
            got = "a call after the first" if self.state is not None else f"another seed in {path}"
            advice = "pass resume=... to the constructor, which takes over the seed"
            raise ConfigError(
                f"`Runner.resume` must come before `train`, with the same seed, got {got}; {advice}"
            )
        self._load_from = None
        self._resume_from = path

    def load_checkpoint(
        self, filename: Any, strict: bool = False, revise_keys: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Load weights, now or when the run begins; the arguments are `path`, `strict` and `rename`
        of `load_from`.

        `revise_keys` may be those of MMEngine, `(r"^backbone\\.", "")`.
        """
        rename = [(_as_prefix(old), new.rstrip(".")) for old, new in revise_keys]
        cfg = {"path": filename, "strict": strict, "rename": rename}
        self._load_from = parse_load_from(cfg, self.processes)
        self._resume_from = None
        self._is_loaded = False
        if self.state is not None:
            self.load_or_resume()

    @property
    def val_interval(self) -> int:
        """Epochs, or iterations, between two validations; in an iteration loop 1000 by default."""
        if self.train_loop is not None:
            return self.train_loop.val_interval
        section = self._sections["train_cfg"]
        return section.get("val_interval", 1 if components.is_epoch_based(section) else 1000)

    @property
    def val_begin(self) -> int:
        """The first epoch, or iteration, after which a validation may run."""
        return (
            self._sections["train_cfg"].get("val_begin", 1)
            if self.train_loop is None
            else self.train_loop.val_begin
        )

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.processes.count > 1

    @property
    def rank(self) -> int:
        """Index of this process."""
        return self.processes.index

    @property
    def world_size(self) -> int:
        """Number of processes, each of which may have several devices."""
        return self.processes.count

    @property
    def launcher(self) -> str:
        """'jax' for several processes, which `jax.distributed` connects, or 'none'."""
        return "jax" if self.distributed else "none"


def _as_prefix(pattern: str) -> str:
    """Return the prefix that a regular expression such as `^backbone\\.` matches."""
    return pattern.removeprefix("^").removesuffix(".").removesuffix("\\").replace(r"\.", ".")
