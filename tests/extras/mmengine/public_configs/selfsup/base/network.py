"""Keys and values of MMSelfSup's MAE with ViT-B/16."""

model = dict(
    type="MAE",
    data_preprocessor=dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True),
    backbone=dict(type="MAEViT", arch="b", patch_size=16, mask_ratio=0.75),
    neck=dict(
        type="MAEPretrainDecoder", patch_size=16, in_chans=3, embed_dim=768, decoder_embed_dim=512, decoder_depth=8,
        decoder_num_heads=16, mlp_ratio=4.0,
    ),
    head=dict(type="MAEPretrainHead", norm_pix=True, patch_size=16, loss=dict(type="MAEReconstructionLoss")),
    init_cfg=[
        dict(type="Xavier", distribution="uniform", layer="Linear"),
        dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0),
    ],
)  # fmt: skip
