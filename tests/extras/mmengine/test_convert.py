"""Test `jengine convert` on configs in the styles of MMPretrain, MMSegmentation, MMSelfSup and MMDetection."""

import pathlib
import re

import pytest

from jengine.cli import main
from jengine.config import load_config, resolve
from jengine.extras.mmengine.conversion import Conversion
from jengine.runner import Runner

CONFIGS = pathlib.Path(__file__).parent / "mmengine_configs"

MY_MODEL = """
from flax import linen as nn

class ImageClassifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="head")(nn.relu(nn.Dense(4)(x.reshape(len(x), -1))))
"""
MY_DATA = """
import numpy as np

class ImageNet:
    metainfo = {}
    def __init__(self, data_root, split):
        self.label = 1 if split == "train" else 2
    def __len__(self):
        return 70
    def __getitem__(self, index):
        return dict(image=np.full((4, 4, 1), index / 70, np.float32), label=np.int32(self.label))

class RandomCrop:
    def __init__(self, crop_size, padding): ...
    def __call__(self, sample, rng):
        return sample

class RandomFlip(RandomCrop):
    def __init__(self, prob, direction): ...
"""


@pytest.fixture
def convert(tmp_path, capsys):
    """Return a function that converts one of the configs, and returns the new file and the rows of the table."""

    def run(name):
        out = tmp_path / f"{name}_jengine.py"
        assert main(["convert", str(CONFIGS / f"{name}.py"), "-o", str(out)]) == 0
        rows, last = [], None
        for line in capsys.readouterr().out.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 3 and cells[0]:
                rows.append(cells)
            elif len(cells) == 3 and rows:  # the next line of a long text
                rows[-1][2] += f" {cells[2]}"
            last = line
        assert last == f"wrote {out}; search it for TODO"
        return out, rows

    return run


def find(rows, status):
    """Return the text of each key with a status."""
    return {path: text for kind, path, text in rows if kind == status}


def todo(path):
    """Return the comments of a file, each on one line."""
    return " ".join(line.strip().removeprefix("#").strip() for line in path.read_text().splitlines() if "#" in line)


def test_a_classification_config_trains_once_its_model_and_data_are_written(convert, tmp_path):
    path, rows = convert("classification")
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    (tmp_path / "my_data.py").write_text(MY_DATA)
    overrides = ["train_cfg.max_epochs=1", "randomness.seed=0", f"work_dir={tmp_path / 'run'}"]
    overrides += [f"{mode}_dataloader.num_workers=0" for mode in ("train", "val", "test")]
    cfg = resolve(load_config(path, overrides))
    assert cfg["optim_wrapper"]["optimizer"] == dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=5e-4)
    assert cfg["param_scheduler"][0]["convert_to_iter_based"] is True
    cfg["param_scheduler"] = []  # of 20 epochs
    cfg["default_hooks"]["checkpoint"] = None
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert runner.iter == 1  # 70 examples in batches of 64
    assert {"accuracy/top1", "accuracy/top5"} == set(runner.validations[-1][2])
    assert {group["lr"] for group in runner.optim_wrapper.param_groups} == {0.1, 1.0}, "the head has a rule"
    dropped = find(rows, "dropped")
    assert {"default_scope", "env_cfg", "train_dataloader.persistent_workers", "randomness.deterministic"} <= {*dropped}
    assert dropped["optim_wrapper.optimizer.foreach"] == "SGD has no such argument"
    assert dropped["train_pipeline"] == "a variable, whose value is where it is used"
    assert find(rows, "changed")["visualizer.type"] == "UniversalVisualizer to LocalVisualizer"
    assert {"train_cfg", "custom_hooks", "auto_scale_lr", "val_evaluator"} <= {*find(rows, "taken over")}
    assert dropped["default_hooks.visualization"] == "VisualizationHook: it only draws"
    assert "(backbone=ResNet, neck=GlobalAveragePooling, head=LinearClsHead)" in todo(path)


