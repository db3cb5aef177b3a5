"""Optimizers by role: Muon, NorMuon, SOAP and Shampoo for matrices, AdamW for the other parameters."""

import logging
import math
import operator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.networks import TransformerLM
from jengine.extras.optimizers import Muon
from jengine.extras.plan.collectives import find_collectives
from jengine.extras.plan.program_costs import compile_plan
from jengine.hooks import Hook
from jengine.model import CrossEntropy, FunctionalModel, LinenModel
from jengine.model.roles import parameter_roles
from jengine.optim import OptimWrapper, build_optim_wrapper
from jengine.optim.optimizers.adam import scale_by_adam
from tests.devices import take_devices
from tests.runner.conftest import build_runner

RNG = np.random.default_rng(0)
STEPS = 30
ROLES = {
    "layers.kernel": dict(role="hidden", fan_in=(1,), fan_out=(2,), stacked=(0,)),
    "layers.bias": dict(role="bias", fan_out=(1,), stacked=(0,)),
    "conv.kernel": dict(role="convolution", fan_in=(0, 1, 2), fan_out=(3,)),
    "embed.table": dict(role="embedding", fan_in=(0,), fan_out=(1,)),
}
PARAMS = {
    "layers": {"kernel": RNG.normal(size=(3, 8, 12)).astype("f"), "bias": RNG.normal(size=(3, 12)).astype("f")},
    "conv": {"kernel": RNG.normal(size=(3, 3, 4, 6)).astype("f")},
    "embed": {"table": RNG.normal(size=(7, 8)).astype("f")},
}
TOKENS = RNG.integers(0, 32, (16, 8))
BATCH = dict(tokens=TOKENS, label=np.roll(TOKENS, -1, 1))


EACH = [*(dict(type=name) for name in ("Muon", "NorMuon", "SOAP")), dict(type="Shampoo", precondition_frequency=2)]
EACH_NAME = operator.itemgetter("type")


def random_grads(params, steps=STEPS):
    rng = np.random.default_rng(1)
    return [jax.tree.map(lambda p: rng.normal(size=p.shape).astype("f"), params) for _ in range(steps)]


def build(params, optimizer, roles=ROLES, **rules):
    return build_optim_wrapper(params, dict(optimizer=optimizer, paramwise_cfg=dict(roles=roles, **rules)))


def train(wrapper, params, grads):
    params = jax.tree.map(jnp.asarray, params)
    state = wrapper.init(params)
    step = jax.jit(wrapper.apply_gradients)
    with jax.default_matmul_precision("highest"):  # GPUs round products of float32 otherwise
        for g in grads:
            params, state = step(g, state, params, wrapper.hyperparams)
    assert step._cache_size() == 1
    return params


def assert_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def make_lm(**changes):
    sizes = dict(vocab_size=32, width=16, depth=2, heads=2, mlp_width=24, remat=False)
    return LinenModel(TransformerLM(**{**sizes, **changes}), CrossEntropy(), inputs="tokens")


def make_mlp():
    """Return a model that compiles fast, with two hidden matrices."""
    layers = [nn.Embed(32, 8), nn.Dense(12), nn.tanh, nn.Dense(8), nn.tanh, nn.Dense(32)]
    return LinenModel(nn.Sequential(layers), CrossEntropy(), inputs="tokens")


def build_for(model, params, **cfg):
    return build_optim_wrapper(
        params,
        cfg,
        module_types=model.module_types,
        roles=lambda given: parameter_roles(model, params, given, BATCH),
    )


# --- Muon ---


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(nesterov=False), dict(consistent_rms=0.2), dict(preconditioning="aol", ns_steps=4)],
    ids=str,
)
def test_muon_is_that_of_optax_with_dimension_numbers(settings):
    dims = optax.contrib.MuonDimensionNumbers
    numbers = {
        "layers": {"kernel": dims(1, 2), "bias": None},
        "conv": {"kernel": dims((0, 1, 2), 3)},
        "embed": {"table": None},
    }
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers, weight_decay=0.1, **settings)
    grads = random_grads(PARAMS)
    expected, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(tx.update)
    for g in grads:
        updates, state = step(g, state, expected)
        expected = optax.apply_updates(expected, updates)
    wrapper = build(PARAMS, dict(type="muon", learning_rate=0.1, weight_decay=0.1, **settings))
    actual = train(wrapper, PARAMS, grads)
    for name in ("layers", "conv"):
        np.testing.assert_allclose(actual[name]["kernel"], expected[name]["kernel"], atol=3e-6)
    # the others by AdamW, without the Nesterov momentum that optax adds to it
    adam = optax.chain(scale_by_adam(0.9, 0.999, 1e-8), optax.scale(-0.1))
    others = train(OptimWrapper(adam), PARAMS, grads)
    np.testing.assert_allclose(actual["embed"]["table"], others["embed"]["table"], atol=1e-6)
    np.testing.assert_allclose(actual["layers"]["bias"], others["layers"]["bias"], atol=1e-6)


