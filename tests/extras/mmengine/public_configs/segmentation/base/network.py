"""Keys and values of MMSegmentation's SegFormer with MiT-B0."""

norm_cfg = dict(type="SyncBN", requires_grad=True)
data_preprocessor = dict(
    type="SegDataPreProcessor", mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True,
    pad_val=0, seg_pad_val=255,
)  # fmt: skip
model = dict(
    type="EncoderDecoder",
    data_preprocessor=data_preprocessor,
    pretrained=None,
    backbone=dict(type="MixVisionTransformer", embed_dims=32, num_layers=[2, 2, 2, 2], drop_path_rate=0.1),
    decode_head=dict(
        type="SegformerHead", in_channels=[32, 64, 160, 256], channels=256, dropout_ratio=0.1, num_classes=19,
        norm_cfg=norm_cfg, align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)  # fmt: skip