def test_a_segmentation_config_keeps_its_schedule_metric_and_layer_decay(convert):
    path, _ = convert("segmentation")
    cfg = resolve(load_config(path))
    assert cfg["train_cfg"] == dict(type="IterBasedTrainLoop", max_iters=160, val_interval=80)
    assert cfg["optim_wrapper"]["constructor"] == "LayerDecayOptimizerConstructor"
    assert cfg["optim_wrapper"]["accumulative_counts"] == 2
    assert [schedule["type"] for schedule in cfg["param_scheduler"]] == ["LinearLR", "PolyLR"]
    assert cfg["val_evaluator"] == dict(type="IoUMetric", iou_metrics=["mIoU"])
    assert cfg["default_hooks"]["visualization"] == dict(type="SegVisualizationHook", draw=True, interval=20)
    assert cfg["visualizer"]["type"] == "LocalVisualizer"
    assert cfg["load_from"] is None
    comments = todo(path)
    assert comments.count("'mean': [123.0, 116.0, 103.0]") == 1
    assert "BaseTTAModel and PrepareTTAHook" in comments
    assert "weights of https://example.org/beit_base.pth" in comments


def test_a_self_supervised_config_keeps_its_hook_and_lars_rules(convert):
    path, rows = convert("selfsup")
    cfg = resolve(load_config(path))
    assert cfg["custom_hooks"] == [dict(type="SimSiamHook", fix_pred_lr=True, lr=0.05)]
    assert cfg["optim_wrapper"]["paramwise_cfg"]["custom_keys"]["predictor"] == dict(fix_lr=True)
    assert cfg["model"]["loss"] == dict(type="my_model.loss")
    assert "changed" not in {status for status, *_ in rows}
    assert "check with `jengine groups`" in todo(path)


@pytest.mark.parametrize(("load_from", "expected"), [("epoch_9.pth", False), (None, True)])
def test_resume_with_load_from_is_to_be_done(load_from, expected):
    conversion = Conversion(dict(load_from=load_from, resume=True))
    assert (conversion.result["load_from"], conversion.result["resume"]) == (None, expected)
    rows = {row.path: row for row in conversion.rows}
    assert rows["resume"].status == ("taken over" if expected else "to be done")
    assert expected or "MMEngine continues the run of load_from='epoch_9.pth'" in rows["resume"].text


def test_what_jengine_lacks_of_a_detection_config_is_to_be_done(convert):
    path, rows = convert("detection")
    cfg = resolve(load_config(path))
    assert cfg["custom_hooks"] == [dict(type="NumClassCheckHook")]
    assert cfg["val_evaluator"]["type"] == "my_metrics.CocoMetric"
    assert cfg["train_dataloader"]["dataset"]["pipeline"] == [
        dict(type="my_data.Resize", scale=(1333, 800), keep_ratio=True)
    ]
    to_be_done = find(rows, "to be done")
    assert {"model", "train_dataloader", "val_evaluator", "custom_hooks[1]"} <= {*to_be_done}
    assert "SyncNormHook" in to_be_done["custom_hooks[1]"]
    assert "TODO custom_imports: import these modules in this file" in path.read_text()
    assert [backend["type"] for backend in cfg["visualizer"]["vis_backends"]] == ["LocalVisBackend", "AimVisBackend"]


def test_the_text_of_a_converted_config_has_lines_that_fit(convert):
    path, _ = convert("segmentation")
    assert max(map(len, path.read_text().splitlines())) <= 120
    assert re.match('"""Converted from segmentation.py by `jengine convert`."""', path.read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data = dict()\nrunner = dict(type='EpochBasedRunner')", "got the older form of MMCV 1.x"),
        ("_base_ = 'no_such.py'", "must be a Python, JSON or YAML file, got"),
    ],
)
def test_other_files_are_refused(text, message, tmp_path, capsys):
    (tmp_path / "a.py").write_text(text)
    assert main(["convert", str(tmp_path / "a.py")]) == 2
    assert message in capsys.readouterr().err


def test_an_existing_file_is_not_replaced(tmp_path, capsys):
    (tmp_path / "out.py").write_text("mine")
    assert main(["convert", str(CONFIGS / "detection.py"), "-o", str(tmp_path / "out.py")]) == 2
    assert "which exists" in capsys.readouterr().err
    assert (tmp_path / "out.py").read_text() == "mine"
