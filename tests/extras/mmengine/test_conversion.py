"""Each value of a config of MMEngine is in the converted one, or a row says what became of it."""

import collections
import copy

import pytest

from jengine.config import HOOKS, MODELS
from jengine.config.containers import iter_nodes
from jengine.extras.augment import BatchAugmentHook
from jengine.extras.mmengine.conversion import Conversion
from jengine.extras.mmengine.counterparts import convert_loss

from .mmengine_shapes import SHAPES


def list_values(value, path=""):
    """Return each value that is no dict and no list of dicts or lists, with its path."""
    if isinstance(value, dict) and value:
        return [found for key, item in value.items() for found in list_values(item, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        return [found for i, item in enumerate(value) for found in list_values(item, f"{path}[{i}]")]
    return [(path, value)]


def find_lost(cfg, conversion):
    """Return the paths of values that are neither in the result, by their last key, nor in the table."""
    kept = collections.Counter()
    for path, value in list_values(conversion.result):
        kept[path.rpartition(".")[2], repr(value).replace("my_data.", "").replace("my_metrics.", "")] += 1
    lost = []
    for path, value in list_values(cfg):
        key = path.rpartition(".")[2]
        name = value.rpartition(".")[2] if key == "type" else repr(value)
        if kept[key, repr(name) if key == "type" else name]:
            continue
        rows = [row for row in conversion.rows if path == row.path or path.startswith((f"{row.path}.", f"{row.path}["))]
        # What is left to a person is told with its value, unless the row is about it alone.
        whole = [row.path == path or row.status in ("dropped", "changed") for row in rows if row.is_whole]
        if not any(whole) and not any(name in row.text for row in rows):
            lost.append(path)
    return lost


@pytest.mark.parametrize("name", SHAPES)
def test_each_value_is_in_the_new_config_or_in_the_table(name):
    cfg = copy.deepcopy(SHAPES[name])
    conversion = Conversion(cfg)
    assert find_lost(cfg, conversion) == []
    assert cfg == SHAPES[name]  # not modified
    # An argument that nobody has thought of, at each place
    nodes = [node for path, node in iter_nodes(cfg) if isinstance(node, dict) and path]
    for i, node in enumerate(nodes):
        node[f"unknown_{i}"] = f"value {i}"
    assert find_lost(cfg, Conversion(cfg)) == []


def test_smoothing_mixing_and_erasing_of_a_classifier_have_counterparts():
    result = Conversion(SHAPES["ConvNeXt"]).result
    assert result["model"]["loss"] == dict(type="CrossEntropy", label_smoothing=0.1)
    assert MODELS.build(result["model"]["loss"]).label_smoothing == 0.1
    *_, hook = result["custom_hooks"]
    assert hook == dict(
        type="BatchAugmentHook",
        augments=[
            dict(type="RandomErasing", prob=0.25, area=(0.02, 0.3), aspect_ratio=(0.3, 10 / 3), fill="pixels"),
            dict(type="SoftLabels", num_classes=1000),
            dict(augments=[dict(type="MixUp", alpha=0.8), dict(type="CutMix", alpha=1.0)]),
        ],
    )
    assert isinstance(HOOKS.build(hook), BatchAugmentHook)
    assert [entry["type"] for entry in result["train_dataloader"]["dataset"]["pipeline"]] == [
        "my_data.RandomResizedCrop", "my_data.RandAugment",
    ]  # fmt: skip
    # In a validation it is no augmentation of training batches.
    kinds = [entry["type"] for entry in result["val_dataloader"]["dataset"]["pipeline"]]
    assert "my_data.RandomErasing" in kinds


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (dict(type="LabelSmoothLoss", label_smooth_val=0.25, mode="classy_vision"), dict(label_smoothing=0.2)),
        (dict(type="LabelSmoothLoss", label_smooth_val=0.1, num_classes=5, loss_weight=1.0), dict(label_smoothing=0.1)),
        (dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="multi_label"), None),
        (dict(type="CrossEntropyLoss", use_soft=True, loss_name="loss_ce"), dict(name="loss_ce")),
        (dict(type="CrossEntropyLoss", loss_weight=0.4), None),
        (dict(type="CrossEntropyLoss", use_sigmoid=True), None),
        (dict(type="CrossEntropyLoss", class_weight=[1.0, 2.0]), None),
        (dict(type="FocalLoss"), None),
    ],
)
def test_a_loss_has_a_counterpart_only_with_all_its_arguments(loss, expected):
    found = convert_loss(loss)
    assert found == (None if expected is None else dict(type="CrossEntropy", **expected))
    model = dict(type="ImageClassifier", head=dict(type="LinearClsHead", num_classes=5, loss=loss))
    assert Conversion(dict(model=model)).result["model"]["loss"] == (found or dict(type="my_model.loss"))


