"""Test iMIX's constructors against groups derived by hand from imix/solver/default_constructor.py of iMIX v0.1.1."""

import json
import logging

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.extras.imix import from_imix
from jengine.optim import build_optim_wrapper
from tests.refusals import check_refusal

ONE = np.ones((2, 2), np.float32)
NORM = {"scale": ONE[0], "bias": ONE[0]}
DENSE = {"kernel": ONE, "bias": ONE[0]}

# one language layer, one vision layer and two heads, with the names of iMIX's ViLBERT
VILBERT = {
    "bert": {
        "embeddings": {"word_embeddings": {"embedding": ONE}, "LayerNorm": NORM},
        "encoder": {"layer_0": {"query": DENSE}, "v_layer_0": {"query": DENSE}},
    },
    "vil_prediction": DENSE,
    "vil_logit": DENSE,
}
LANGUAGE = ["embeddings.word_embeddings.weight", "embeddings.LayerNorm.weight", "embeddings.LayerNorm.bias",
            "encoder.layer.0.query.weight", "encoder.layer.0.query.bias"]  # fmt: skip


@pytest.fixture
def language_weights(tmp_path):
    file = tmp_path / "weight_name.json"
    file.write_text(json.dumps(LANGUAGE))
    return str(file)


def build(constructor, params, paramwise_cfg=None, types=None, **optimizer):
    optimizer = dict(type="AdamW", lr=1e-3, training_encoder_lr_multiply=1, **optimizer)
    cfg = dict(optimizer=optimizer, constructor=constructor, paramwise_cfg=paramwise_cfg)
    return build_optim_wrapper(params, cfg, module_types=types)


def get_settings(wrapper):
    return {path: (entry["lr"], entry["weight_decay"]) for path, entry in wrapper.param_settings.items()}


def test_bert_trains_language_weights_with_lr_and_the_rest_with_image_lr(language_weights):
    cfg = dict(language_weights_file=language_weights)
    wrapper = build("BertOptimizerConstructor", VILBERT, cfg, image_lr=1e-5)
    assert get_settings(wrapper) == {
        "bert.embeddings.word_embeddings.embedding": (1e-3, 0.01),
        "bert.embeddings.LayerNorm.scale": (1e-3, 0), "bert.embeddings.LayerNorm.bias": (1e-3, 0),
        "bert.encoder.layer_0.query.kernel": (1e-3, 0.01), "bert.encoder.layer_0.query.bias": (1e-3, 0),
        "bert.encoder.v_layer_0.query.kernel": (1e-5, 0.01), "bert.encoder.v_layer_0.query.bias": (1e-5, 0),
        "vil_prediction.kernel": (1e-5, 0.01), "vil_prediction.bias": (1e-5, 0),
        "vil_logit.kernel": (1e-5, 0.01), "vil_logit.bias": (1e-5, 0),
    }  # fmt: skip
    assert len(wrapper.param_groups) == 4


def expected_vilbert_settings(vision_lr, heads=("vil_prediction", "vil_logit")):
    settings = {
        "bert.embeddings.word_embeddings.embedding": (1e-3, 0.01),
        "bert.embeddings.LayerNorm.scale": (1e-3, 0), "bert.embeddings.LayerNorm.bias": (1e-3, 0),
        "bert.encoder.layer_0.query.kernel": (1e-3, 0.01), "bert.encoder.layer_0.query.bias": (1e-3, 0),
        "bert.encoder.v_layer_0.query.kernel": (vision_lr, 0.01), "bert.encoder.v_layer_0.query.bias": (vision_lr, 0),
    }  # fmt: skip
    for name in ("vil_prediction", "vil_logit"):
        lr = 1e-4 if name in heads else vision_lr
        settings |= {f"{name}.kernel": (lr, 0.01), f"{name}.bias": (lr, 0)}
    return settings


@pytest.mark.parametrize(("vision_scratch", "vision_lr"), [(False, 1e-3), (True, 1e-4)])
def test_vilbert_trains_its_heads_and_a_vision_stream_from_scratch_with_1e_4(
    language_weights, vision_scratch, vision_lr
):
    cfg = dict(language_weights_file=language_weights, vision_scratch=vision_scratch)
    assert get_settings(build("VilbertOptimizerConstructor", VILBERT, cfg)) == expected_vilbert_settings(vision_lr)


