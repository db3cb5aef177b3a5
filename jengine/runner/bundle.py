"""Bundles: what a run's checkpoint contains, how it is saved, and how a run continues from it."""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jengine.checkpoint.checkpointer import Checkpointer
from jengine.checkpoint.hook_states import HookStateMatch, match_hook_states
from jengine.checkpoint.layout import read_meta
from jengine.checkpoint.progress import wait_for_processes
from jengine.checkpoint.restore import list_arrays, restore_verified
from jengine.checkpoint.start_from import LoadFrom
from jengine.config.annotations import is_host_number
from jengine.config.errors import ConfigError
from jengine.config.explain import explained
from jengine.config.plugins import load_each, load_provided
from jengine.hooks.run_record import update_record
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import get_model, is_number
from jengine.optim.schedules.chain import chain_of
from jengine.optim.schedules.state import schedulers_state_dict
from jengine.optim.wrapper_dict import wrappers_by_name
from jengine.parallel.processes import put_whole
from jengine.parallel.replica_axis import convert_replica_axis, convert_replica_axis_structs
from jengine.runner.lifecycle import recreate_work_dir
from jengine.runner.loops import TrainLoop, check_losses
from jengine.runner.resume_check import (
    complete_optimizer_state,
    match_optimizer_state,
    restore_schedules,
)
from jengine.runner.resume_data import collect_position, restore_position
from jengine.train.state import TrainState
from jengine.train.traced_hooks import TracedHooks, hook_names
from jengine.versions import __version__, environment_versions

PyTree = Any
Bundle = dict[str, Any]
Variables = dict[str, Any]  # by item


