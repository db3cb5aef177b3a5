"""Parametrizations: initial scales, rates and decays of a base model, by role."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.extras.networks import TransformerLM
from jengine.extras.optimizers.parametrizations import Base
from jengine.model import CrossEntropy, LinenModel, parameter_roles
from jengine.optim import build_optim_wrapper
from jengine.runner import Runner
from jengine.train import create_train_state
from tests.refusals import check_refusal

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 12)).astype("f")
TOKENS = RNG.integers(0, 32, (4, 9))
LM_BATCH = dict(tokens=TOKENS[:, :-1], label=TOKENS[:, 1:])
BATCH = dict(x=X, label=RNG.integers(0, 5, 32))


class MLP(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width, name="first")(x))
        x = nn.relu(nn.Dense(self.width, name="second")(x))
        return nn.Dense(5, name="head")(x)


def language_model(width=16, depth=2):
    module = TransformerLM(
        vocab_size=32, width=width, depth=depth, heads=width // 8, head_size=8, mlp_width=2 * width, remat=False
    )
    return LinenModel(module, CrossEntropy(), inputs="tokens")


def build(model, base, optimizer, batch=BATCH, width=1.0, depth=1.0, **rules):
    """Return the wrapper for a base model, or its parameters."""
    params, state = jax.eval_shape(model.init, jax.random.key(1), batch)
    init = (lambda: base.init(jax.random.key(0), batch)[0]) if hasattr(base, "init") else lambda: base
    rules = {"parametrization": "mup", "base": {"width": {"model.module.width": 16}}, **rules}
    return build_optim_wrapper(
        params,
        dict(optimizer=optimizer, paramwise_cfg=rules),
        module_types=model.module_types,
        roles=functools.partial(parameter_roles, model, params, batch=batch, model_state=state),
        base=lambda _: Base(init, width, depth),
    )


def start_sizes(model, wrapper, batch=BATCH):
    """Return the root mean squares of the parameters at the first step, by path."""

    @jax.jit
    def init(key):
        state = create_train_state(*model.init(key, batch), wrapper, rng=key)
        return {path: rms(x) for path, x in paths.flatten(state.params).items()}

    return {path: float(size) for path, size in init(jax.random.key(1)).items()}


def rescaled_sizes(model, wrapper, batch):
    """Return the root mean squares of parameters that are all 3 and then scaled, by path."""
    scaled = jax.jit(lambda params: wrapper.rescale(jax.tree.map(lambda x: 3 * x, params)))(ones(model, batch))
    return {path: float(rms(x)) for path, x in paths.flatten(jax.device_get(scaled)).items()}


def ones(model, batch):
    """Return parameters like the model's, all 1."""
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params)


def mlp(width):
    return LinenModel(MLP(width), CrossEntropy(), inputs="x")


def rms(x):
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.sqrt(xp.mean(xp.square(x)))


def initial_sizes(model, batch):
    @jax.jit
    def init(key):
        return {path: rms(x) for path, x in paths.flatten(model.init(key, batch)[0]).items()}

    return {path: float(size) for path, size in init(jax.random.key(0)).items()}


# by path: learning rates of SGD, Adam and Muon in units of the base model's (paper's table 3)
RATES = {
    "first.kernel": ("r", "1", "1"),
    "first.bias": ("r", "1", "1"),
    "second.kernel": ("1", "1/r", "1"),
    "second.bias": ("r", "1", "1"),
    "head.kernel": ("1/r", "1/r", "1/r"),
    "head.bias": ("1", "1", "1"),
}


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize(("column", "kind"), [(0, "SGD"), (1, "AdamW"), (2, "Muon"), (1, "SOAP"), (1, "Shampoo")])
def test_rates_and_decays_at_several_times_the_width_are_those_of_the_table(ratio, column, kind):
    settings = dict(adam_weight_decay=0.1) if kind in ("Muon", "SOAP", "Shampoo") else {}
    optimizer = dict(type=kind, lr=0.5, weight_decay=0.1, **settings)
    wrapper = build(mlp(16 * ratio), mlp(16), optimizer)
    for path, rates in RATES.items():
        expected = eval(rates[column], {"r": ratio})
        found = wrapper.grouped.param_settings()[path]
        assert found["lr"] == pytest.approx(0.5 * expected), path
        assert found["lr"] * found["weight_decay"] == pytest.approx(0.05), path