def test_the_list_of_language_weights_is_not_read_with_a_pretrained_vision_stream():
    cfg = dict(language_weights_file="/no/such/file.json", vision_scratch=False)
    assert get_settings(build("VilbertOptimizerConstructor", VILBERT, cfg)) == expected_vilbert_settings(1e-3)


def test_devlbert_has_one_head_and_decays_like_vilbert_unless_strict_upstream(language_weights):
    cfg = dict(language_weights_file=language_weights, vision_scratch=False)
    expected = expected_vilbert_settings(1e-3, heads=("vil_prediction",))
    assert get_settings(build("DevlbertOptimizerConstructor", VILBERT, cfg)) == expected
    upstream = build("DevlbertOptimizerConstructor", VILBERT, {**cfg, "strict_upstream": True})
    assert get_settings(upstream) == {path: (lr, 0.01 - decay) for path, (lr, decay) in expected.items()}


@pytest.mark.parametrize(
    "constructor", ["OscarOptimizerConstructor", "OscarPreTrainOptimizerConstructor", "UniterOptimizerConstructor"]
)
def test_oscar_and_uniter_have_one_group_with_decay_and_one_without(constructor):
    wrapper = build(constructor, VILBERT, dict(weight_decay=0.05))
    assert [(group["lr"], group["weight_decay"]) for group in wrapper.param_groups] == [(1e-3, 0.05), (1e-3, 0.0)]
    assert wrapper.param_groups[1].paths == [
        "bert.embeddings.LayerNorm.scale", "bert.embeddings.LayerNorm.bias", "bert.encoder.layer_0.query.bias",
        "bert.encoder.v_layer_0.query.bias", "vil_prediction.bias", "vil_logit.bias",
    ]  # fmt: skip


def test_the_groups_of_the_head_come_first_in_uniter_vqa():
    params = {"uniter": {"dense": DENSE, "LayerNorm_0": NORM}, "vqa_output": {"layers_0": DENSE, "norm": NORM}}
    cfg = dict(weight_decay=0.01, lr_mul=10.0, key_named_param="vqa_output")
    types = {
        "uniter.dense": "Dense", "uniter.LayerNorm_0": "LayerNorm",
        "vqa_output.layers_0": "Dense", "vqa_output.norm": "LayerNorm",
    }  # fmt: skip
    groups = build("UniterVQAOptimizerConstructor", params, cfg, types).param_groups
    assert [(group["lr"], group["weight_decay"], group.paths) for group in groups] == [
        (1e-2, 0.01, ["vqa_output.layers_0.kernel"]),
        (1e-2, 0.0, ["vqa_output.layers_0.bias", "vqa_output.norm.scale", "vqa_output.norm.bias"]),
        (1e-3, 0.01, ["uniter.dense.kernel"]),
        (1e-3, 0.0, ["uniter.dense.bias", "uniter.LayerNorm_0.scale", "uniter.LayerNorm_0.bias"]),
    ]


def test_default_rules_apply_to_layer_norms_then_depthwise_convolutions_then_biases():
    depthwise = {"kernel": np.ones((3, 3, 1, 4), np.float32), "bias": ONE[0]}
    params = {"bn": NORM, "ln": NORM, "dw": depthwise, "fc": DENSE, "head": DENSE}
    types = {"bn": "BatchNorm", "ln": "LayerNorm", "dw": "Conv", "fc": "Dense", "head": "Dense"}
    cfg = dict(
        norm_decay_mult=0.0, bias_decay_mult=0.5, dwconv_decay_mult=0.25, bias_lr_mult=2.0,
        custom_keys={"head": dict(lr_mult=0.1)},
    )  # fmt: skip
    for module_types in (types, None):
        assert get_settings(build("DefaultOptimizerConstructor", params, cfg, module_types, weight_decay=1.0)) == {
            "bn.scale": (1e-3, 1), "bn.bias": (2e-3, 0.5), "ln.scale": (1e-3, 0), "ln.bias": (1e-3, 0),
            "dw.kernel": (1e-3, 0.25), "dw.bias": (2e-3, 0.25), "fc.kernel": (1e-3, 1), "fc.bias": (2e-3, 0.5),
            "head.kernel": (1e-4, 1), "head.bias": (1e-4, 1),
        }  # fmt: skip
    # a rule that is not set still excludes the next rules
    actual = get_settings(
        build("DefaultOptimizerConstructor", params, dict(bias_decay_mult=0.5), types, weight_decay=1.0)
    )
    assert {path for path, (_, decay) in actual.items() if decay == 0.5} == {"bn.bias", "fc.bias", "head.bias"}


