"""Where a run starts: the Runner's arguments `load_from` and `resume`."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jengine.checkpoint.array_rules import RuleLike, load_rules, parse_rules
from jengine.checkpoint.layout import find_checkpoint, find_latest
from jengine.checkpoint.manifest import read_manifest
from jengine.checkpoint.weights import describe_formats, is_pytree_of_arrays, locate_weights
from jengine.config.errors import ConfigError, config_path
from jengine.config.plugins import load_each, provided
from jengine.config.registry import check_arguments
from jengine.config.storage import storage_path
from jengine.parallel.processes import ProcessGroup


@dataclasses.dataclass(frozen=True)
class LoadFrom:
    """Weights that a run starts from; see `jengine.checkpoint.load_pretrained`.

    Attributes:
      path: where the weights are, or an object in memory: a pytree of arrays, an `nnx.State` or an
        `nnx.Module`.
      rename: `(old, new)` prefixes of parameter paths, for a model with other names; or `(old, new,
        options)` with functions on the arrays; or the name of rules that an extra has.
      strict: False keeps the model's own values where there are no matching ones.
      raw: True loads the raw parameters from a run that saved averages.
      exclude: paths of parameters that keep the initial values.
      interpolate: paths of position embeddings that are resized to the model's grid.
      interpolation: how they are resized.
      item: dotted path to the weights in a tree, if it is not that of the parameters.
      optimizer: True continues another loop's training: also loads the optimizer state and the step
        that are stored next to the weights.
      structure: for an `.eqx` file that has more than the parameters: a function without arguments,
        or an import path, that returns a pytree like the one that was saved.
    """

    path: Any
    rename: Sequence[RuleLike] | str = ()
    strict: bool = True
    raw: bool = False
    exclude: Sequence[str] = ()
    interpolate: Sequence[str] = ()
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    item: str | None = None
    optimizer: bool = False
    structure: Callable[[], Any] | str | None = None

    def make_structure(self, params: Any) -> Any:
        """Return the pytree that an `.eqx` file was written from, with any values."""
        from jengine.config.modules import import_attribute

        make = (
            import_attribute(self.structure) if isinstance(self.structure, str) else self.structure
        )
        return params if make is None else make()

    @property
    def rules(self) -> dict[str, Any]:
        """The arguments of `load_pretrained` that say where each array goes."""
        names = ("rename", "strict", "exclude", "interpolate", "interpolation", "item")
        return {name: getattr(self, name) for name in names}


def parse_load_from(load_from: Any, processes: ProcessGroup) -> LoadFrom | None:
    """Return the weights to start from; all processes verify that they exist.

    Raises:
      FileNotFoundError: nothing is at the path. CorruptCheckpointError: a checkpoint is damaged.
        ValueError: a file in another format. TypeError: neither a path nor a pytree of arrays, or
        an unknown field.
    """
    if load_from is None:
        return None
    with config_path("load_from"):
        options = dict(load_from.items()) if _is_options(load_from) else {"path": load_from}
        if "path" in options:
            path = options["path"]
            if isinstance(path, str | os.PathLike):
                # Verified now, before anything is built
                options["path"] = locate_weights(path, checksums=True, processes=processes)
            elif not is_pytree_of_arrays(path):
                raise TypeError(f"`load_from` must be {describe_formats()}; got {path!r}")
        check_arguments(LoadFrom, options)
        # A wrong rule is found before the model is built
        if isinstance(rules := options.get("rename", ()), str):
            load_rules(rules)
        else:
            parse_rules(rules)
        if options.get("optimizer") and not provided("continue"):
            raise ConfigError(
                "`optimizer` must be False without an extra that reads other loops' optimizers"
            )
        return LoadFrom(**options)


def remove_in_memory(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return the config without `load_from` if that is an object in memory, and warn about it."""
    load_from: Any = cfg.get("load_from")
    weights = load_from["path"] if _is_options(load_from) and "path" in load_from else load_from
    # Paths can be written into config.py; arrays in memory cannot, and a file of megabytes would
    # help nobody.
    if weights is None or isinstance(weights, str | os.PathLike) or _is_options(weights):
        return cfg
    warnings.warn(
        "`load_from` must be a path to be written to a config file, got an object in memory: "
        "config.py is written without it. A resumed run does not need it, but a new run from that "
        "file starts from random weights",
        stacklevel=2,
    )
    return {name: value for name, value in cfg.items() if name != "load_from"}


def _is_options(load_from: Any) -> bool:
    """Return whether `load_from` is a dict with options, not a pytree of arrays."""
    return hasattr(load_from, "items") and (
        "path" in load_from or not is_pytree_of_arrays(load_from)
    )


def find_checkpoint_to_resume(
    processes: ProcessGroup, work_dir: str, load_from: object, resume: bool | str | os.PathLike[str]
) -> tuple[str | None, str]:
    """Return the checkpoint to continue from, if there is one, and a line for the log.

    As in MMEngine, `resume=True` continues from `load_from` if that is the path of a checkpoint,
    and otherwise from the newest one in the work dir. Other weights (a file, objects, a dict with
    options) cannot be continued.
    """
    verification: Any = dict(checksums=True, processes=processes)
    if not resume:
        return None, ""
    if resume is not True and resume not in ("must", "exact"):  # a path
        with config_path("resume"):
            return find_checkpoint(resume, **verification), ""
    if isinstance(load_from, str | os.PathLike):
        with config_path("load_from"):
            path = locate_weights(load_from, **verification)
        manifest = read_manifest(storage_path("load_from", path))
        if manifest is not None and manifest.iteration is not None:  # published weights have none
            return path, (
                f"resume={resume!r} continues the run of load_from={os.fspath(load_from)!r}, as "
                f"in MMEngine, and does so again at each start. resume={os.fspath(load_from)!r} "
                "does the same. load_from=dict(path=...) loads only its weights, and continues "
                f"from the newest checkpoint of {work_dir} when started again."
            )
    newest = find_latest(work_dir, **verification)
    for find_newer in load_each("newer_checkpoints"):
        if (newer := find_newer(work_dir, newest, processes)) is not None:
            return newer  # the path and a line for the log
    if newest is None and resume == "must":
        raise ConfigError(
            f"`resume` must find a checkpoint in {work_dir} with resume='must', got none"
        )
    start = "from scratch" if load_from is None else "from the weights of load_from"
    return (
        newest,
        "" if newest else f"There is nothing to resume in {work_dir}: the run starts {start}.",
    )


def default_resume_command(load_from: object, path: str | None) -> str:
    """Return how to continue a run.

    >>> default_resume_command(None, None)
    'Runner(..., resume=True)'

    Args:
      load_from: the Runner's argument.
      path: a checkpoint; None for the newest one in the work dir, '' to start from scratch.
    """
    # it would hold
    without = (
        ["load_from=None"] if path is None and isinstance(load_from, str | os.PathLike) else []
    )
    resume = [] if path == "" else [f"resume={path or True!r}"]
    return f"Runner({', '.join(['...', *without, *resume])})"


def choose_seed(randomness: Mapping[str, Any] | None, saved: int | None) -> int:
    """Return the seed of the checkpoint, of the config, or a new one."""
    configured = (randomness or {}).get("seed")
    if saved is not None:
        return saved
    if configured is not None:
        return int(configured)
    # Without the section all runs have seed 0; `seed=None` in it draws another for each run
    return int(np.random.SeedSequence().generate_state(1)[0]) if randomness else 0
