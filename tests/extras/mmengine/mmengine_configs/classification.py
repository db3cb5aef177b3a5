_base_ = ["./base/digits_bs64.py"]

model = dict(
    type="ImageClassifier",
    backbone=dict(type="ResNet", depth=18, num_stages=4, out_indices=(3,)),
    neck=dict(type="GlobalAveragePooling"),
    head=dict(
        type="LinearClsHead", num_classes=10, in_channels=512, loss=dict(type="CrossEntropyLoss", loss_weight=1.0)
    ),
)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=5e-4, foreach=True),
    clip_grad=dict(max_norm=5.0),
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys={"head": dict(lr_mult=10.0)}),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=True, end=2, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", T_max=18, by_epoch=True, begin=2, end=20),
]
train_cfg = dict(by_epoch=True, max_epochs=20, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=256, enable=False)

default_scope = "mmpretrain"
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=100),
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=3, save_best="auto"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="VisualizationHook", enable=False),
)
custom_hooks = [dict(type="mmengine.EMAHook", momentum=4e-5, priority="ABOVE_NORMAL")]
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method="fork"), dist_cfg=dict(backend="nccl"))
vis_backends = [dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]
visualizer = dict(type="UniversalVisualizer", vis_backends=vis_backends)
log_level = "INFO"
load_from = None
resume = False
randomness = dict(seed=None, deterministic=False)
