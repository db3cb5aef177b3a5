"""What diagnoses refuse: a call, its error, and the words that must be in the message."""

import pathlib
import sys
import types

import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.experimental import checkify

from jengine.config import ConfigError
from jengine.config.errors import MissingPackageError
from jengine.extras.diagnose import ClassNumCheckHook
from jengine.extras.diagnose.coord_check import check_coordinates
from jengine.extras.diagnose.missing_packages import check_packages
from jengine.extras.diagnose.replay import read_dump
from jengine.extras.diagnose.schedule import preview_schedules
from jengine.model import FunctionalModel, LinenModel
from tests.refusals import check_row


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="fc")(x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Blocks(name="blocks")(x)[..., 0]


LAYERS = dict(model=LinenModel(Net(), lambda outputs, batch: outputs - batch["y"], inputs="x"))
SGD = dict(optimizer=dict(type="SGD", lr=0.1))


def checked(params, batch):
    checkify.check(jnp.all(batch["x"] < 4), "inputs must be below 4")
    return jnp.square(batch["x"] @ params["w"])


def check_classes(stage, names, skip=("rpn_head",), **model):
    """Check the classes of data against the parts of a model that have a number of classes."""
    loader = types.SimpleNamespace(metainfo=dict(classes=names))
    runner = types.SimpleNamespace(
        model=types.SimpleNamespace(**model), train_dataloader=loader, val_dataloader=loader, test_dataloader=loader
    )
    getattr(ClassNumCheckHook(skip=skip), stage)(runner)


def head(num_classes):
    return types.SimpleNamespace(num_classes=num_classes)


def packages(cfg, monkeypatch):
    for name in ("tensorboard", "sklearn", "PIL", "wandb", "safetensors"):
        monkeypatch.setitem(sys.modules, name, None)
    check_packages(cfg)


def read_text_as_dump(tmp_path):
    (tmp_path / "x").write_text("hello")
    read_dump(tmp_path / "x")


def train(make_runner, *hooks, **changes):
    make_runner(custom_hooks=list(hooks), **changes).train()


UNKNOWN_PATH = (ConfigError, "'blocs.fc'", "closest: blocks.fc")
REFUSED = {
    # checks
    "a check without its switch": (
        lambda make_runner: train(make_runner, model=FunctionalModel(lambda: {"w": jnp.ones(2)}, checked)), ConfigError, "`jengine train --check`", "`Runner(check=True)`",
    ),
    "a check of replicas of two devices": (
        lambda make_runner: make_runner(check=True, parallel=dict(type="DataParallel", devices=4, mesh=dict(data=2, fsdp=2))), ConfigError, "`check`", "`Pjit`", "DataParallel",
    ),
    **{
        f"two classes for three, {stage}": (lambda stage=stage: check_classes(stage, ("a", "b"), module=head(3)), ValueError, "model.module.num_classes", "2", "got 3")
        for stage in ("before_train", "before_val", "before_test")
    },
    "one class for the head of a list": (lambda: check_classes("before_train", ("a",), heads=[head(7)]), ValueError, "model.heads[0].num_classes", "1", "got 7"),
    "a proposal head that is not left out": (
        lambda: check_classes("before_train", tuple("abcdefg"), skip=(), rpn_head=head(1)), ValueError, "model.rpn_head.num_classes", "7", "got 1",
    ),
    "classes in a text": (lambda: check_classes("before_train", "cat", module=head(3)), TypeError, "got 'cat'", "did you mean ('cat',)"),
    # what is shown
    "a width without a base": (
        lambda: check_coordinates(dict(model=dict(type="LinenModel"), train_cfg=dict(max_iters=1), optim_wrapper=SGD), [32, 64], 2), ConfigError, "paramwise_cfg.base", "width",
    ),
    "histograms of no parameter": (lambda make_runner: train(make_runner, dict(type="HistogramHook", patterns=["kernel"])), ValueError, "HistogramHook", "['kernel']"),
    "histograms of nothing": (lambda make_runner: make_runner(custom_hooks=[dict(type="HistogramHook", gradients=False, weights=False)]), ValueError, "gradients", "weights", "True"),
    "statistics of a path of nothing": (lambda make_runner: train(make_runner, dict(type="InspectHook", paths=["blocs.fc"]), **LAYERS), *UNKNOWN_PATH),
    "an inspection of a path of nothing": (lambda make_runner: train(make_runner, inspect=["loss", "blocs.fc"], **LAYERS), *UNKNOWN_PATH),
    "a schedule without training": (lambda: preview_schedules(dict(model=1)), ConfigError, "train_cfg"),
    "a misspelt schedule": (
        lambda: preview_schedules(dict(train_cfg=dict(by_epoch=False, max_iters=3), optim_wrapper=SGD, param_scheduler=[dict(type="CosineAnealingLR", by_epoch=False)])),
        KeyError, "CosineAnnealingLR", "`param_scheduler[0].type`",
    ),
    "a text for a dump": (read_text_as_dump, ValueError, "dump of a training step"),
    # packages
    **{
        f"{name} without its package": (lambda monkeypatch, cfg=cfg: packages(cfg, monkeypatch), MissingPackageError, f"pip install 'jengine[{extra}]'")
        for name, cfg, extra in (
            ("a visualizer", dict(visualizer="LocalVisualizer"), "draw"),
            ("a backend", dict(visualizer=dict(vis_backends=["WandbVisBackend"])), "wandb"),
            ("a hook", dict(custom_hooks=[dict(type="mmseg.SegVisualizationHook")]), "draw"),
            ("a clustering", dict(custom_hooks=[dict(type="DeepClusterHook", clustering=dict(type="PIC"))]), "examples"),
            ("a file of weights", dict(load_from="vit.safetensors"), "safetensors"),
            ("a path of weights", dict(load_from=dict(path=pathlib.Path("vit.safetensors"))), "safetensors"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_diagnosed_is_refused(row, request):
    check_row(request, *row)
