"""Find the learning rate of a small ViT with five rates and four seeds, export the best model, and
print a table.

python examples/experiment.py
"""

import argparse
from collections.abc import Sequence

import numpy as np

import jengine
from jengine.extras.serving import export_model

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def get_config() -> dict:
    """Return the config, which the sweep and `jengine train examples/experiment.py` run."""
    val_data = dict(batch_size=360, dataset=dict(type="Digits", split="test"))
    warmup = 60
    end = 600
    return dict(
        model=dict(
            type="LinenModel",
            module=dict(type="SmallViT", num_classes=10, patch=2, width=64, depth=4, heads=4),
            loss=dict(type="CrossEntropy"),
        ),
        train_dataloader=dict(batch_size=32, dataset=dict(type="Digits", split="train")),
        train_cfg=dict(by_epoch=False, max_iters=end, val_interval=50),
        val_dataloader=val_data,
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=3e-3, weight_decay=0.05),
            clip_grad=dict(max_norm=1.0),
            accumulative_counts=2,
        ),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=warmup),
            dict(type="CosineAnnealingLR", by_epoch=False, begin=warmup, end=end),
        ],
        custom_hooks=[
            dict(
                type="BatchAugmentHook",
                augments=[
                    dict(type="SoftLabels", num_classes=10, smoothing=0.05),
                    dict(type="MixUp", alpha=0.2, prob=0.5),
                ],
            ),
            dict(type="EMAHook", momentum=0.01),
            dict(type="EarlyStoppingHook", monitor="accuracy/top1", min_delta=0.002, patience=4),
        ],
        default_hooks=dict(
            checkpoint=dict(
                type="CheckpointHook",
                by_epoch=False,
                interval=100,
                max_keep_ckpts=1,
                save_best="accuracy/top1",
            )
        ),
    )


def main(
    work_dir: str = "work_dirs/experiment",
    rates: Sequence[float] = RATES,
    seeds: int = 4,
    jobs: int = 2,
    **settings,
) -> dict:
    """Run the sweep and return the best hyperparameters."""
    table = jengine.sweep(
        __file__, grid={"lr": rates}, seeds=seeds, jobs=jobs, work_dir=work_dir, **settings
    )
    print(table.format(group=True))
    best = table.groups()[0]  # by the mean over the seeds
    model = jengine.load_model(best.runs[0].best_checkpoint())
    export_model(
        model, {"image": np.zeros((1, 8, 8, 1), np.float32)}, f"{work_dir}/best.jax_export"
    )
    return dict(best.hyperparams)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    print(main(jobs=parser.parse_args().jobs))
