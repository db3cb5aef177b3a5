"""Config checks before anything is built."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jengine.checkpoint.arrays import check_storable
from jengine.config.annotations import is_mapping
from jengine.config.containers import check_keys
from jengine.config.dump import check_written
from jengine.config.errors import (
    ConfigError,
    config_path,
    current_config_path,
)
from jengine.config.plugins import load_each
from jengine.config.registry import LOOPS, Config, as_config, check_arguments
from jengine.data.build import check_dataloader, name_to_function
from jengine.data.find_source import as_source, is_stream
from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.evaluation.sections import (
    EvalSettings,
    build_evaluators,
    loader_path,
    split_dataloaders,
    split_settings,
)
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import EvalLoopProtocol, TrainLoopProtocol
from jengine.optim.batch_size import read_auto_scale_lr
from jengine.optim.schedules.scheduler import Schedulers, flatten_schedulers
from jengine.optim.schedules.scheduler_builder import check_param_schedulers
from jengine.optim.wrapper_builder import check_optim_wrapper
from jengine.train.phases import parse_phases
from jengine.train.state import TrainState

_SECTIONS = {
    "train": ("train_dataloader", "train_cfg", "optim_wrapper"),
    "val": ("val_dataloader", "val_cfg", "val_evaluator"),
    "test": ("test_dataloader", "test_cfg", "test_evaluator"),
}
_TRAINING_OPTIONS = ("param_scheduler", "auto_scale_lr")
LoopSection = Config | TrainLoopProtocol | EvalLoopProtocol  # `train_cfg`, `val_cfg` or `test_cfg`
EVAL_LOOPS = {"val": "ValLoop", "test": "TestLoop"}


def adapt_config(cfg: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a resolved config as the `config_checks` of the extras leave it, and what they say."""
    changes = ""
    for check in load_each("config_checks"):
        cfg, lines = check(cfg)
        changes += lines
    return cfg, changes


def read_top_level(
    cfg: dict[str, Any], constructor: Callable[..., Any]
) -> tuple[dict[str, Any], str]:
    """Read a resolved config, whose keys are `model`, `work_dir`, other arguments of
    `constructor`, and `vars`.

    Returns:
      See `adapt_config`.
    """
    cfg, changes = adapt_config(cfg)
    known = [
        name for name in inspect.signature(constructor).parameters if name not in ("self", "cfg")
    ]
    check_keys(cfg, [*known, "vars"], hint="put your own variables under `vars`")
    for name in ("model", "work_dir"):
        if cfg.get(name) is None:
            raise ConfigError(f"the config must have the key {name!r}, got none")
    check_written(cfg)
    return cfg, changes


