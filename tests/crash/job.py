"""Train a small model with every state that a restart could lose: dropout, accumulation, an average, a schedule.

    python tests/crash/job.py WORK_DIR [ITERATIONS]

The job continues from the newest checkpoint of WORK_DIR. It may be killed and restarted at any moment.
"""

import sys

import numpy as np
from flax import linen as nn

from jengine import Runner
from jengine.data import ArrayDataset
from jengine.model import LinenModel, MeanSquaredError


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


def main(work_dir, max_iters):
    x = np.random.default_rng(0).standard_normal((100, 4), np.float32)
    data = ArrayDataset(dict(x=x, target=x.sum(axis=1, keepdims=True)))
    Runner(
        LinenModel(Net(), MeanSquaredError(), inputs="x"),
        work_dir,
        train_dataloader=dict(batch_size=8, dataset=data),
        train_cfg=dict(by_epoch=False, max_iters=max_iters, val_interval=7),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.05), clip_grad=dict(max_norm=1.0), accumulative_counts=3),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=10),
            dict(type="CosineAnnealingLR", by_epoch=False, begin=10, end=max_iters),
        ],
        val_dataloader=dict(batch_size=32, dataset=data),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=MeanSquaredError()),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=1),
            checkpoint=dict(
                type="CheckpointHook", by_epoch=False, interval=2, max_keep_ckpts=2, save_best="loss", rule="less"
            ),
        ),
        custom_hooks=[dict(type="EMAHook", momentum=0.1, begin_iter=5)],
        resume=True,
    ).train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40)
