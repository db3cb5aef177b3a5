"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "MODELS": {
        "PreprocessedModel": "jengine.extras.augment.preprocessed",
        "SwitchedLoss": "jengine.extras.augment.switched_loss",
    },
    "DATASETS": {
        "BaseDataset": "jengine.extras.augment.base_dataset",
        "ClassBalancedDataset": "jengine.extras.augment.dataset_wrappers",
        "ConcatDataset": "jengine.extras.augment.dataset_wrappers",
        "ImageFolder": "jengine.extras.augment.image_files",
        "MixedDataset": "jengine.extras.augment.dataset_wrappers",
        "RepeatDataset": "jengine.extras.augment.dataset_wrappers",
    },
    "HOOKS": {
        "BatchAugmentHook": "jengine.extras.augment.batch_augment",
        "MeanTeacherHook": "jengine.extras.augment.mean_teacher",
        "PipelineSwitchHook": "jengine.extras.augment.switch_recipe",
        "PreciseBNHook": "jengine.extras.augment.precise_bn",
        "SetEpochInfoHook": "jengine.extras.augment.step_inputs",
        "SwitchRecipeHook": "jengine.extras.augment.switch_recipe",
        "WarmupParamHook": "jengine.extras.augment.step_inputs",
    },
    "TRANSFORMS": {
        "BatchNormalize": "jengine.extras.augment.image_steps",
        "CutMix": "jengine.extras.augment.augments",
        "LoadImage": "jengine.extras.augment.image_files",
        "MixUp": "jengine.extras.augment.augments",
        "Normalize": "jengine.extras.augment.image_steps",
        "Pad": "jengine.extras.augment.image_steps",
        "RandomErasing": "jengine.extras.augment.augments",
        "SoftLabels": "jengine.extras.augment.augments",
    },
    "jengine.data": {
        "ImageFolder": "jengine.extras.augment.image_files",
        "LoadImage": "jengine.extras.augment.image_files",
    },
    "jengine.model": {"PreprocessedModel": "jengine.extras.augment.preprocessed"},
    "path_records": {
        "as_record": "jengine.extras.augment.inputs",
    },
    "own_data": {
        "find_metainfo": "jengine.extras.augment.inputs",
        "is_inputs": "jengine.extras.augment.inputs",
        "open_inputs": "jengine.extras.augment.inputs",
        "read_rows": "jengine.extras.augment.inputs",
    },
    "names": {
        "force_full_init": "jengine.extras.augment.base_dataset",
        "read_image": "jengine.extras.augment.image_files",
    },
    "batch_workers": {"start_workers": "jengine.extras.augment.worker_processes"},
    "data_sources": {"find_library_source": "jengine.extras.augment.library_sources"},
}
