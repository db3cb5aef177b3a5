"""Test the config of a language model: training at its small size, and the parameters of its large one."""

import math
import pathlib

import jax
import numpy as np
import pytest

from jengine import Runner, load_config
from jengine.config import paths, resolve
from jengine.extras.language import Sentences
from jengine.extras.networks import TransformerLM
from jengine.hooks import Hook
from jengine.optim import build_optim_wrapper
from jengine.parallel import Placement, build_mesh
from tests.refusals import check_refusal

CONFIG = pathlib.Path(__file__).parent.parent.parent / "configs" / "lm.py"


class LossHook(Hook):
    """Record the loss of each step."""

    def __init__(self):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(float(outputs["loss"]))


@pytest.fixture(scope="module")
def large():
    """Return the config of the large size and the shapes of its parameters."""
    cfg = resolve(load_config(f"{CONFIG}:1b"))
    module = {name: value for name, value in cfg["model"]["module"].items() if name != "type"}
    tokens = jax.ShapeDtypeStruct((1, 8), np.int32)
    return cfg, jax.eval_shape(TransformerLM(**module).init, jax.random.key(0), tokens)["params"]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(dict(type="Pjit", devices=2), id="Pjit"),
        pytest.param(
            dict(type="DataParallel", mesh=dict(data=2, fsdp=2, tensor=2)),
            id="DataParallel",
            marks=pytest.mark.many_processes,
        ),
    ],
)
def test_the_loss_of_the_small_size_falls_from_a_guess_to_two_nats_in_thirty_steps(tmp_path, parallel):
    cfg = resolve(load_config(f"{CONFIG}:toy"))
    cfg.update(train_cfg=dict(by_epoch=False, max_iters=30), work_dir=tmp_path, default_hooks=dict(checkpoint=None))
    for name in ("val_dataloader", "val_evaluator", "val_cfg"):
        del cfg[name]
    hook = LossHook()
    cfg["parallel"].update(parallel)
    Runner.from_cfg({**cfg, "custom_hooks": [hook]}).train()
    assert hook.losses[0] == pytest.approx(math.log(256), abs=0.7)  # all bytes are about equally likely
    assert np.mean(hook.losses[-3:]) < 2.0
    assert np.mean(hook.losses[-3:]) > Sentences.ENTROPY / 60  # bytes of the longest sentences


def test_experts_learn_and_are_used_alike(tmp_path):
    cfg = resolve(load_config(f"{CONFIG}:moe"))
    cfg["model"]["module"].update(width=32, depth=2, heads=2, mlp_width=32, vocab_size=256, experts=4)
    cfg["train_dataloader"].update(batch_size=16, dataset=dict(type="Sentences", length=64))
    cfg["optim_wrapper"]["optimizer"]["lr"] = 1e-2
    cfg.update(train_cfg=dict(by_epoch=False, max_iters=30), param_scheduler=None, work_dir=tmp_path)
    cfg.update(default_hooks=dict(checkpoint=None), custom_hooks=[hook := LossHook()])
    cfg["parallel"].update(mesh=dict(expert=2), devices=2)
    for name in ("val_dataloader", "val_evaluator", "val_cfg"):
        del cfg[name]
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert np.mean(hook.losses[-3:]) < 2.6 < hook.losses[0] / 2
    balance = runner.message_hub.get_scalar("train/balance_loss").data[0]
    assert 0.01 <= balance[-1] < 0.015  # equal shares have 1, two experts for all tokens 2, times the weight


def test_the_large_size_has_a_billion_parameters(large):
    _, params = large
    layer = 4 * 2048 * 2048 + 3 * 2048 * 6144 + 2 * 2048  # attention, MLP, norms
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count == 16 * layer + 2 * 32768 * 2048 + 2048 == 1_006_700_544


@pytest.mark.parametrize("mesh", [dict(fsdp=8, data=1), dict(data=2, fsdp=2, tensor=2)], ids=["fsdp", "all axes"])
def test_a_rule_divides_every_large_parameter_over_all_its_axes(large, mesh):
    cfg, params = large
    parallel, built = cfg["parallel"], build_mesh(mesh)
    devices = built.shape["fsdp"] * built.shape["tensor"]
    placed = Placement(built, parallel["rules"], strict=True).place(params)
    for path, leaf in paths.flatten(params).items():
        shard = jax.NamedSharding(built, placed[path].spec).shard_shape(leaf.shape)
        assert math.prod(shard) == leaf.size // (devices if leaf.size > 2**18 else 1), path


def test_norms_and_the_embedding_have_no_weight_decay(large):
    cfg, params = large
    wrapper = build_optim_wrapper(params, cfg["optim_wrapper"])
    decayed = {path for path, settings in wrapper.param_settings.items() if settings["weight_decay"]}
    assert decayed == {path for path in paths.flatten(params) if path.endswith("kernel")}


def test_an_unknown_size_is_refused():
    check_refusal(lambda: load_config(f"{CONFIG}:2b"), ValueError, "'toy', 'tiny', '124m', '1b', '7b', 'moe'", "got '2b'")
