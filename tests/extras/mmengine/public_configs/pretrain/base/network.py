"""Keys and values of MMPretrain's ConvNeXt-T."""

model = dict(
    type="ImageClassifier",
    backbone=dict(type="ConvNeXt", arch="tiny", drop_path_rate=0.1),
    head=dict(
        type="LinearClsHead", num_classes=1000, in_channels=768, init_cfg=None,
        loss=dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
    ),
    init_cfg=dict(type="TruncNormal", layer=["Conv2d", "Linear"], std=0.02, bias=0.0),
    train_cfg=dict(augments=[dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]),
)  # fmt: skip
