"""Layer-wise learning rates for any model, by a pattern over the names of its parameters."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine.config.errors import ConfigError
from jengine.extras.optimizers.layer_depth import LayerPattern
from jengine.optim import build_optim_wrapper
from tests.refusals import check_refusal

PATTERN = r"layers?[._](\d+)|block(\d+)|encoderblock_(\d+)"
ARRAY = np.ones((2, 2), np.float32)


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(8)(x)))


class Encoder1DBlock(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y)
        return x + MlpBlock()(nn.LayerNorm()(x)), None


class Encoder(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x):
        if self.scan:
            stack = nn.scan(Encoder1DBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = stack(name="encoderblock")(x, None)
        else:
            for layer in range(3):
                x, _ = Encoder1DBlock(name=f"encoderblock_{layer}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class ViT(nn.Module):
    """A ViT with three layers and the parameter names of big_vision's models/vit.py."""

    scan: bool = False

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(4, (2, 2), strides=(2, 2), name="embedding")(image)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.param("pos_embedding", nn.initializers.normal(), (1, x.shape[1], 4))
        x = jnp.concatenate([jnp.tile(self.param("cls", nn.initializers.zeros, (1, 1, 4)), [len(x), 1, 1]), x], axis=1)
        x = Encoder(scan=self.scan, name="Transformer")(x)
        return nn.Dense(5, name="head")(nn.tanh(nn.Dense(4, name="pre_logits")(x[:, 0])))


class EncoderDecoder1DBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)))(x)
        return x + MlpBlock()(nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)(y)))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embedding_init = nn.with_logical_partitioning(nn.initializers.normal(), ("vocab", "embed"))
        y = nn.Embed(6, 4, embedding_init=embedding_init)(tokens)
        for layer in range(2):
            y = EncoderDecoder1DBlock(name=f"encoderdecoderblock_{layer}")(y)
        y = nn.LayerNorm(name="encoderdecoder_norm")(y)
        return nn.Dense(6, name="logitdense")(y)


class TransformerLM(nn.Module):
    """A language model with two layers and the parameter names of Flax's examples/lm1b/models.py."""

    @nn.compact
    def __call__(self, tokens):
        return Decoder(name="decoder")(tokens)


class LayersAtTheRoot(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 2, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(3)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.head = nnx.Linear(2, 3, rngs=rngs)


def linen_params(module, *inputs):
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]


def vit_params(scan=False):
    return linen_params(ViT(scan), jnp.ones((1, 4, 4, 3)))


def mmselfsup(params, pattern, rate=0.5, paramwise_cfg=None, **more):
    optimizer = dict(
        type="AdamW",
        lr=1.0,
        weight_decay=0.05,
        layer_decay_rate=rate,
        **({"layer_pattern": pattern} if pattern else {}),
    )
    return build_optim_wrapper(
        params,
        dict(
            optimizer={**optimizer, **more},
            constructor="LearningRateDecayOptimWrapperConstructor",
            paramwise_cfg=paramwise_cfg,
        ),
    )


def mmseg(params, **paramwise_cfg):
    return build_optim_wrapper(
        params,
        dict(
            optimizer=dict(type="AdamW", lr=1.0, weight_decay=0.05),
            constructor="LearningRateDecayOptimizerConstructor",
            paramwise_cfg=paramwise_cfg,
        ),
    )


def rates(wrapper):
    return {path: settings["lr"] for path, settings in wrapper.param_settings.items()}


def rates_by_module(wrapper, depth=2):
    """Return the learning rates in each module, with modules at most `depth` levels deep."""
    by_module = {}
    for path, lr in rates(wrapper).items():
        by_module.setdefault(".".join(path.split(".")[:depth]), set()).add(lr)
    return by_module


# three layers, the stem and the head: 0.5 ** (4 - layer)
VIT_RATES = {
    "embedding.kernel": {0.0625}, "embedding.bias": {0.0625}, "pos_embedding": {0.0625}, "cls": {0.0625},
    "Transformer.encoderblock_0": {0.125}, "Transformer.encoderblock_1": {0.25}, "Transformer.encoderblock_2": {0.5},
    "Transformer.encoder_norm": {1.0}, "pre_logits.kernel": {1.0}, "pre_logits.bias": {1.0}, "head.kernel": {1.0},
    "head.bias": {1.0},
}  # fmt: skip


@pytest.mark.parametrize("pattern", [PATTERN, r"encoderblock_(\d+)", r"encoderblock\.(\d+)"])
def test_big_visions_vit_is_numbered_from_its_parameters(pattern):
    assert rates_by_module(mmselfsup(vit_params(), pattern)) == VIT_RATES
    assert rates_by_module(mmseg(vit_params(), decay_rate=0.5, layer_pattern=pattern)) == VIT_RATES


