"""Test that a whole config of MMPretrain, MMSegmentation and MMSelfSup moves over by a new model and dataset alone."""

import copy
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jengine.cli import main
from jengine.config import DATASETS, HOOKS, MODELS, load_config, resolve
from jengine.extras.diagnose.schedule import preview_schedules
from jengine.hooks import Hook
from jengine.runner import Runner

CONFIGS = pathlib.Path(__file__).parent / "public_configs"


class Stop(Hook):
    """Stop of the training after two iterations."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.train_loop.stop_training = runner.iter >= 1  # it counts up after this stage


def load(path, work_dir, *overrides):
    return resolve(load_config(path, [f"work_dir={str(work_dir)!r}", "train_dataloader.num_workers=0", *overrides]))


def train(cfg):
    """Return a config, and a Runner that has trained two iterations of it."""
    runner = Runner.from_cfg(copy.deepcopy(cfg))
    runner.register_hook(Stop())
    runner.train()
    assert runner.iter == 2
    return cfg, runner


def read_log(runner):
    """Return the parts of the config that have no effect by path, and the scalars of a run."""
    (log,) = pathlib.Path(runner.work_dir).glob("*/*.log")
    (scalars,) = pathlib.Path(runner.work_dir).glob("*/vis_data/scalars.json")
    summary = log.read_text().partition("that are changed or have no effect here:\n")[2]
    changed = re.findall(r"^  ([\w.\[\]]+): (.*)$", summary, re.MULTILINE)
    return dict(changed), [json.loads(line) for line in scalars.read_text().splitlines()]


def cosine(base, low, done, length):
    return low + (base - low) * (1 + math.cos(math.pi * done / length)) / 2


def names_of(runner):
    return [type(hook).__name__ for hook in runner.hooks]


def find(runner, name):
    (hook,) = (hook for hook in runner.hooks if type(hook).__name__ == name)
    return hook


# ----------------------------------------------------------------------------------------- MMPretrain

MY_MODEL = """
import jax.numpy as jnp
from flax import linen as nn

