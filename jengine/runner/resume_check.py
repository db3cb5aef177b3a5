"""Resume of a run: what differs from the checkpoint, and the optimizer that continues.

One rule: counters, arrays, the seed, the data position and the learned state come from the
checkpoint, settings from the config that is given now. What differs is printed once;
`resume='exact'` refuses any difference.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jengine.checkpoint.arrays import is_key
from jengine.checkpoint.layout import read_meta
from jengine.config.errors import ConfigError
from jengine.config.fingerprint import compare_settings
from jengine.config.paths import flatten
from jengine.optim.schedules.chain import chain_of
from jengine.optim.schedules.scheduler import flatten_schedulers
from jengine.optim.schedules.state import load_schedulers_state_dict
from jengine.optim.wrapper_dict import wrappers_by_name
from jengine.runner.runner_protocol import RunnerInternals

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


def check_resume(runner: RunnerInternals, path: str) -> None:
    """Compare the settings of a run with a checkpoint, and log once what differs.

    Nothing is restored and nothing compiled yet, but loop, optimizer and schedulers should be
    built.

    Raises:
      ConfigError: the checkpoint is past the end; or something differs with `resume='exact'`.
    """
    saved = read_meta(path)
    check_length(runner, path, saved["meta"])
    # of an early version: all differs
    fingerprint = saved.get("fingerprint", {"settings": {}, "programs": {}})
    differences = dict(compare_settings(runner.settings, fingerprint))
    seed = saved["meta"]["seed"]
    configured = runner.configured_seed
    if configured is not None and configured != seed:  # a seed that was drawn gives way silently
        line = f"randomness.seed: {configured} in the config, {seed} in the checkpoint, which holds"
        differences["randomness.seed"] = line
    lines = list(differences.values())
    if lines and runner.resume_is_exact:
        raise ConfigError(
            f"the settings must be those of the checkpoint {path} with resume='exact', got "
            f"others:{_list(lines)}"
        )
    if lines:
        runner.logger.warning(
            f"The settings of the run and of {path} differ; those of the run hold:{_list(lines)}"
        )
    if all(name.startswith(_OUTSIDE_THE_STEP) for name in differences):
        # Else a program that has changed would be a second message of one cause
        runner.saved_hashes = dict(fingerprint["programs"])


def check_length(runner: RunnerInternals, path: str, meta: Mapping[str, Any]) -> None:
    """Raise ConfigError if a checkpoint with the `iter` and `epoch` in `meta` is past the end of
    a run.
    """
    loop = runner.train_loop
    name, unit = ("max_epochs", "epoch") if loop.by_epoch else ("max_iters", "iter")
    end = loop.max_epochs if loop.by_epoch else loop.max_iters
    if meta[unit] > end:
        raise ConfigError(
            f"`train_cfg.{name}` must be at least {meta[unit]}, which the checkpoint {path} has "
            f"completed, got {end}"
        )
    if meta[unit] == end:
        runner.logger.info(
            f"There is nothing left to train: {path} has completed all of train_cfg.{name}={end}."
        )


def _list(lines: Sequence[str]) -> str:
    more = [f"… {len(lines) - _MAX_LINES} more …"] if len(lines) > _MAX_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_MAX_LINES], *more])


def collect_fingerprint(runner: RunnerInternals) -> dict[str, Any]:
    """Return what a checkpoint stores for the comparison: the settings, and the hashes of the
    training programs.
    """
    programs = runner.programs.hash_jaxprs() if runner.programs is not None else {}
    return {"settings": runner.settings, "programs": programs}


def match_optimizer_state(
    runner: RunnerInternals, path: str, opt_state: PyTree, stored: Mapping[str, Any]
) -> tuple[PyTree | None, list[str]]:
    """Match the optimizer state to a checkpoint.

    If only the hyperparameters in the state differ, they are not restored: each update receives
    them. A state that does not fit is new.

    Args:
      runner: the run.
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
    optimizers = wrappers_by_name(runner.optim_wrapper)
    names = [f"opt_state.{name}" if name else "opt_state" for name in optimizers]
    ignore = [f"{name}.hyperparams" for name in names]
    prefixes = tuple(f"{prefix}." for prefix in ignore)
    target = _strip_hyperparams(opt_state)
    if _shapes(target) == {
        path: shape for path, shape in saved.items() if not path.startswith(prefixes)
    }:
        return target, ignore
    message = f"the optimizer state of {path} does not fit the optimizer of the run"
    if runner.resume_is_exact:
        raise ConfigError(f"{message}, as it must with resume='exact'")
    runner.logger.warning(f"{message}, which starts with a new state.".capitalize())
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


def restore_schedules(runner: RunnerInternals, bundle: Mapping[str, Any]) -> None:
    """Continue the schedules at the position of a checkpoint, with the values that were set by
    hand.

    Without schedules in the checkpoint they start from the beginning.
    """
    loop = runner.train_loop
    schedulers = runner.param_schedulers
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
    for name, wrapper in wrappers_by_name(runner.optim_wrapper).items():
        chain_of(wrapper).load_unscheduled(bundle.get("set_by_hand", {}).get(name, ()))
