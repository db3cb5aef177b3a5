"""Give an example of a config for each registered name: its arguments, as written in a config file.

Names that are not listed have no required argument, and their example is the `type` alone.
"""

from collections.abc import Callable

from jengine.config import Registry
from jengine.config.annotations import parameters_of

_CNN = 'module=dict(type="SmallCNN"), loss=dict(type="CrossEntropy")'

# The place of an entry in a config, by the name of its registry.
PLACES = {
    "hook": "custom_hooks = [{}]",
    "optimizer": "optim_wrapper = dict(optimizer={})",
    "optimizer wrapper": "optim_wrapper = {}",
    "optimizer wrapper constructor": "optim_wrapper = {}",
    "parameter scheduler": "param_scheduler = [{}]",
    "model": "model = {}",
    "transform": 'custom_hooks = [dict(type="BatchAugmentHook", augments=[{}])]',
    "dataset": "train_dataloader = dict(batch_size=64, dataset={})",
    "data sampler": 'train_dataloader = dict(batch_size=64, dataset=dict(type="Digits"), sampler={})',
    "metric": "val_evaluator = [{}]",
    "evaluator": "val_evaluator = {}",
    "visualizer": "visualizer = {}",
    "visualization backend": "visualizer = dict(vis_backends=[{}])",
    "log processor": "log_processor = {}",
    "strategy": "parallel = {}",
    "average": "{}",
}
# Entries with another place than the others of their registry.
OWN_PLACES = {
    "Normalize": 'train_dataloader.dataset = dict(type="TransformedDataset", dataset=..., pipeline=[{}])',
    "Pad": 'train_dataloader.dataset = dict(type="TransformedDataset", dataset=..., pipeline=[{}])',
    "BatchNormalize": 'model = dict(type="PreprocessedModel", model=..., steps=[{}])',
    "LoadImage": 'train_dataloader.dataset = dict(type="BaseDataset", ann_file=..., pipeline=[{}])',
    "IterTimerHook": "default_hooks = dict(timer={})",
    "LoggerHook": "default_hooks = dict(logger={})",
    "CheckpointHook": "default_hooks = dict(checkpoint={})",
    "RuntimeInfoHook": "default_hooks = dict(runtime_info={})",
    "ParamSchedulerHook": "default_hooks = dict(param_scheduler={})",
    "DistSamplerSeedHook": "default_hooks = dict(sampler_seed={})",
    "SmallCNN": 'model = dict(type="LinenModel", loss=dict(type="CrossEntropy"), module={})',
    "SmallViT": 'model = dict(type="LinenModel", loss=dict(type="CrossEntropy"), module={})',
    "CLIP": 'model = dict(type="LinenModel", inputs=["image", "tokens"], '
    'loss="jengine.extras.networks.contrastive_loss", module={})',
    "ConvNeXt": 'model = dict(type="LinenModel", loss=dict(type="CrossEntropy"), module={})',
    "ResNet": 'model = dict(type="LinenModel", loss=dict(type="CrossEntropy"), module={})',
    "ViT": 'model = dict(type="LinenModel", loss=dict(type="CrossEntropy"), module={})',
    "Quantized": 'model = dict(type="LinenModel", loss=dict(type="CrossEntropy"), module={})',
    "TransformerLM": 'model = dict(type="LinenModel", inputs="tokens", loss=dict(type="CrossEntropy"), module={})',
    "CrossEntropy": 'model = dict(type="LinenModel", module=dict(type="SmallCNN"), loss={})',
    "MeanSquaredError": 'model = dict(type="LinenModel", module=dict(type="SmallCNN"), loss={})',
    "SwitchedLoss": 'model = dict(type="LinenModel", module=dict(type="SmallCNN"), loss={})',
    "EpochBasedTrainLoop": "train_cfg = {}",
    "IterBasedTrainLoop": "train_cfg = {}",
    "ValLoop": "val_cfg = {}",
    "TestLoop": "test_cfg = {}",
}

