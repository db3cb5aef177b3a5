"""LARS, Lamb and Adan against values from MMSelfSup and MMPretrain on PyTorch, float64; w = (3, 4)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.extras.optimizers import LARS
from jengine.optim import OptimWrapper, build_optim_wrapper
from tests.refusals import check_refusal

ZERO_LAST = ((0.6, 0.8), (1.0, 0.0), (0.0, 0.0))
SIGN_CHANGE = ((0.6, 0.8), (1.0, 0.0), (0.5, -0.5))


def trajectory(optimizer, grads, paramwise_cfg=None):
    with jax.enable_x64(True):
        params = {"w": jnp.asarray((3.0, 4.0))}
        wrapper = build_optim_wrapper(params, {"optimizer": optimizer, "paramwise_cfg": paramwise_cfg})
        state = wrapper.init(params)
        seen = []
        for grad in grads:
            updates, state = wrapper.update({"w": jnp.asarray(grad)}, state, params)
            params = optax.apply_updates(params, updates)
            seen.append(np.asarray(params["w"]))
        return np.concatenate(seen)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"lr": 1, "momentum": 0.9, "weight_decay": 0.1},
            (2.99700000002, 3.996000000027, 2.989970555919, 3.991068888356, 2.684647000636, 3.587523999016),
        ),
        (
            {"lr": 4.8, "momentum": 0.9, "weight_decay": 1e-6},
            (2.985600000144, 3.980800000192, 2.948755248051, 3.963519905285, 2.915580817143, 3.947948794973),
        ),
        (
            {"lr": 1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
            (2.994300000038, 3.992400000051, 2.983650707698, 3.986634684911, 2.41106605914, 3.22518151307),
        ),
        (
            {"lr": 1, "weight_decay": 0.1},
            (2.99700000002, 3.996000000027, 2.992670555901, 3.994668888332, 2.693403500311, 3.595201999498),
        ),
        (
            {"lr": 1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5},
            (2.99700000002, 3.996000000027, 2.992135277978, 3.991734444203, 2.838150264242, 3.788308721752),
        ),
    ],
)
def test_lars_scales_each_tensor_by_its_norms(settings, expected):
    np.testing.assert_allclose(trajectory({"type": "LARS", **settings}, ZERO_LAST), expected, rtol=0, atol=1e-10)


def test_lars_exclude_gives_momentum_sgd_with_decay():
    seen = trajectory(
        {"type": "LARS", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        ZERO_LAST,
        {"custom_keys": {"w": {"lars_exclude": True}}},
    )
    np.testing.assert_allclose(seen, (2.91, 3.88, 2.6999, 3.7332, 2.483811, 3.563748), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -0.1}, ["lr`", "at least 0", "got -0.1"]),
        ({"lr": 1, "momentum": -1}, ["momentum`", "[0, 1]"]),
        ({"lr": 1, "momentum": 0.9, "nesterov": True, "dampening": 0.5}, ["above 0"]),
    ],
)
def test_lars_rejects_settings_outside_their_range(settings, words):
    check_refusal(lambda: LARS(**settings), ValueError, *words)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (
            {"type": "Lamb", "lr": 0.1, "weight_decay": 0.01},
            (2.6481587763, 3.6447426942, 2.2790801918, 3.3863825956, 1.8747183239, 3.3306204589),
        ),
        # without decay there is no trust ratio: the first step is Adam's
        ({"type": "Lamb", "lr": 0.1, "weight_decay": 0.0}, (2.9, 3.9)),
    ],
)
def test_lamb_follows_mmpretrain(optimizer, expected):
    seen = trajectory(optimizer, SIGN_CHANGE)[: len(expected)]
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-6 if len(expected) == 2 else 1e-9)


def test_adan_follows_mmpretrain():
    seen = trajectory({"type": "ProximalAdan", "lr": 0.1, "weight_decay": 0.02}, SIGN_CHANGE)
    # the second and the third step; optax.adan gives 2.7913, 3.8202 at the second
    np.testing.assert_allclose(seen[2:], (2.7947070168, 3.8828069934, 2.7132510788, 3.9131476833), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "optimizer",
    [
        dict(type="LARS", lr=0.1, momentum=0.9, weight_decay=0.01),
        dict(type="Lamb", lr=0.1, max_grad_norm=None),
        dict(type="TorchAdafactor", lr=0.1, weight_decay=0.01),
        dict(type="BertAdam1", lr=0.1, max_grad_norm=0.5),
    ],
)
def test_each_of_stacked_layers_is_updated_as_a_layer_by_itself(optimizer):
    rng = np.random.default_rng(0)
    layers = [
        dict(kernel=rng.normal(size=(4, 5)) * 10**i, bias=rng.normal(size=5), scale=rng.normal(size=5)) for i in range(2)
    ]
    grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / (1 + abs(leaf).max()), layers)
    as_tree = lambda layers: {str(i): jax.tree.map(jnp.float32, layer) for i, layer in enumerate(layers)}  # noqa: E731
    as_stack = lambda layers: {"layers": jax.tree.map(lambda *x: jnp.float32(np.stack(x)), *layers)}  # noqa: E731
    results = []
    for build in (as_tree, as_stack):
        params, grad = build(layers), build(grads)
        wrapper = build_optim_wrapper(params, dict(optimizer=optimizer))
        state = wrapper.init(params)
        for _ in range(3):
            updates, state = wrapper.update(grad, state, params)
            params = optax.apply_updates(params, updates)
        results.append(params)
    unrolled, stacked = results
    for i in range(2):
        for name, leaf in unrolled[str(i)].items():
            np.testing.assert_allclose(stacked["layers"][name][i], leaf, rtol=1e-6, atol=1e-6)


def test_layers_of_a_tensor_may_be_in_several_groups():
    groups = [{"params": f"layers[{i}]", "lr": 0.1 * (i + 1)} for i in range(2)]
    wrapper = OptimWrapper(LARS(lr=0.1, eta=1.0).with_groups(groups))
    params, grads = {"layers": jnp.array([[3.0, 4.0], [6.0, 8.0]])}, {"layers": jnp.array([[1.0, 0.0], [0.0, 2.0]])}
    updates, _ = wrapper.update(grads, wrapper.init(params), params, wrapper.hyperparams)
    # lr |w| g / |g|
    np.testing.assert_allclose(updates["layers"], [[-0.5, 0], [0, -2]], rtol=1e-6)