def test_others_have_a_rate_and_decay_of_their_own_that_rules_multiply():
    optimizer = dict(type="Muon", lr=0.4, weight_decay=0.2, adam_learning_rate=0.02, adam_weight_decay=0.1)
    rules = dict(bias_decay_mult=0.0, custom_keys={"embed": dict(lr_mult=0.5, decay_mult=3.0), "conv": dict(lr_mult=2)})
    settings = build(PARAMS, optimizer, **rules).param_settings
    rates = {path: (group["lr"], group["weight_decay"], group["adam"]) for path, group in settings.items()}
    assert rates == {
        "conv.kernel": (0.8, 0.2, False),
        "embed.table": (0.01, pytest.approx(0.3), True),
        "layers.bias": (0.02, 0.0, True),
        "layers.kernel": (0.4, 0.2, False),
    }


def test_layer_decay_multiplies_both_rates():
    params = {
        name: {"kernel": np.ones((4, 4), "f"), "bias": np.ones(4, "f")} for name in ("block_0", "block_1", "head")
    }
    cfg = dict(
        optimizer=dict(type="Muon", lr=1.0, weight_decay=0.1, adam_learning_rate=0.1),
        constructor="LearningRateDecayOptimWrapperConstructor",
        paramwise_cfg=dict(layer_pattern=r"block_(\d+)", layer_decay_rate=0.5),
    )
    settings = build_optim_wrapper(params, cfg).param_settings
    assert {path: group["lr"] for path, group in settings.items()} == {
        "block_0.bias": 0.025, "block_0.kernel": 0.25, "block_1.bias": 0.05, "block_1.kernel": 0.5,
        "head.bias": 0.1, "head.kernel": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("optimizer", EACH, ids=EACH_NAME)
def test_fused_projections_are_trained_like_separate_ones(optimizer):
    parts = [RNG.normal(size=(8, 8)).astype("f") for _ in range(3)]
    fused = {"qkv": {"kernel": np.concatenate(parts, 1)}}
    separate = {n: {"kernel": part} for n, part in zip("qkv", parts, strict=True)}
    role = dict(role="hidden", fan_in=(0,), fan_out=(1,))
    grads = random_grads(separate, 5)
    actual = train(
        build(fused, dict(optimizer, lr=0.1), {"qkv.kernel": dict(role, parts=3)}),
        fused,
        [{"qkv": {"kernel": np.concatenate([g[n]["kernel"] for n in "qkv"], 1)}} for g in grads],
    )
    expected = train(build(separate, dict(optimizer, lr=0.1), {"*.kernel": role}), separate, grads)
    joined = np.concatenate([expected[n]["kernel"] for n in "qkv"], 1)
    np.testing.assert_allclose(actual["qkv"]["kernel"], joined, atol=5e-6)


@pytest.mark.parametrize("optimizer", EACH, ids=EACH_NAME)
def test_with_per_head_each_head_is_a_matrix(optimizer):
    heads = {
        "query": {"kernel": RNG.normal(size=(6, 2, 6)).astype("f")},
        "out": {"kernel": RNG.normal(size=(2, 6, 6)).astype("f")},
    }
    roles = {
        "query.kernel": dict(role="hidden", fan_in=(0,), fan_out=(1, 2), heads=1),
        "out.kernel": dict(role="hidden", fan_in=(0, 1), fan_out=(2,), heads=0),
    }
    apart = lambda tree: {  # noqa: E731
        f"{name}{i}": {"kernel": np.take(np.asarray(tree[name]["kernel"]), i, axis)}
        for name, axis in (("query", 1), ("out", 0))
        for i in range(2)
    }
    grads = random_grads(heads, 5)
    actual = train(build(heads, dict(optimizer, lr=0.1, per_head=True), roles), heads, grads)
    role = {"*.kernel": dict(role="hidden", fan_in=(0,), fan_out=(1,))}
    expected = train(build(apart(heads), dict(optimizer, lr=0.1), role), apart(heads), [apart(g) for g in grads])
    assert_close(apart(actual), expected, atol=2e-6)


def test_a_plain_call_tells_roles_by_names_and_shapes_with_a_warning(caplog):
    params = {"dense": {"kernel": np.ones((4, 4), "f"), "bias": np.ones(4, "f")}, "head": {"kernel": np.ones((4, 2), "f")}}
    wrapper = OptimWrapper(Muon(lr=0.1, adam_learning_rate=0.01))
    with caplog.at_level(logging.WARNING, "jengine"):
        train(wrapper, params, random_grads(params, 2))
    assert [record.message for record in caplog.records] == [
        "the roles of the parameters are told by their names and shapes alone"
    ]
    assert {path: group["lr"] for path, group in wrapper.param_settings.items()} == {
        "dense.bias": 0.01, "dense.kernel": 0.1, "head.kernel": 0.01
    }  # fmt: skip


def test_kinds_name_what_is_trained_as_matrices():
    settings = build(PARAMS, dict(type="Muon", lr=0.1, kinds=["hidden", "embedding"])).param_settings
    assert {path for path, group in settings.items() if not group["adam"]} == {"layers.kernel", "embed.table"}
    with pytest.raises(ConfigError, match=r"`optim_wrapper.optimizer.kinds\[0\]` must be 'hidden' or .*, got 'norm'"):
        build(PARAMS, dict(type="Muon", lr=0.1, kinds=["norm"]))


def test_optax_muon_under_its_path_says_where_it_differs_from_roles(caplog):
    params = {**PARAMS, "dense": {"kernel": np.ones((4, 4), "f")}}
    roles = {**ROLES, "dense.kernel": dict(role="hidden", fan_in=(0,), fan_out=(1,))}
    text = (
        "optax.contrib.muon without muon_weight_dimension_numbers trains each parameter with two axes: "
        "2 (embed.table, layers.bias) that are no hidden matrices, and not 2 (conv.kernel, layers.kernel) that are; "
        "type='Muon' goes by role"
    )
    for kind in ("optax.contrib.muon", optax.contrib.muon):
        caplog.clear()
        wrapper = build(params, dict(type=kind, learning_rate=0.1), roles)
        assert wrapper.optimizer.name == "muon"
        assert text in [record.message for record in caplog.records]
    caplog.clear()
    build({"dense": params["dense"]}, dict(type="optax.contrib.muon", learning_rate=0.1), {"dense.kernel": roles["dense.kernel"]})
    assert not any("optax" in record.message for record in caplog.records)


def test_bfloat16_momentum_halves_the_state_of_matrices():
    bytes_of = {}
    for dtype in (None, "bfloat16"):
        wrapper = build({"layers": {"kernel": PARAMS["layers"]["kernel"]}}, dict(type="Muon", lr=0.1, mu_dtype=dtype),
                        {"layers.kernel": ROLES["layers.kernel"]})
        state = wrapper.init({"layers": {"kernel": PARAMS["layers"]["kernel"]}})
        bytes_of[dtype] = sum(leaf.nbytes for leaf in jax.tree.leaves(state.inner_state) if leaf.ndim)
    assert bytes_of == {None: 3 * 8 * 12 * 4, "bfloat16": 3 * 8 * 12 * 2}


# --- NorMuon, cautious decay, SOAP and Shampoo, written in NumPy ---


def newton_schulz(x):
    transposed = len(x) > x.shape[1]
    x = (x.T if transposed else x) / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if transposed else x


def numpy_muon(p, grads, lr, decay, beta2=None, cautious=False):
    """Return a matrix (in, out) after Muon, or NorMuon (arXiv:2510.05491, Algorithm 1), in float64."""
    p, mu, nu, beta = p.astype("d"), np.zeros(p.shape), np.zeros((1, p.shape[1])), 0.95
    for t, g in enumerate(grads, start=1):
        mu = beta * mu + (1 - beta) * g
        update = newton_schulz(beta * mu / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t))
        if beta2 is not None:
            nu = beta2 * nu + (1 - beta2) * (update**2).mean(0, keepdims=True)
            scaled = update / (np.sqrt(nu) + 1e-8)
            update = scaled * np.linalg.norm(update) / np.linalg.norm(scaled)
        update = update * max(1, p.shape[1] / p.shape[0]) ** 0.5
        # arXiv:2510.12402: only where update and parameter have the same sign
        p = p - lr * (update + decay * p * ((update * p >= 0) if cautious else 1))
    return p


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [(dict(type="NorMuon"), dict(beta2=0.95)), (dict(type="Muon", cautious=True), dict(cautious=True))],
    ids=["NorMuon", "cautious"],
)
def test_muon_variants_are_those_of_the_papers(optimizer, settings, shape):
    params = {"dense": {"kernel": RNG.normal(size=shape).astype("f")}}
    grads = random_grads(params)
    roles = {"dense.kernel": dict(role="hidden", fan_in=(0,), fan_out=(1,))}
    actual = train(build(params, dict(optimizer, lr=0.05, weight_decay=0.5), roles), params, grads)
    expected = numpy_muon(params["dense"]["kernel"], [g["dense"]["kernel"] for g in grads], 0.05, 0.5, **settings)
    np.testing.assert_allclose(actual["dense"]["kernel"], expected, atol=5e-6)


