"""Roles that are given, guessed or unknown, and what shows them."""

import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from jengine.config.errors import ConfigError
from jengine.model.functional import FunctionalModel
from jengine.model.linen import LinenModel
from jengine.model.roles import Role, parameter_roles
from jengine.optim import build_optim_wrapper
from tests.refusals import check_refusal

PARAMS = {"blocks_0": {"qkv": {"kernel": jnp.zeros((4, 3, 8)), "bias": jnp.zeros((3, 8))}}, "head": jnp.zeros((8, 2))}


def test_a_bare_tree_is_told_by_names_and_shapes_with_a_warning(caplog):
    params = {
        "embed": {"embedding": jnp.zeros((7, 4))},
        "pos_embedding": jnp.zeros((1, 3, 4)),
        "layers": {
            "attn": {"query": {"kernel": jnp.zeros((2, 4, 2, 2))}, "out": {"kernel": jnp.zeros((2, 2, 2, 4))}},
            "ln": {"scale": jnp.zeros((2, 4)), "bias": jnp.zeros((2, 4))},
            "mlp": {"kernel": jnp.zeros((2, 4, 4)), "bias": jnp.zeros((2, 4))},
        },
        "temperature": jnp.zeros(()),
        "lm_head": {"kernel": jnp.zeros((4, 7))},
    }  # fmt: skip
    roles = parameter_roles(None, params)
    assert roles == {
        "embed.embedding": Role("embedding", (0,), (1,)),
        "pos_embedding": Role("position", (), (0, 1, 2)),
        "layers.attn.query.kernel": Role("hidden", (1,), (2, 3), (0,), 2),
        "layers.attn.out.kernel": Role("hidden", (1, 2), (3,), (0,), 1),
        "layers.ln.scale": Role("norm", (), (1,), (0,)),
        "layers.ln.bias": Role("norm", (), (1,), (0,)),
        "layers.mlp.kernel": Role("hidden", (1,), (2,), (0,)),
        "layers.mlp.bias": Role("bias", (), (1,), (0,)),
        "temperature": Role("scale"),
        "lm_head.kernel": Role("head", (0,), (1,)),
    }
    assert [r.message for r in caplog.records] == [
        "the roles of the parameters are told by their names and shapes alone"
    ]


def test_what_cannot_be_told_is_an_error_only_where_it_is_asked_for():
    roles = parameter_roles(None, PARAMS)
    assert roles["head"].kind == "head"
    with pytest.raises(ConfigError, match=r"the role of 'blocks_0.qkv.kernel' cannot be told: set `paramwise_cfg.roles`"):
        roles["blocks_0.qkv.kernel"]


@pytest.mark.parametrize("pattern", ["blocks_*.qkv.kernel", "blocks.*.qkv.weight", "*.kernel"])
def test_a_given_role_replaces_the_one_that_is_told(pattern):
    given = dict(role="hidden", fan_in=[0], fan_out=(1, 2), heads=1, parts=3)
    roles = parameter_roles(None, PARAMS, {pattern: given, "head": dict(role="router")})
    assert roles["blocks_0.qkv.kernel"] == Role("hidden", (0,), (1, 2), heads=1, parts=3)
    assert roles["head"] == Role("router", (0,), (1,))  # the axes stay


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"blocks_1.qkv": dict(role="hidden")}, ["got none like it", "closest: blocks_0.qkv"]),
        ({"head": dict(role="heads")}, ["['head']", "(role=...)", "got {'role': 'heads'}"]),
        ({"head": "head"}, ["(role=...)", "got 'head'"]),
        ({"head": dict(role="head", fanin=(0,))}, ["'fanin'", "did you mean 'fan_in'"]),
        ({"head": dict(role="head", fan_in="in")}, ["['head']", ".fan_in", "(0,)", "got 'in'"]),
        ({"head": dict(role="head", fan_in=(2,))}, ["'head'"]),
        ({"head": dict(role="head", parts="two")}, ["parts`", "got 'two'"]),
    ],
)  # fmt: skip
def test_a_given_role_that_fits_nothing_is_an_error(given, words):
    check_refusal(lambda: build_optim_wrapper(PARAMS, dict(optimizer=dict(type="AdamW"), paramwise_cfg=dict(roles=given))), ConfigError, *words)


def test_a_loss_that_cannot_be_traced_leaves_names_and_shapes(caplog):
    def loss(params, batch):
        raise RuntimeError("not today")

    model = FunctionalModel(lambda rng: PARAMS, loss)
    assert parameter_roles(model, PARAMS, batch=jnp.zeros(2))["head"].kind == "head"
    assert "cannot be traced for the roles of the parameters: RuntimeError('not today')" in caplog.text


class TwoWays(nn.Module):
    """Biases with axes for heads, and a norm of one's own."""

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 4), name="split")(x)
        x = x * self.param("gain", nn.initializers.ones, (2, 4))
        x = x * jax.lax.rsqrt(jnp.mean(x * x, (1, 2), keepdims=True))
        x = x * self.param("weight", nn.initializers.ones, (2, 4))
        return nn.Dense(3, name="out")(x.reshape(-1, 8))


def two_ways():
    model, batch = LinenModel(TwoWays(), loss=lambda y, batch: y.sum(), inputs="x"), {"x": jnp.zeros((2, 5))}
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    return params, lambda given, **kwargs: parameter_roles(model, params, given, batch, **kwargs)


def test_flat_decay_is_by_role(caplog):
    params, find_roles = two_ways()
    cfg = dict(optimizer=dict(type="AdamW", weight_decay=1.0), paramwise_cfg=dict(flat_decay_mult=0.0))
    wrapper = build_optim_wrapper(params, cfg, module_types={"split": "DenseGeneral"}, roles=find_roles)
    assert {path for path, group in wrapper.param_settings.items() if group["weight_decay"] == 0} == {
        "split.bias", "weight", "out.bias",
    }  # fmt: skip
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_table_of_groups_has_the_roles():
    params, find_roles = two_ways()
    cfg = dict(
        optimizer=dict(type="AdamW", weight_decay=1.0),
        paramwise_cfg=dict(
            custom_keys={"out": dict(lr_mult=2.0), "gain": dict(requires_grad=False), "none": dict(lr_mult=3.0)},
            roles={"out.kernel": dict(role="hidden")},
        ),
    )
    wrapper = build_optim_wrapper(params, cfg, roles=find_roles)
    columns, rows = wrapper.group_table(with_roles=True)
    assert columns[:4] == ["group", "patterns", "roles", "tensors"]
    assert [row[:4] for row in rows] == [
        ["0", "", "1 bias, 1 input, 1 norm", "3"],
        ["1", "out", "1 bias, 1 hidden", "2"],
        ["frozen", "", "1 scale", "1"],
        ["no match", "none", "", "0"],
    ]
    assert wrapper.group_table()[0] == columns[:2] + columns[3:]


def test_a_wrapper_that_knows_roles_does_not_keep_the_parameters():
    kernel = jnp.ones((3, 2))
    is_alive = weakref.ref(kernel)
    cfg = dict(optimizer=dict(type="AdamW", weight_decay=1.0), paramwise_cfg=dict(norm_decay_mult=0.0))
    wrapper = build_optim_wrapper({"head": {"kernel": kernel}, "norm": {"scale": jnp.ones(2)}}, cfg)
    del kernel
    gc.collect()
    assert is_alive() is None
    assert [row[2] for row in wrapper.group_table(with_roles=True)[1]] == ["1 head", "1 norm"]
