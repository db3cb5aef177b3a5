"""Train a small vision transformer on scikit-learn's handwritten digits for a number of
iterations.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the config; its keys are the arguments of `jengine.Runner`."""
    config = ConfigDict()

    config.model = dict(
        type="LinenModel",
        module=dict(type="SmallViT", num_classes=10, patch=2, width=64, depth=4, heads=4),
        loss=dict(type="CrossEntropy", label_smoothing=0.05),
    )

    config.train_dataloader = dict(batch_size=64, dataset=dict(type="Digits", split="train"))
    config.val_dataloader = dict(batch_size=128, dataset=dict(type="Digits", split="test"))
    config.test_dataloader = config.val_dataloader
    config.val_evaluator = dict(type="Accuracy")
    config.test_evaluator = config.val_evaluator

    config.train_cfg = dict(by_epoch=False, max_iters=1200, val_interval=200)
    config.val_cfg = dict()
    config.test_cfg = dict()

    # No weight decay for norms, biases and embeddings. Keys match Flax paths or torch names.
    no_decay = ("cls_token", "pos_embed", "ln", "norm", "bias")
    config.optim_wrapper = dict(
        optimizer=dict(type="AdamW", lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05),
        clip_grad=dict(max_norm=1.0),
        paramwise_cfg=dict(custom_keys={key: dict(decay_mult=0.0) for key in no_decay}),
    )
    config.param_scheduler = [
        dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=100),
        dict(type="CosineAnnealingLR", by_epoch=False, begin=100, end=1200),
    ]

    config.default_hooks = dict(
        logger=dict(type="LoggerHook", interval=50),
        checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=400, max_keep_ckpts=2),
    )
    config.visualizer = dict(
        vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]
    )
    config.randomness = dict(seed=0)
    return config