def numpy_soap(p, grads, lr, decay, frequency):
    """Return a square matrix after SOAP (arXiv:2409.11321, Algorithm 3; first update skipped as in the authors' code)."""
    p, beta = p.astype("d"), 0.95
    mu, nu, left, right = (np.zeros(p.shape) for _ in range(4))
    q_left = q_right = np.eye(len(p))

    def iterate(gram, basis):
        values = np.diag(basis.T @ gram @ basis)
        order = np.argsort(-values)
        # damped, unlike in the paper: see the tests of a null space
        return np.linalg.qr((gram @ basis + 1e-4 * values.max() * basis)[:, order])[0], order

    for t, g in enumerate(grads):
        update = 0
        if t > 0:
            mu = beta * mu + (1 - beta) * g
            nu = beta * nu + (1 - beta) * (q_left.T @ g @ q_right) ** 2
            rotated = (q_left.T @ mu @ q_right) / (np.sqrt(nu) + 1e-8)
            update = q_left @ rotated @ q_right.T * np.sqrt(1 - beta**t) / (1 - beta**t)
        p = p - lr * (update + decay * p)
        left = beta * left + (1 - beta) * g @ g.T
        right = beta * right + (1 - beta) * g.T @ g
        if t == 0:
            q_left, q_right = (np.linalg.eigh(gram)[1][:, ::-1] for gram in (left, right))
        elif t % frequency == 0:
            (q_left, rows), (q_right, columns) = iterate(left, q_left), iterate(right, q_right)
            nu = nu[rows][:, columns]
    return p