@pytest.mark.parametrize("pattern", [PATTERN, r"encoderblock_(\d+)", r"[Bb]lock_(\d+)"])
def test_a_scanned_vit_gets_the_rates_of_the_unrolled_one(pattern):
    params = vit_params(scan=True)
    for wrapper in (mmselfsup(params, pattern), mmseg(params, decay_rate=0.5, layer_pattern=pattern)):
        by_module = rates_by_module(wrapper)
        assert by_module.pop("Transformer.encoderblock") == {0.125, 0.25, 0.5}
        assert by_module == {k: v for k, v in VIT_RATES.items() if "encoderblock" not in k}
        by_path = rates(wrapper)
        kernel = "Transformer.encoderblock.MlpBlock_0.Dense_0.kernel"
        assert [by_path[f"{kernel}[{layer}]"] for layer in range(3)] == [0.125, 0.25, 0.5]


def test_a_scanned_vit_has_the_decays_of_the_unrolled_one():
    def undecayed(wrapper):
        return {path for path, settings in wrapper.param_settings.items() if not settings["weight_decay"]}

    cfg = dict(flat_decay_mult=0.0)
    unrolled = undecayed(mmselfsup(vit_params(), PATTERN, paramwise_cfg=cfg))
    scanned = undecayed(mmselfsup(vit_params(scan=True), PATTERN, paramwise_cfg=cfg))
    # scales and biases of the norms, and all biases, also those with an axis for heads
    assert "Transformer.encoderblock.LayerNorm_0.scale[1]" in scanned
    assert "Transformer.encoderblock.MultiHeadDotProductAttention_0.query.bias[1]" in scanned
    assert "Transformer.encoderblock.MultiHeadDotProductAttention_0.query.kernel[1]" not in scanned
    assert {
        path.replace("encoderblock.", "encoderblock_1.").removesuffix("[1]") for path in scanned if "[1]" in path
    } == {path for path in unrolled if "encoderblock_1" in path}


def test_the_language_model_of_flax_is_numbered_from_its_parameters():
    params = linen_params(TransformerLM(), jnp.ones((1, 3), jnp.int32))
    # two layers, the stem and the head: 0.5 ** (3 - layer); some parameters are boxed with axis names
    assert rates_by_module(mmselfsup(params, r"encoderdecoderblock_(\d+)")) == {
        "decoder.Embed_0": {0.125}, "decoder.encoderdecoderblock_0": {0.25}, "decoder.encoderdecoderblock_1": {0.5},
        "decoder.encoderdecoder_norm": {1.0}, "decoder.logitdense": {1.0},
    }  # fmt: skip


def test_layers_at_the_root_of_an_nnx_module_are_numbered():
    module = LayersAtTheRoot(nnx.Rngs(0))
    expected = {
        "embed.embedding": {0.0625}, "layers.0": {0.125}, "layers.1": {0.25}, "layers.2": {0.5}, "norm.scale": {1.0},
        "norm.bias": {1.0}, "head.kernel": {1.0}, "head.bias": {1.0},
    }  # fmt: skip
    wrapper = mmselfsup(module, PATTERN, paramwise_cfg=dict(norm_decay_mult=0.0))
    assert rates_by_module(wrapper) == expected
    assert {p for p, s in wrapper.param_settings.items() if not s["weight_decay"]} == {"norm.scale", "norm.bias"}
    assert rates_by_module(mmselfsup(nnx.state(module), PATTERN)) == expected


