"""Keys and values of MMSelfSup's mae_vit-base-p16_8xb512-coslr-400e_in1k."""

_base_ = ["base/network.py", "base/images.py", "base/schedule.py", "base/runtime.py"]

train_dataloader = dict(batch_size=512, num_workers=8)
optimizer = dict(type="AdamW", lr=1.5e-4 * 4096 / 256, betas=(0.9, 0.95), weight_decay=0.05)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=optimizer,
    paramwise_cfg=dict(
        custom_keys={name: dict(decay_mult=0.0) for name in ("ln", "bias", "pos_embed", "mask_token", "cls_token")}
    ),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-4, by_epoch=True, begin=0, end=40, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", T_max=360, by_epoch=True, begin=40, end=400, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=400)
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=100), checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=3)
)
randomness = dict(seed=0, diff_rank_seed=True)
resume = True