def test_soap_is_that_of_the_paper():
    # Square, as the basis for the null space of a gram matrix is a matter of rounding.
    params = {"dense": {"kernel": RNG.normal(size=(5, 5)).astype("f")}}
    grads = random_grads(params)
    roles = {"dense.kernel": dict(role="hidden", fan_in=(0,), fan_out=(1,))}
    wrapper = build(params, dict(type="SOAP", lr=0.1, weight_decay=0.1, precondition_frequency=3), roles)
    actual = train(wrapper, params, grads)
    expected = numpy_soap(params["dense"]["kernel"], [g["dense"]["kernel"] for g in grads], 0.1, 0.1, 3)
    np.testing.assert_allclose(actual["dense"]["kernel"], expected, atol=2e-5)


def test_soap_without_a_basis_is_adam_after_the_first_gradient():
    params = {"dense": {"kernel": RNG.normal(size=(5, 4)).astype("f")}}
    grads = random_grads(params)
    roles = {"dense.kernel": dict(role="hidden", fan_in=(0,), fan_out=(1,))}
    wrapper = build(params, dict(type="SOAP", lr=0.1, weight_decay=0.0, max_precondition_size=3, eps=1e-12), roles)
    actual = train(wrapper, params, grads)
    adam = optax.chain(scale_by_adam(0.95, 0.95, 1e-12), optax.scale(-0.1))
    assert_close(actual, train(OptimWrapper(adam), params, grads[1:]), atol=1e-5)
    assert sum(leaf.size for leaf in jax.tree.leaves(wrapper.init(params).inner_state)) == 2 * 20 + 1


