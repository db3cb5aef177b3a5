"""Keys and values of MMPretrain's imagenet_bs64_swin_224."""

dataset_type = "ImageNet"
data_preprocessor = dict(num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)
bgr_mean = data_preprocessor["mean"][::-1]
bgr_std = data_preprocessor["std"][::-1]
bicubic = dict(backend="pillow", interpolation="bicubic")
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="RandomResizedCrop", scale=224, **bicubic),
    dict(type="RandomFlip", prob=0.5, direction="horizontal"),
    dict(
        type="RandAugment", policies="timm_increasing", num_policies=2, total_level=10, magnitude_level=9,
        magnitude_std=0.5, hparams=dict(pad_val=[round(x) for x in bgr_mean], interpolation="bicubic"),
    ),
    dict(
        type="RandomErasing", erase_prob=0.25, mode="rand", min_area_ratio=0.02, max_area_ratio=1 / 3,
        fill_color=bgr_mean, fill_std=bgr_std,
    ),
    dict(type="PackInputs"),
]  # fmt: skip
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="ResizeEdge", scale=256, edge="short", **bicubic),
    dict(type="CenterCrop", crop_size=224),
    dict(type="PackInputs"),
]
train_dataloader = dict(
    batch_size=64, num_workers=5, sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type=dataset_type, data_root="data/imagenet", split="train", pipeline=train_pipeline),
)  # fmt: skip
val_dataloader = dict(
    batch_size=64, num_workers=5, sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type=dataset_type, data_root="data/imagenet", split="val", pipeline=test_pipeline),
)  # fmt: skip
val_evaluator = dict(type="Accuracy", topk=(1, 5))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