def test_the_default_constructor_without_rules_has_one_group():
    assert len(build("DefaultOptimizerConstructor", VILBERT).param_groups) == 1


def test_settings_without_effect_log_a_warning(caplog, language_weights):
    with caplog.at_level(logging.WARNING, "jengine"):
        optimizer = dict(type="AdamW", lr=1e-3, training_encoder_lr_multiply=0.1)
        default = build_optim_wrapper(VILBERT, dict(optimizer=optimizer, constructor="DefaultOptimizerConstructor"))
        cfg = dict(language_weights_file=language_weights, vision_scratch=False)
        vilbert = build("VilbertOptimizerConstructor", VILBERT, cfg, weight_decay=0.1)
    assert {lr for lr, _ in get_settings(default).values()} == {1e-3}
    assert {decay for _, decay in get_settings(vilbert).values()} == {0.01, 0}
    assert "training_encoder_lr_multiply has no effect" in caplog.text
    assert "weight_decay=0.1 has no effect: the constructor uses 0.01" in caplog.text


@pytest.mark.parametrize(
    ("constructor", "cfg", "words"),
    [
        ("OscarOptimizerConstructor", None, ["`paramwise_cfg`", "OscarOptimizerConstructor", "weight_decay"]),
        (
            "OscarOptimizerConstructor",
            dict(weight_decay=-1),
            ["`paramwise_cfg.weight_decay`"],
        ),
        ("OscarOptimizerConstructor", dict(weight_decay=0.1, lr_mul=2), ["paramwise_cfg", "'lr_mul'"]),
        ("BertOptimizerConstructor", dict(language_weights_file="LANGUAGE"), ["`optimizer.image_lr`"]),
        ("VilbertOptimizerConstructor", dict(language_weights_file="LANGUAGE"), ["vision_scratch"]),
        (
            "VilbertOptimizerConstructor",
            dict(language_weights_file="LANGUAGE", vision_scratch="no"),
            ["`paramwise_cfg.vision_scratch`", "True or False", "got 'no'"],
        ),
        (
            "UniterVQAOptimizerConstructor",
            dict(weight_decay=0.1, lr_mul=10.0, key_named_param="vil_predictoin"),
            ["'s name, got '", "vil_predictoin", "closest: vil_prediction"],
        ),
    ],
)
def test_bad_settings_are_rejected(constructor, cfg, words, language_weights):
    if cfg and cfg.get("language_weights_file") == "LANGUAGE":
        cfg = {**cfg, "language_weights_file": language_weights}
    check_refusal(lambda: build(constructor, VILBERT, cfg), ConfigError, *words)


def test_a_config_in_imixs_style_without_rules_has_one_group():
    optimizer = dict(type="AdamW", lr=5e-5, training_encoder_lr_multiply=1)
    arguments = from_imix(
        dict(
            model=dict(), work_dir="w", train_data=dict(samples_per_gpu=1, data=dict()), optimizer=optimizer, max_iter=1
        )
    )
    assert len(build_optim_wrapper(VILBERT, arguments["optim_wrapper"]).param_groups) == 1


def test_a_config_in_imixs_style_has_its_constructor_inside_the_optimizer():
    optimizer = dict(
        type="TansformerAdamW", constructor="OscarOptimizerConstructor", paramwise_cfg=dict(weight_decay=0.05), lr=5e-5,
        eps=1e-8, training_encoder_lr_multiply=1,
    )  # fmt: skip
    arguments = from_imix(dict(model=dict(), work_dir="w", train_data=dict(samples_per_gpu=1, data=dict()),
                               optimizer=optimizer, total_epochs=1))  # fmt: skip
    groups = build_optim_wrapper(VILBERT, arguments["optim_wrapper"]).param_groups
    assert [(group["lr"], group["weight_decay"], group["eps"]) for group in groups] == [
        (5e-5, 0.05, 1e-8),
        (5e-5, 0.0, 1e-8),
    ]