def numpy_shampoo(p, grads, lr, decay, frequency, sides):
    """Return a matrix (in, out) after Shampoo (arXiv:1802.09568) grafted to Adam (arXiv:2309.06497, Algorithm 2) in float64."""
    p, b1, b2 = p.astype("d"), 0.9, 0.99
    mu, nu, grams = np.zeros(p.shape), np.zeros(p.shape), [np.zeros((n, n)) for n in p.shape]
    roots = [np.eye(n) for n in p.shape]
    for t, g in enumerate(grads, start=1):
        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        grams = [b2 * gram + (1 - b2) * new for gram, new in zip(grams, (g @ g.T, g.T @ g), strict=True)]
        if t % frequency == 0:
            for side in sides:
                values, vectors = np.linalg.eigh(grams[side])
                # arXiv:2002.09018 adds the part of the largest value instead of raising smaller ones to it
                roots[side] = (vectors * np.maximum(values, 1e-5 * values[-1]) ** (-0.5 / len(sides))) @ vectors.T
        update = mu / (1 - b1**t) / (np.sqrt(nu / (1 - b2**t)) + 1e-8)
        if t >= frequency:
            direction = roots[0] @ mu @ roots[1]
            update = direction * np.linalg.norm(update) / np.linalg.norm(direction)
        p = p - lr * (update + decay * p)
    return p


@pytest.mark.parametrize(
    ("shape", "max_size", "sides"), [((5, 5), 9, (0, 1)), ((6, 4), 9, (0, 1)), ((4, 12), 9, (0,)), ((12, 4), 9, (1,))]
)
def test_shampoo_is_that_of_the_papers(shape, max_size, sides):
    params = {"dense": {"kernel": RNG.normal(size=shape).astype("f")}}
    grads = random_grads(params)
    roles = {"dense.kernel": dict(role="hidden", fan_in=(0,), fan_out=(1,))}
    optimizer = dict(type="Shampoo", lr=0.1, weight_decay=0.1, precondition_frequency=3, max_precondition_size=max_size)
    actual = train(build(params, optimizer, roles), params, grads)
    expected = numpy_shampoo(params["dense"]["kernel"], [g["dense"]["kernel"] for g in grads], 0.1, 0.1, 3, sides)
    np.testing.assert_allclose(actual["dense"]["kernel"], expected, atol=2e-6)


def test_shampoo_without_gram_matrices_or_gradients_is_adam():
    params = {"large": RNG.normal(size=(5, 4)).astype("f"), "unused": RNG.normal(size=(3, 3)).astype("f")}
    grads = [dict(g, unused=np.zeros((3, 3), "f")) for g in random_grads(params)]
    role = dict(role="hidden", fan_in=(0,), fan_out=(1,))
    optimizer = dict(type="Shampoo", lr=0.1, weight_decay=0.0, max_precondition_size=3)
    actual = train(build(params, optimizer, dict(large=role, unused=role)), params, grads)
    adam = optax.chain(scale_by_adam(0.9, 0.99, 1e-8), optax.scale(-0.1))
    assert_close(actual, train(OptimWrapper(adam), params, grads), atol=1e-6)


# --- Stacked layers, meshes and runs ---


def unstack(params):
    layers = {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(2)}
    return {**{name: value for name, value in params.items() if name != "layers"}, **layers}