@pytest.mark.parametrize("ratio", [2, 4])
def test_initial_sizes_are_those_of_the_base_model_times_the_table(ratio):
    base = initial_sizes(mlp(16), BATCH)
    model = mlp(16 * ratio)
    sizes = start_sizes(model, build(model, mlp(16), dict(type="Adam", lr=0.1)))
    factors = {"first.kernel": 1, "second.kernel": ratio**-0.5, "head.kernel": 1 / ratio}
    for path, factor in factors.items():
        assert sizes[path] == pytest.approx(base[path] * factor, rel=1e-5), path
    assert not any(sizes[f"{name}.bias"] for name in ("first", "second", "head"))


def test_a_transformer_has_the_table_by_role():
    model = language_model(64)
    base = ones(language_model(), LM_BATCH)
    wrapper = build(model, base, dict(type="AdamW", lr=0.5), LM_BATCH, width=4.0)
    sizes = rescaled_sizes(model, wrapper, LM_BATCH)
    settings = wrapper.grouped.param_settings()
    for path, found in sizes.items():
        is_hidden = path.startswith("layers") and "norm" not in path
        scale = 1 / 4 if path == "head.kernel" else 1 / 2 if is_hidden else 1
        assert found == pytest.approx(scale), path
        assert settings[path]["lr"] == (0.125 if is_hidden or path == "head.kernel" else 0.5), path


def test_an_initializer_that_knows_the_width_gets_the_size_at_the_base_width():
    class Table(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            # Flax's default has the variance 1 / width, the table asks for that of the base
            return nn.Dense(5, name="head")(nn.Embed(32, self.width, name="embed")(x).mean(1))

    batch = dict(x=TOKENS, label=TOKENS[:, 0] % 5)
    small, large = (LinenModel(Table(width), CrossEntropy(), inputs="x") for width in (16, 64))
    sizes = start_sizes(large, build(large, small, dict(type="Adam", lr=0.1), batch), batch)
    assert sizes["embed.embedding"] == pytest.approx(initial_sizes(small, batch)["embed.embedding"], rel=1e-5)


def test_rates_of_muon_take_its_own_factor_into_account():
    rules = dict(type="Muon", lr=0.5, consistent_rms=0.2)
    wrapper = build(mlp(64), mlp(16), rules)
    assert wrapper.grouped.param_settings()["second.kernel"]["lr"] == pytest.approx(0.25)
    wrapper = build(mlp(64), mlp(16), dict(type="Muon", lr=0.5, kinds=["hidden", "input", "head"]))
    settings = wrapper.grouped.param_settings()
    # `sqrt(max(1, out / in))` from 12 inputs to 16 and 64 outputs; to 5 outputs it is 1
    assert settings["first.kernel"]["lr"] == pytest.approx(0.5)
    assert settings["head.kernel"]["lr"] == pytest.approx(0.25)


def test_complete_p_makes_residual_branches_smaller_in_deep_models():
    model = language_model(32, 4)
    wrapper = build(
        model,
        ones(language_model(16, 4), LM_BATCH),
        dict(type="AdamW", lr=0.5, weight_decay=0.1, eps=1e-6),
        LM_BATCH,
        width=2.0,
        depth=2.0,
        parametrization="complete-p",
        branches=["layers.attn.out", "layers.mlp.down"],
    )
    sizes = rescaled_sizes(model, wrapper, LM_BATCH)
    settings = wrapper.grouped.param_settings()
    expected = {  # size, rate, epsilon
        "embed.embedding": (1, 1, 1 / 2),
        "layers.attn_norm.scale": (1, 1, 1 / 4),
        "layers.attn.query.kernel": (2**-0.5, 1 / 2, 1 / 4),
        "layers.attn.out.kernel": (2**-0.5 / 2, 1 / 4, 1 / 2),
        "layers.mlp.up.kernel": (2**-0.5, 1 / 2, 1 / 4),
        "layers.mlp.down.kernel": (2**-0.5 / 2, 1 / 4, 1 / 2),
        "norm.scale": (1, 1, 1 / 2),
        "head.kernel": (1 / 2, 1 / 2, 1),
    }
    for path, (size, rate, eps) in expected.items():
        assert sizes[path] == pytest.approx(size), path
        assert settings[path]["lr"] == pytest.approx(0.5 * rate), path
        assert settings[path]["lr"] * settings[path]["weight_decay"] == pytest.approx(0.05), path
        assert settings[path]["eps"] == pytest.approx(1e-6 * eps), path


def test_multipliers_folded_into_a_layer_train_as_multipliers_do():
    """Adam on `W = c V` with the folded settings equals Adam on V, with the output multiplied by c."""
    x, y = X[:, :6], X[:, 6:9]
    c, w = 0.25, RNG.normal(size=(6, 3)).astype("f")

    def train(params, multiplier, lr, decay, eps):
        wrapper = build_optim_wrapper(params, dict(optimizer=dict(type="AdamW", lr=lr, weight_decay=decay, eps=eps)))
        state = wrapper.init(params)
        for _ in range(5):
            grads = jax.grad(lambda p: jnp.mean((multiplier * (x @ p["w"]) - y) ** 2))(params)
            params, state = wrapper.apply_gradients(grads, state, params)
        return multiplier * params["w"]

    multiplied = train({"w": jnp.asarray(w)}, c, 0.1, 0.2, 1e-3)
    folded = train({"w": jnp.asarray(c * w)}, 1.0, 0.1 * c, 0.2 / c, 1e-3 / c)
    np.testing.assert_allclose(multiplied, folded, rtol=2e-5, atol=1e-6)


def runner_config(tmp_path, width, **rules):
    return dict(
        model=dict(type="LinenModel", module=dict(type=MLP, width=width), loss=dict(type="CrossEntropy"), inputs="x"),
        work_dir=str(tmp_path),
        train_dataloader=dict(batch_size=16, dataset=dict(type="ArrayDataset", arrays=BATCH)),
        train_cfg=dict(by_epoch=False, max_iters=2),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1), paramwise_cfg=rules),
        default_hooks=dict(logger=None),
    )


