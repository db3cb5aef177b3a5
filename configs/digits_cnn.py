"""Train a small convolutional network on scikit-learn's handwritten digits: accuracy 0.99 after
20 epochs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the config; its keys are the arguments of `jengine.Runner`."""
    config = ConfigDict()

    config.model = dict(
        type="LinenModel",
        module=dict(type="SmallCNN", num_classes=10, widths=(32, 64), dropout=0.1),
        loss=dict(type="CrossEntropy", label_smoothing=0.05),
    )

    config.train_dataloader = dict(batch_size=64, dataset=dict(type="Digits", split="train"))
    config.val_dataloader = dict(batch_size=128, dataset=dict(type="Digits", split="test"))
    config.test_dataloader = config.val_dataloader
    config.val_evaluator = [
        dict(type="Accuracy"),
        dict(type="MeanLoss", loss=dict(type="CrossEntropy")),
    ]
    config.test_evaluator = config.val_evaluator

    config.train_cfg = dict(by_epoch=True, max_epochs=20, val_interval=4)
    config.val_cfg = dict()
    config.test_cfg = dict()

    config.optim_wrapper = dict(
        optimizer=dict(type="AdamW", lr=3e-3, weight_decay=0.02),
        clip_grad=dict(max_norm=1.0),
        paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
    )
    config.param_scheduler = [
        dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=40),
        dict(type="CosineAnnealingLR", by_epoch=True, begin=2, end=20, convert_to_iter_based=True),
    ]

    config.default_hooks = dict(
        logger=dict(type="LoggerHook", interval=20),
        checkpoint=dict(
            type="CheckpointHook", interval=4, max_keep_ckpts=2, save_best="accuracy/top1"
        ),
    )
    config.visualizer = dict(
        vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]
    )
    config.randomness = dict(seed=0)
    return config