_ADAMW = 'optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05)'
_ARGUMENTS = {
    "hook": {
        "AutogradProfilerHook": 'enable_predicate=lambda hook: hook.trainer.iter == 20, output_dir="work_dirs/trace"',
        "BatchAugmentHook": 'augments=[dict(type="SoftLabels", num_classes=10), dict(type="MixUp", alpha=0.8)]',
        "CheckInvalidLossHook": "interval=50",
        "CheckpointHook": 'interval=5, max_keep_ckpts=2, save_best="accuracy/top1"',
        "DeepClusterHook": "extract_dataloader=dict(batch_size=256, dataset=dict(type='Digits')), "
        'clustering=dict(type="Kmeans", k=30, pca_dim=16), unif_sampling=True, reweight=False, '
        "reweight_pow=0.5",
        "DenseCLHook": "start_iters=1000",
        "DistillHook": 'teacher="work_dirs/large", temperature=4.0, task_weight=0.1',
        "FrozenModelHook": 'model="work_dirs/pretrained", name="reference"',
        "EMAHook": "momentum=0.0002, begin_iter=500",
        "GenerationHook": 'prompts=["def ", "import "], interval=500',
        "OptunaPruningHook": 'monitor="accuracy/top1"',
        "EarlyStoppingHook": 'monitor="accuracy/top1", min_delta=0.001, patience=5',
        "InspectHook": 'paths=["blocks.*", "grads.*.kernel"], interval=500',
        "IterTimerHook": "block=True",
        "LocalCheckpointHook": 'directory="/local/ssd/jengine", interval=50',
        "LoggerHook": "interval=50",
        "MeanTeacherHook": "momentum=0.001",
        "NumericsGuardHook": "max_in_row=3, spike_factor=10.0",
        "ODCHook": "centroids_update_interval=10, deal_with_small_clusters_interval=1, evaluate_interval=50, "
        "reweight=True, reweight_pow=0.5",
        "PipelineSwitchHook": "switch_epoch=280, switch_pipeline=[]",
        "PreciseBNHook": "num_samples=1024",
        "PrepareTTAHook": 'tta_cfg=dict(type="FlipTTA")',
        "SegVisualizationHook": "draw=True, interval=10",
        "SimSiamHook": "fix_pred_lr=True, lr=0.05",
        "SwAVHook": "batch_size=32, queue_length=3840, epoch_queue_starts=15, "
        "frozen_layers_cfg=dict(prototypes=5005)",
        "SwitchRecipeHook": "schedule=[\n    dict(action_epoch=1, hyperparams=dict(mixup=0.8)), "
        "dict(action_epoch=90, hyperparams=dict(mixup=0.0))]",
        "WarmupParamHook": 'param_name="loss_lambda", value=0.5, warmup_epochs=2',
    },
    "optimizer": {
        "Adafactor": "lr=1e-3",
        "Adam": "lr=1e-3, betas=(0.9, 0.99)",
        "Adan": "lr=1e-3",
        "AdamW": "lr=1e-3, weight_decay=0.05",
        "SGD": "lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True",
        "LARS": "lr=4.8, momentum=0.9, weight_decay=1e-6",
        "Lion": "lr=1e-4, weight_decay=0.1",
        "BertAdam": "lr=1e-4",
        "Muon": "lr=0.02, weight_decay=0.1, adam_learning_rate=1e-3",
        "NorMuon": "lr=0.02, adam_learning_rate=1e-3",
        "SOAP": "lr=3e-3, precondition_frequency=10",
        "Shampoo": "lr=3e-3, precondition_frequency=20",
        "BertAdam1": "lr=1e-4",
    },
    "optimizer wrapper": {
        "OptimWrapper": 'optimizer=dict(type="AdamW", lr=1e-3), clip_grad=dict(max_norm=1.0), '
        "accumulative_counts=4",
        "AmpOptimWrapper": 'optimizer=dict(type="AdamW", lr=1e-3), dtype="bfloat16"',
    },
    "optimizer wrapper constructor": {
        "BertOptimizerConstructor": 'optimizer=dict(type="AdamW", lr=1e-3, image_lr=1e-4), '
        'paramwise_cfg=dict(language_weights_file="language_weights.json")',
        "DefaultOptimWrapperConstructor": f'{_ADAMW}, paramwise_cfg=dict(custom_keys={{"head": dict(lr_mult=10.0)}})',
        "DefaultOptimizerConstructor": f"{_ADAMW}, paramwise_cfg=dict(bias_lr_mult=2.0)",
        "DevlbertOptimizerConstructor": f"{_ADAMW}, "
        'paramwise_cfg=dict(vision_scratch=False, language_weights_file="language_weights.json")',
        "ForceDefaultOptimWrapperConstructor": f"{_ADAMW}, paramwise_cfg=dict(bias_decay_mult=0.0)",
        "LayerDecayOptimizerConstructor": f"{_ADAMW}, "
        'paramwise_cfg=dict(num_layers=12, layer_decay_rate=0.9, backbone="BEiT")',
        "LearningRateDecayOptimWrapperConstructor": f"{_ADAMW}, "
        'paramwise_cfg=dict(layer_decay_rate=0.75, layer_pattern=r"layers_(\\d+)")',
        "LearningRateDecayOptimizerConstructor": f"{_ADAMW}, "
        'paramwise_cfg=dict(decay_rate=0.9, layer_pattern=r"layers_(\\d+)")',
        "MultiOptimWrapperConstructor": f"generator=dict({_ADAMW}), discriminator=dict({_ADAMW})",
        "OscarOptimizerConstructor": f"{_ADAMW}, paramwise_cfg=dict(weight_decay=0.05)",
        "OscarPreTrainOptimizerConstructor": f"{_ADAMW}, paramwise_cfg=dict(weight_decay=0.05)",
        "UniterOptimizerConstructor": f"{_ADAMW}, paramwise_cfg=dict(weight_decay=0.01)",
        "UniterVQAOptimizerConstructor": 'optimizer=dict(type="AdamW", lr=1e-3), '
        'paramwise_cfg=dict(weight_decay=0.01, lr_mul=10.0, key_named_param="head")',
        "VilbertOptimizerConstructor": f"{_ADAMW}, "
        'paramwise_cfg=dict(vision_scratch=False, language_weights_file="language_weights.json")',
    },
    "parameter scheduler": {
        "BertWarmupLinearLR": "max_iters=10_000, warmup=0.1",
        "ConstantLR": "factor=0.1, end=5",
        "CosineAnnealingLR": "begin=1, end=20, eta_min=1e-5, convert_to_iter_based=True",
        "CosineRestartLR": "periods=[10, 20], restart_weights=[1.0, 0.5], eta_min=0.0",
        "ExponentialLR": "gamma=0.95",
        "LinearLR": "start_factor=0.01, by_epoch=False, end=500",
        "MultiStepLR": "milestones=[60, 80], gamma=0.1",
        "MultiStepScheduler": "lr_steps=[6000, 8000], lr_ratio=0.1, warmup_iterations=500",
        "OneCycleLR": "eta_max=0.1, total_steps=10_000, by_epoch=False",
        "OptaxLR": "by_epoch=False, schedule=dict(\n"
        '    type="warmup_cosine_decay_schedule", init_value=0.0, peak_value=0.1, '
        "warmup_steps=500,\n"
        "    decay_steps=10_000)",
        "PolyLR": "power=0.9, eta_min=1e-4, by_epoch=False, end=40_000",
        "PolyLRRatio": "power=0.9, eta_min_ratio=0.01, by_epoch=False, end=40_000",
        "PythiaScheduler": "lr_steps=[6000, 8000], lr_ratio=0.1, warmup_iterations=500",
        "QuadraticWarmupLR": "by_epoch=False, end=500",
        "ReduceOnPlateauLR": 'monitor="accuracy/top1", rule="greater", patience=3',
        "StepLR": "step_size=30, gamma=0.1",
        "WarmupConstantSchedule": "num_warmup_steps=500",
        "WarmupCosineLR": "max_iters=10_000, warmup_iters=500",
        "WarmupCosineSchedule": "num_warmup_steps=500, num_training_steps=10_000",
        "WarmupCosineWithHardRestartsSchedule": "num_warmup_steps=500, num_training_steps=10_000, num_cycles=3",
        "WarmupLinearSchedule": "num_warmup_steps=500, num_training_steps=10_000",
        "WarmupLinearScheduleNonZero": "t_total=10_000, warmup_iterations=500",
        "WarmupMultiStepLR": "milestones=[6000, 8000]",
        "WarmupPolynomialSchedule": "num_warmup_steps=500, num_training_steps=10_000",
    },
    "model": {
        "CrossEntropy": "label_smoothing=0.1",
        "FunctionalModel": "init=lambda: dict(w=0.0), "
        'loss=lambda params, batch: (params["w"] * batch["x"] - batch["y"]) ** 2',
        "LinenModel": _CNN,
        "LoRA": f'rank=4, targets=["conv1"], trainable=["head"], model=dict(type="LinenModel", {_CNN})',
        "NnxModel": 'module=dict(type="flax.nnx.Linear", in_features=8, out_features=10), '
        'loss=dict(type="CrossEntropy")',
        "PreprocessedModel": f'steps=[dict(type="BatchNormalize", mean=0.5, std=0.25)], '
        f'model=dict(type="LinenModel", {_CNN})',
        "SmallCNN": "num_classes=10, widths=(32, 64), dropout=0.1",
        "SmallViT": "num_classes=10, patch=2, width=64, depth=4, heads=4",
        "ViT": "num_classes=10, patch=4, width=192, depth=12, heads=3",
        "ConvNeXt": "num_classes=10, widths=(40, 80, 160, 320), depths=(2, 2, 6, 2)",
        "ResNet": 'num_classes=10, kind="basic", widths=(64, 128, 256, 512), depths=(2, 2, 2, 2)',
        "CLIP": "image=dict(patch=32), text=dict(max_length=77)",
        "SwitchedLoss": 'losses=[dict(type="CrossEntropy"), dict(type="CrossEntropy", label_smoothing=0.1)]',
        "TextGenerator": 'tokenizer="bytes", max_new_tokens=64, temperature=0.7, model=dict(type="LinenModel", '
        'module=dict(type="TransformerLM", vocab_size=257), inputs="tokens", '
        'loss=dict(type="CrossEntropy", label="targets"))',
        "Quantized": 'module=dict(type="SmallViT", num_classes=10, patch=4, width=16, depth=2, heads=2), '
        'dtype="int8"',
        "TransformerLM": "vocab_size=256, width=128, depth=4, heads=4",
    },
    "dataset": {
        "ArrayDataset": "arrays=dict(x=np.zeros((64, 8), np.float32), y=np.zeros(64, np.float32))",
        "ConcatDataset": 'datasets=[dict(type="Digits", split="train"), dict(type="Digits", split="test")]',
        "Digits": 'split="train"',
        "ImageFolder": 'root="images", size=(224, 224), lazy_init=True',
        "MixedDataset": 'datasets=[dict(type="Digits"), dict(type="Digits", split="test")], weights=[0.8, 0.2]',
        "PackedText": 'sources=[dict(prompt="2 + 2 =", response="4")], tokenizer="bytes", length=64',
        "Prompts": 'source=[dict(prompt="2 + 2 =", response="4")], tokenizer="bytes"',
        "PseudoLabelDataset": 'dataset=dict(type="Digits")',
        "RepeatDataset": 'dataset=dict(type="Digits"), times=5',
        "StandardLibrary": "length=64",
        "TokenWindows": "tokens=list(range(1000)), length=64",
        "TransformedDataset": 'dataset=dict(type="Digits"), pipeline=[lambda sample: sample]',
    },
    "transform": {
        "SoftLabels": "num_classes=10, smoothing=0.1",
        "MixUp": "alpha=0.8",
        "RandomErasing": "prob=0.25",
        "LoadImage": "size=(224, 224)",
        "Normalize": "mean=[123.7, 116.3, 103.5], std=[58.4, 57.1, 57.4]",
        "Pad": "size_divisor=32",
        "BatchNormalize": "mean=127.5, std=127.5",
    },
    "data sampler": {"DefaultSampler": "shuffle=True, seed=0", "InfiniteSampler": "shuffle=True"},
    "loop": {
        "EpochBasedTrainLoop": "max_epochs=20, val_interval=4",
        "IterBasedTrainLoop": "max_iters=10_000, val_interval=1000, steps_per_call=10",
    },
    "metric": {
        "Accuracy": "topk=(1, 5)",
        "MeanLoss": 'loss=dict(type="CrossEntropy")',
        "DumpResults": 'out_file_path="predictions.npz"',
        "MetricAdapter": 'metric="flax.nnx.metrics.Accuracy", inputs=dict(logits="logits", labels="label")',
    },
    "evaluator": {"Evaluator": 'metrics=[dict(type="Accuracy")]'},
    "visualizer": {"Visualizer": 'vis_backends=[dict(type="LocalVisBackend")]'},
    "log processor": {"LogProcessor": "window_size=50, by_epoch=False"},
    "strategy": {
        "DataParallel": "mesh=dict(data=-1, fsdp=2)",
        "DiLoCo": "inner_steps=50",
        "Pjit": "mesh=dict(data=-1, fsdp=4)",
        "SingleDevice": "device=0",
    },
    "average": {"ExponentialMovingAverage": "momentum=0.0002", "MomentumAnnealingEMA": "gamma=100"},
}

