backend_args = None
custom_imports = dict(imports=["my_project.models"], allow_failed_imports=False)
model = dict(
    type="FasterRCNN",
    data_preprocessor=dict(type="DetDataPreprocessor", mean=[123.0], std=[58.0], pad_size_divisor=32),
    backbone=dict(type="ResNet", depth=50, frozen_stages=1),
    rpn_head=dict(type="RPNHead", in_channels=256),
)
train_dataloader = dict(
    batch_size=2,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    batch_sampler=dict(type="AspectRatioBatchSampler"),
    dataset=dict(
        type="CocoDataset",
        ann_file="annotations/train.json",
        pipeline=[
            dict(type="LoadImageFromFile", backend_args=backend_args),
            dict(type="Resize", scale=(1333, 800), keep_ratio=True),
            dict(type="PackDetInputs"),
        ],
    ),
)
val_dataloader = dict(
    batch_size=1,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="CocoDataset", ann_file="annotations/val.json", test_mode=True),
)
val_evaluator = dict(type="CocoMetric", ann_file="annotations/val.json", metric="bbox")
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=12, val_interval=1)
val_cfg = dict(type="ValLoop")
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type="MultiStepLR", begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1),
]
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.02, momentum=0.9, weight_decay=0.0001))
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    visualization=dict(type="DetVisualizationHook"),
    checkpoint=dict(type="CheckpointHook", interval=1, save_best="coco/bbox_mAP"),
)
custom_hooks = [dict(type="NumClassCheckHook"), dict(type="SyncNormHook")]
visualizer = dict(type="DetLocalVisualizer", vis_backends=[dict(type="LocalVisBackend"), dict(type="AimVisBackend")])
log_processor = dict(type="LogProcessor", window_size=50, by_epoch=True)
find_unused_parameters = True
