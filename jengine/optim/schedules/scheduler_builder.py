"""Build the schedulers of a run from the config's `param_scheduler`."""

import inspect
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jengine.config.annotations import Count, check_values, checked, is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import PARAM_SCHEDULERS, as_config
from jengine.optim.schedules.chain import chain_of
from jengine.optim.schedules.formulas import INF
from jengine.optim.schedules.scheduler import ParamScheduler, Schedulers


@checked
def build_param_schedulers(
    cfg: Any,
    wrapper: Any,
    *,
    max_epochs: Count | None,
    max_iters: Count | None,
    epoch_length: Count | None,
    by_epoch_loop: bool = True,
) -> Schedulers:
    """Build the schedulers of a run, in the order of the config.

    A scheduler without `end` lasts until the end of the run. `convert_to_iter_based=True` converts
    epochs to iterations. A loop over iterations has no epochs, so a scheduler that counts epochs
    must be converted, unless it follows validations.

    >>> from jengine.optim.optimizers.sgd import SGD
    >>> from jengine.optim.wrapper import OptimWrapper
    >>> cfg = dict(type="CosineAnnealingLR", by_epoch=True, convert_to_iter_based=True)
    >>> build_param_schedulers(
    ...     cfg, OptimWrapper(SGD(lr=0.1)), max_epochs=3, max_iters=None, epoch_length=10
    ... )[0].end
    30

    Args:
      cfg: None, a scheduler config, a function `step -> learning rate` such as an optax schedule,
        which counts iterations, or a list of these; for several optimizers, a dict of such values
        by optimizer name. It may contain built schedulers.
      wrapper: the optimizer wrapper, or a mapping of wrappers by name.
      max_epochs: epochs of the run; None if unknown.
      max_iters: iterations of the run; None if unknown.
      epoch_length: iterations per epoch; None if unknown.
      by_epoch_loop: whether the train loop counts epochs.

    Returns:
      A list; for several optimizers a dict of lists. With `cfg` None they are empty.

    Raises:
      ConfigError, KeyError, TypeError: an entry of the config is illegal; the message contains the
        path.
    """
    run = _RunLength(max_epochs, max_iters, epoch_length, by_epoch_loop)
    wrappers = wrapper if is_mapping(wrapper) else {"": wrapper}
    built: dict[str, list[ParamScheduler]] = {name: [] for name in wrappers}
    for optimizer in wrappers.values():
        chain_of(optimizer).begin()
    for name, path, entry in _list_entries(cfg, list(wrappers)):
        with config_path(*path):
            scheduler = _build_one(entry, wrappers[name], run)
            # A list for several optimizers may hold built schedulers of all; each belongs to one.
            if scheduler.chain.optimizer is wrappers[name]:
                _check_overlaps(scheduler, built[name])
                built[name].append(scheduler)
    for name, optimizer in wrappers.items():
        chain = chain_of(optimizer)
        chain.epoch_length = epoch_length
        chain.members = list(built[name])  # in the order of the config
        with config_path("param_scheduler"):
            chain.refresh()
    return built if is_mapping(wrapper) else built[""]


def check_param_schedulers(cfg: Any, optimizers: Sequence[str], by_epoch_loop: bool) -> None:
    """Check the names and arguments of schedulers, before the optimizers and the data are known.

    Args:
      cfg, by_epoch_loop: see `build_param_schedulers`.
      optimizers: names of the optimizers, '' for a single one.
    """
    for _, path, entry in _list_entries(cfg, optimizers):
        with config_path(*path):
            if not isinstance(entry, ParamScheduler):
                scheduler_type, arguments, *_ = _parse(entry, by_epoch_loop)
                PARAM_SCHEDULERS.check({"type": scheduler_type, **arguments}, optimizer=None)


class _RunLength(NamedTuple):
    """Length of the run in epochs and iterations."""

    epochs: int | None
    iters: int | None
    epoch_length: int | None
    by_epoch_loop: bool


def _list_entries(
    cfg: Any, optimizers: Sequence[str]
) -> list[tuple[str, tuple[str | int, ...], Any]]:
    """Return for each scheduler the optimizer's name, the path in the config, and the config."""
    path: tuple[str | int, ...] = ("param_scheduler",)
    # each of several optimizers gets objects of its own, as they have states
    parts = dict.fromkeys(optimizers, (path, cfg))
    if is_mapping(cfg) and "type" not in cfg:
        if set(cfg) != set(optimizers):
            with config_path(*path):
                raise ConfigError(
                    "`param_scheduler` must have a 'type', or the names of the optimizers, "
                    f"{sorted(optimizers)}, got {sorted(map(str, cfg))}"
                )
        parts = {name: ((*path, name), cfg[name]) for name in optimizers}
    entries = []
    for name, (path, part) in parts.items():
        if isinstance(part, list | tuple):
            entries += [(name, (*path, index), item) for index, item in enumerate(part)]
        elif part is not None:
            entries.append((name, path, part))
    return entries


