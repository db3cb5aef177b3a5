"""Stop a run whose loss is not finite, and show how to continue it."""

import contextlib
import math
from pathlib import Path

from jengine.checkpoint import CheckpointSaveError, list_checkpoints
from jengine.checkpoint.manifest import read_manifest
from jengine.hooks.checks import NonFiniteLossError
from jengine.optim import AmpOptimWrapper
from jengine.runner.runner_protocol import Runner


def check_losses(runner: Runner, *, at_line: bool = False, at_end: bool = False) -> None:
    """Check the losses that were fetched since the last call, as `train_cfg.on_nonfinite` requires.

    Args:
      runner: in training; elsewhere nothing is checked.
      at_line: at a log line, where several processes check the losses up to the previous line, so that all of them stop
        at the same iteration; elsewhere they fetch all losses.
      at_end: training has ended: fetch all losses that are left.

    Raises:
      NonFiniteLossError: a loss is not finite, of a step that no loss scale and no hook has dropped.
    """
    loop, hub = runner.train_loop, runner.message_hub
    if loop is None or hub.losses is None:
        return
    last: float = math.inf
    if at_line and runner.processes.count > 1:
        runner.log_writer.flush()
        last = hub.last_snapshot
    elif at_end or runner.processes.count > 1:
        hub.flush()
    wrapper = runner.optim_wrapper
    has_scale = isinstance(wrapper, AmpOptimWrapper) and wrapper.loss_scale is not None
    found = hub.losses.pop(last, waits=has_scale and wrapper.accumulates and not at_end)
    if found is None:
        return
    iteration, value = found
    if loop.on_nonfinite == "warn":
        hub.losses = None
        runner.logger.warning(f"The loss of iteration {iteration}, counted from 0, is {value}; training continues.")
        return
    path = _find_checkpoint_before(runner, iteration)
    newest = f"The newest checkpoint from before it is {path}" if path else "There is no checkpoint from before it"
    raise NonFiniteLossError(
        f"the loss of iteration {iteration}, counted from 0, is {value} (train_cfg.on_nonfinite='warn' or 'ignore' "
        f"continues). {newest}. To train from {'there' if path else 'scratch'} with the numerics guard, which drops "
        f"such steps, and after several in a row writes one for `jengine replay`:\n"
        f"  {runner.resume_command(path or '', guard=True)}"
    )


def _find_checkpoint_before(runner: Runner, iteration: int) -> str | None:
    """Return the newest checkpoint of this run whose parameters are those of a step before that of `iteration`."""
    if runner.processes.count == 1:  # several would have to wait together
        with contextlib.suppress(CheckpointSaveError):
            runner.checkpointer.wait()
    directories = [runner.work_dir, *(path for hook in runner.hooks for path in hook.list_directories(runner.work_dir))]
    paths = (path for directory in directories if Path(directory).is_dir() for path in list_checkpoints(directory))
    manifests = {path: read_manifest(Path(path)) for path in paths}
    # the step that starts from a checkpoint, and computes the first loss with it, is that of the checkpoint's number
    found = [
        (manifest.iteration, manifest.is_latest, path)
        for path, manifest in manifests.items()
        if manifest is not None and manifest.is_complete and manifest.run == runner.run_id
        if manifest.iteration is not None and manifest.iteration < iteration
    ]
    return max(found)[2] if found else None
