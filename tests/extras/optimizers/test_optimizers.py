"""Optimizers without recorded trajectories: formulas in NumPy, optax by name, settings outside their range."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jengine import optim
from jengine.config import OPTIMIZERS
from jengine.extras import optimizers
from jengine.extras.optimizers import (
    adagrad,
    adam_variants,
    adan,
    averaged_sgd,
    large_batch,
    rmsprop,
)
from jengine.optim import OptimWrapper, build_optim_wrapper
from jengine.optim.optimizers import optax_optimizers
from tests.refusals import check_refusal

RNG = np.random.default_rng(0)
PARAMS = {"kernel": RNG.normal(size=(4, 3)).astype("f"), "bias": RNG.normal(size=3).astype("f")}
GRADS = [jax.tree.map(lambda p: RNG.normal(size=p.shape).astype("f"), PARAMS) for _ in range(3)]


def train(wrapper, params=PARAMS, lrs=(None, None, None)):
    params, state = jax.tree.map(jnp.asarray, params), wrapper.init(params)
    step = jax.jit(wrapper.update)
    for grads, lr in zip(GRADS, lrs, strict=True):
        if lr is not None:
            wrapper.param_groups[0]["lr"] = lr
        updates, state = step({name: grads[name] for name in params}, state, params, wrapper.hyperparams)
        params = optax.apply_updates(params, updates)
    assert step._cache_size() == 1
    return params, state


def assert_close(actual, expected, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 2e-6, "atol": 1e-7})), actual, expected
    )


def test_adafactor_factors_the_last_two_axes():
    # torch.optim.Adafactor, written out in float64
    w, v = PARAMS["kernel"].astype("d"), PARAMS["bias"].astype("d")
    row, column, square, eps = np.zeros((4, 1)), np.zeros((1, 3)), np.zeros(3), np.finfo("f").eps
    for t, grads in enumerate(GRADS, start=1):
        gw, gv = grads["kernel"].astype("d"), grads["bias"].astype("d")
        weight, rate = t**-0.8, min(0.01, t**-0.5)
        row += weight * ((gw**2).mean(1, keepdims=True) - row)
        column += weight * ((gw**2).mean(0, keepdims=True) - column)
        square += weight * (gv**2 - square)
        for p, g, variance in ((w, gw, row @ column / max(row.mean(), eps)), (v, gv, square)):
            direction = g / np.sqrt(np.maximum(variance, eps**2))
            scale = max(1e-3, np.sqrt((p**2).mean())) * rate
            excess = max(1, np.sqrt((direction**2).mean()))
            p -= 0.01 * 0.1 * p + scale / excess * direction
    actual, _ = train(OptimWrapper(optimizers.TorchAdafactor(lr=0.01, weight_decay=0.1)))
    assert_close(actual, {"kernel": w, "bias": v}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [("Adafactor", "TorchAdafactor"), ("Adan", "ProximalAdan")])
def test_names_that_differ_from_those_of_optax_in_case_only_are_aliases_with_a_warning(old, new):
    with pytest.warns(FutureWarning, match=f"{old} is optax's {old.lower()}; .* is {new}"):
        alias = OPTIMIZERS.build({"type": old, "lr": 0.5})
    optax_own = OPTIMIZERS.build({"type": old.lower(), "learning_rate": 0.5})
    assert (alias.name, alias.defaults) == (optax_own.name, optax_own.defaults)


def test_an_alias_takes_betas_and_the_arguments_of_optax():
    with pytest.warns(FutureWarning):
        alias = OPTIMIZERS.build({"type": "Adan", "lr": 0.5, "betas": (0.9, 0.8, 0.7), "weight_decay": 0.1})
    assert {name: alias.defaults[name] for name in ("b1", "b2", "b3", "weight_decay")} == {
        "b1": 0.9, "b2": 0.8, "b3": 0.7, "weight_decay": 0.1
    }  # fmt: skip


def test_muon_orthogonalises_matrices():
    wrapper = OptimWrapper(optimizers.TorchMuon(lr=0.1, weight_decay=0.0))
    params = {"kernel": PARAMS["kernel"]}
    state = wrapper.init(params)
    updates, _ = wrapper.update({"kernel": GRADS[0]["kernel"]}, state, params)
    # five Newton-Schulz iterations bring the singular values close to 1; lr 0.1 scales them
    singular = np.linalg.svd(np.asarray(updates["kernel"]), compute_uv=False) / 0.1
    assert np.all((singular > 0.6) & (singular < 1.3))
    wide = {"kernel": np.ascontiguousarray(PARAMS["kernel"].T)}
    transposed, _ = wrapper.update({"kernel": GRADS[0]["kernel"].T}, OptimWrapper(optimizers.TorchMuon()).init(wide), wide)
    # a kernel (in 3, out 4) gets sqrt(4 / 3) of the rate of (in 4, out 3)
    np.testing.assert_allclose(transposed["kernel"], updates["kernel"].T * (4 / 3) ** 0.5, rtol=2e-2, atol=2e-3)
    with pytest.raises(ValueError, match="TorchMuon: parameter 'bias' must be a matrix, got shape"):
        OptimWrapper(optimizers.TorchMuon()).init(PARAMS)


@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [
        (optimizers.Lion(lr=0.01, weight_decay=0.1), optax.lion(0.01, b1=0.9, b2=0.99, weight_decay=0.1)),
        (optimizers.Adadelta(lr=0.5), optax.adadelta(0.5, rho=0.9, eps=1e-6)),
        (optimizers.Adamax(lr=0.01), optax.adamax(0.01)),
        (optimizers.RMSprop(lr=0.01, alpha=0.9), optax.rmsprop(0.01, decay=0.9, eps=1e-8, eps_in_sqrt=False)),
        (
            optimizers.RMSprop(lr=0.01, alpha=0.9, centered=True, momentum=0.5),
            optax.rmsprop(0.01, decay=0.9, eps=1e-8, eps_in_sqrt=False, centered=True, momentum=0.5),
        ),
        (
            optimizers.Lamb(lr=0.01, weight_decay=0.1),
            optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.01, eps=1e-6, weight_decay=0.1)),
        ),
        (optim.Adam(lr=0.01, maximize=True), optax.chain(optax.scale(-1.0), optax.adam(0.01))),
        (optim.Adam(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True), optax.adamw(0.01, weight_decay=0.1)),
    ],
)
def test_optimizers_that_optax_has_too(optimizer, reference):
    assert_close(train(OptimWrapper(optimizer))[0], train(OptimWrapper(reference))[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "parts"),
    [
        (optimizers.Adagrad(lr=0.01), (adagrad.scale_by_adagrad(0.0, 1e-10), optax.scale(-0.01))),
        (optimizers.ProximalAdan(lr=0.01), (adan.scale_by_adan(0.98, 0.92, 0.99, 1e-8), optax.scale(-0.01))),
        (optimizers.ASGD(lr=0.01), (averaged_sgd.averaged_sgd(0.01, 1e-4, 0.75, 1e6),)),
        (optimizers.LARS(lr=0.01), (large_batch.scale_by_lars(0.01, 0.0, 0.001, 1e-8), optax.scale(-1.0))),
        (optimizers.NAdam(lr=0.01), (adam_variants.scale_by_nadam(0.9, 0.999, 1e-8, 4e-3), optax.scale(-0.01))),
        (optimizers.RAdam(lr=0.01), (adam_variants.scale_by_radam(0.9, 0.999, 1e-8), optax.scale(-0.01))),
        (optimizers.Rprop(lr=0.01), (rmsprop.scale_by_rprop(0.01, 0.5, 1.2, 1e-6, 50.0), optax.scale(-1.0))),
    ],
)
def test_transformations_chain_with_those_of_optax(optimizer, parts):
    assert_close(train(OptimWrapper(optimizer))[0], train(OptimWrapper(optax.chain(*parts)))[0])


def test_centered_rmsprop_stays_finite_where_the_variance_vanishes():
    gradient = jnp.asarray(np.random.default_rng(0).lognormal(size=1000, sigma=3).astype("f"))
    tx = rmsprop.scale_by_stddev(0.9, 1e-8)
    step, state = jax.jit(tx.update), tx.init(gradient)
    for _ in range(300):
        updates, state = step(gradient, state)
    # the mean of equal squares minus the square of their mean: a negative rounding error for four values in ten
    assert np.all(np.isfinite(updates))


def test_lars_exclude_differs_from_parameter_to_parameter():
    cfg = {"type": "LARS", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    rules = {"custom_keys": {"bias": {"lars_exclude": True, "decay_mult": 0.0}}}
    actual, state = train(build_optim_wrapper(PARAMS, {"optimizer": cfg, "paramwise_cfg": rules}))
    sgd, _ = train(OptimWrapper(optim.SGD(lr=0.1, momentum=0.9)))
    lars_of_all, _ = train(OptimWrapper(cfg))
    assert_close(actual, {"kernel": lars_of_all["kernel"], "bias": sgd["bias"]})
    assert set(optax.tree.get(state, "trace")) == {"kernel", "bias"}  # one chain for both groups


@pytest.mark.parametrize(
    "optimizer", [optimizers.Lamb(), optimizers.ProximalAdan(max_grad_norm=1.0), {"type": "BertAdam1", "lr": 0.1}]
)
@pytest.mark.parametrize("clip_grad", [{"max_norm": 1.0}, {"clip_value": 0.1}])
def test_optimizers_that_clip_work_with_clipping_in_the_wrapper(optimizer, clip_grad):
    actual, _ = train(OptimWrapper(optimizer, clip_grad=clip_grad))
    assert all(np.all(np.isfinite(p)) for p in actual.values())


OPTAX_NAMES = {*optax_optimizers.OPTAX_NAMES, *optax_optimizers.OPTAX_CONTRIB_NAMES}
# their updates require the loss; they are tested in test_optax_usage.py and test_optax_contrib_of_a_run.py
REQUIRE_LOSS = {"lbfgs", "momo", "momo_adam", "polyak_sgd", "sophia"}


@pytest.mark.parametrize("name", sorted(OPTAX_NAMES - REQUIRE_LOSS))
def test_optax_optimizers_are_available_by_name(name):
    factory = getattr(optax, name, None) or getattr(optax.contrib, name)
    extra = {"key": 0} if name == "noisy_sgd" else {}
    tx = factory(learning_rate=0.01, **extra)
    params, state = jax.tree.map(jnp.asarray, PARAMS), tx.init(PARAMS)
    for grads in GRADS:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    actual, _ = train(build_optim_wrapper(PARAMS, {"optimizer": {"type": name, "learning_rate": 0.01, **extra}}))
    # a compiled sign or factor may be rounded differently; the most chaotic optimizers differ by 1e-5
    assert_close(actual, params, rtol=1e-4, atol=1e-5)


def test_hyperparams_of_optax_optimizers_are_data_in_every_group():
    cfg = {
        "optimizer": {"type": "adamw", "learning_rate": 0.1, "weight_decay": 0.01},
        "paramwise_cfg": {"custom_keys": {"bias": {"lr_mult": 0.5, "decay_mult": 0.0, "b1": 0.8}}},
    }
    wrapper = build_optim_wrapper(PARAMS, cfg)
    assert wrapper.get_lr() == {"base_lr": [0.1], "lr": [0.1, 0.05]}
    actual, _ = train(wrapper)
    alone = {"kernel": optax.adamw(0.1, weight_decay=0.01), "bias": optax.adamw(0.05, b1=0.8, weight_decay=0.0)}
    for name, tx in alone.items():
        p, state = jnp.asarray(PARAMS[name]), tx.init(PARAMS[name])
        for grads in GRADS:
            updates, state = tx.update(grads[name], state, p)
            p = optax.apply_updates(p, updates)
        # optax computes 1 - b2 from a float32 here
        np.testing.assert_allclose(actual[name], p, rtol=1e-5, atol=5e-6)


def test_injected_lr_of_a_built_chain_can_be_changed():
    assert OptimWrapper(optax.sgd(0.1)).get_lr() == {}
    wrapper = OptimWrapper(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    assert wrapper.get_lr()["lr"] == pytest.approx([0.1])
    actual, _ = train(wrapper, lrs=(0.1, 0.05, 0.0))
    expected = jax.tree.map(lambda p, a, b: p - 0.1 * a - 0.05 * b, PARAMS, GRADS[0], GRADS[1])
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"type": "SGD", "nesterov": True}, ["nesterov", "momentum", "above 0"]),
        ({"type": "SGD", "nesterov": True, "momentum": 0.9, "dampening": 0.1}, ["dampening 0"]),
        ({"type": "Adam", "betas": (0.9, 1.0)}, ["betas[1]`", "got 1.0"]),
        ({"type": "AdamW", "betas": (0.9,)}, ["betas`", "got (0.9,)"]),
        ({"type": "Rprop", "etas": (1.5, 1.2)}, ["etas[0]`", "(0, 1)"]),
        ({"type": "TorchAdafactor", "eps": (None, -1.0)}, ["eps[1]`", "at least 0"]),
        ({"type": "TorchMuon", "adjust_lr_fn": "foo"}, ["adjust_lr_fn`", "'original'", "'match_rms_adamw'", "None"]),
        ({"type": "TorchMuon", "ns_coefficients": (1.0,)}, ["ns_coefficients`"]),
        ({"type": "TorchMuon", "ns_steps": 0}, ["ns_steps`", "100", "got 0"]),
    ],
)
def test_settings_outside_their_range(cfg, words):
    check_refusal(lambda: OPTIMIZERS.build(cfg), ValueError, *words)
