"""Rules for the learning rate and weight decay of each parameter; expected values from MMEngine 0.10.7."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jengine.config import OPTIM_WRAPPER_CONSTRUCTORS
from jengine.config.errors import ConfigError
from jengine.optim import DefaultOptimWrapperConstructor, build_optim_wrapper
from tests.refusals import check_refusal


def ones(*shape):
    return np.ones(shape, np.float32)


def dense():
    return {"kernel": ones(2, 2), "bias": ones(2)}


def norm():
    return {"scale": ones(2), "bias": ones(2)}


TOY = {"backbone": {"layer0": dense(), "layer1": dense()}, "head": {"linear": dense(), "bn": norm()}}
# gamma (1-D), conv, depthwise conv, conv with one input channel, batch norm, layer norm, linear
MIXED = {
    "gamma": ones(2),
    "conv": {"kernel": ones(3, 3, 2, 4), "bias": ones(4)},
    "dwconv": {"kernel": ones(3, 3, 1, 4), "bias": ones(4)},
    "stem": {"kernel": ones(3, 3, 1, 8)},
    "bn": norm(),
    "ln": norm(),
    "fc": dense(),
}
MIXED_TYPES = {"conv": "Conv", "dwconv": "Conv", "stem": "Conv", "bn": "BatchNorm", "ln": "LayerNorm", "fc": "Dense"}


def build(params, paramwise_cfg, types=None, **optimizer):
    optimizer = {"type": "SGD", "lr": 1.0, **optimizer}
    return build_optim_wrapper(params, {"optimizer": optimizer, "paramwise_cfg": paramwise_cfg}, module_types=types)


def settings(wrapper):
    return {path: (entry["lr"], entry["weight_decay"]) for path, entry in wrapper.param_settings.items()}


def log_lines(caplog):
    return [m for m in caplog.messages if m.startswith("paramwise_options")]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_norm_decay_mult_applies_only_to_norms_and_is_logged(caplog):
    with caplog.at_level(logging.INFO, "jengine"):
        wrapper = build(TOY, {"norm_decay_mult": 0}, lr=0.01, weight_decay=1e-4)
    actual = settings(wrapper)
    assert {path for path, (_, wd) in actual.items() if wd == 0} == {"head.bn.scale", "head.bn.bias"}
    assert {lr for lr, _ in actual.values()} == {0.01}
    assert log_lines(caplog) == [
        "paramwise_options -- head.bn.scale:weight_decay=0.0",
        "paramwise_options -- head.bn.bias:weight_decay=0.0",
    ]
    assert [len(group.paths) for group in wrapper.param_groups] == [6, 2]


def test_custom_keys_of_the_tutorial(caplog):
    custom_keys = {
        "backbone.layer0": {"lr_mult": 0, "decay_mult": 0},
        "backbone": {"lr_mult": 1},
        "head": {"lr_mult": 0.1},
    }
    with caplog.at_level(logging.INFO, "jengine"):
        wrapper = build(TOY, {"custom_keys": custom_keys}, lr=0.01, weight_decay=1e-4)
    actual = settings(wrapper)
    lr = pytest.approx(0.001)
    assert actual == {
        "backbone.layer0.kernel": (0, 0), "backbone.layer0.bias": (0, 0),
        "backbone.layer1.kernel": (0.01, 1e-4), "backbone.layer1.bias": (0.01, 1e-4),
        "head.linear.kernel": (lr, 1e-4), "head.linear.bias": (lr, 1e-4),
        "head.bn.scale": (lr, 1e-4), "head.bn.bias": (lr, 1e-4),
    }  # fmt: skip
    assert wrapper.get_lr() == {"base_lr": [0.01], "lr": [0.0, 0.01, lr]}
    expected = []
    for path in ("backbone.layer0.kernel", "backbone.layer0.bias"):
        expected += [f"{path}:lr=0.0", f"{path}:weight_decay=0.0", f"{path}:lr_mult=0", f"{path}:decay_mult=0"]
    for path in ("backbone.layer1.kernel", "backbone.layer1.bias"):
        expected += [f"{path}:lr=0.01", f"{path}:weight_decay=0.0001", f"{path}:lr_mult=1"]
    for path in ("head.linear.kernel", "head.linear.bias", "head.bn.scale", "head.bn.bias"):
        expected += [f"{path}:lr=0.001", f"{path}:weight_decay=0.0001", f"{path}:lr_mult=0.1"]
    assert log_lines(caplog) == [f"paramwise_options -- {line}" for line in expected]


def test_longest_then_first_key_is_used_and_a_leading_dot_matches_the_root():
    wrapper = build({"abxcd": ones(1)}, {"custom_keys": {"cd": {"lr_mult": 3}, "ab": {"lr_mult": 2}}})
    assert wrapper.get_lr()["lr"] == [2.0]
    params = {"pos_embed": ones(1), "abs_pos_embed": ones(1), "vit": {"pos_embed": ones(1)}}
    wrapper = build(params, {"custom_keys": {".pos_embed": {"lr_mult": 2}}})
    lr = {path: entry["lr"] for path, entry in wrapper.param_settings.items()}
    assert lr == {"pos_embed": 2.0, "abs_pos_embed": 1.0, "vit.pos_embed": 2.0}


def test_keys_in_torch_names_match_flax_parameters():
    params = {"layers_3": {"fc": dense()}, "layers_4": {"fc": dense()}}
    wrapper = build(params, {"custom_keys": {"layers.3.fc.weight": {"lr_mult": 2}}})
    assert [path for path, entry in wrapper.param_settings.items() if entry["lr"] == 2] == ["layers_3.fc.kernel"]


@pytest.mark.parametrize("types", [MIXED_TYPES, None])
def test_rules_by_kind_of_module(types):
    cfg = {"bias_lr_mult": 2, "bias_decay_mult": 0.5, "norm_decay_mult": 0.25, "flat_decay_mult": 0.125,
           "dwconv_decay_mult": 0.75}  # fmt: skip
    assert settings(build(MIXED, cfg, types, weight_decay=1.0)) == {
        "gamma": (1, 0.125), "conv.kernel": (1, 1), "conv.bias": (2, 0.5), "dwconv.kernel": (1, 0.75),
        "dwconv.bias": (2, 0.5), "stem.kernel": (1, 0.75), "bn.scale": (1, 0.25), "bn.bias": (1, 0.25),
        "ln.scale": (1, 0.25), "ln.bias": (1, 0.25), "fc.kernel": (1, 1), "fc.bias": (2, 0.5),
    }  # fmt: skip


def test_flat_rule_applies_where_no_other_rule_does():
    actual = settings(
        build(MIXED, {"flat_decay_mult": 0.125, "dwconv_decay_mult": 0.75}, MIXED_TYPES, weight_decay=1.0)
    )
    decay = {path: wd for path, (_, wd) in actual.items()}
    assert (decay["conv.bias"], decay["dwconv.kernel"], decay["dwconv.bias"]) == (0.125, 0.75, 0.75)
    assert (decay["bn.scale"], decay["ln.bias"], decay["fc.bias"], decay["fc.kernel"]) == (0.125, 0.125, 0.125, 1)


def test_rms_norm_is_not_a_norm_and_grouped_conv1d_not_depthwise():
    params = {"rms": {"scale": ones(4)}, "c1d": {"kernel": ones(3, 1, 4), "bias": ones(4)}}
    types = {"rms": "RMSNorm", "c1d": "Conv"}
    cfg = {"norm_decay_mult": 0.0, "bias_decay_mult": 0.5, "dwconv_decay_mult": 0.1, "flat_decay_mult": 0.3}
    for known in (types, None):
        actual = settings(build(params, cfg, known, weight_decay=1.0))
        assert actual == {"rms.scale": (1, 0.3), "c1d.kernel": (1, 1), "c1d.bias": (1, 0.5)}


NORMS_BY_NAME = {
    "bn": {"weight": ones(2), "bias": ones(2)},  # PyTorch's names
    "bn_gamma": {"gamma": ones(2), "beta": ones(2)},
    "encoder": {"ln_1": {"g": ones(2), "b": ones(2)}, "LayerNorm_0": {"w": ones(2)}},
    "norms": [{"weight": ones(2)}, {"weight": ones(2)}],
    "3": {"weight": ones(2), "bias": ones(2)},  # of a torch.nn.Sequential
    "haiku": {"scale": ones(2), "offset": ones(2)},
    "bn1_scale": ones(2),
    "block": {"gn_beta": ones(2), "kernel": ones(2, 2)},
}
NO_NORMS = {
    "linear": {"weight": ones(2, 2), "bias": ones(2)},
    "gamma": ones(2),  # of a layer scale
    "block": {"gamma": ones(2), "kernel": ones(2, 2)},
    "rms_norm": {"weight": ones(2)},  # as in MMEngine
    "lnear": {"w": ones(2)},
    "prelu": {"weight": ones(2)},
    "norm_proj": {"weight": ones(2, 2), "bias": ones(2)},
}


def test_names_and_shapes_tell_the_norms_of_a_bare_tree(caplog):
    decays = settings(build(NORMS_BY_NAME, {"norm_decay_mult": 0.0}, weight_decay=1.0))
    assert [path for path, (_, decay) in decays.items() if decay != 0] == ["block.kernel"]
    assert warnings(caplog) == []
    decays = settings(build(NO_NORMS, {"norm_decay_mult": 0.0}, weight_decay=1.0))
    assert [path for path, (_, decay) in decays.items() if decay != 1] == []
    assert "'norm_decay_mult' matches no parameter; without `module_types` names and shapes tell" in caplog.text


def test_a_rule_that_matches_no_parameter_is_reported(caplog):
    params = {"fc": {"kernel": ones(2, 2), "b": ones(2)}}
    rules = {"bias_lr_mult": 2, "bias_decay_mult": 0, "dwconv_decay_mult": 0, "flat_decay_mult": 0}
    wrapper = build(params, rules, {"fc": "Dense"}, weight_decay=1.0)
    assert warnings(caplog) == [
        f"`paramwise_cfg`: {rule!r} matches no parameter"
        for rule in ("bias_decay_mult", "dwconv_decay_mult", "bias_lr_mult")
    ]
    assert [row[1] for row in wrapper.group_table()[1] if row[0] == "no match"] == [
        "bias_decay_mult",
        "dwconv_decay_mult",
        "bias_lr_mult",
    ]
    with pytest.raises(ConfigError, match="'norm_decay_mult' matches no parameter"):
        build(params, {"norm_decay_mult": 0, "strict": True}, {"fc": "Dense"}, weight_decay=1.0)
    # a rule that another one overrides everywhere matches, as in the usual three rules of a vision transformer
    caplog.clear()
    build(TOY, {"norm_decay_mult": 0, "bias_decay_mult": 0, "flat_decay_mult": 0}, weight_decay=1.0)
    assert warnings(caplog) == []


def test_module_types_of_a_flax_model_take_precedence_over_names():
    # a scale that is not in a norm, although it has the name of one
    params = {"affine": {"scale": ones(2), "bias": ones(2)}}
    assert settings(build(params, {"norm_decay_mult": 0.0}, weight_decay=1.0))["affine.scale"] == (1, 0)
    assert settings(build(params, {"norm_decay_mult": 0.0}, {"affine": "Affine"}, weight_decay=1.0)) == {
        "affine.scale": (1, 1),
        "affine.bias": (1, 1),
    }


def test_flax_parameters_of_a_real_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.LayerNorm()(nn.Conv(4, (3, 3), feature_group_count=2)(x)))

    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 4, 4, 2)))["params"]
    actual = settings(build(params, {"norm_decay_mult": 0.0, "dwconv_decay_mult": 0.5}, weight_decay=1.0))
    assert actual["LayerNorm_0.scale"] == (1, 0)
    assert actual["Conv_0.kernel"] == (1, 0.5)
    assert actual["Dense_0.kernel"] == (1, 1)


@pytest.mark.parametrize(
    ("cfg", "optimizer", "error", "words"),
    [
        ({"norm_decay_mult": 0}, {}, ValueError, ["weight_decay`", "norm_decay_mult", "got none"]),
        ({"custom_keys": {"fc": {"decay_mult": 0}}}, {}, ValueError, ["set for", "'fc'", "decay_mult", "got none"]),
        ({"custom_keys": [{"fc": {}}]}, {}, TypeError, ["custom_keys"]),
        (
            {"norm_decay_mul": 0},
            {"weight_decay": 1.0},
            ConfigError,
            ["'norm_decay_mul'", "did you mean 'norm_decay_mult'"],
        ),
        ({"custom_keys": {"hed": {"lr_mult": 2}}, "strict": True}, {}, ConfigError, ["'hed'", "matches no parameter"]),
        (5, {}, TypeError, ["paramwise_cfg`", "None", "got 5"]),
        ({"custom_keys": [("fc", {}), ("fc", {})]}, {}, ConfigError, ["got 'fc' twice"]),
        ({"custom_keys": {"fc": 0.1}}, {}, ConfigError, ["dict(lr_mult=0.1)", "got 0.1"]),
        (
            {"bias_lr_mult": "2"},
            {},
            ConfigError,
            ["`paramwise_cfg.bias_lr_mult`", "at least 0", "got '2'"],
        ),
        ({"norm_decay_mult": -1}, {"weight_decay": 1.0}, ConfigError, ["at least 0", "got -1"]),
        ({"strict": "no"}, {}, ConfigError, ["`paramwise_cfg.strict`", "True or False", "got 'no'"]),
        ({"dcn_modules": "dcn"}, {}, ConfigError, ["`paramwise_cfg.dcn_modules`"]),
    ],
)
def test_invalid_rules(cfg, optimizer, error, words):
    check_refusal(lambda: build(TOY, cfg, **optimizer), error, *words)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("lr_multt", 0.1, ["got 'lr_multt'", "did you mean 'lr_mult'"]),
        ("decaymult", 0.1, ["SGD", "'s groups, got '", "'; did you mean '", "decay_mult"]),
        ("momentun", 0.1, ["got 'momentun'", "did you mean 'momentum'"]),
        ("betas", (0.9, 0.99), ["SGD", "'s groups, got '"]),
        ("lr_mult", -1, ["lr_mult`", "at least 0", "got -1"]),
        ("lr_mult", "0.1", ["lr_mult`", "at least 0", "got '0.1'"]),
        ("lr_mult", True, ["lr_mult`", "at least 0", "got True"]),
        ("lr_mult", float("nan"), ["lr_mult`", "at least 0", "got nan"]),
        ("decay_mult", None, ["decay_mult`", "at least 0", "got None"]),
        ("requires_grad", "no", ["requires_grad`", "True or False", "got 'no'"]),
        ("lr", -0.1, ["lr`", "at least 0", "got -0.1"]),
        ("momentum", "0.9", ["momentum`", "got '0.9'"]),
        ("fix_lr", 1, ["fix_lr`", "True or False", "got 1"]),
    ],
)
def test_fields_of_a_custom_key_are_checked(field, value, words):
    rules = {"custom_keys": {"head": {field: value}}}
    places = "`paramwise_cfg.custom_keys['head']", "`optim_wrapper`"
    check_refusal(lambda: build(TOY, rules, weight_decay=0.1), ConfigError, *words, *places)


def test_fields_in_the_documentation_are_legal():
    # SimSiam, DeepCluster, BarlowTwins and SwAV of MMSelfSup; betas and eps of one part
    build(TOY, {"custom_keys": {"head": {"fix_lr": True}}})
    build(TOY, {"custom_keys": {"head": {"momentum": 0.0}}}, momentum=0.9)
    flags = {"decay_mult": 0, "lars_exclude": True}
    keys = {"bn": {**flags, "lr_mult": 0.024}, "bias": {**flags, "lr_mult": 0.024}}
    wrapper = build(TOY, {"custom_keys": keys}, type="LARS", weight_decay=1e-6)
    assert wrapper.param_settings["head.bn.scale"]["lars_exclude"] is True
    wrapper = build(TOY, {"custom_keys": {"head": {"betas": [0.8, 0.9], "eps": 1e-6}}}, type="AdamW")
    assert wrapper.param_settings["head.bn.scale"]["eps"] == 1e-6
    build(TOY, {"custom_keys": {"head": {"lr": 0.5}}})


def test_custom_keys_may_be_a_list_of_pairs():
    pairs = [("backbone.layer0", {"lr_mult": 0.1}), ("head", {"lr_mult": 2})]
    for keys in (pairs, [list(pair) for pair in pairs], tuple(pairs), ConfigDict({"keys": pairs}).to_dict()["keys"]):
        wrapper = build(TOY, {"custom_keys": keys})
        assert wrapper.get_lr()["lr"] == [0.1, 1.0, 2.0]
    assert wrapper.group_table()[1][0][1] == "backbone.layer0"


def test_flat_decay_alone_works_without_weight_decay():
    assert set(settings(build(TOY, {"flat_decay_mult": 0.0})).values()) == {(1.0, 0.0)}


@pytest.mark.parametrize(
    "rules", [{"flat_decay_mult": 0.0}, {"bias_decay_mult": 0.0, "custom_keys": {"bn": {"decay_mult": 0.0}}}]
)
def test_rules_multiply_the_default_decay_of_the_optimizer(rules):
    actual = settings(build(TOY, rules, type="AdamW"))
    decays = {path: 0.01 if path.endswith("kernel") else 0.0 for path in actual}  # AdamW's default
    assert {path: decay for path, (_, decay) in actual.items()} == decays


def test_multipliers_outside_custom_keys_are_warned_about(caplog):
    assert {lr for lr, _ in settings(build(TOY, {"lr_mult": 2})).values()} == {1.0}
    assert "lr_mult has an effect only inside an entry of custom_keys" in caplog.text


def test_key_that_matches_nothing_is_warned_about_and_in_the_table(caplog):
    wrapper = build(TOY, {"custom_keys": {"head.linaer": {"lr_mult": 2}, "backbone": {"lr_mult": 0.5}}})
    assert "'head.linaer' matches no parameter; closest: head.linear" in caplog.text
    columns, rows = wrapper.group_table()
    assert columns == ["group", "patterns", "tensors", "parameters", "lr", "weight decay"]
    assert rows == [
        ["0", "backbone", "4", "12", "0.5", "0"],
        ["1", "", "4", "10", "1", "0"],
        ["no match", "head.linaer", "0", "0", "", ""],
    ]


def test_the_table_names_the_custom_key_in_the_place_of_rules():
    cfg = {"custom_keys": {"head": {"lr_mult": 0.1}}, "norm_decay_mult": 0.0, "bias_lr_mult": 2.0}
    assert [row[:3] for row in build(TOY, cfg, weight_decay=1.0).group_table()[1]] == [
        ["0", "", "2"],
        ["1", "bias_lr_mult", "2"],
        ["2", "head", "4"],
    ]
    same = {"custom_keys": {"bn": {"decay_mult": 0.0}}, "norm_decay_mult": 0.0}
    assert [row[1] for row in build(TOY, same, weight_decay=1.0).group_table()[1]] == ["", "bn"]


def test_deformable_convolution_offsets():
    # in a deformable convolution, dcn_offset_lr_mult applies to the bias of the offset, not bias_lr_mult
    params = {
        "dcn": {
            "kernel": ones(3, 3, 2, 2),
            "bias": ones(2),
            "conv_offset": {"kernel": ones(3, 3, 2, 2), "bias": ones(2)},
        }
    }
    cfg = {"dcn_offset_lr_mult": 0.1, "bias_lr_mult": 2, "bias_decay_mult": 0.0}
    expected = {
        "dcn.kernel": (1, 1), "dcn.bias": (2, 0), "dcn.conv_offset.kernel": (0.1, 1), "dcn.conv_offset.bias": (0.1, 1),
    }  # fmt: skip
    assert settings(build(params, {**cfg, "dcn_modules": ["dcn"]}, weight_decay=1.0)) == expected
    types = {"dcn": "ModulatedDeformConv2d", "dcn.conv_offset": "Conv"}
    assert settings(build(params, cfg, types, weight_decay=1.0)) == expected


def test_frozen_parameters_have_no_state_and_stay_bit_identical(caplog):
    params = {"backbone": {"w": jnp.asarray([1.1, 2.2])}, "head": {"w": jnp.asarray([3.3])}}
    with caplog.at_level(logging.DEBUG, "jengine"):
        wrapper = build(params, {"custom_keys": {"backbone": {"requires_grad": False}}}, type="AdamW", weight_decay=0.1)
    assert "backbone.w does not require gradients" in caplog.text
    state = wrapper.init(params)
    assert optax.tree.get(state, "mu")["backbone"]["w"] is None
    before = np.asarray(params["backbone"]["w"])
    for _ in range(5):
        _, grads = wrapper.value_and_grad(lambda p: jnp.sum(p["backbone"]["w"]) * p["head"]["w"][0])(params, state)
        assert not grads["backbone"]["w"].any()
        updates, state = wrapper.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert np.asarray(params["backbone"]["w"]).tobytes() == before.tobytes()
    assert float(params["head"]["w"][0]) < 0
    assert wrapper.group_table()[1][-1] == ["frozen", "", "1", "2", "", ""]


def test_force_default_settings_applies_other_rules_after_a_custom_key():
    cfg = {"custom_keys": {"head": {"lr_mult": 0.1, "decay_mult": 1}}, "norm_decay_mult": 0}
    assert settings(build(TOY, cfg, weight_decay=1.0))["head.bn.scale"] == (0.1, 1)
    forced = settings(build(TOY, {**cfg, "force_default_settings": True}, weight_decay=1.0))
    assert forced["head.bn.scale"] == (0.1, 0)
    assert forced["head.linear.kernel"] == (0.1, 1)


def test_mae_and_vit_examples_of_the_documentation():
    vit = {
        "backbone": {"cls_token": ones(1, 1, 2), "pos_embed": ones(1, 2, 2), "ln1": norm(), "fc": dense()},
        "neck": {"mask_token": ones(1, 1, 2)},
    }
    no_decay = {"decay_mult": 0.0}
    keys = {"ln": no_decay, "bias": no_decay, "pos_embed": no_decay, "mask_token": no_decay, "cls_token": no_decay}
    actual = settings(build(vit, {"custom_keys": keys}, type="AdamW", lr=0.0024, betas=(0.9, 0.95), weight_decay=0.05))
    assert {path for path, (_, wd) in actual.items() if wd} == {"backbone.fc.kernel"}
    assert {lr for lr, _ in actual.values()} == {0.0024}

    vit["backbone"]["norm1"] = vit["backbone"].pop("ln1")
    keys = {"pos_embed": no_decay, "cls_token": no_decay, "norm": no_decay}
    actual = settings(build(vit, {"custom_keys": keys}, type="AdamW", lr=6e-5, weight_decay=0.01))
    assert {path for path, (_, wd) in actual.items() if wd == 0} == {
        "backbone.pos_embed", "backbone.cls_token", "backbone.norm1.scale", "backbone.norm1.bias",
    }  # fmt: skip


def test_custom_constructor(caplog):
    @OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
    class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
        def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
            super().__init__(optim_wrapper_cfg, paramwise_cfg)
            self.decay_factor = self.paramwise_cfg.get("decay_factor", 0.5)

        def add_params(self, params, module, prefix="", lr=None):
            lr = self.base_lr if lr is None else lr
            for name, param in module.named_parameters(recurse=False):
                params.append({"params": [param], "lr": lr})
                logging.getLogger("jengine").info("%s : lr=%s", f"{prefix}.{name}" if prefix else name, lr)
            for name, child in module.named_children():
                self.add_params(params, child, f"{prefix}.{name}" if prefix else name, lr=lr * self.decay_factor)

    cfg = {
        "optimizer": {"type": "SGD", "lr": 0.01},
        "paramwise_cfg": {"decay_factor": 0.5},
        "constructor": "LayerDecayOptimWrapperConstructor",
    }
    params = {"linear": dense(), "layer": {"linear": dense()}}
    with caplog.at_level(logging.DEBUG, "jengine"):
        wrapper = build_optim_wrapper(params, cfg)
    assert {path: entry["lr"] for path, entry in wrapper.param_settings.items()} == {
        "linear.kernel": 0.005, "linear.bias": 0.005, "layer.linear.kernel": 0.0025, "layer.linear.bias": 0.0025,
    }  # fmt: skip
    assert caplog.messages == [
        "linear.kernel : lr=0.005", "linear.bias : lr=0.005", "layer.linear.kernel : lr=0.0025",
        "layer.linear.bias : lr=0.0025",
    ]  # fmt: skip


def test_bypass_duplicate_is_ignored_because_a_tree_has_a_leaf_once():
    wrapper = build(TOY, {"bypass_duplicate": True})
    assert [len(group.paths) for group in wrapper.param_groups] == [8]


def test_each_key_that_matches_nothing_is_a_warning(caplog):
    rules = {f"hed{i}": dict(lr_mult=2.0) for i in range(9)}
    cfg = dict(optimizer=dict(type="SGD", lr=0.1), paramwise_cfg=dict(custom_keys=rules))
    with caplog.at_level(logging.WARNING, "jengine"):
        wrapper = build_optim_wrapper({"head": dense()}, cfg)
    assert len(caplog.messages) == 9
    assert [row[1] for row in wrapper.group_table()[1][-9:]] == [f"hed{i}" for i in range(9)]


def test_groups_are_in_the_order_of_the_modules_although_jit_sorts_parameters():
    params = {"a_head": {"kernel": 0.0}, "blocks": {"1": {"w": 0.0}, "0": {"w": 0.0}}, "stem": {"kernel": 0.0}}
    types = {"": "Net", "stem": "Conv", "blocks.0": "Block", "blocks.1": "Block", "a_head": "Dense"}
    params = jax.eval_shape(jax.jit(lambda: jax.tree.map(jnp.asarray, params)))
    keys = {key: dict(lr_mult=mult) for key, mult in [("a_head", 2.0), ("blocks.0", 3.0), ("blocks.1", 4.0)]}
    cfg = dict(optimizer=dict(type="SGD", lr=1.0), paramwise_cfg=dict(custom_keys=keys))
    wrapper = build_optim_wrapper(params, cfg, module_types=types)
    assert wrapper.get_lr()["lr"] == [1.0, 3.0, 4.0, 2.0]
