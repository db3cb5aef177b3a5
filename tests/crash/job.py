"""Train a small model with every state that a restart could lose: dropout, accumulation, an average, a schedule.

    python tests/crash/job.py WORK_DIR [ITERATIONS] [OPTIONS]

The job continues from the newest checkpoint of WORK_DIR. It may be killed and restarted at any moment. OPTIONS is JSON:
`url` of a work dir in a bucket instead, `steps_per_call`, `out_dir`, `save`, the iterations between two checkpoints (0: no checkpoint before the
last), `local`, those between two copies on local disks, in the directory of the environment variable JENGINE_TEST_DISK, `process` with the address, number and index of one of several processes, and `kill_at`, the
number of the file operation at which the job kills itself. It prints the number of file operations at its end.
"""

import json
import os
import signal
import sys

import jax
import numpy as np
from flax import linen as nn

from jengine import Runner
from jengine.data import ArrayDataset
from jengine.model import LinenModel, MeanSquaredError
from jengine.parallel import launch

HEARTBEAT_TIMEOUT = 10  # seconds


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(12)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


class FileOperations:
    """Count the operations of Python on the files of checkpoints, and kill the process at one of them."""

    NAMES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
    PARTS = (".incoming", ".outgoing", "last_checkpoint", "current_run", "iter_", "manifest.json", "earlier_")

    def __init__(self, directories, kill_at):
        self.directories = [os.path.abspath(directory) for directory in directories]
        self.kill_at = kill_at
        self.count = 0
        sys.addaudithook(self._audit)

    def _audit(self, event, args):
        if event not in self.NAMES or (event == "open" and not (len(args) > 2 and args[2] & (os.O_WRONLY | os.O_RDWR))):
            return
        path = os.path.abspath(os.fspath(args[0])) if isinstance(args[0], str | os.PathLike) else ""
        if path.startswith(tuple(self.directories)) and any(part in path for part in self.PARTS):
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def main(work_dir, max_iters, steps_per_call=1, out_dir=None, url=None, save=2, local=0, hooks=()):
    x = np.random.default_rng(0).standard_normal((100, 4), np.float32)
    data = ArrayDataset(dict(x=x, target=x.sum(axis=1, keepdims=True)))
    count = jax.process_count()
    if local:
        hooks = [*hooks, dict(type="LocalCheckpointHook", directory="$JENGINE_TEST_DISK", interval=local)]
    Runner(
        LinenModel(Net(), MeanSquaredError(), inputs="x"),
        url or work_dir,
        train_dataloader=dict(batch_size=12 // count, dataset=data),
        train_cfg=dict(by_epoch=False, max_iters=max_iters, val_interval=7, steps_per_call=steps_per_call),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.05), clip_grad=dict(max_norm=1.0), accumulative_counts=3),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=10),
            dict(type="CosineAnnealingLR", by_epoch=False, begin=10, end=max_iters),
        ],
        val_dataloader=dict(batch_size=36 // count, dataset=data),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=MeanSquaredError()),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=1),
            checkpoint=dict(
                type="CheckpointHook",
                by_epoch=False,
                interval=save or -1,
                max_keep_ckpts=2,
                save_best="loss" if save else None,
                rule="less" if save else None,
                out_dir=out_dir,
            ),
        ),
        custom_hooks=[dict(type="EMAHook", momentum=0.1, begin_iter=5), *hooks],
        parallel=dict(type="Pjit", mesh=dict(data=1, fsdp=count), fsdp_min_size=1) if count > 1 else None,
        resume=True,
    ).train()


if __name__ == "__main__":
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    directories = [sys.argv[1], *([options["out_dir"]] if "out_dir" in options else [])]
    directories += [os.environ["JENGINE_TEST_DISK"]] if "local" in options else []
    operations = FileOperations(directories, options.pop("kill_at", None))
    if "process" in options:
        launch("none", *options.pop("process"), timeout=60, heartbeat_timeout=HEARTBEAT_TIMEOUT)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40, **options)
    print("file operations:", operations.count)