def read_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sections for training, validation and test, among the Runner's arguments by name.

    Returns:
      The sections: loops with their `type`, dataloaders and built evaluators by name.
    """
    checked = {
        name: sections[name] for name in (*itertools.chain(*_SECTIONS.values()), *_TRAINING_OPTIONS)
    }
    for mode, names in _SECTIONS.items():
        missing = [name for name in names if sections[name] is None]
        if missing and len(missing) < len(names):
            given = " and ".join(f"`{name}`" for name in names if name not in missing)
            absent = " and ".join(f"`{name}`" for name in missing)
            raise ConfigError(
                f"the {mode} sections must be complete or absent, got {given} without {absent}; "
                f"either give {absent}, or set {given} to None as well"
            )
        if missing:
            continue
        if mode == "train":
            _check_loader("train_dataloader", sections["train_dataloader"])
            with config_path("train_cfg"):
                loop = sections["train_cfg"]
                loop = _check_loop(train_loop_config(loop) if _is_config(loop) else loop)
                if is_mapping(loop):
                    parse_phases(loop.get("phases"))
            checked["train_cfg"] = loop
        else:
            checked |= _read_evaluations(mode, *map(sections.__getitem__, names))
    if sections["param_scheduler"] is not None and sections["optim_wrapper"] is None:
        raise ConfigError("`optim_wrapper` must be given with param_scheduler, got none")
    checked["auto_scale_lr"] = read_auto_scale_lr(sections["auto_scale_lr"])
    if sections["optim_wrapper"] is not None:
        wrappers = check_optim_wrapper(sections["optim_wrapper"])
        by_epoch = is_epoch_based(checked["train_cfg"])
        check_param_schedulers(sections["param_scheduler"], list(wrappers), by_epoch)
    return checked


def train_loop_config(cfg: LoopSection) -> dict[str, Any]:
    """Return the training loop config with a `type`, which `max_epochs` or `max_iters` and
    `by_epoch` may replace.

    >>> train_loop_config(dict(max_iters=100))
    {'type': 'IterBasedTrainLoop', 'max_iters': 100}
    """
    lengths = ("max_epochs", "max_iters")
    # None takes back what a base config has set
    cfg = {
        key: value
        for key, value in as_config(cfg).items()
        if key not in lengths or value is not None
    }
    if "type" in cfg and "by_epoch" in cfg:
        raise ConfigError("train_cfg must have a type or by_epoch, got both; remove one of them")
    if "type" in cfg:
        return cfg
    if cfg.keys() >= set(lengths):
        epochs, iters = (cfg[name] for name in lengths)
        raise ConfigError(
            f"`train_cfg` must have either max_epochs or max_iters, got max_epochs={epochs} and "
            f"max_iters={iters}; remove one of them; on the command line, "
            "--config.train_cfg.max_epochs=None --config.train_cfg.by_epoch=False trains for "
            f"{iters} iterations, and --config.train_cfg.max_iters=None "
            f"--config.train_cfg.by_epoch=True for {epochs} epochs"
        )
    by_epoch = cfg.pop("by_epoch", "max_iters" not in cfg)
    if not isinstance(by_epoch, bool):
        raise TypeError(f"`train_cfg.by_epoch` must be True or False, got {by_epoch!r}")
    other = lengths[by_epoch]
    if other in cfg:
        raise ConfigError(
            f"`train_cfg.by_epoch` must be {not by_epoch} with {other}, got {by_epoch}"
        )
    return {"type": "EpochBasedTrainLoop" if by_epoch else "IterBasedTrainLoop", **cfg}


def is_epoch_based(train_cfg: LoopSection | None) -> bool:
    """Return whether the training loop counts in epochs; True for a run without training.

    >>> is_epoch_based(dict(type="IterBasedTrainLoop", max_iters=100))
    False
    """
    if train_cfg is not None and _is_config(train_cfg):
        kind = train_loop_config(train_cfg)["type"]
        train_cfg = LOOPS.get(kind) if isinstance(kind, str) else kind
    return getattr(train_cfg, "by_epoch", True)  # a loop of the user need not have it


def check_hooks(hooks: Sequence[Hook], schedulers: Schedulers, sections: Mapping[str, Any]) -> None:
    """Check that no two checkpoint hooks write the same files, and what extras check.

    Raises:
      ConfigError: two checkpoint hooks with equal file names.
    """
    for check in load_each("hook_checks"):
        check(hooks, flatten_schedulers(schedulers), sections)
    from jengine.hooks.checkpoint import CheckpointHook

    files: set[tuple[str, str]] = set()
    for hook in hooks:
        if isinstance(hook, CheckpointHook):
            if files & hook.file_names:
                raise ConfigError(
                    f"`{type(hook).__name__}.out_dir` must differ between two checkpoint hooks "
                    "with the same file names, or each removes the checkpoints of the other; got "
                    f"{hook.out_dir!r}"
                )
            files |= hook.file_names


def check_state(hooks: Sequence[Hook], shapes: TrainState) -> None:
    """Raise ConfigError if a hook saves the state, given as `jax.ShapeDtypeStruct`s, and it
    cannot be stored.
    """
    from jengine.hooks.checkpoint import CheckpointHook

    if any(isinstance(hook, CheckpointHook) for hook in hooks):
        check_storable(dict(vars(shapes)))


def _check_loader(name: str, cfg: Any) -> None:
    with config_path(name):
        if isinstance(cfg, str):
            cfg = name_to_function(cfg)
        if hasattr(cfg, "items"):
            check_dataloader(cfg)
        elif not isinstance(cfg, DataLoader | IterableLoader) and (
            _is_config(cfg) or not is_stream(cfg)
        ):
            as_source(cfg)  # raises the error that lists what to pass


def _read_evaluations(
    mode: str, dataloader: object, cfg: LoopSection, evaluator: object
) -> dict[str, Any]:
    """Return the sections for validation or test by evaluation name, with built evaluators."""
    loaders = split_dataloaders(f"{mode}_dataloader", dataloader)
    for name, loader in loaders.items():
        _check_loader(loader_path(mode, name), loader)
    with config_path(f"{mode}_cfg"):
        loop = as_config(cfg)
        if is_mapping(loop):
            common, own = split_settings(f"{mode}_cfg", loop, list(loaders))
            loop = {"type": EVAL_LOOPS[mode], **common, **({"evaluations": own} if own else {})}
            for name, settings in own.items():
                with config_path(name):
                    check_arguments(EvalSettings, dict(settings))
                    if mode == "test" and "interval" in settings:
                        raise ConfigError(
                            "`interval` must be a setting of a validation, got one for a test"
                        )
        _check_loop(loop, evaluator=None)
    evaluators = build_evaluators(f"{mode}_evaluator", evaluator, list(loaders))
    return {
        f"{mode}_dataloader": loaders,
        f"{mode}_cfg": loop,
        f"{mode}_evaluator": evaluators,
    }


def _check_loop(loop: Any, **supplied: Any) -> Any:
    if hasattr(loop, "items"):
        # None where the Runner supplies the value
        LOOPS.check(loop, runner=None, dataloader=None, **supplied)
    elif not callable(getattr(loop, "run", None)):
        raise TypeError(
            f"`{current_config_path()}` must be a dict or a loop with a method `run`, got {loop!r}"
        )
    return loop


def _is_config(value: object) -> bool:
    return isinstance(value, str) or hasattr(value, "items")