@pytest.mark.parametrize(
    "settings",
    [
        *(dict(type=name, consistent_rms=0.2, ns_steps=2) for name in ("Muon", "NorMuon")),
        dict(type="Shampoo", precondition_frequency=2),
    ],
    ids=EACH_NAME,
)
def test_stacked_layers_are_trained_like_unrolled_ones(settings):
    stacked, unrolled = make_lm(), make_lm(scan=False)
    params = stacked.init(jax.random.key(0), BATCH)[0]
    unrolled.init(jax.random.key(0), BATCH)
    optimizer = dict(settings, lr=0.02, weight_decay=0.1, adam_learning_rate=0.01)
    grads = random_grads(params, 5)
    with jax.default_matmul_precision("highest"):  # GPUs round products of float32 otherwise
        actual = train(build_for(stacked, params, optimizer=optimizer), params, grads)
        expected = train(
            build_for(unrolled, unstack(params), optimizer=optimizer), unstack(params), [unstack(g) for g in grads]
        )
    assert_close(unstack(actual), expected, atol=1e-6)


# Nearly equal eigenvalues of a growing rank make a last bit larger; a basis by rounding differs by 2e-3.
@pytest.mark.parametrize(
    ("name", "shape", "atol"),
    [("SOAP", (6, 9), 1e-6), ("SOAP", (4, 32), 1e-4), ("Shampoo", (4, 32), 1e-6)],
    ids=["SOAP, full rank at once", "SOAP, low rank", "Shampoo, low rank"],
)
def test_stacked_matrices_are_trained_like_single_ones(name, shape, atol):
    # Gram matrices of the longer side have a null space at first, of which rounding must not choose the basis.
    single = {name: RNG.normal(size=shape).astype("f") for name in "ab"}
    grads = random_grads(single, 8)
    optimizer = dict(type=name, lr=0.001, precondition_frequency=3)
    each = dict(role="hidden", fan_in=(0,), fan_out=(1,))
    expected = train(build(single, optimizer, dict(a=each, b=each)), single, grads)

    def stack(tree):
        return {"c": np.stack([tree["a"], tree["b"]])}

    stacked = dict(c=dict(role="hidden", fan_in=(1,), fan_out=(2,), stacked=(0,)))
    actual = train(build(stack(single), optimizer, stacked), stack(single), [stack(g) for g in grads])
    assert_close(actual, stack(expected), atol=atol)


class NoteRates(Hook):
    """Notes the sorted rates of the groups in each iteration."""

    def before_train(self, runner):
        self.rates = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.rates.append(sorted({group["lr"] for group in runner.optim_wrapper.param_groups}))


def make_runner(work_dir, **changes):
    cfg = dict(
        model=make_lm(),
        train_dataloader=dict(dataset=ArrayDataset(BATCH), batch_size=8),
        train_cfg=dict(by_epoch=False, max_iters=4),
        optim_wrapper=dict(optimizer=dict(type="Muon", lr=0.02, adam_learning_rate=0.01, ns_steps=2)),
        randomness=dict(seed=0),
    )
    return build_runner(work_dir, **{**cfg, **changes})


def test_a_schedule_multiplies_both_rates(tmp_path):
    hook = NoteRates()
    scheduler = dict(type="LinearLR", start_factor=0.25, by_epoch=False, end=3)
    make_runner(tmp_path, custom_hooks=[hook], param_scheduler=scheduler).train()
    np.testing.assert_allclose(hook.rates, [[0.01 * f, 0.02 * f] for f in (0.25, 0.625, 1.0, 1.0)])


