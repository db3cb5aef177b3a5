dataset_type = "ImageNet"
data_preprocessor = dict(num_classes=10, mean=[127.5], std=[127.5], to_rgb=False)

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="RandomCrop", crop_size=28, padding=4),
    dict(type="RandomFlip", prob=0.5, direction="horizontal"),
    dict(type="PackInputs"),
]
test_pipeline = [dict(type="LoadImageFromFile"), dict(type="PackInputs")]

train_dataloader = dict(
    batch_size=64,
    num_workers=2,
    persistent_workers=True,
    pin_memory=True,
    dataset=dict(type=dataset_type, data_root="data/digits", split="train", pipeline=train_pipeline),
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=dict(type="default_collate"),
)
val_dataloader = dict(
    batch_size=128,
    num_workers=2,
    dataset=dict(type=dataset_type, data_root="data/digits", split="val", pipeline=test_pipeline),
    sampler=dict(type="DefaultSampler", shuffle=False),
)
val_evaluator = dict(type="Accuracy", topk=(1, 5))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
