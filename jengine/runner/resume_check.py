"""Resume of a run: what differs from the checkpoint, and the optimizer that continues.

One rule: counters, arrays, the seed, the data position and the learned state come from the
checkpoint, settings from the config that is given now. What differs is printed once;
`resume='exact'` refuses any difference.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jengine.checkpoint.arrays import is_key
from jengine.checkpoint.layout import read_meta
from jengine.config.errors import ConfigError
from jengine.config.fingerprint import compare_settings
from jengine.config.paths import flatten
from jengine.hooks.run import Run
from jengine.optim.schedules.chain import chain_of
from jengine.optim.schedules.scheduler import Schedulers, flatten_schedulers
from jengine.optim.schedules.state import load_schedulers_state_dict
from jengine.optim.wrapper_dict import AnyWrapper, wrappers_by_name
from jengine.runner.loops import TrainLoop

PyTree = Any

# sections that do not change what a step computes
_OUTSIDE_THE_STEP = (
    "train_cfg.max_",
    "param_scheduler",
    "train_dataloader",
    "val_",
    "test_",
    "visualizer",
    "randomness",
)
_MAX_LINES = 20


def check_resume(run: Run, loop: TrainLoop, path: str) -> None:
    """Compare the settings of a run with a checkpoint, and log once what differs.

    Nothing is restored and nothing compiled yet.

    Raises:
      ConfigError: the checkpoint is past the end; or something differs with `resume='exact'`.
    """
    saved = read_meta(path)
    check_length(run, loop, path, saved["meta"])
    # of an early version: all differs
    fingerprint = saved.get("fingerprint", {"settings": {}, "programs": {}})
    differences = dict(compare_settings(run.described.settings, fingerprint))
    seed = saved["meta"]["seed"]
    configured = run.configured_seed
    if configured is not None and configured != seed:  # a seed that was drawn gives way silently
        line = f"randomness.seed: {configured} in the config, {seed} in the checkpoint, which holds"
        differences["randomness.seed"] = line
    if differences:
        lines = list(differences.values())
        more = [f"… {len(lines) - _MAX_LINES} more …"] if len(lines) > _MAX_LINES else []
        listed = "".join(f"\n  {line}" for line in [*lines[:_MAX_LINES], *more])
        if run.resume_is_exact:
            raise ConfigError(
                f"the settings must be those of the checkpoint {path} with resume='exact', got "
                f"others:{listed}"
            )
        run.logger.warning(
            f"The settings of the run and of {path} differ; those of the run hold:{listed}"
        )
    if all(name.startswith(_OUTSIDE_THE_STEP) for name in differences):
        # Else a program that has changed would be a second message of one cause
        run.saved_hashes.update(fingerprint["programs"])


def check_length(run: Run, loop: TrainLoop, path: str, meta: Mapping[str, Any]) -> None:
    """Raise ConfigError if a checkpoint with the `iter` and `epoch` in `meta` is past the end of
    a run.
    """
    name, unit = ("max_epochs", "epoch") if loop.by_epoch else ("max_iters", "iter")
    end = loop.max_epochs if loop.by_epoch else loop.max_iters
    if meta[unit] > end:
        raise ConfigError(
            f"`train_cfg.{name}` must be at least {meta[unit]}, which the checkpoint {path} has "
            f"completed, got {end}"
        )
    if meta[unit] == end:
        run.logger.info(
            f"There is nothing left to train: {path} has completed all of train_cfg.{name}={end}."
        )


def match_optimizer_state(
    run: Run, optim_wrapper: AnyWrapper, path: str, opt_state: PyTree, stored: Mapping[str, Any]
) -> tuple[PyTree | None, list[str]]:
    """Match the optimizer state to a checkpoint.

    If only the hyperparameters in the state differ, they are not restored: each update receives
    them. A state that does not fit is new.

    Args:
      run, optim_wrapper: the run and its optimizer.
      path, stored: the checkpoint, and the arrays in it by dotted path.
      opt_state: this run's state, in the form that the checkpoint has.

    Returns:
      The structure to restore, None for a new state; and the stored prefixes that are not restored.

    Raises:
      ConfigError: the state does not fit, with `resume='exact'`.
    """
    saved = {path: leaf.shape for path, leaf in stored.items() if path.startswith("opt_state.")}
    if _shapes(opt_state) == saved:
        return opt_state, []
    optimizers = wrappers_by_name(optim_wrapper)
    names = [f"opt_state.{name}" if name else "opt_state" for name in optimizers]
    ignore = [f"{name}.hyperparams" for name in names]
    prefixes = tuple(f"{prefix}." for prefix in ignore)
    target = _strip_hyperparams(opt_state)
    if _shapes(target) == {
        path: shape for path, shape in saved.items() if not path.startswith(prefixes)
    }:
        return target, ignore
    message = f"the optimizer state of {path} does not fit the optimizer of the run"
    if run.resume_is_exact:
        raise ConfigError(f"{message}, as it must with resume='exact'")
    run.logger.warning(f"{message}, which starts with a new state.".capitalize())
    return None, ["opt_state"]


def _shapes(opt_state: PyTree) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays as a checkpoint stores them: typed keys as their data."""

    def as_stored(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if is_key(leaf) else leaf

    stored = jax.eval_shape(lambda state: jax.tree.map(as_stored, state), opt_state)
    return {f"opt_state.{path}": leaf.shape for path, leaf in flatten(stored).items()}


def _strip_hyperparams(opt_state: PyTree) -> PyTree:
    if isinstance(opt_state, Mapping):  # several optimizers
        return {name: _strip_hyperparams(state) for name, state in opt_state.items()}
    return opt_state._replace(hyperparams={})


def complete_optimizer_state(restored: PyTree | None, initial: PyTree) -> PyTree:
    """Return a restored state, None for a new one, with the hyperparameters that this run's
    initial state has.
    """
    if restored is None:
        return initial
    if isinstance(restored, Mapping):
        return {
            name: complete_optimizer_state(state, initial[name]) for name, state in restored.items()
        }
    return restored._replace(hyperparams=initial.hyperparams)


def restore_schedules(
    run: Run,
    loop: TrainLoop,
    schedulers: Schedulers,
    optim_wrapper: AnyWrapper,
    bundle: Mapping[str, Any],
) -> None:
    """Continue the schedules at the position of a checkpoint, with the values that were set by
    hand.

    Without schedules in the checkpoint they start from the beginning.
    """
    if "param_schedulers" in bundle and schedulers is not None:
        load_schedulers_state_dict(
            schedulers,
            bundle["param_schedulers"],
            iters=loop.iter,
            epochs=loop.epoch,
        )
        # with other data the checkpoint may be the end of an epoch
        skipped = loop.epoch - bundle["meta"]["epoch"]
        for scheduler in flatten_schedulers(schedulers) if skipped else ():
            if scheduler.by_epoch:
                scheduler.seek(scheduler.global_step + skipped)
                scheduler.chain.refresh()
    for name, wrapper in wrappers_by_name(optim_wrapper).items():
        chain_of(wrapper).load_unscheduled(bundle.get("set_by_hand", {}).get(name, ()))
