"""Train on the digits with an iMIX config: half precision, by iterations, with schedules of rate
and momentum.
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
            work_dir="work_dirs/imix_fp16",
            train_data=dict(samples_per_gpu=64, data=dict(type="Digits", split="train")),
            test_data=dict(
                samples_per_gpu=128,
                data=dict(type="Digits", split="test"),
                post_processor=dict(metrics=[dict(type="Accuracy")]),
            ),
            optimizer=dict(type="SGD", lr=0.2, momentum=0.9, weight_decay=1e-4),
            optimizer_config=dict(grad_clip=dict(max_grad_l2_norm=2.0, use_scale=True)),
            fp16=dict(init_scale=1024.0, growth_interval=200),
            gradient_accumulation_steps=2,
            lr_config=dict(policy="WarmupCosineLR", max_iters=150, warmup_iters=10),
            momentum_config=dict(policy="LinearMomentum", start_factor=0.9, end=50, by_epoch=False),
            max_iter=300,
            eval_iter_period=50,
            log_config=dict(
                period=10,
                hooks=[
                    dict(type="CommonMetricLoggerHook"),
                    dict(type="JSONLoggerHook"),
                    dict(type="TensorboardLoggerHook"),
                ],
            ),
            checkpoint_config=dict(iter_period=100, max_num_checkpoints=2),
            seed=0,
        )
    )