def test_settings_may_be_in_paramwise_cfg_as_in_mmpretrain():
    cfg = dict(layer_decay_rate=0.5, layer_pattern=PATTERN)
    optimizer = dict(type="AdamW", lr=1.0, weight_decay=0.05)
    name = "LearningRateDecayOptimWrapperConstructor"
    wrapper = build_optim_wrapper(vit_params(), dict(optimizer=optimizer, constructor=name, paramwise_cfg=cfg))
    assert rates_by_module(wrapper) == VIT_RATES
    with pytest.raises(ConfigError, match="`layer_decay_rate` must be in `optimizer` or in `paramwise_cfg`, got both"):
        mmselfsup(vit_params(), None, paramwise_cfg=cfg)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(pattern=r"layers_\d+"), ["`layer_pattern`"]),
        (dict(pattern=r"layers_(\d+"), ["`layer_pattern`"]),
        (dict(pattern=r"(encoderblock)_\d+"), ["got 'encoderblock'"]),
        (dict(pattern=PATTERN, stem_pattern="["), ["`stem_pattern`"]),
        (
            dict(pattern=None, model_type="vit", stem_pattern="x"),
            ["`layer_pattern`", "stem_pattern", "got only stem_pattern"],
        ),
        (dict(pattern=PATTERN, model_type="vit"), ["`model_type`", "`layer_pattern`"]),
        (dict(pattern=PATTERN, rate=-1), ["`layer_decay_rate`", "at least 0", "got -1"]),
        (dict(pattern=PATTERN, rate=0), ["`layer_decay_rate`", "above 0", "got 0"]),
        (dict(pattern=PATTERN, rate="0.5"), ["`layer_decay_rate`", "at least 0", "got '0.5'"]),
    ],
)
def test_invalid_settings_of_the_pattern(settings, words):
    check_refusal(lambda: mmselfsup(vit_params(), **settings), ConfigError, *words)


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (dict(num_layers=3), ["decay_rate", "num_layers", "layer_pattern", "got ['num_layers']"]),
        (dict(decay_rate=0.9), ["decay_rate", "num_layers", "layer_pattern", "got ['decay_rate']"]),
        (dict(layer_pattern=PATTERN), ["decay_rate", "num_layers", "layer_pattern"]),
        (dict(layer_pattern=PATTERN, decay_rate=0.5, num_layers=4), ["layer_pattern", "got 4"]),
        (dict(layer_pattern=PATTERN, decay_rate=0.5, decay_type="stage_wise"), ["'layer_wise'"]),
        (dict(num_layers="3", decay_rate=0.5), ["`paramwise_cfg.num_layers`", "at least 1", "got '3'"]),
        (dict(num_layers=3, decay_rate="x"), ["`paramwise_cfg.decay_rate`"]),
    ],
)
def test_invalid_settings_of_mmsegmentations_constructor(cfg, words):
    check_refusal(lambda: mmseg(vit_params(), **cfg), ConfigError, *words)


def test_default_rate_of_one_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, "jengine"):
        mmselfsup(vit_params(), PATTERN, rate=1.0)
    assert "layer_decay_rate" not in caplog.text
    optimizer = dict(type="AdamW", lr=1.0, weight_decay=0.05, layer_pattern=PATTERN)
    wrapper = build_optim_wrapper(vit_params(), dict(optimizer=optimizer, constructor="LearningRateDecayOptimWrapperConstructor"))
    assert {group["lr"] for group in wrapper.param_groups} == {1.0}
    assert "layer_decay_rate is not set and defaults to 1" in caplog.text


def test_the_first_match_is_used_and_alternatives_are_numbered_in_order():
    names = [
        "encoder.layers_0.mlp.layers_1.kernel",
        "encoder.layers_1.kernel",
        "decoder.layers_0.kernel",
        "head.kernel",
    ]
    layer_id, layers = LayerPattern(r"encoder\.layers_(\d+)|decoder\.layers_(\d+)").number(names)
    assert ([layer_id(name) for name in names], layers) == ([1, 2, 3, 4], 5)
    # blocks are counted across stages, whatever the first numbers are
    names = ["stages_1.blocks_0.w", "stages_1.blocks_1.w", "stages_2.blocks_0.w", "stem.w"]
    layer_id, layers = LayerPattern(r"stages_(\d+)\.blocks_(\d+)").number(names)
    assert ([layer_id(name) for name in names], layers) == ([1, 2, 3, 0], 5)


def test_a_stem_pattern_selects_the_parameters_before_the_first_layer():
    params = {"conv_in": {"kernel": ARRAY}, "layers_0": {"kernel": ARRAY}, "embed_out": {"kernel": ARRAY}}
    expected = {"conv_in.kernel": 0.25, "layers_0.kernel": 0.5, "embed_out.kernel": 1.0}
    assert rates(mmselfsup(params, PATTERN, stem_pattern="^conv_in")) == expected


def test_mmsegmentations_older_name_reads_layer_decay_rate(caplog):
    params = {"backbone": {f"layers_{i}": {"kernel": ARRAY} for i in range(2)}, "head": {"kernel": ARRAY}}
    cfg = dict(
        optimizer=dict(type="AdamW", lr=1.0, weight_decay=0.05),
        constructor="LayerDecayOptimizerConstructor",
        paramwise_cfg=dict(num_layers=2, layer_decay_rate=0.5),
    )
    with caplog.at_level(logging.WARNING, "jengine"):
        wrapper = build_optim_wrapper(params, cfg, module_types={"backbone": "BEiT"})
    assert rates(wrapper) == {"backbone.layers_0.kernel": 0.25, "backbone.layers_1.kernel": 0.5, "head.kernel": 1.0}
    assert "the old name of LearningRateDecayOptimizerConstructor" in caplog.text
    with pytest.raises(ConfigError, match="must have layer_decay_rate"):
        build_optim_wrapper(params, {**cfg, "paramwise_cfg": dict(num_layers=2)})
