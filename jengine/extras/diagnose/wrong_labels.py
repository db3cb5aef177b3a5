"""Why a loss is not finite: labels out of range, or else what is often the cause."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jengine.checkpoint.checkpointer import CheckpointSaveError
from jengine.checkpoint.layout import find_manifests
from jengine.config import paths
from jengine.config.storage import storage_path
from jengine.data.host_entries import select_arrays
from jengine.data.masking import whole_batches
from jengine.extras.diagnose.failing_examples import draw_again, list_some
from jengine.extras.diagnose.labels import LABEL_SETTINGS, OUTPUT_SETTINGS, find_wrong_labels
from jengine.extras.diagnose.locate import locate_sizes
from jengine.logging.loss_watch import NonFiniteLossError
from jengine.optim.wrapper_dict import OptimWrapperDict
from jengine.parallel.local_batch import process_local_batch
from jengine.parallel.replica_axis import map_per_replica
from jengine.runner.components import list_directories

PyTree = Any


def name_wrong_labels(error: BaseException, context: Mapping[str, Any]) -> list[str] | None:
    """Return the checkpoint from before a loss that was not finite, and what is wrong with the
    labels of the step, or what else to do.

    Explainer for the errors of the loss check and of the numerics guard.
    """
    run = context.get("run")
    if run is None or "evaluation" in context or not isinstance(error, FloatingPointError):
        return None
    iteration = getattr(error, "iteration", None)
    labels = _search(run, run.iter if iteration is None else iteration)
    notes = [describe_labels(labels, run.cfg)] if labels else []
    if not isinstance(error, NonFiniteLossError) or iteration is None:
        return notes
    before, later = find_checkpoints(run, iteration)
    return [
        _describe_checkpoints(before, later),
        *(notes or [_describe_likely_cause(run, iteration, before)]),
    ]


def _describe_checkpoints(before: str | None, later: str | None) -> str:
    text = "No checkpoint is from before it."
    if before:
        text = f"The newest checkpoint from before it is {before}."
    elif not later:
        text = "No checkpoint was saved, since its parameters could not be trusted."
    return f"{text} Do not resume from {later}, which was saved after it." if later else text


def find_checkpoints(run: Any, iteration: int) -> tuple[str | None, ...]:
    """Return this run's newest checkpoints from before and after the step of `iteration`."""
    if run.processes.count == 1:  # several would have to wait together
        with contextlib.suppress(CheckpointSaveError):
            run.checkpointer.wait()
    directories = [
        storage_path("path", directory) for directory in list_directories(run.work_dir, run.hooks)
    ]
    manifests = {
        path: manifest
        for found in map(find_manifests, directories)
        for path, manifest in found.items()
    }
    # The step that starts from a checkpoint, and computes the first loss with it, has the
    # checkpoint's number
    found = [
        (manifest.iteration, manifest.is_latest, str(path))
        for path, manifest in manifests.items()
        if manifest is not None and manifest.run == run.run.run_id
        if manifest.iteration is not None
    ]
    parts = [x for x in found if x[0] < iteration], [x for x in found if x[0] >= iteration]
    return tuple(max(part)[2] if part else None for part in parts)


def describe_labels(labels: str, cfg: Any) -> str:
    """Return a message of `find_wrong_labels` with the settings of a config that it is about."""
    labels = labels.replace(
        LABEL_SETTINGS, "in the data or the settings of `train_dataloader.dataset`"
    )
    count = re.search(r"the outputs have (\d+) classes", labels)
    sizes = locate_sizes(cfg, [int(count[1])]) if count else {}
    setting = " or ".join(f"`{path}`, now {size}" for path, size in sizes.items())
    return labels.replace(f" {OUTPUT_SETTINGS}", f" by {setting}") if setting else labels