RUNS = dict(
    accumulation=dict(optim_wrapper=dict(optimizer=dict(type="NorMuon", lr=0.02, ns_steps=2), accumulative_counts=2)),
    loss_scale=dict(
        optim_wrapper=dict(
            type="AmpOptimWrapper",
            loss_scale="dynamic",
            optimizer=dict(type="Muon", lr=0.02, cautious=True, weight_decay=0.1, ns_steps=2),
        )
    ),
    soap=dict(
        optim_wrapper=dict(optimizer=dict(type="SOAP", lr=0.01, precondition_frequency=2)),
        custom_hooks=[dict(type="EMAHook")],
    ),
    shampoo=dict(optim_wrapper=dict(optimizer=dict(type="Shampoo", lr=0.01, precondition_frequency=3))),
)


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_resumed_run_continues_to_the_same_bits(tmp_path, changes):
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=2)
    scheduler = dict(type="CosineAnnealingLR", by_epoch=False, T_max=6)

    def run(name, iters, **more):
        hooks = dict(logger=None, checkpoint=checkpoint)
        cfg = dict(changes, model=make_mlp(), default_hooks=hooks, param_scheduler=scheduler, **more)
        return make_runner(tmp_path / name, train_cfg=dict(by_epoch=False, max_iters=iters), **cfg).train()

    expected = run("whole", 6)
    actual = run("rest", 6, resume=tmp_path / "whole" / "iter_2")
    assert_close((actual.params, actual.opt_state), (expected.params, expected.opt_state), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "depth", "mesh"),
    [
        ("Muon", 4, dict(data=1, fsdp=4)),  # the layers are divided
        ("Muon", 3, dict(data=1, fsdp=2, tensor=2)),  # one layer after the other
        ("NorMuon", 2, dict(data=1, fsdp=2, tensor=2)),  # over one axis the layers, over the other each
    ],
)
def test_on_a_mesh_parameters_are_those_of_one_device(tmp_path, name, depth, mesh):
    rules = [("attn.query.kernel", (None, "fsdp", "tensor")), ("mlp.down.kernel", (None, "tensor", "fsdp"))]
    optimizer = dict(type=name, lr=0.02, adam_learning_rate=0.01, ns_steps=2)
    cfg = dict(model=make_lm(depth=depth), optim_wrapper=dict(optimizer=optimizer))
    expected = make_runner(tmp_path / "one", **cfg).train()
    cfg["parallel"] = dict(type="Pjit", mesh=mesh, devices=4, rules=rules, fsdp_min_size=16)
    cfg["model"] = make_lm(depth=depth)
    runner = make_runner(tmp_path / "many", **cfg)
    actual = runner.train()
    assert_close(actual.params, expected.params, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "depth"), [("SOAP", 4), ("SOAP", 3), ("Shampoo", 4)], ids=["SOAP", "SOAP, one layer after the other", "Shampoo"]
)
def test_gram_matrices_on_a_mesh_train_as_on_one_device_by_the_same_gradients(name, depth):
    # By the same gradients of full rank: in the null space of a gram matrix, rounding decides on the eigenvectors.
    params = {"layers": {"kernel": RNG.normal(size=(depth, 8, 8)).astype("f")}}
    wrapper = build(params, dict(type=name, lr=0.1, precondition_frequency=2), {"layers.kernel": ROLES["layers.kernel"]})
    grads = random_grads(params, 6)
    mesh = Mesh(np.array(take_devices(4)), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))

    def step(g, state, params):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return wrapper.apply_gradients(g, state, params)

    run = jax.jit(step, out_shardings=(sharding, NamedSharding(mesh, PartitionSpec())))
    found, state = jax.device_put(params, sharding), wrapper.init(params)
    for g in grads:
        found, state = jax.block_until_ready(run(jax.device_put(g, sharding), state, found))
    assert_close(found, train(wrapper, params, grads), atol=1e-5)


def test_on_a_mesh_the_bases_of_soap_are_sharded(tmp_path):
    optimizer = dict(type="SOAP", lr=0.02)
    parallel = dict(type="Pjit", mesh=dict(data=1, fsdp=4), devices=4, fsdp_min_size=16)
    cfg = dict(model=make_lm(depth=4), optim_wrapper=dict(optimizer=optimizer), train_cfg=dict(by_epoch=False, max_iters=1))
    state = make_runner(tmp_path / "run", parallel=parallel, **cfg).train()
    leaves = paths.flatten(state.opt_state)
    (basis,) = [leaf for path, leaf in leaves.items() if path.endswith("inputs.factor.layers.mlp.down.kernel")]
    assert (basis.shape, basis.sharding.spec) == ((4, 1, 24, 24), PartitionSpec(None, None, "fsdp"))