def save(
    runner: RunnerProtocol,
    path: str,
    *,
    save_optimizer: bool,
    save_param_scheduler: bool,
    meta: Mapping[str, Any],
    checkpointer: Checkpointer | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint to `path` in the background; see `Runner.save_checkpoint`."""
    run = runner.run
    run.wait_for_device()  # so that the save is not charged with the steps
    run.directories.check_locks(before_write=True)
    recreate_work_dir(run, runner.iter)
    checkpoint = collect_checkpoint(
        runner, save_optimizer=save_optimizer, save_param_scheduler=save_param_scheduler, meta=meta
    )
    check_losses(runner)  # of all iterations so far, which the message hub has fetched to be saved
    runner.call_hook("before_save_checkpoint", checkpoint=checkpoint)  # hooks may exchange averages
    state = checkpoint.pop("state")
    if checkpointer is not None:  # for a copy besides the run's checkpoints
        checkpointer.save(path, state, checkpoint, **options)
        return
    run.checkpointer.save(path, state, checkpoint, **options)
    update_record(runner)


def collect_checkpoint(
    runner: RunnerProtocol,
    *,
    save_optimizer: bool,
    save_param_scheduler: bool,
    meta: Mapping[str, Any],
) -> Bundle:
    """Return everything that an exact resume needs: `state` (arrays) and further entries, see
    `Checkpointer.save`.
    """
    run = runner.run
    programs = runner.programs.hash_jaxprs() if runner.programs is not None else {}
    run.log_writer.flush()  # the visualizer records the sizes of the scalar files
    arrays = dict(vars(runner.state))
    if not save_optimizer:
        del arrays["opt_state"]
    bundle: Bundle = dict(
        state=arrays,
        meta=dict(
            epoch=runner.epoch,
            iter=runner.iter,
            seed=run.seed,
            experiment_name=run.experiment_name,
            timestamp=run.timestamp,
            run=run.run_id,
            work_dir=run.work_dir,
            time=time.strftime("%Y-%m-%d %H:%M:%S"),
            cfg=run.described.cfg_text,
            jengine_version=__version__,
            versions=environment_versions(),
        ),
        message_hub=run.message_hub.state_dict(),
        hooks={
            name: saved
            for name, hook in hook_names(runner.hooks).items()
            if (saved := hook.state_dict())
        },
        hyperparams={name: float(value) for name, value in runner.hyperparams.items()},
        visualizer=run.visualizer.state_dict(),
        replicas=run.strategy.replicas,
        fingerprint={"settings": run.described.settings, "programs": programs},
        validations=[
            [
                epoch,
                iteration,
                {name: float(value) for name, value in metrics.items() if is_host_number(value)},
            ]
            for epoch, iteration, metrics in run.validations
        ],
    )
    bundle["meta"].update(meta)
    bundle["data"] = collect_position(run, _train_loop(runner), bundle["meta"])
    bundle["set_by_hand"] = {
        name: chain_of(wrapper).unscheduled()
        for name, wrapper in wrappers_by_name(runner.optim_wrapper).items()
    }
    if save_optimizer:
        bundle["optimizer"] = runner.optim_wrapper.group_state_dict()
    if save_param_scheduler and runner.param_schedulers is not None:
        bundle["param_schedulers"] = schedulers_state_dict(runner.param_schedulers)
    return bundle


# --- Resuming ---


def load_or_resume(
    runner: RunnerProtocol, load_from: LoadFrom | None, resume_from: str | None
) -> None:
    """Continue from a checkpoint or start from weights.

    A run that does not train resumes only the weights.
    """
    if note := runner.run.resume_note:  # where it looked for a checkpoint
        runner.logger.info(note)
    if resume_from is not None and runner.train_loop is not None:
        for find_fitting in load_each("fitting_checkpoints"):
            resume_from = find_fitting(
                runner.work_dir, resume_from, runner.state, runner.run.processes
            )
        resume(runner, resume_from)
    elif load_from is not None:
        load_weights(runner, load_from)
    elif resume_from is not None:
        load_weights(runner, LoadFrom(resume_from))
    elif runner.train_loop is None:
        runner.logger.warning(
            "The model has its initial weights: set load_from to evaluate those of a checkpoint."
        )


def resume(runner: RunnerProtocol, path: str) -> None:
    """Restore the run from the checkpoint at `path`, at the iteration at which it was written."""
    run = runner.run
    saved_meta = read_meta(path)
    if "optimizer" not in saved_meta:
        runner.logger.warning(f"{path} was saved without the optimizer, which starts from scratch.")
    bundle, match = _restore_arrays(runner, path, saved_meta)
    _call_after_load(runner, bundle)
    meta = bundle["meta"]
    runner.state = _add_missing_hook_states(runner, TrainState(**bundle["state"]), match, path)
    loop = _train_loop(runner)
    loop.iter = meta["iter"]
    loop.epoch = meta["epoch"]
    if (step := int(runner.state.step)) != loop.iter:  # an overflow of int32, or the work of a hook
        raise ConfigError(
            f"{path} must have one number of iterations, got {loop.iter} in `meta` and {step} in "
            "`state.step`"
        )
    run.message_hub.load_state_dict(bundle["message_hub"])
    # drops scalars written after it
    run.visualizer.load_state_dict(bundle["visualizer"], meta["iter"])
    run.validations[:] = [
        (epoch, iteration, metrics) for epoch, iteration, metrics in bundle["validations"]
    ]
    # A number that is an attribute of the model is the attribute's now, until a hook sets it again
    model = get_model(runner.model)
    for name, saved in bundle["hyperparams"].items():
        current = getattr(model, name, None)
        if not is_number(current):
            runner.hyperparams[name] = saved
        elif np.float32(current) != np.float32(saved):
            runner.logger.info(
                f"`{type(model).__name__}.{name}`, which was {saved:g} when {path} was written, "
                f"is {current:g} until a hook assigns it again"
            )
    restore_position(run, loop, bundle["data"])
    # after the position, which may move the epoch
    restore_schedules(run, loop, runner.param_schedulers, runner.optim_wrapper, bundle)
    for name, hook in hook_names(runner.hooks).items():
        if name in bundle["hooks"]:
            hook.load_state_dict(bundle["hooks"][name])
    runner.logger.info(f"Resumed from {path}: epoch {loop.epoch}, iteration {loop.iter}.")


def load_best(runner: RunnerProtocol, metric: str | bool) -> None:
    """Give the state the weights and hook states of the best checkpoint; nothing else changes."""
    path = load_provided("jengine.checkpoint", "find_best_checkpoint")(runner.work_dir, metric)
    meta = read_meta(path)
    # without the optimizer, so that that of the run stays
    bundle, match = _restore_arrays(runner, path, {**meta, "optimizer": None})
    _call_after_load(runner, bundle)
    state = _add_missing_hook_states(runner, TrainState(**bundle["state"]), match, path)
    runner.state = state.replace(step=runner.state.step, rng=runner.state.rng)
    runner.run.evaluated.update(meta["meta"], path=path)
    runner.logger.info(f"Loaded the best checkpoint, {path}.")


def _train_loop(runner: RunnerProtocol) -> TrainLoop:
    """Return the training loop, whose counters a resume sets."""
    loop: Any = runner.train_loop
    return loop


def _call_after_load(runner: RunnerProtocol, bundle: Bundle) -> None:
    """Call the hooks with a checkpoint that has been read, and end all processes if one stands
    still in them.
    """
    runner.call_hook("after_load_checkpoint", checkpoint=bundle)
    wait_for_processes("hooks at after_load_checkpoint")  # before a collective, which has no limit


def _restore_arrays(
    runner: RunnerProtocol, path: str, saved_meta: Mapping[str, Any]
) -> tuple[Bundle, HookStateMatch]:
    """Return the checkpoint with arrays on the devices, and how the hook states match."""
    target = dict(vars(runner.state))
    fresh = {}
    if saved_meta.get("optimizer") is None:
        fresh["opt_state"] = target.pop("opt_state")
    replicas = runner.strategy.replicas, saved_meta.get("replicas")
    with explained(run=runner, cfg=runner.run.cfg, checkpoint=(path, saved_meta["meta"])):
        stored = list_arrays(path)  # shapes only
        match = match_hook_states(target["hook_state"], stored, saved_meta.get("exchanged", {}))
        target["hook_state"] = match.states
        converted = dict(convert_replica_axis_structs(target, *replicas))  # the shapes on disk
        ignored: list[str] = []  # parts of the optimizer state
        if "opt_state" in target:
            matched = match_optimizer_state(
                runner.run, runner.optim_wrapper, path, converted["opt_state"], stored
            )
            converted["opt_state"], ignored = matched
        arrays, rest = restore_verified(path, converted, match.rename, [*match.ignore, *ignored])
    arrays = dict(convert_replica_axis(arrays, *reversed(replicas)))
    if ignored:
        arrays["opt_state"] = complete_optimizer_state(arrays["opt_state"], target["opt_state"])
    return {"state": {**_put_like(arrays, target), **fresh}, **rest}, match


def _put_like(tree: PyTree, like: PyTree) -> PyTree:
    """Return `tree` with NumPy arrays moved to the devices that hold `like`."""
    return jax.tree.map(
        lambda x, y: put_whole(x, y.sharding) if isinstance(x, np.ndarray) else x, tree, like
    )


def init_hook_states(
    runner: RunnerProtocol, names: Iterable[str], params: PyTree, model_state: PyTree
) -> dict[str, PyTree]:
    """Return initial states on the device for the hooks with these names, from the given
    weights.
    """
    selected = set(names)

    def init_states(params: PyTree, model_state: PyTree) -> dict[str, PyTree]:
        states = TracedHooks(runner.hooks).init(params, model_state)
        return {name: state for name, state in states.items() if name in selected}

    return (
        runner.strategy.compile_init(init_states, params, model_state)(params, model_state)
        if selected
        else {}
    )


def _add_missing_hook_states(
    runner: RunnerProtocol, state: TrainState, match: HookStateMatch, path: str
) -> TrainState:
    for name in match.unused:
        runner.logger.warning(
            f"{path} has a state of {name}, which is not a hook of this run: it is ignored."
        )
    for name in match.missing:
        runner.logger.warning(
            f"{path} has no state of {name}, which starts from the weights of the checkpoint."
        )
    initial = init_hook_states(runner, match.missing, state.params, state.model_state)
    return state.replace(hook_state={**initial, **state.hook_state})


# --- Starting from weights ---


def load_weights(runner: RunnerProtocol, source: LoadFrom) -> None:
    """Load the parameters and the model state from a checkpoint or other weights."""
    if any(getattr(hook, "strict_load", None) is False for hook in runner.hooks):  # of an EMAHook
        source = dataclasses.replace(source, strict=False)
    # then use the weights that the checkpoint's run has validated
    is_evaluated = runner.train_loop is None
    weights = source.open(runner.state.params, evaluated=is_evaluated)
    rest = dict(weights.meta)
    if is_evaluated:
        runner.run.evaluated.update(rest.get("meta", {}), path=weights.label)
    variables = {"params": runner.state.params, "model_state": runner.state.model_state}
    replicas = runner.strategy.replicas
    names = [path.removeprefix("params.") for path in weights.names]
    initial = variables
    to_run = dict
    for split in load_each("adapted_weights"):
        initial, to_run = split(get_model(runner.model), variables, replicas, names)
    conversion = replicas, rest.get("replicas")
    target = convert_replica_axis(initial, *conversion)
    with explained(checkpoint=(weights.label, rest.get("meta", {}))):
        loaded, report = weights.load(target)
    loaded = convert_replica_axis(loaded, *reversed(conversion))
    bundle: Bundle = {"state": _put_like(to_run(loaded), variables), **rest}
    _call_after_load(runner, bundle)
    values = {item: bundle["state"][item] for item in initial}
    # Hook states derived from the weights, such as averages, start from the loaded weights
    states = init_hook_states(runner, runner.state.hook_state, **values)
    runner.state = runner.state.replace(**values, hook_state=states)
    is_raw = source.raw or (is_evaluated and "evaluated" in rest)
    averaged = "averaged " if "exchanged" in rest and not is_raw else ""
    log = runner.logger.info if report.fits else runner.logger.warning
    log(f"Loaded the {averaged}weights of {weights.label}: {report}")
    weights.finish(runner, report)
