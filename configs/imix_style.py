"""Train on the digits with an iMIX config: its keys, hooks and levels. The accuracy is about
0.99 after 12 epochs.
"""

from typing import Any

from jengine.extras.imix import from_imix


def get_config() -> dict[str, Any]:
    """Convert iMIX's keys to the arguments of `jengine.Runner`."""
    return from_imix(
        dict(
            model=dict(
                type="LinenModel",
                module=dict(type="SmallCNN", num_classes=10, widths=(16, 32)),
                loss=dict(type="CrossEntropy"),
            ),
            work_dir="work_dirs/imix_style",
            train_data=dict(samples_per_gpu=64, data=dict(type="Digits", split="train")),
            test_data=dict(
                samples_per_gpu=128,
                data=dict(type="Digits", split="test"),
                post_processor=dict(metrics=[dict(type="Accuracy")]),
            ),
            optimizer=dict(type="Adam", lr=3e-3),
            optimizer_config=dict(grad_clip=dict(max_norm=1.0)),
            lr_config=dict(
                policy="WarmupMultiStepLR",
                milestones=(170, 220),
                warmup_factor=0.1,
                warmup_iters=20,
            ),
            gradient_accumulation_steps=1,
            total_epochs=12,
            log_config=dict(period=10),
            checkpoint_config=dict(epoch_period=4, max_num_checkpoints=2),
            custom_hooks=[dict(type="EMAIterHook", decay=0.99, level="LOW")],
            seed=0,
        )
    )