class ImageClassifier(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.LayerNorm(name="norm")(x.reshape(len(x), -1))
        scale = self.param("gamma", nn.initializers.ones, (x.shape[-1],))
        return nn.Dense(1000, name="head")(scale * x)
"""
MY_DATA = """
import numpy as np

MADE = []

class ImageNet:
    metainfo = {}
    def __init__(self, data_root, split):
        MADE.append(("ImageNet", dict(data_root=data_root, split=split)))
    def __len__(self):
        return 300
    def __getitem__(self, index):
        return dict(image=np.full((2, 2, 3), index / 300, np.float32), label=np.int32(index))

class _Transform:
    def __init__(self, **settings):
        MADE.append((type(self).__name__, settings))
    def __call__(self, sample, rng):
        return sample

for name in ("RandomResizedCrop", "RandomFlip", "RandAugment", "ResizeEdge", "CenterCrop"):
    globals()[name] = type(name, (_Transform,), {})
"""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "my_model.py").write_text(MY_MODEL)
    (folder / "my_data.py").write_text(MY_DATA)
    path = folder / "convnext.py"
    assert main(["convert", str(CONFIGS / "pretrain" / "convnext.py"), "-o", str(path)]) == 0
    cfg = load(path, folder / "run", "val_dataloader.num_workers=0", "test_dataloader.num_workers=0")
    *hooks, augment = cfg["custom_hooks"]
    # XLA compiles the augmentations for half a minute; their tests run them
    _, runner = train({**cfg, "custom_hooks": hooks})
    return cfg, runner, HOOKS.build(augment)


def test_a_classifier_keeps_its_augmentation_with_all_settings(classifier):
    cfg, runner, augment = classifier
    made = vars(__import__(type(runner.train_dataloader.dataset.dataset).__module__))["MADE"]
    data, *transforms = made[:4]
    assert data == ("ImageNet", dict(data_root="data/imagenet", split="train"))
    bicubic = dict(backend="pillow", interpolation="bicubic")
    assert dict(transforms) == dict(
        RandomResizedCrop=dict(scale=224, **bicubic),
        RandomFlip=dict(prob=0.5, direction="horizontal"),
        RandAugment=dict(
            policies="timm_increasing", num_policies=2, total_level=10, magnitude_level=9, magnitude_std=0.5,
            hparams=dict(pad_val=[104, 116, 124], interpolation="bicubic"),
        ),
    )  # fmt: skip
    assert dict(made[4:7]) == dict(
        ImageNet=dict(data_root="data/imagenet", split="val"),
        ResizeEdge=dict(scale=256, edge="short", **bicubic),
        CenterCrop=dict(crop_size=224),
    )
    assert type(augment).__name__ == "BatchAugmentHook"
    erase, soft, mix = augment._augments
    (erase,), (soft,) = erase.augments, soft.augments
    assert (erase.prob, erase.area, erase.fill) == (0.25, (0.02, 1 / 3), "pixels")
    assert (soft.num_classes, soft.smoothing) == (1000, 0.0)
    assert [(type(part).__name__, part.alpha, part.prob) for part in mix.augments] == [
        ("MixUp", 0.8, 1.0), ("CutMix", 1.0, 1.0),
    ]  # fmt: skip
    assert mix.probs.tolist() == [0.5, 0.5, 0.0]
    assert cfg["model"]["module"] == dict(type="my_model.ImageClassifier")


def test_a_classifier_is_smoothed_in_the_loss(classifier):
    _, runner, _ = classifier
    batch = {"image": jnp.ones((2, 2, 2, 3)) * jnp.arange(12.0).reshape(2, 2, 3), "label": jnp.array([3, 999])}

    @jax.jit
    def compute(state):
        logits = runner.model.predict(state.params, state.model_state, batch)
        return logits, runner.model.loss(state.params, state.model_state, batch, rng=state.rng, hyperparams={})

    logits, (losses, _) = compute(runner.state)
    logs = jax.nn.log_softmax(logits)
    expected = -0.9 * logs[jnp.arange(2), batch["label"]] - 0.1 * logs.mean(axis=-1)
    np.testing.assert_allclose(losses["loss"] if isinstance(losses, dict) else losses, expected, rtol=1e-5)


def test_a_classifier_keeps_its_schedule_in_iterations_and_epochs(classifier):
    cfg, runner, _ = classifier
    length = 300 // 128
    curve = preview_schedules(cfg)["lr"]
    assert len(curve) == 300 * length
    warm = 20 * length
    for i in (0, 1, 17, warm - 1):
        assert curve[i] == pytest.approx(4e-3 * (1e-3 + (1 - 1e-3) * i / (warm - 1)), rel=1e-12)
    for epoch in (20, 21, 160, 299):
        assert curve[epoch * length] == curve[epoch * length + 1]
        assert curve[epoch * length] == pytest.approx(cosine(4e-3, 1e-5, epoch - 20, 280), rel=1e-9)
    group = runner.optim_wrapper.param_groups[0]
    assert (group["lr"], group["betas"]) == (pytest.approx(curve[2], rel=1e-12), (0.9, 0.999))


def test_a_classifier_keeps_its_decay_rules_hooks_and_keys(classifier):
    cfg, runner, _ = classifier
    decays = {path: group["weight_decay"] for path, group in runner.optim_wrapper.param_settings.items()}
    assert decays == {"norm.scale": 0, "norm.bias": 0, "gamma": 0, "head.kernel": 0.05, "head.bias": 0}
    assert runner.optim_wrapper.clip_grad is None
    assert names_of(runner).index("EMAHook") < names_of(runner).index("IterTimerHook"), "ABOVE_NORMAL"
    assert find(runner, "EMAHook").average.momentum == 1e-4
    assert (find(runner, "LoggerHook").interval, cfg["default_hooks"]["checkpoint"]["interval"]) == (100, 1)
    assert (runner.max_epochs, runner.train_loop.val_interval) == (300, 1)
    assert {"accuracy/top1", "accuracy/top5"} == set(runner.validations[-1][2])
    changed, _ = read_log(runner)
    assert changed == {"auto_scale_lr": "with `enable=True` it scales the learning rates"}


def test_the_rate_of_a_classifier_is_scaled_once_that_is_enabled(classifier, tmp_path):
    cfg, _, _ = classifier
    scaled = {**cfg, "work_dir": str(tmp_path), "auto_scale_lr": dict(base_batch_size=4096, enable=True)}
    scaled |= dict(param_scheduler=None, custom_hooks=None, default_hooks=dict(checkpoint=None, logger=None))
    runner = Runner.from_cfg({**scaled, "val_dataloader": None, "val_cfg": None, "val_evaluator": None})
    runner.register_hook(Stop())
    runner.train()
    assert {group["lr"] for group in runner.optim_wrapper.param_groups} == {4e-3 * 128 / 4096}


# --------------------------------------------------------------------------- MMSegmentation, MMSelfSup


@DATASETS.register_module()
class PublicPixels:
    def __init__(self):
        self.metainfo = dict(classes=("road", "tree"))

    def __len__(self):
        return 520

    def __getitem__(self, index):
        label = np.array([[0, 1], [255, 255]], np.uint8)
        return dict(image=np.full((2, 2, 3), index / 9, np.float32), label=label)


@MODELS.register_module()
class PublicSegmenter(nn.Module):
    @nn.compact
    def __call__(self, image, train=False):
        x = nn.Dense(3, name="backbone_pos_block")(image)
        return nn.Dense(2, name="decode_head")(nn.LayerNorm(name="norm1")(x))


@MODELS.register_module()
class PublicAutoencoder(nn.Module):
    @nn.compact
    def __call__(self, image, train=False):
        token = self.param("cls_token", nn.initializers.ones, (1, 1, 1, 3))
        return nn.Dense(3, name="head")(nn.LayerNorm(name="ln1")(image + token))


def reconstruction(outputs, batch):
    return jnp.square(outputs - batch["image"]).mean(axis=(1, 2, 3))


SEGMENTATION = """
_base_ = [{config!r}]
data_preprocessor = None
model = dict(_delete_=True, type='LinenModel', module=dict(type='PublicSegmenter'),
             loss=dict(type='CrossEntropy', ignore_index=255))
train_dataloader = dict(dataset=dict(_delete_=True, type='PublicPixels'))
val_dataloader = dict(num_workers=0, dataset=dict(_delete_=True, type='PublicPixels'))
test_dataloader = val_dataloader
"""
SELFSUP = """
_base_ = [{config!r}]
model = dict(_delete_=True, type='LinenModel', module=dict(type='PublicAutoencoder'), loss={loss!r})
train_dataloader = dict(dataset=dict(_delete_=True, type='PublicPixels'))
"""


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmentation")
    path = folder / "segformer.py"
    path.write_text(SEGMENTATION.format(config=str(CONFIGS / "segmentation" / "segformer.py")))
    return train(load(path, folder / "run"))


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selfsup")
    path = folder / "mae.py"
    loss = f"{__name__}.reconstruction"
    path.write_text(SELFSUP.format(config=str(CONFIGS / "selfsup" / "mae.py"), loss=dict(type=loss)))
    return train(load(path, folder / "run"))


def test_a_segmenter_keeps_its_schedule_and_the_rates_and_decays_of_its_parts(segmenter):
    cfg, runner = segmenter
    curve = preview_schedules(cfg)["lr"]
    assert len(curve) == 160_000
    for i in (0, 1, 700, 1499):
        assert curve[i] == pytest.approx(6e-5 * (1e-6 + (1 - 1e-6) * i / 1499), rel=1e-9)
    for i in (1500, 80_000, 159_999):
        assert curve[i] == pytest.approx(6e-5 * (1 - (i - 1500) / (158_500 - 1)), rel=1e-6, abs=1e-18)
    settings = runner.optim_wrapper.param_settings
    assert {path: (group["initial_lr"], group["weight_decay"]) for path, group in settings.items()} == {
        "backbone_pos_block.kernel": (6e-5, 0), "backbone_pos_block.bias": (6e-5, 0),
        "norm1.scale": (6e-5, 0), "norm1.bias": (6e-5, 0),
        "decode_head.kernel": (pytest.approx(6e-4), 0.01), "decode_head.bias": (pytest.approx(6e-4), 0.01),
    }  # fmt: skip
    assert settings["decode_head.kernel"]["lr"] == pytest.approx(10 * curve[2])
    assert "momentum" not in cfg["optim_wrapper"]["optimizer"], "_delete_"


def test_a_segmenter_keeps_its_loop_hooks_and_data_settings(segmenter):
    cfg, runner = segmenter
    assert (runner.max_iters, runner.train_loop.val_interval) == (160_000, 16_000)
    logger, saver = find(runner, "LoggerHook"), cfg["default_hooks"]["checkpoint"]
    assert (logger.interval, logger.log_metric_by_epoch) == (50, False)
    assert (saver["by_epoch"], saver["interval"]) == (False, 16_000)
    assert find(runner, "SegVisualizationHook").draw is False
    assert type(runner.visualizer).__name__ == "LocalVisualizer"
    assert type(runner.train_dataloader.sampler).__name__ == "InfiniteSampler"
    assert (runner.train_dataloader.batch_size, runner.val_dataloader.batch_size) == (2, 1)
    scores = runner.val()
    assert set(scores) == {"aAcc", "mIoU", "mAcc"}
    changed, _ = read_log(runner)
    assert changed == {
        "default_scope": "a name is found in every package",
        "env_cfg": "there are no CUDA or fork settings",
        **{
            f"{mode}_dataloader.persistent_workers": "workers stay alive between epochs"
            for mode in ("train", "val", "test")
        },
        "tta_model": "`build_runner_with_tta` reads it",
        "tta_pipeline": "`build_runner_with_tta` reads it",
        "visualizer.type": "SegLocalVisualizer to LocalVisualizer",
    }


def test_taking_back_a_preprocessor_is_no_warning(tmp_path, caplog):
    path = tmp_path / "segformer.py"
    path.write_text(SEGMENTATION.format(config=str(CONFIGS / "segmentation" / "segformer.py")))
    assert load_config(path).get("data_preprocessor") is None
    assert [text for text in caplog.messages if "has no effect" in text] == []


def test_an_autoencoder_keeps_its_schedule_and_decay_rules(autoencoder):
    cfg, runner = autoencoder
    curve = preview_schedules(cfg)["lr"]  # an iteration is an epoch: 520 images in batches of 512
    assert len(curve) == 400
    for i in (0, 1, 20, 39):
        assert curve[i] == pytest.approx(2.4e-3 * (1e-4 + (1 - 1e-4) * i / 39), rel=1e-9)
    for i in (40, 41, 220, 399):
        assert curve[i] == pytest.approx(cosine(2.4e-3, 0, i - 40, 360), rel=1e-6, abs=1e-12)
    settings = runner.optim_wrapper.param_settings
    assert {path: group["weight_decay"] for path, group in settings.items()} == {
        "cls_token": 0, "ln1.scale": 0, "ln1.bias": 0, "head.kernel": 0.05, "head.bias": 0,
    }  # fmt: skip
    assert settings["head.kernel"]["betas"] == (0.9, 0.95)
    assert settings["head.kernel"]["lr"] == pytest.approx(curve[2], rel=1e-12)


def test_an_autoencoder_keeps_its_hooks_seed_and_start(autoencoder):
    cfg, runner = autoencoder
    assert (runner.max_epochs, runner.seed) == (400, 0)
    assert find(runner, "LoggerHook").interval == 100
    assert cfg["default_hooks"]["checkpoint"] == dict(type="CheckpointHook", interval=1, max_keep_ckpts=3)
    assert cfg["resume"] is True
    assert cfg["log_processor"]["window_size"] == 10
    assert type(runner.visualizer).__name__ == "SelfSupVisualizer"
    changed, scalars = read_log(runner)
    assert set(changed) == {
        "default_scope", "env_cfg", "randomness.diff_rank_seed", "train_dataloader.persistent_workers",
        "train_dataloader.collate_fn", "log_processor.custom_cfg[0]",
    }  # fmt: skip
    assert scalars[-1]["step"] == 2


def test_commands_that_build_no_runner_take_the_config_too(tmp_path, capsys):
    path = tmp_path / "mae.py"
    path.write_text(SELFSUP.format(config=str(CONFIGS / "selfsup" / "mae.py"), loss=None))
    assert main(["data", str(path), "--config.train_dataloader.num_workers=0"]) == 0
    assert re.search(r"batch size +512\n", capsys.readouterr().out)
    assert main(["schedule", str(path), "--config.train_dataloader.num_workers=0"]) == 0
    assert "lr: 2.4e-07 to 4.569e-08, between 4.569e-08 and 0.0024" in capsys.readouterr().out
