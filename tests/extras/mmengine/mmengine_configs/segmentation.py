crop_size = (64, 64)
norm_cfg = dict(type="SyncBN", requires_grad=True)
data_preprocessor = dict(type="SegDataPreProcessor", mean=[123.0, 116.0, 103.0], std=[58.0, 57.0, 57.0], size=crop_size)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=data_preprocessor,
    backbone=dict(type="mmpretrain.BEiT", depth=12),
    decode_head=dict(type="UPerHead", num_classes=2, norm_cfg=norm_cfg, loss_decode=dict(type="CrossEntropyLoss")),
    test_cfg=dict(mode="whole"),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="RandomCrop", crop_size=crop_size, cat_max_ratio=0.75),
    dict(type="PackSegInputs"),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(type="RoadDataset", data_root="data/roads", pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=1,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="RoadDataset", data_root="data/roads", pipeline=[dict(type="PackSegInputs")]),
)
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
train_cfg = dict(type="IterBasedTrainLoop", max_iters=160, val_interval=80)
val_cfg = dict(type="ValLoop")
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=6e-5, betas=(0.9, 0.999), weight_decay=0.05),
    constructor="LayerDecayOptimizerConstructor",
    paramwise_cfg=dict(num_layers=12, layer_decay_rate=0.9),
    accumulative_counts=2,
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=15),
    dict(type="PolyLR", power=1.0, begin=15, end=160, eta_min=0.0, by_epoch=False),
]
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=80),
    visualization=dict(type="SegVisualizationHook", draw=True, interval=20),
)
custom_hooks = [dict(type="EMAHook", begin_iter=40)]
visualizer = dict(type="SegLocalVisualizer", vis_backends=[dict(type="LocalVisBackend")], name="visualizer")
log_processor = dict(by_epoch=False)
tta_model = dict(type="SegTTAModel")
load_from = "https://example.org/beit_base.pth"
