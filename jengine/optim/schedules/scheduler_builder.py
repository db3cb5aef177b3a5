"""Build the schedulers of a run from the config's `param_scheduler`."""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from jengine.config import annotations
from jengine.config.annotations import Count, checked, is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import PARAM_SCHEDULERS, as_config, check_arguments, is_built_in
from jengine.optim.schedules.chain import Groups, chain_of
from jengine.optim.schedules.formulas import INF
from jengine.optim.schedules.scheduler import ParamScheduler, Schedulers, flatten_schedulers

# values that are computed before training; those of longer runs are checked when they are set
_MAX_CHECKED = 100_000


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
        path. ConfigError: a value in the run is illegal, such as a negative learning rate.
    """
    built = _build(cfg, wrapper, _RunLength(max_epochs, max_iters, epoch_length, by_epoch_loop))
    with config_path("param_scheduler"):
        _check_values(
            built,
            iters=max_iters,
            epochs=max_epochs if by_epoch_loop else None,
            epoch_length=epoch_length,
        )
    return built


def check_param_schedulers(
    cfg: Any,
    wrapper: Groups | Mapping[str, Groups],
    *,
    max_epochs: int | None,
    max_iters: int | None,
    by_epoch_loop: bool,
) -> Sequence[ParamScheduler]:
    """Build the schedulers as `build_param_schedulers` does, before the epoch length is known.

    What depends on that length is checked by `build_param_schedulers` alone. The result cannot be
    stepped.
    """
    built = flatten_schedulers(
        _build(cfg, wrapper, _RunLength(max_epochs, max_iters, None, by_epoch_loop, is_open=True))
    )
    # the steps of the others are unknown
    if all(scheduler.epoch_length is None for scheduler in built):
        with config_path("param_scheduler"):
            _check_values(list(built), iters=max_iters, epochs=max_epochs, epoch_length=None)
    return built


@dataclasses.dataclass
class _RunLength:
    """Length of the run in epochs and iterations."""

    epochs: int | None
    iters: int | None
    epoch_length: int | None
    by_epoch_loop: bool
    is_open: bool = False  # unknown lengths are not an error

    def length(self, by_epoch: bool, converted: bool) -> float | None:
        """Return the default `end`, in the unit of the config."""
        if converted and not self.by_epoch_loop and self.iters is not None and self.epoch_length:
            # Exact when multiplied back
            return Fraction(self.iters, self.epoch_length)  # type: ignore[return-value]
        return self.epochs if by_epoch else self.iters


def _build(cfg: Any, wrapper: Any, run: _RunLength) -> Schedulers:
    is_by_name = is_mapping(cfg) and "type" not in cfg
    with config_path("param_scheduler"):
        if not is_mapping(wrapper):
            if is_by_name and cfg:
                raise ConfigError(
                    "`param_scheduler` must be a scheduler with a 'type' or a list of schedulers "
                    f"for a single optimizer, got a dict of {sorted(map(str, cfg))}"
                )
            return _build_list(cfg, wrapper, run)
        # One scheduler or list for several optimizers: each gets objects of its own, as they have
        # states.
        if not is_by_name:
            return {name: _build_list(cfg, optimizer, run) for name, optimizer in wrapper.items()}
        if set(cfg) != set(wrapper.keys()):
            raise ConfigError(
                "`param_scheduler` must have the names of the optimizers, "
                f"{sorted(wrapper.keys())}, got {sorted(cfg)}"
            )
        built = {}
        for name, optimizer in wrapper.items():
            with config_path(name):
                built[name] = _build_list(cfg[name], optimizer, run)
        return built


def _build_list(cfg: Any, wrapper: Groups, run: _RunLength) -> list[ParamScheduler]:
    chain = chain_of(wrapper)
    built = []
    chain.begin()
    chain.epoch_length = run.epoch_length
    if cfg is not None and not isinstance(cfg, list | tuple):
        built = _build_one(cfg, wrapper, run)
    else:
        for index, item in enumerate(cfg or ()):
            with config_path(index):
                built += _build_one(item, wrapper, run)
        _check_overlaps(built, run)
    if chain.members != built:  # the config has schedulers that were built before
        chain.members = list(built)
        chain.refresh()
    return built


def _build_one(cfg: Any, wrapper: Groups, run: _RunLength) -> list[ParamScheduler]:
    if isinstance(cfg, ParamScheduler):
        # A list for several optimizers may hold built schedulers of all; each belongs to one.
        return [cfg] if cfg.optimizer is wrapper else []
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
    annotations.check_values("", _read_units, arguments)
    converted = arguments.pop("convert_to_iter_based", False)
    entry: Any = PARAM_SCHEDULERS.get_type(arguments.get("type"))
    if not callable(entry):
        PARAM_SCHEDULERS.check(arguments)  # raises the error
    if not isinstance(entry, type):  # a schedule, or a function that returns one, such as optax's
        return _build_one(PARAM_SCHEDULERS.build_function(given), wrapper, run)
    del arguments["type"]
    # The user's own class may have an `__init__` without a signature
    init: Any = entry.__init__  # type: ignore[misc]
    by_default = (
        init.__signature__.parameters["by_epoch"].default
        if hasattr(init, "__signature__")
        else True
    )
    by_epoch = arguments.get("by_epoch", by_default)
    follows_validations = getattr(entry, "need_val_args", False)
    # An error and not a guess: both readings of the numbers are plausible.
    if by_epoch and not run.by_epoch_loop and not converted and not follows_validations:
        raise ConfigError(
            f"`by_epoch` of {entry.__name__} must be False in a train loop that counts "
            "iterations, got True (the default), with which its value would never change; write "
            "by_epoch=False if its numbers are iterations, or convert_to_iter_based=True if they "
            "are epochs"
        )
    if "end" not in arguments:
        arguments["end"] = _default_end(
            entry, arguments, run, by_epoch, converted, follows_validations
        )
    return [_construct(entry, wrapper, arguments, run, converted)]


def _check_values(
    schedulers: Schedulers, *, iters: int | None, epochs: int | None, epoch_length: int | None
) -> None:
    """Compute the values of a run, so that an illegal one is an error before training.

    Only the first values are checked if there are many, and none if one of the schedules is a
    user's class, whose step may do anything. Unknown iterations leave the schedules over iterations
    unchecked.
    """
    flat = flatten_schedulers(schedulers)
    if not flat or any(not is_built_in(type(s)) or s.last_step > 0 for s in flat):
        return
    limit = min(
        _MAX_CHECKED // max(1, sum(len(s.scheduled) for s in flat)),
        *(100 * s.settings.block for s in flat),
    )
    iters = 0 if iters is None or all(s.by_epoch for s in flat) else min(iters, limit)
    epochs = min(epochs or 0, limit, *([iters // epoch_length] if iters and epoch_length else []))
    for chain in {id(s.chain): s.chain for s in flat}.values():
        chain.check(max(iters - 1, 0), max(epochs - 1, 0))


def _read_units(by_epoch: bool = True, convert_to_iter_based: bool = False) -> None:
    """Annotate the arguments that are read before the scheduler checks its own."""


def _construct(
    entry: type[ParamScheduler],
    wrapper: Groups,
    arguments: dict[str, Any],
    run: _RunLength,
    converted: bool,
) -> ParamScheduler:
    if not converted:
        return PARAM_SCHEDULERS.build({"type": entry, **arguments}, optimizer=wrapper)
    if run.epoch_length is None and not run.is_open:
        raise ConfigError(
            "`convert_to_iter_based` must be False unless the train dataloader has a known "
            "length, got True"
        )
    # `build_iter_from_epoch` takes `**kwargs`, so that a misspelled name would fail far from the
    # config.
    check_arguments(entry, {"optimizer": wrapper, **arguments})
    return entry.build_iter_from_epoch(wrapper, epoch_length=run.epoch_length or 1, **arguments)


def _default_end(
    entry: type[ParamScheduler],
    arguments: Mapping[str, Any],
    run: _RunLength,
    by_epoch: bool,
    converted: bool,
    follows_validations: bool,
) -> Any:
    if follows_validations and not run.by_epoch_loop:
        if arguments.get("begin", 0) > 0:
            raise ConfigError(
                f"`begin` of {entry.__name__} must be 0 in a train loop without epochs, got "
                f"{arguments['begin']}"
            )
        return INF
    end = run.length(by_epoch, converted)
    if end is None and run.is_open:
        return INF // 2  # an end, but none that a schedule reaches
    if end is None:
        unit = "epochs" if by_epoch else "iterations"
        raise ConfigError(
            f"`end` of {entry.__name__} must be given in a run whose length in {unit} is unknown, "
            "got no end"
        )
    return end


def _check_overlaps(chain: Sequence[ParamScheduler], run: _RunLength) -> None:
    """Raise ConfigError if an optax schedule, which sets a value, overlaps with another schedule
    for it.
    """
    from jengine.optim.schedules.from_optax import OptaxFormula

    length = run.epoch_length
    for index, scheduler in enumerate(chain):
        for other in chain if isinstance(scheduler.settings, OptaxFormula) else ():
            if other is scheduler or other.param_name != scheduler.param_name:
                continue
            if length is None and other.by_epoch != scheduler.by_epoch:
                continue  # the ranges cannot be compared
            units = [(length or 1) if each.by_epoch else 1 for each in (scheduler, other)]
            begin = max(scheduler.begin * units[0], other.begin * units[1])
            if begin < min(scheduler.end * units[0], other.end * units[1]):
                with config_path(index):
                    raise ConfigError(
                        f"an optax schedule must not overlap with another schedule, because it "
                        f"sets {scheduler.param_name!r} at each step, got {type(other).__name__} "
                        "in the same range; give both a `begin` and an `end`, or use one "
                        "optax.join_schedules"
                    )