def test_the_only_loss_of_a_segmentation_head_leaves_out_255_and_of_several_none_is_taken():
    loss = Conversion(SHAPES["segmentation"]).result["model"]["loss"]
    assert loss == dict(type="CrossEntropy", ignore_index=255)
    conversion = Conversion(SHAPES["segmentation with an auxiliary head"])
    assert conversion.result["model"]["loss"] == dict(type="my_model.loss")


@pytest.mark.parametrize("name", ["Swin", "self-supervised", "detection"])
def test_mixing_without_a_counterpart_is_to_be_done(name):
    conversion = Conversion(SHAPES[name])
    assert "BatchAugmentHook" not in str(
        [hook for hook in conversion.result.get("custom_hooks", []) if "mix" in str(hook).lower()]
    )
    texts = [row.text for row in conversion.rows if row.path == "model.train_cfg"]
    assert any("ResizeMix(lam_min=0.1)" in text for text in texts) == (name == "Swin")
    # A transform of samples with the name of one of batches is another one.
    kinds = [node["type"] for _, node in iter_nodes(conversion.result) if isinstance(node, dict) and "type" in node]
    assert ("my_data.MixUp" in kinds) == (name == "detection")


def test_datasets_within_datasets_are_converted_with_their_pipelines():
    result = Conversion(SHAPES["segmentation"]).result["train_dataloader"]["dataset"]
    assert (result["type"], result["dataset"]["type"]) == ("RepeatDataset", "ConcatDataset")
    part, other = result["dataset"]["datasets"]
    assert part == other == dict(
        type="TransformedDataset", dataset=dict(type="my_data.CityscapesDataset", data_root="data"),
        pipeline=[dict(type="Pad", size=(512, 1024), pad_val=0), dict(type="my_data.RandomFlip", prob=0.5)],
    )  # fmt: skip


def test_transforms_of_torchvision_are_classes_of_ones_own():
    pipeline = [dict(type="torchvision/Normalize", mean=[0.5], std=[0.2]), dict(type="torchvision/RandomCrop", size=8)]
    conversion = Conversion(dict(train_dataloader=dict(batch_size=1, dataset=dict(type="Own", pipeline=pipeline))))
    assert conversion.result["train_dataloader"]["dataset"]["pipeline"] == [
        dict(type="my_data.Normalize", mean=[0.5], std=[0.2]), dict(type="my_data.RandomCrop", size=8),
    ]  # fmt: skip
    changed = [row.text for row in conversion.rows if row.path.startswith("train_dataloader.dataset.pipeline")]
    assert changed == [
        "torchvision/Normalize to my_data.Normalize", "torchvision/RandomCrop to my_data.RandomCrop",
    ]  # fmt: skip


def test_a_variable_that_nothing_reads_is_named_with_its_value():
    rows = {row.path: row.text for row in Conversion(dict(lr=0.1, own=dict(a=1)), read={"lr"}).rows}
    assert rows == {"lr": "a variable, whose value is where it is used", "own": "nothing reads a=1"}