def _build_one(cfg: Any, wrapper: Any, run: _RunLength) -> ParamScheduler:
    if isinstance(cfg, ParamScheduler):
        return cfg
    entry, arguments, by_epoch, converted = _parse(cfg, run.by_epoch_loop)
    if "end" not in arguments:
        arguments["end"] = _default_end(entry, arguments, run, by_epoch, converted)
    scheduler = PARAM_SCHEDULERS.build({"type": entry, **arguments}, optimizer=wrapper)
    if converted:
        scheduler.convert(run.epoch_length)
    return scheduler


def _parse(
    cfg: Any, by_epoch_loop: bool
) -> tuple[type[ParamScheduler], dict[str, Any], bool, bool]:
    """Return the class, the arguments, whether they are in epochs, and whether to convert them."""
    # without an end, so that the run can be extended
    if callable(cfg) and not isinstance(cfg, type):
        cfg = {"type": "OptaxLR", "schedule": cfg, "by_epoch": False, "end": INF}
    given = cfg
    cfg = as_config(cfg)
    if not is_mapping(cfg):
        raise TypeError(
            "a parameter scheduler must be a dict with a 'type', or a function from the iteration "
            f"to the learning rate such as an optax schedule, got {type(cfg).__name__}: {cfg!r}"
        )
    arguments = {key: value for key, value in cfg.items() if key != "_delete_"}
    # These two are read here, before the constructor checks its arguments.
    check_values("", _read_units, arguments)
    converted = arguments.pop("convert_to_iter_based", False)
    entry: Any = arguments.get("type")
    if isinstance(entry, str):
        with config_path("type"):
            entry = PARAM_SCHEDULERS.get(entry)
    if not callable(entry):
        PARAM_SCHEDULERS.check(arguments)  # raises the error
    if not isinstance(entry, type):  # a schedule, or a function that returns one, such as optax's
        return _parse(PARAM_SCHEDULERS.build_function(given), by_epoch_loop)
    del arguments["type"]
    parameter = inspect.signature(entry).parameters.get("by_epoch")
    by_epoch = arguments.get("by_epoch", getattr(parameter, "default", True))
    # An error and not a guess: both readings of the numbers are plausible.
    if by_epoch and not (by_epoch_loop or converted or getattr(entry, "need_val_args", False)):
        raise ConfigError(
            f"`by_epoch` of {entry.__name__} must be False in a train loop that counts "
            "iterations, got True (the default), with which its value would never change; write "
            "by_epoch=False if its numbers are iterations, or convert_to_iter_based=True if they "
            "are epochs"
        )
    return entry, arguments, by_epoch, converted


def _read_units(by_epoch: bool = True, convert_to_iter_based: bool = False) -> None:
    """Annotate the arguments that are read before the scheduler checks its own."""


def _default_end(
    entry: type[ParamScheduler],
    arguments: dict[str, Any],
    run: _RunLength,
    by_epoch: bool,
    converted: bool,
) -> Any:
    if by_epoch and not run.by_epoch_loop:
        if not converted:  # it follows validations
            if arguments.get("begin", 0) > 0:
                raise ConfigError(
                    f"`begin` of {entry.__name__} must be 0 in a train loop without epochs, got "
                    f"{arguments['begin']}"
                )
            return INF
        if run.iters is not None and run.epoch_length:
            return Fraction(run.iters, run.epoch_length)  # exact when multiplied back
    end = run.epochs if by_epoch else run.iters
    if end is None:
        unit = "epochs" if by_epoch else "iterations"
        raise ConfigError(
            f"`end` of {entry.__name__} must be given in a run whose length in {unit} is unknown, "
            "got no end"
        )
    return end


def _check_overlaps(scheduler: ParamScheduler, earlier: Sequence[ParamScheduler]) -> None:
    """Raise ConfigError if an optax schedule, which sets a value, overlaps with another schedule
    for it.
    """
    for other in earlier:
        is_alone = scheduler.settings.is_alone or other.settings.is_alone
        is_after = scheduler.by_epoch == other.by_epoch and scheduler.begin >= other.end
        if is_alone and not is_after and scheduler.param_name == other.param_name:
            raise ConfigError(
                "an optax schedule must not overlap with another schedule, because it sets "
                f"{scheduler.param_name!r} at each step, got {type(scheduler).__name__} beside "
                f"{type(other).__name__}; let each `begin` at the `end` of the one before in the "
                "list, all in iterations or all in epochs, or use one optax.join_schedules"
            )
