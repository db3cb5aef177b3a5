"""Configs in the shapes of OpenMMLab's packages, as their files resolve."""

import copy

PIPELINE = [
    dict(type="LoadImageFromFile"),
    dict(type="RandomResizedCrop", scale=224, backend="pillow", interpolation="bicubic"),
    dict(type="RandAugment", policies="timm_increasing", num_policies=2, hparams=dict(pad_val=[104, 116, 124])),
    dict(type="RandomErasing", erase_prob=0.25, mode="rand", max_area_ratio=0.3, fill_std=[57.4, 57.1, 58.4]),
    dict(type="PackInputs", meta_keys=("img_path",)),
]


def classifier(backbone, loss, **model):
    """Return a config as of MMPretrain."""
    loader = dict(
        batch_size=128, num_workers=5, persistent_workers=True, sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=dict(type="default_collate"),
        dataset=dict(type="ImageNet", data_root="data/imagenet", split="train", pipeline=copy.deepcopy(PIPELINE)),
    )  # fmt: skip
    return dict(
        default_scope="mmpretrain", train_pipeline=PIPELINE, bgr_mean=[103.5, 116.3, 123.7],
        data_preprocessor=dict(num_classes=1000, mean=[123.7], std=[58.4], to_rgb=True),
        model=dict(
            type="ImageClassifier", backbone=backbone, neck=dict(type="GlobalAveragePooling"),
            head=dict(type="LinearClsHead", num_classes=1000, in_channels=768, loss=loss, topk=(1, 5)),
            init_cfg=[dict(type="TruncNormal", layer="Linear", std=0.02), dict(type="Constant", layer="LN", val=1.0)],
            **model,
        ),
        train_dataloader=loader, val_dataloader={**copy.deepcopy(loader), "batch_size": 64},
        val_evaluator=dict(type="Accuracy", topk=(1, 5), collect_device="gpu"),
        optim_wrapper=dict(
            type="AmpOptimWrapper", optimizer=dict(type="AdamW", lr=4e-3, weight_decay=0.05, foreach=False),
            clip_grad=dict(max_norm=5.0), paramwise_cfg=dict(norm_decay_mult=0.0, dcn_offset_lr_mult=0.1),
        ),
        param_scheduler=[dict(type="LinearLR", start_factor=1e-3, end=20, convert_to_iter_based=True), dict(type="OwnLR", a=3)],
        train_cfg=dict(by_epoch=True, max_epochs=300, val_interval=1), val_cfg=dict(), auto_scale_lr=dict(base_batch_size=4096),
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=1, save_best="auto"), logger=dict(type="LoggerHook", interval=100),
            visualization=dict(type="VisualizationHook", enable=False),
        ),
        custom_hooks=[dict(type="OptimizerHook", a=1), dict(type="EMAHook", momentum=1e-4), dict(type="OwnHook", b=[2, 3])],
        visualizer=dict(type="UniversalVisualizer", vis_backends=[dict(type="LocalVisBackend"), dict(type="PaviVisBackend")]),
        vis_backends=[dict(type="LocalVisBackend")], env_cfg=dict(mp_cfg=dict(mp_start_method="fork")),
        randomness=dict(seed=0, deterministic=True), load_from="a.pth", resume=False,
    )  # fmt: skip


def segmentor(**changes):
    """Return a config as of MMSegmentation."""
    head = dict(
        type="UPerHead", num_classes=19, loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0)
    )
    dataset = dict(type="CityscapesDataset", data_root="data", pipeline=[
        dict(type="LoadAnnotations", reduce_zero_label=True), dict(type="Pad", size=(1024, 512), pad_val=dict(img=0, seg=255)),
        dict(type="RandomFlip", prob=0.5),
    ])  # fmt: skip
    return dict(
        model=dict(
            type="EncoderDecoder", data_preprocessor=dict(type="SegDataPreProcessor", mean=[123.7], bgr_to_rgb=True),
            backbone=dict(type="SwinTransformer", depths=[2, 2, 6, 2], drop_path_rate=0.3), decode_head=head,
            test_cfg=dict(mode="whole"),
        ),
        train_dataloader=dict(
            batch_size=2, sampler=dict(type="InfiniteSampler", shuffle=True), prefetch_factor=4,
            dataset=dict(type="RepeatDataset", times=50, dataset=dict(type="ConcatDataset", datasets=[dataset, dataset])),
        ),
        train_cfg=dict(type="IterBasedTrainLoop", max_iters=160, val_interval=80), tta_model=dict(type="SegTTAModel", module=1),
        tta_pipeline=[dict(type="TestTimeAug", transforms=[[dict(type="Resize", scale_factor=r) for r in (0.5, 1.0)]])],
        optim_wrapper=dict(
            type="OptimWrapper", constructor="LayerDecayOptimizerConstructor", optimizer=dict(type="AdamW", lr=1e-4),
            paramwise_cfg=dict(num_layers=12, layer_decay_rate=0.9), accumulative_counts=2,
        ),
        param_scheduler=dict(type="PolyLR", power=0.9, begin=0, end=160, by_epoch=False),
        val_evaluator=[dict(type="IoUMetric", iou_metrics=["mIoU"]), dict(type="DepthMetric", min_depth=1e-3)],
        log_processor=dict(by_epoch=False, custom_cfg=[dict(data_src="", method="mean"), dict(data_src="loss", method_name="mean", window_size=10)]),
        **changes,
    )  # fmt: skip