MUP = dict(parametrization="mup", base=dict(width=[("model.module.width", 16)]))


def test_at_the_base_width_a_run_is_the_standard_one_bit_for_bit(tmp_path):
    states = [
        Runner.from_cfg(runner_config(tmp_path / str(len(rules)), 16, **rules)).train() for rules in ({}, MUP)
    ]
    for one, other in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_scales_its_initial_parameters_once_and_resumes_them_as_they_are(tmp_path):
    runner = Runner.from_cfg(runner_config(tmp_path, 32, **MUP))
    runner.prepare_training()
    first = paths.flatten(jax.device_get(runner.state.params))
    base = initial_sizes(mlp(16), BATCH)
    assert float(rms(first["head.kernel"])) == pytest.approx(base["head.kernel"] / 2, rel=1e-5)
    settings = runner.optim_wrapper.grouped.param_settings()
    assert settings["second.kernel"]["lr"] == pytest.approx(0.05)
    trained = runner.train()
    again = Runner.from_cfg({**runner_config(tmp_path, 32, **MUP), "resume": True})
    for one, other in zip(jax.tree.leaves(trained.params), jax.tree.leaves(again.train().params), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (dict(parametrization="up", base=MUP["base"]), ["mup, complete-p"]),
        (dict(parametrization="mup"), ["must be dict(width="]),
        (dict(base=MUP["base"]), ["paramwise_cfg.parametrization` must be set"]),
        (dict(parametrization="mup", base=dict(width={"model.module.wdth": 16})), ["'model.module.wdth'", "width"]),
        (dict(**MUP, branches=["x"]), ["complete-p"]),
        (dict(parametrization="complete-p", base=MUP["base"]), ["branches`"]),
    ],
)
def test_mistakes_are_named(tmp_path, rules, words):
    cfg = runner_config(tmp_path, 32, **rules)
    check_refusal(lambda: Runner.from_cfg(cfg).build_optimizer(), ConfigError, *words)