@pytest.mark.parametrize(
    ("shape", "spec", "role"),
    [
        ((4, 8, 16), (None, "fsdp"), dict(fan_in=(1,), fan_out=(2,))),  # all-to-all: a layer to each device
        ((3, 8, 16), (None, "fsdp"), dict(fan_in=(1,), fan_out=(2,))),  # one layer after the other
        ((3, 16, 2, 8), (None, "fsdp"), dict(fan_in=(1,), fan_out=(2, 3), heads=2)),
        ((3, 16, 48), (None, None, "fsdp"), dict(fan_in=(1,), fan_out=(2,), parts=3)),
    ],
    ids=["layers divided", "one after the other", "attention", "fused projections"],
)
def test_muon_gathers_at_most_one_layer(shape, spec, role):
    params = {"layers": {"kernel": RNG.normal(size=shape).astype("f")}}
    roles = {"layers.kernel": dict(role="hidden", stacked=(0,), **role)}
    wrapper = build(params, dict(type="Muon", lr=0.1, ns_steps=1), roles)
    mesh = Mesh(np.array(take_devices(4)), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))

    def step(g, state, params):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return wrapper.apply_gradients(g, state, params)

    state = wrapper.init(params)
    placed = jax.tree.map(
        lambda x: jax.device_put(x, sharding if x.ndim == len(shape) else NamedSharding(mesh, PartitionSpec())), state
    )
    shardings = sharding, jax.tree.map(lambda x: x.sharding, placed)
    params = jax.device_put(params, sharding)
    program = jax.jit(step, out_shardings=shardings).lower(params, placed, params).compile().as_text()
    sizes = [collective.size for collective in find_collectives(program)]
    assert 0 < max(sizes) <= 4 * math.prod(shape[1:])


@pytest.mark.parametrize("mesh", [dict(data=1, fsdp=4), dict(data=1, fsdp=2, tensor=2)], ids=["fsdp", "fsdp and tensor"])
def test_a_plan_shows_what_muon_exchanges_for_the_layers_of_a_stack(mesh):
    def loss(params, batch):
        x = jax.nn.one_hot(batch["tokens"][:, 0], 16)
        x = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params["layers"])[0]
        return jnp.square(x).mean(1)

    def exchanged(optimizer):
        cfg = dict(
            model=FunctionalModel(lambda: {"layers": jnp.ones((3, 16, 16))}, loss),
            train_dataloader=dict(dataset=ArrayDataset(BATCH), batch_size=8),
            train_cfg=dict(by_epoch=False, max_iters=2),
            optim_wrapper=dict(optimizer=optimizer, paramwise_cfg=dict(roles=dict(layers=ROLES["layers.kernel"]))),
            parallel=dict(type="Pjit", mesh=mesh, devices=4, rules=[("layers", (None, "fsdp", "tensor"))]),
        )
        rows = compile_plan(cfg, training_only=True)["programs"]["update"]["collectives"]
        return sum(row["traffic"] for row in rows), max(row["largest"] for row in rows if row["kind"] == "all-gather")

    sent, largest = exchanged(dict(type="Muon", lr=0.1, ns_steps=1))
    assert sent > exchanged(dict(type="SGD", lr=0.1))[0]
    assert largest <= 16 * 16 * 4


@pytest.mark.parametrize("name", ["Muon", "SOAP"])
def test_explicit_mesh_axes_give_the_same_update(name):
    params = {"layers": {"kernel": RNG.normal(size=(2, 8, 8)).astype("f")}}
    wrapper = build(params, dict(type=name, lr=0.1), {"layers.kernel": ROLES["layers.kernel"]})
    grads = random_grads(params, 2)
    expected = train(wrapper, params, grads)
    mesh = Mesh(np.array(take_devices(2)), ("fsdp",), axis_types=(AxisType.Explicit,))
    with jax.sharding.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
        found = jax.device_put(params, sharding)
        state = jax.jit(wrapper.init)(found)
        for g in grads:
            found, state = jax.jit(wrapper.apply_gradients)(jax.device_put(g, sharding), state, found)
    assert found["layers"]["kernel"].sharding.spec == sharding.spec
    assert_close(jax.device_get(found), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["Muon", "SOAP"])
def test_replicas_that_shard_their_parameters_train_as_one_device(tmp_path, name):
    optimizer = dict(type=name, lr=0.02, **(dict(ns_steps=2) if name == "Muon" else {}))
    # SOAP's second update depends on the rounding of the first gradient
    cfg = dict(optim_wrapper=dict(optimizer=optimizer), train_cfg=dict(by_epoch=False, max_iters=1))
    expected = make_runner(tmp_path / "one", model=make_lm(depth=2), **cfg).train()
    cfg["parallel"] = dict(type="DataParallel", mesh=dict(data=2, fsdp=2), devices=4, fsdp_min_size=16)
    actual = make_runner(tmp_path / "many", model=make_lm(depth=2), **cfg).train()
    assert_close(actual.params, expected.params, atol=1e-5)