SHAPES = {
    "ConvNeXt": classifier(
        dict(type="ConvNeXt", arch="tiny", drop_path_rate=0.1),
        dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
        train_cfg=dict(augments=[dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]),
    ),
    "Swin": classifier(
        dict(type="mmpretrain.SwinTransformer", img_size=224, drop_path_rate=0.2, stage_cfgs=[dict(a=1), dict(b=2)]),
        dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="multi_label"),
        train_cfg=dict(augments=[dict(type="Mixup", alpha=0.8), dict(type="ResizeMix", lam_min=0.1)], probs=[0.5, 0.3]),
    ),
    "ResNet": classifier(
        dict(type="ResNet", depth=50, out_indices=(3,), norm_cfg=dict(type="SyncBN", requires_grad=True), frozen_stages=None),
        dict(type="CrossEntropyLoss", loss_weight=1.0),
        train_cfg=dict(augments=dict(type="BatchMixup", alpha=0.2, num_classes=1000, prob=0.5)),
    ),
    "ViT": classifier(
        dict(type="VisionTransformer", patch_cfg=dict(stride=16), final_norm=True),
        dict(type="CrossEntropyLoss", use_sigmoid=True, class_weight=[1.0, 2.0]),
        pretrained="torchvision://vit",
    ),
    "segmentation": segmentor(),
    "segmentation with an auxiliary head": segmentor() | dict(
        model=dict(
            type="EncoderDecoder", decode_head=[dict(type="FCNHead", loss_decode=dict(type="CrossEntropyLoss", avg_non_ignore=True))],
            auxiliary_head=dict(type="FCNHead", loss_decode=dict(type="CrossEntropyLoss", loss_weight=0.4)),
        ),
    ),
    "self-supervised": dict(
        model=dict(
            type="MoCo", queue_len=65536, momentum=0.001, backbone=dict(type="ResNet", depth=50),
            head=dict(type="ContrastiveHead", temperature=0.2, loss=dict(type="CrossEntropyLoss", loss_weight=1.0)),
        ),
        train_dataloader=dict(batch_size=32, drop_last=True, dataset=dict(type="ImageNet", pipeline=[
            dict(type="MultiView", num_views=[1, 1], transforms=[[dict(type="RandomGrayscale", prob=0.2)], [dict(type="Solarize", thr=128)]]),
        ])),
        optim_wrapper=dict(type="ApexOptimWrapper", loss_scale=512, optimizer=dict(type="LARS", lr=4.8), paramwise_cfg=dict(
            custom_keys={"bn": dict(decay_mult=0, lars_exclude=True), "backbone.layer0": dict(lr_mult=0)},
        )),
        train_cfg=dict(type="OwnLoop", max_epochs=200), custom_hooks=[dict(type="DenseCLHook", start_iters=500)],
        param_scheduler=[dict(type="CosineAnnealingLR", T_max=200, begin=0, end=200, verbose=True)], own_flag=dict(deep=[1, 2]),
    ),
    "detection": dict(
        model=dict(
            type="FasterRCNN", roi_head=dict(type="CascadeRoIHead", stage_loss_weights=[1, 0.5], bbox_head=[
                dict(type="Shared2FCBBoxHead", loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=True), target_stds=[0.1]),
                dict(type="Shared2FCBBoxHead", loss_bbox=dict(type="SmoothL1Loss", beta=1.0)),
            ]),
            train_cfg=dict(rpn=dict(assigner=dict(type="MaxIoUAssigner", pos_iou_thr=0.7), debug=False)),
        ),
        train_dataloader=dict(
            batch_size=2, batch_sampler=dict(type="AspectRatioBatchSampler", drop_last=True), sampler=dict(type="ClassAwareSampler", n=1),
            dataset=dict(type="MultiImageMixDataset", pipeline=[dict(type="Mosaic", img_scale=(640, 640)), dict(type="MixUp", ratio_range=(0.8, 1.6))],
                         dataset=dict(type="CocoDataset", ann_file="a.json", filter_cfg=dict(min_size=32), pipeline=[dict(type="LoadAnnotations", with_bbox=True)])),
        ),
        optim_wrapper=dict(type="OptimWrapper", constructor="SwinOptimWrapperConstructor", optimizer=dict(type="Lamb2", lr=1e-3),
                           paramwise_cfg=dict(base_lr=0.1, bias_lr_mult=2.0)),
        val_evaluator=dict(type="CocoMetric", ann_file="b.json", metric=["bbox", "segm"], format_only=False),
        default_hooks=dict(optimizer=dict(type="OptimizerHook", grad_clip=None), own=dict(type="OwnHook", x=dict(y=1)), timer=None),
        custom_imports=dict(imports=["a.b"]), activation_checkpointing=None, strategy=dict(type="DeepSpeedStrategy", fp16=dict(enabled=True)),
        resume=True, load_from="b.pth",
    ),
}  # fmt: skip