def _search(run: Any, iteration: int) -> str | None:
    """Return what is wrong with the labels of the current batch, or of the batch at `iteration`."""
    count = run.train_loop.batches_per_iteration

    def batches() -> Iterator[Any]:
        if run.train_loop.batch is not None:
            batch = select_arrays(run.train_loop.batch)
            batch = jax.device_get(process_local_batch(batch, batch))
            yield from batch if count > 1 else [batch]
        loader = run.train_dataloader
        if loader.has_random_access:
            yield from draw_again(loader, iteration * count, count)

    with contextlib.suppress(Exception):  # the data may fail as well
        return next(filter(None, (_check_batch(run, batch) for batch in batches())), None)
    return None


def _check_batch(run: Any, batch: PyTree) -> str | None:
    """Return what is wrong with a batch of NumPy arrays, values or labels; None if nothing is."""
    if bad := describe_bad_values(batch):
        return bad
    # A loss alone has no collectives, so the first replica is enough
    state = (
        run.state
        if run.strategy.replicas is None
        else map_per_replica(lambda leaf: leaf[0], run.state)
    )
    hyperparams = run.step_hyperparams()
    losses = [run.model.loss]
    if isinstance(run.optim_wrapper, OptimWrapperDict):
        losses = [functools.partial(run.model.phase_loss, name) for name in run.optim_wrapper]

    def compute_losses(batch: PyTree) -> None:
        def compute(params: PyTree, model_state: PyTree) -> None:
            for loss in losses:
                loss(params, model_state, batch, rng=jax.random.key(0), hyperparams=hyperparams)

        # The batch is no argument of `eval_shape`: the labels must keep their values
        jax.eval_shape(compute, state.params, state.model_state)

    with whole_batches(run.train_dataloader.batch_rules is not None):
        return find_wrong_labels(compute_losses, batch)


def describe_bad_values(batch: PyTree) -> str | None:
    """Return which entry of a batch has values that are not finite, and in which examples.

    >>> describe_bad_values({"x": np.array([[1.0], [np.nan]]), "y": np.zeros(2)})
    "the entry 'x' of the batch has values that are not finite, in example 1: look at the data"
    """
    for path, leaf in paths.flatten(batch).items():
        x = np.asarray(leaf)
        if np.ndim(x) and np.issubdtype(x.dtype, np.inexact) and not np.isfinite(x).all():
            bad = np.flatnonzero(~np.isfinite(x).all(axis=tuple(range(1, x.ndim))))
            return (
                f"the entry {path!r} of the batch has values that are not finite, in example "
                f"{list_some(bad.tolist())}: look at the data"
            )
    return None


def _describe_likely_cause(run: Any, iteration: int, checkpoint: str | None) -> str:
    # With several groups, `base_lr` is the rate of none
    largest = max(
        (
            rate
            for name, group in run.optim_wrapper.get_lr().items()
            if not name.endswith("base_lr")
            for rate in group
        ),
        default=0,
    )
    rate = f", here {largest:g}," if largest else ""
    # At a rate that no run has, updates of clipped gradients are too large as well.
    clip = (
        ", or limit the gradients with `optim_wrapper.clip_grad=dict(max_norm=1.0)`"
        if largest < 10
        else ""
    )
    cause = (
        f"Often the learning rate{rate} is too large: set a smaller "
        f"`optim_wrapper.optimizer.lr`{clip}"
        if iteration
        else "No update came before it: look for values that are not finite, or too large, in the "
        "first batch, and for a division, root or logarithm of zero in the model and its loss"
    )
    return (
        f"{cause}.\n"
        "If that is not it, train with the numerics guard, which drops such steps, and after "
        "several in a row stores "
        "the batch and the state of one, for `jengine replay` to compute again:\n"
        f"  {_add_guard(run.resume_command(checkpoint or ''))}"
    )


def _add_guard(command: str) -> str:
    """Return a command that trains, or a call of the Runner, with the numerics guard."""
    if command.endswith(")"):
        return f"{command[:-1]}, default_hooks=dict(guard=dict(type='NumericsGuardHook')))"
    return f"{command} --config.default_hooks.guard.type=NumericsGuardHook"
