model = dict(
    type="SimSiam",
    backbone=dict(type="ResNet", depth=50, zero_init_residual=True),
    neck=dict(type="NonLinearNeck", in_channels=2048, hid_channels=2048, out_channels=2048),
    head=dict(type="LatentPredictHead", loss=dict(type="CosineSimilarityLoss")),
)
train_dataloader = dict(
    batch_size=32,
    num_workers=4,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=dict(type="default_collate"),
    dataset=dict(
        type="mmcls.ImageNet",
        data_root="data/images",
        pipeline=[
            dict(type="LoadImageFromFile"),
            dict(type="MultiView", num_views=2, transforms=[[dict(type="RandomResizedCrop", size=224)]]),
            dict(type="PackSelfSupInputs", meta_keys=["img_path"]),
        ],
    ),
)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="LARS", lr=4.8, momentum=0.9, weight_decay=1e-6),
    paramwise_cfg=dict(
        custom_keys={
            "bn": dict(decay_mult=0, lars_exclude=True),
            "bias": dict(decay_mult=0, lars_exclude=True),
            "predictor": dict(fix_lr=True),
        }
    ),
)
param_scheduler = [dict(type="CosineAnnealingLR", T_max=100, by_epoch=True, begin=0, end=100)]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=100)
custom_hooks = [dict(type="SimSiamHook", fix_pred_lr=True, lr=0.05)]
default_hooks = dict(checkpoint=dict(type="CheckpointHook", interval=10, max_keep_ckpts=3))
default_scope = "mmselfsup"
log_processor = dict(window_size=10, custom_cfg=[dict(data_src="", method="mean", window_size="global")])