# Entries that a config cannot build by themselves: base classes, and names that only raise an
# error.
WITHOUT_EXAMPLE = (
    "BaseDataset",
    "BaseTTAModel",
    "ClassBalancedDataset",
    "NnxTransformerLM",
    "OptimWrapperDict",
)
_VARIANTS = ("Momentum", "ParamScheduler", "WeightDecay")  # of a scheduler whose name ends in LR


def example_of(registry: Registry, name: str) -> str | None:
    """Return the config of an entry as Python source, `dict(type="EMAHook", momentum=0.0002)`;
    None if it has none.
    """
    if name in WITHOUT_EXAMPLE:
        return None
    key = "constructor" if registry.name == "optimizer wrapper constructor" else "type"
    return f"dict({', '.join(part for part in (f'{key}={name!r}', _arguments(registry, name)) if part)})".replace(
        "'", '"'
    )


def in_its_place(registry: Registry, name: str, config: str) -> str:
    """Return the line of a config file that contains the config of an entry."""
    return OWN_PLACES.get(name, PLACES.get(registry.name, "{}")).format(config)


def _arguments(registry: Registry, name: str) -> str:
    own = _ARGUMENTS.get(registry.name, {})
    for variant in _VARIANTS:
        if registry.name == "parameter scheduler" and name.endswith(variant):
            prefix = 'param_name="lr", ' if variant == "ParamScheduler" else ""
            return prefix + own.get(name.removesuffix(variant) + "LR", "")
    if (
        name not in own
        and registry.name == "optimizer"
        and "learning_rate" in _required(registry.get(name))
    ):
        return "learning_rate=1e-3"
    return own.get(name, "")


def _required(entry: Callable[..., object]) -> list[str]:
    return [
        name
        for name, parameter in parameters_of(entry).items()
        if parameter.default is parameter.empty
    ]
