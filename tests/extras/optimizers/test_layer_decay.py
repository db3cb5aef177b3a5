"""Layer-wise learning rates: the groups of MMSelfSup's and MMSegmentation's constructors."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.config import OPTIM_WRAPPER_CONSTRUCTORS
from jengine.extras.optimizers import layer_depth
from jengine.optim import build_optim_wrapper

ONE = np.ones(1, np.float32)


def conv():
    return {"kernel": np.ones((1, 1, 3, 3), np.float32), "bias": np.ones(3, np.float32)}


def toy_vit(layers=2):
    blocks = {f"layers_{i}": conv() for i in range(layers)}
    return {"backbone": {"cls_token": ONE, "pos_embed": ONE, **blocks}, "head": conv()}


def toy_convnext():
    stages = {f"stages_{i}": {"layers_0": conv()} for i in range(4)}
    downsampling = {f"downsample_layers_{i}": {"layers_0": conv()} for i in range(4)}
    norm = {"norm0": {"scale": np.ones(2, np.float32), "bias": np.ones(2, np.float32)}}
    tokens = {"cls_token": ONE, "mask_token": ONE, "pos_embed": ONE, "stem_norm": ONE}
    return {"backbone": {**tokens, **stages, **norm, **downsampling}, "decode_head": conv()}


def build(params, constructor, optimizer=None, paramwise_cfg=None, types=None):
    return build_optim_wrapper(
        params,
        {
            "optimizer": {"type": "AdamW", "lr": 1.0, "weight_decay": 0.05, **(optimizer or {})},
            "constructor": constructor,
            "paramwise_cfg": paramwise_cfg,
        },
        module_types=types,
    )


def mmselfsup(params, paramwise_cfg=None, **optimizer):
    return build(params, "mmselfsup.LearningRateDecayOptimWrapperConstructor", optimizer, paramwise_cfg)


def mmseg(params, backbone, lr=1.0, **paramwise_cfg):
    name = "LearningRateDecayOptimizerConstructor"
    return build(params, name, {"lr": lr}, paramwise_cfg, types={"backbone": backbone})


def decay_and_scale(wrapper):
    return [(group["weight_decay"], group["lr_scale"]) for group in wrapper.param_groups]


NO_DECAY = {".bias": {"decay_mult": 0.0}, ".cls_token": {"decay_mult": 0.0}, ".pos_embed": {"decay_mult": 0.0}}


def test_vit_groups_match_mmselfsup():
    wrapper = mmselfsup(toy_vit(), {"custom_keys": NO_DECAY}, model_type="vit", layer_decay_rate=2)
    # the groups of MMSelfSup's own unit test
    assert decay_and_scale(wrapper) == [(0, 8), (0.05, 4), (0, 4), (0.05, 2), (0, 2), (0.05, 1), (0, 1)]
    assert [group["group_name"] for group in wrapper.param_groups][0::6] == ["layer_0_no_decay", "layer_3_no_decay"]
    assert wrapper.get_lr() == {"base_lr": [1.0], "lr": [8.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("constructor", "optimizer", "rules"),
    [
        ("LearningRateDecayOptimWrapperConstructor", {"model_type": "vit"}, {"custom_keys": NO_DECAY}),
        ("LearningRateDecayOptimizerConstructor", {}, {"layer_pattern": r"layers_(\d+)", "decay_rate": 0.5}),
    ],
)
def test_layer_decay_uses_the_default_decay_of_the_optimizer(constructor, optimizer, rules):
    cfg = {"optimizer": {"type": "AdamW", "lr": 1.0, **optimizer}, "constructor": constructor, "paramwise_cfg": rules}
    settings = build_optim_wrapper(toy_vit(), cfg).param_settings
    kernels = {path for path in settings if path.endswith("kernel")}
    assert {path for path, entry in settings.items() if entry["weight_decay"] == 0.01} == kernels
    assert {settings[path]["weight_decay"] for path in settings if path not in kernels} == {0.0}


def test_the_swin_sample_of_mmselfsup_as_printed():
    dense = {"kernel": np.ones((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
    swin = {"absolute_pos_embed": np.ones((1, 4, 2), np.float32), "patch_embed": {"projection": dense},
            "stages_0": {"blocks_0": {"attn": {**dense, "relative_position_bias_table": np.ones((9, 2), np.float32)},
                                      "norm1": {"scale": ONE, "bias": ONE}}}}  # fmt: skip
    optim_wrapper = dict(
        type="AmpOptimWrapper",
        optimizer=dict(type="AdamW", lr=5e-3, model_type="swin", layer_decay_rate=0.9),
        clip_grad=dict(max_norm=5.0),
        paramwise_cfg=dict(
            norm_decay_mult=0.0,
            bias_decay_mult=0.0,
            custom_keys={
                ".absolute_pos_embed": dict(decay_mult=0.0),
                ".relative_position_bias_table": dict(decay_mult=0.0),
            },
        ),
        constructor="mmselfsup.LearningRateDecayOptimWrapperConstructor",
    )
    settings = build_optim_wrapper({"backbone": swin, "head": dense}, optim_wrapper).param_settings
    actual = {path: (entry["lr"], entry["weight_decay"]) for path, entry in settings.items()}
    block = "backbone.stages_0.blocks_0"
    lr = [pytest.approx(5e-3 * 0.9**i) for i in range(3)]  # head, block and stem
    assert actual == {
        "head.kernel": (lr[0], 0.01), "head.bias": (lr[0], 0.0),
        f"{block}.attn.kernel": (lr[1], 0.01), f"{block}.attn.bias": (lr[1], 0.0),
        f"{block}.attn.relative_position_bias_table": (lr[1], 0.0),
        f"{block}.norm1.scale": (lr[1], 0.0), f"{block}.norm1.bias": (lr[1], 0.0),
        "backbone.patch_embed.projection.kernel": (lr[2], 0.01),
        "backbone.patch_embed.projection.bias": (lr[2], 0.0),
        "backbone.absolute_pos_embed": (lr[0], 0.0),  # which is no stem for MMSelfSup
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("backbone.patch_embed.projection.weight", 0),
        ("backbone.stages.0.blocks.0.norm1.weight", 1),
        ("backbone.stages.0.blocks.1.attn.qkv.weight", 2),
        ("backbone.stages.0.downsample.reduction.weight", 2),
        ("backbone.stages.2.blocks.5.ffn.weight", 10),
        ("backbone.stages.3.blocks.1.ffn.weight", 12),
        ("backbone.stages.1.norm.weight", 4),  # like the downsampling: in the last block of its stage
        ("backbone.norm3.weight", 13),
        ("head.fc.weight", 13),
    ],
)
def test_swin_layers_count_blocks_over_the_stages(name, layer):
    # depths 2, 2, 6, 2: 14 layers, so that rate 0.9 scales by 0.9 ** (13 - layer)
    assert layer_depth.swin_layer_id(name, [2, 2, 6, 2]) == layer


def test_swin_and_mixmim_scales():
    def blocks(depths, prefix):
        return {
            f"{prefix}_{s}": {
                **{f"blocks_{b}": {"norm1": {"bias": ONE}} for b in range(depth)},
                "downsample": {"reduction": {"bias": ONE}},
            }
            for s, depth in enumerate(depths)
        }

    swin = {"backbone": {"patch_embed": {"bias": ONE}, **blocks([2, 2, 6, 2], "stages")}, "head": {"bias": ONE}}
    settings = mmselfsup(swin, model_type="swin", layer_decay_rate=0.9).param_settings
    scale = {path: entry["lr"] for path, entry in settings.items()}
    assert scale["backbone.patch_embed.bias"] == pytest.approx(0.25418658, rel=1e-7)  # 0.9 ** 13
    assert scale["backbone.stages_0.blocks_1.norm1.bias"] == pytest.approx(0.3138106, rel=1e-6)
    assert scale["backbone.stages_2.blocks_5.norm1.bias"] == pytest.approx(0.729, rel=1e-9)
    assert scale["head.bias"] == 1.0

    mixmim = {"backbone": {"patch_embed": {"bias": ONE}, **blocks([2, 2, 6, 2], "layers")}, "head": {"bias": ONE}}
    settings = mmselfsup(mixmim, model_type="mixmim", layer_decay_rate=0.9).param_settings
    assert settings["head.bias"]["lr"] == pytest.approx(0.9)  # MMSelfSup gives the head one step of decay
    assert settings["backbone.patch_embed.bias"]["lr"] == pytest.approx(0.9**13)
    assert settings["backbone.layers_0.blocks_0.norm1.bias"]["lr"] == pytest.approx(0.9**12)
    assert settings["backbone.layers_0.downsample.reduction.bias"]["lr"] == pytest.approx(0.9**11)


def test_longest_key_sets_the_decay_unless_strict_upstream_is_set():
    cfg = {"custom_keys": {"bias": {"decay_mult": 0.0}, "layers.1.bias": {"decay_mult": 0.5}}}
    wrapper = mmselfsup(toy_vit(), cfg, model_type="vit")
    assert wrapper.param_settings["backbone.layers_1.bias"]["weight_decay"] == 0.025
    assert wrapper.param_settings["backbone.layers_0.bias"]["weight_decay"] == 0.0
    upstream = mmselfsup(toy_vit(), {**cfg, "strict_upstream": True}, model_type="vit")
    assert upstream.param_settings["backbone.layers_1.bias"]["weight_decay"] == 0.0


def test_type_rules_apply_unless_strict_upstream_is_set(caplog):
    cfg = {"bias_decay_mult": 0.0, "custom_keys": {"head": {"lr_mult": 10}}}
    with caplog.at_level(logging.WARNING, "jengine"):
        wrapper = mmselfsup(toy_vit(), cfg, model_type="vit", layer_decay_rate=0.5)
    assert "custom_keys['head'].lr_mult" in caplog.text
    assert wrapper.param_settings["head.kernel"]["lr"] == 1.0
    assert wrapper.param_settings["backbone.layers_0.bias"]["weight_decay"] == 0.0
    upstream = mmselfsup(toy_vit(), {**cfg, "strict_upstream": True}, model_type="vit")
    assert upstream.param_settings["backbone.layers_0.bias"]["weight_decay"] == 0.05


def test_convnext_groups_match_mmsegmentation():
    # the lists of MMSegmentation's own unit test, num_layers 6, rate 2
    stage_wise = [(0, 128), (0, 1), (0.05, 64), (0, 64), (0.05, 32), (0, 32), (0.05, 16), (0, 16), (0.05, 8), (0, 8),
                  (0.05, 128), (0.05, 1)]  # fmt: skip
    layer_wise = [(0, 128), (0, 1), (0.05, 64), (0, 64), (0.05, 32), (0, 32), (0.05, 16), (0, 16), (0.05, 2), (0, 2),
                  (0.05, 128), (0.05, 1)]  # fmt: skip
    arguments = {"num_layers": 6, "decay_rate": 2}
    wrapper = mmseg(toy_convnext(), "ToyConvNeXt", decay_type="stage_wise", **arguments)
    assert decay_and_scale(wrapper) == stage_wise
    wrapper = mmseg(toy_convnext(), "ToyConvNeXt", decay_type="layer_wise", **arguments)
    assert decay_and_scale(wrapper) == layer_wise


@pytest.mark.parametrize("backbone", ["ToyBEiT", "ToyMAE"])
def test_vit_backbones_of_mmsegmentation(backbone):
    wrapper = mmseg(toy_vit(3), backbone, num_layers=3, decay_rate=2)
    assert decay_and_scale(wrapper) == [
        (0, 16), (0.05, 8), (0, 8), (0.05, 4), (0, 4), (0.05, 2), (0, 2), (0.05, 1), (0, 1),
    ]  # fmt: skip


def test_stage_wise_example_of_the_documentation():
    # ConvNeXt with num_layers 12, rate 0.9, lr 1e-4: 0.9 ** (13 - stage)
    wrapper = mmseg(toy_convnext(), "ConvNeXt", lr=1e-4, num_layers=12, decay_rate=0.9, decay_type="stage_wise")
    lr = {path: entry["lr"] for path, entry in wrapper.param_settings.items()}
    expected = {
        "backbone.downsample_layers_3.layers_0.kernel": 0.25418658,
        "backbone.stages_0.layers_0.kernel": 0.28242954,
        "backbone.stages_1.layers_0.kernel": 0.3138106,
        "backbone.stages_2.layers_0.kernel": 0.34867844,
        "backbone.stages_3.layers_0.kernel": 0.38742049,
        "backbone.norm0.scale": 1.0,
        "decode_head.kernel": 1.0,
    }
    for path, scale in expected.items():
        assert lr[path] == pytest.approx(1e-4 * scale, rel=1e-7)


def test_missing_layer_decay_settings_give_one_group_and_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "jengine"):
        wrapper = mmseg(toy_vit(), "ViT", lr=1e-4)
    assert "all layers have the same learning rate" in caplog.text
    assert [(group["lr"], group["weight_decay"]) for group in wrapper.param_groups] == [(1e-4, 0.05)]


def test_constructor_resolves_with_a_scope():
    name = "mmselfsup.LearningRateDecayOptimWrapperConstructor"
    assert OPTIM_WRAPPER_CONSTRUCTORS.get(name).__name__ == "LearningRateDecayOptimWrapperConstructor"


def test_stacked_layers_train_like_the_unrolled_model():
    rng = np.random.default_rng(0)
    kernels, biases = rng.normal(size=(3, 4, 4)).astype("f"), rng.normal(size=(3, 4)).astype("f")
    head = {"kernel": rng.normal(size=(4, 2)).astype("f")}
    unrolled = {
        "backbone": {f"layers_{i}": {"fc": {"kernel": kernels[i], "bias": biases[i]}} for i in range(3)},
        "head": head,
    }
    stacked = {"backbone": {"layers": {"fc": {"kernel": kernels, "bias": biases}}}, "head": head}
    cfg = {"custom_keys": {"bias": {"decay_mult": 0.0}}}
    settings = {"model_type": "vit", "layer_decay_rate": 0.5}

    def train(params):
        wrapper = mmselfsup(params, cfg, **settings)
        params, state = jax.tree.map(jnp.asarray, params), wrapper.init(params)
        step = jax.jit(wrapper.update)
        for _ in range(3):
            grads = jax.tree.map(jnp.sin, params)
            updates, state = step(grads, state, params, wrapper.hyperparams)
            params = optax.apply_updates(params, updates)
        return params, wrapper

    rolled, wrapper = train(stacked)
    plain, reference = train(unrolled)
    for i in range(3):
        for leaf in ("kernel", "bias"):
            np.testing.assert_allclose(
                rolled["backbone"]["layers"]["fc"][leaf][i],
                plain["backbone"][f"layers_{i}"]["fc"][leaf],
                rtol=1e-6,
                atol=1e-7,
            )
        assert (
            wrapper.param_settings[f"backbone.layers.fc.kernel[{i}]"]
            == reference.param_settings[f"backbone.layers_{i}.fc.kernel"]
        )
    assert sorted(wrapper.get_lr()["lr"]) == sorted(reference.get_lr()["lr"])
    assert sum(int(row[3]) for row in wrapper.group_table()[1]) == 3 * 20 + 8
