"""Fine-tune a vision transformer on scikit-learn's handwritten digits, from weights in timm's
layout, with LoRA.

    jengine train configs/finetune_vit.py:vit.safetensors

examples/finetune_timm.py writes such a file. Without one, training starts from random weights.
"""

from ml_collections import ConfigDict

# Names in timm -> names in SmallViT; the fused `qkv` is split, and layouts are converted, without a
# rule.
FROM_TIMM = [
    ("patch_embed.proj", "patch_embed"),
    (r"blocks\.(\d+)\.norm(\d)", r"layers_\1.ln\2"),
    (r"blocks\.(\d+)\.(?:mlp\.)?(\w+)", r"layers_\1.\2"),
]


def get_config(weights: str = "") -> ConfigDict:
    """Return the config.

    Args:
      weights: a safetensors file in timm's layout; its head is not loaded.
    """
    config = ConfigDict()

    vit = dict(
        type="LinenModel",
        module=dict(type="SmallViT", num_classes=10, patch=2, width=32, depth=2, heads=2),
        loss=dict(type="CrossEntropy", label_smoothing=0.05),
    )
    # Low-rank updates of the projections and of the MLPs; the new head and the last norm are
    # trained themselves.
    config.model = dict(
        type="LoRA",
        model=vit,
        rank=4,
        alpha=8,
        targets=["attn", r"fc\d"],
        trainable=["head", "norm"],
    )
    if weights:
        config.load_from = dict(
            path=weights, rename=FROM_TIMM, exclude=["head"], interpolate=["pos_embed"]
        )

    config.train_dataloader = dict(batch_size=64, dataset=dict(type="Digits", split="train"))
    config.val_dataloader = dict(batch_size=128, dataset=dict(type="Digits", split="test"))
    config.test_dataloader = config.val_dataloader
    config.val_evaluator = dict(type="Accuracy")
    config.test_evaluator = config.val_evaluator

    config.train_cfg = dict(by_epoch=False, max_iters=400, val_interval=100)
    config.val_cfg = dict()
    config.test_cfg = dict()

    config.optim_wrapper = dict(
        optimizer=dict(type="AdamW", lr=1e-2, weight_decay=0.01),
        clip_grad=dict(max_norm=1.0),
        paramwise_cfg=dict(
            norm_decay_mult=0.0, bias_decay_mult=0.0, custom_keys=dict(head=dict(lr_mult=0.5))
        ),
    )
    config.param_scheduler = [
        dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=20),
        dict(type="CosineAnnealingLR", by_epoch=False, begin=20, end=400),
    ]
    config.custom_hooks = [dict(type="EMAHook", momentum=0.05)]
    config.default_hooks = dict(
        checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=200, max_keep_ckpts=1)
    )
    config.randomness = dict(seed=0)
    return config
