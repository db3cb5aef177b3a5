"""The wrapper's chain in every use of optax transformations, compared with optax alone."""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jengine.config.explain import explain
from jengine.model import FunctionalModel
from jengine.optim import (
    SGD,
    Adam,
    AdamW,
    AmpOptimWrapper,
    OptimWrapper,
    build_optim_wrapper,
    transforms,
)
from jengine.train import build_train_step, create_train_state
from tests.devices import take_devices

RNG = np.random.default_rng(0)
PARAMS = {
    "backbone": {"kernel": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32), "bias": jnp.ones(3)},
    "head": {"kernel": jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32), "bias": jnp.zeros(2)},
}
TARGET = jax.tree.map(lambda p: p + 1, PARAMS)
LR = 0.05


def loss_fn(params, target=TARGET):
    return sum(jnp.sum((p - t) ** 2) for p, t in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True))


def ours():
    return OptimWrapper(AdamW(lr=LR, weight_decay=0.1)).tx


def theirs():
    return optax.adamw(LR, weight_decay=0.1)


def train(tx, params=PARAMS, steps=5, loss=loss_fn, **extra):
    """Train with optax alone, passing the loss to transformations that require it."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss, **extra)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def assert_close(actual, expected, rtol=1e-5, atol=1e-5):
    # betas are data here and constants in optax, where `1 - b2**count` loses five digits: 4e-5 of an update
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected)


def labels(params):
    return {name: jax.tree.map(lambda _, name=name: name, part) for name, part in params.items()}


def biases(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "bias", params)


def halving_schedule(step):
    return LR * 0.5 ** (step // 2)


# compositions of optax, applied to our transformation and to optax's own
COMPOSITIONS = {
    "alone": lambda make: make(),
    "chain": lambda make: optax.chain(optax.clip(0.5), make()),
    "chain, before another": lambda make: optax.chain(make(), optax.scale(0.5)),
    "named_chain": lambda make: optax.named_chain(("clip", optax.clip_by_global_norm(1.0)), ("optimizer", make())),
    "masked": lambda make: optax.masked(make(), biases),
    "partition, one transformation twice": lambda make: (
        lambda tx: optax.partition({"backbone": tx, "head": tx}, labels)
    )(make()),
    "multi_transform": lambda make: optax.multi_transform({"backbone": make(), "head": optax.sgd(0.1)}, labels),
    "partition, a part frozen": lambda make: optax.partition({"backbone": optax.set_to_zero(), "head": make()}, labels),
    "flatten": lambda make: optax.flatten(make()),
    "MultiSteps": lambda make: optax.MultiSteps(make(), every_k_schedule=2),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(), max_consecutive_errors=2),
    "lookahead sync": lambda make: optax.chain(make(), optax.ema(0.9)),
    "reduce_on_plateau": lambda make: optax.chain(make(), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)),
    "scale_by_schedule": lambda make: optax.chain(make(), optax.scale_by_schedule(lambda step: 0.5**step)),
    "add_decayed_weights": lambda make: optax.chain(optax.add_decayed_weights(0.1, mask=biases), make()),
    "skip_not_finite": lambda make: optax.transforms.conditionally_transform(
        make(), lambda step, **extra: step % 2 == 0
    ),
    "freeze": lambda make: optax.transforms.selective_transform(make(), freeze_mask=biases),
    "keep_params_nonnegative": lambda make: optax.chain(make(), optax.keep_params_nonnegative()),
    "schedule_free": lambda make: optax.contrib.schedule_free(make(), learning_rate=LR, b1=0.9),
    "mechanize": lambda make: optax.contrib.mechanize(make()),
    "polyak_averaging": lambda make: optax.chain(make(), optax.scale_by_polyak(max_learning_rate=0.5)),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_chain_works_inside_of_optax(name):
    def make_tx(make):
        tx = COMPOSITIONS[name](make)
        return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx

    assert_close(train(make_tx(ours)), train(make_tx(theirs)))


# transformations of optax that the wrapper runs
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(LR),
    "sgd": lambda: optax.sgd(LR, momentum=0.9),
    "schedule": lambda: optax.adam(halving_schedule),
    "chain with a schedule": lambda: optax.chain(optax.clip(0.5), optax.adam(optax.cosine_decay_schedule(LR, 5))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(LR),
    "inject_hyperparams, a schedule": lambda: optax.inject_hyperparams(optax.adamw)(halving_schedule),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(LR), every_k_schedule=2),
    "lbfgs": lambda: optax.lbfgs(),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "prodigy": lambda: optax.contrib.prodigy(),
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(),
    "schedule_free_sgd": lambda: optax.contrib.schedule_free_sgd(LR),
    "muon": lambda: optax.contrib.muon(LR),
    "momo": lambda: optax.contrib.momo(),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(LR), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)),
    "partition": lambda: optax.partition({"backbone": optax.sgd(LR), "head": optax.adam(LR)}, labels),
    "masked": lambda: optax.masked(optax.sgd(LR), biases),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(LR), 3),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(LR)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrapper_runs_optax(name):
    tx = OPTIMIZERS[name]()
    by_hand = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    # a line search may stop at another point if the compiler rounds differently
    assert_close(train(OptimWrapper(tx).tx), train(by_hand), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (dict(type="adamw", learning_rate=LR), optax.adamw(LR)),
        (dict(type=optax.adamw, learning_rate=LR), optax.adamw(LR)),
        (dict(type=optax.contrib.prodigy, learning_rate=1.0), optax.contrib.prodigy(1.0)),
        (dict(type="lbfgs"), optax.lbfgs()),
        (dict(type="polyak_sgd", max_learning_rate=0.5), optax.polyak_sgd(0.5)),
    ],
)
def test_config_of_an_optax_optimizer(config, reference):
    assert_close(train(OptimWrapper(config).tx), train(reference), rtol=1e-4, atol=1e-4)


def test_learning_rate_of_an_optax_optimizer_is_in_the_group():
    for optimizer in (dict(type="adamw", learning_rate=LR), dict(type=optax.adamw, learning_rate=LR)):
        wrapper = OptimWrapper(optimizer)
        assert wrapper.get_lr() == {"lr": [LR]}
        assert wrapper.get_momentum() == {"momentum": [0.9]}
    injected = OptimWrapper(optax.inject_hyperparams(optax.adamw)(LR))
    assert injected.get_lr()["lr"] == pytest.approx([LR])
    # those of a built optimizer are unknown: report nothing rather than 1.0 and 0
    assert (OptimWrapper(optax.adamw(LR)).get_lr(), OptimWrapper(optax.adamw(LR)).get_momentum()) == ({}, {})


def test_an_injected_hyperparameter_keeps_its_own_name():
    wrapper = OptimWrapper(optax.inject_hyperparams(lambda lr, momentum: optax.sgd(lr, momentum))(lr=0.5, momentum=0.0))
    params = {"w": jnp.ones(3)}
    updates, _ = wrapper.update(params, wrapper.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.5)
    assert wrapper.get_lr()["lr"] == pytest.approx([0.5])


def test_injected_hyperparams_are_in_the_group():
    wrapper = OptimWrapper(optax.inject_hyperparams(optax.sgd)(learning_rate=LR))
    wrapper.param_groups[0]["lr"] = 0.5
    updates, _ = wrapper.update(PARAMS, wrapper.init(PARAMS), PARAMS)
    assert_close(updates, jax.tree.map(lambda p: -0.5 * p, PARAMS))


# ---------------------------------------------------------------------- hyperparameters in the state


def test_learning_rate_is_in_the_state_and_changes_without_retracing():
    tx = OptimWrapper(SGD(lr=0.1)).tx
    state, traces = tx.init(PARAMS), []

    @jax.jit
    def step(state):
        traces.append(1)
        return tx.update(PARAMS, state, PARAMS)

    assert float(optax.tree.get(state, "learning_rate")) == pytest.approx(0.1)
    for lr in (0.1, 0.5):
        state = optax.tree.set(state, learning_rate=jnp.float32(lr))
        updates, state = step(state)
        np.testing.assert_allclose(updates["head"]["kernel"], -lr * PARAMS["head"]["kernel"], rtol=1e-6)
    assert len(traces) == 1
    assert float(optax.tree.get(state, "learning_rate")) == pytest.approx(0.5)


def test_a_python_float_may_be_set_in_the_state():
    tx = OptimWrapper(SGD(lr=0.1)).tx
    state = tx.init(PARAMS)
    by_tree, by_field = optax.tree.set(state, learning_rate=0.5), tx.init(PARAMS)
    by_field.hyperparams["learning_rate"] = 0.5
    for changed in (by_tree, by_field):
        updates, _ = tx.update(PARAMS, changed, PARAMS)
        assert_close(updates, jax.tree.map(lambda p: -0.5 * p, PARAMS))


def test_accumulation_of_a_built_transformation():
    wrapper = OptimWrapper(optax.sgd(LR), accumulative_counts=2)
    params, state = PARAMS, wrapper.init(PARAMS)
    for _ in range(4):
        params, state, _ = wrapper.update_params(loss_fn, params, state)
    assert_close(params, train(optax.sgd(LR), steps=2))


def test_hyperparams_argument_replaces_those_in_the_state():
    wrapper = OptimWrapper(SGD(lr=0.1))
    step, state = jax.jit(wrapper.tx.update), wrapper.init(PARAMS)
    for lr in (0.1, 0.5):
        wrapper.param_groups[0]["lr"] = lr
        updates, state = step(PARAMS, state, PARAMS, hyperparams=wrapper.hyperparams)
        np.testing.assert_allclose(updates["head"]["kernel"], -lr * PARAMS["head"]["kernel"], rtol=1e-6)
        assert float(optax.tree.get(state, "learning_rate")) == pytest.approx(lr)
    assert step._cache_size() == 1


def test_update_without_hyperparams_uses_those_of_the_groups_unless_traced():
    wrapper = OptimWrapper(SGD(lr=0.1))
    state = wrapper.init(PARAMS)
    wrapper.param_groups[0]["lr"] = 0.5
    outside, _ = wrapper.update(PARAMS, state, PARAMS)
    inside, _ = jax.jit(wrapper.update)(PARAMS, state, PARAMS)
    np.testing.assert_allclose(outside["head"]["kernel"], -0.5 * PARAMS["head"]["kernel"], rtol=1e-6)
    np.testing.assert_allclose(inside["head"]["kernel"], -0.1 * PARAMS["head"]["kernel"], rtol=1e-6)


def test_state_has_the_names_of_its_parts():
    wrapper = OptimWrapper(AdamW(lr=LR), clip_grad=dict(max_norm=1.0), accumulative_counts=2)
    state = wrapper.init({"w": jnp.ones(3)})
    assert list(state._fields) == ["hyperparams", "inner_state"]
    assert sorted(state.hyperparams) == ["b1", "b2", "eps", "learning_rate", "weight_decay"]
    assert set(state.inner_state.inner_state) == {
        "clip_by_norm", "scale_by_adam", "add_decayed_weights", "scale_by_learning_rate",
    }  # fmt: skip
    assert isinstance(state.inner_state.inner_state["scale_by_adam"], optax.ScaleByAdamState)


# ---------------------------------------------------------------------- trees and states


def test_one_wrapper_serves_two_models():
    tx = ours()
    other = {"w": jnp.arange(3.0)}
    tx.init(PARAMS)
    assert_close(
        train(tx, other, loss=lambda p: jnp.sum(p["w"] ** 2)),
        train(theirs(), other, loss=lambda p: jnp.sum(p["w"] ** 2)),
    )
    assert_close(train(tx), train(theirs()))


def test_tree_map_params():
    tx, reference = ours(), theirs()
    sizes = optax.tree_map_params(tx, lambda leaf: leaf.size, tx.init(PARAMS), transform_non_params=lambda _: None)
    expected = optax.tree_map_params(
        reference, lambda leaf: leaf.size, reference.init(PARAMS), transform_non_params=lambda _: None
    )
    assert optax.tree.get(sizes, "mu") == optax.tree.get(expected, "mu")


def test_rules_apply_to_the_partial_tree_of_masked():
    rules = dict(custom_keys={"head": dict(lr_mult=0.1)})
    wrapper = build_optim_wrapper(PARAMS, dict(optimizer=dict(type="SGD", lr=1.0), paramwise_cfg=rules))
    tx = optax.masked(wrapper.tx, biases)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["backbone"]["bias"], -PARAMS["backbone"]["bias"])
    np.testing.assert_allclose(updates["head"]["bias"], -0.1 * PARAMS["head"]["bias"])
    np.testing.assert_array_equal(updates["head"]["kernel"], PARAMS["head"]["kernel"])  # outside the mask: unchanged


def test_masks_and_multipliers_in_optax_chains():
    rules = dict(custom_keys={"head": dict(lr_mult=0.1)}, bias_decay_mult=0.0)
    cfg = dict(optimizer=dict(type="AdamW", lr=LR, weight_decay=0.1), paramwise_cfg=rules)
    wrapper = build_optim_wrapper(PARAMS, cfg)
    assert wrapper.decay_mask(PARAMS) == {
        "backbone": {"bias": False, "kernel": True}, "head": {"bias": True, "kernel": True},
    }  # fmt: skip
    multipliers = wrapper.learning_rate_multipliers(PARAMS)
    by_optax = optax.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1, mask=wrapper.decay_mask(PARAMS)),
        optax.scale(-LR),
        optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, multipliers)),
    )
    by_transforms = optax.chain(
        optax.scale_by_adam(),
        transforms.add_decayed_weights_by_rule(wrapper.weight_decays),
        transforms.scale_by_group_learning_rate(jax.tree.map(lambda m: LR * m, multipliers)),
    )
    assert_close(train(wrapper.tx), train(by_optax))
    assert_close(train(by_transforms), train(by_optax))


# ---------------------------------------------------------------------- our transformations in chains of optax


def test_accumulation_matches_multisteps():
    accumulating = transforms.accumulate_gradients(optax.adam(LR), every=3)
    reference = optax.MultiSteps(optax.adam(LR), every_k_schedule=3).gradient_transformation()
    assert_close(train(accumulating, steps=7), train(reference, steps=7))
    assert_close(train(OptimWrapper(Adam(lr=LR), accumulative_counts=3).tx, steps=7), train(reference, steps=7))


def test_clipping_in_a_chain():
    tx = optax.chain(transforms.clip_by_norm(1.0), optax.sgd(LR))
    assert_close(train(tx), train(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(LR))))


def test_loss_scale_in_a_chain_skips_non_finite_updates():
    tx = transforms.dynamic_loss_scale(optax.adam(LR), init_scale=8.0)
    state = tx.init(PARAMS)
    grads = jax.grad(loss_fn)(PARAMS)
    scaled = jax.tree.map(lambda g: g * optax.tree.get(state, "loss_scale"), grads)
    updates, state = tx.update(scaled, state, PARAMS)
    expected, expected_state = optax.adam(LR).update(grads, optax.adam(LR).init(PARAMS), PARAMS)
    assert_close(updates, expected)
    updates, after = tx.update(jax.tree.map(lambda g: g * jnp.nan, grads), state, PARAMS)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    assert_close(after.inner_state, expected_state)
    assert float(optax.tree.get(after, "loss_scale")) == 4.0


# ---------------------------------------------------------------------- transformations of JAX


def test_train_state_of_flax():
    states = [train_state.TrainState.create(apply_fn=loss_fn, params=PARAMS, tx=make()) for make in (ours, theirs)]
    for _ in range(5):
        states = [state.apply_gradients(grads=jax.grad(loss_fn)(state.params)) for state in states]
    assert_close(states[0].params, states[1].params)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](self.norm(x))))


@pytest.mark.parametrize("rules", [None, dict(norm_decay_mult=0.0)])
def test_optimizer_of_nnx(rules):
    x = jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32)

    def run(make):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, make(model), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            grads = nnx.grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
            optimizer.update(model, grads)

        for _ in range(3):
            step(model, optimizer)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    cfg = dict(optimizer=dict(type="AdamW", lr=LR, weight_decay=0.1))
    actual = run(lambda model: build_optim_wrapper(model, cfg if rules is None else {**cfg, "paramwise_cfg": rules}).tx)

    def mask(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

    expected = run(lambda model: optax.adamw(LR, weight_decay=0.1, mask=None if rules is None else mask))
    assert_close(actual, expected)


def test_vmap_over_seeds():
    seeds = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), PARAMS)

    def run(tx, params):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=4)[0][0]

    assert_close(jax.vmap(functools.partial(run, ours()))(seeds), jax.vmap(functools.partial(run, theirs()))(seeds))


@pytest.mark.parametrize("through", ["pmap", "shard_map"])
def test_mapped_axis_averages_gradients(through):
    wrapper = OptimWrapper(SGD(lr=1.0), axis_name="data")
    params, state = {"w": jnp.zeros(())}, wrapper.init({"w": jnp.zeros(())})
    grads = {"w": jnp.asarray([1.0, 3.0])}
    if through == "pmap":
        devices = take_devices(2)
        updates = jax.pmap(
            lambda g: wrapper.tx.update(g, state, params)[0], axis_name="data", devices=devices
        )(grads)
    else:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("data")
        shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
        updates = jax.jit(
            shard(lambda g: {"w": wrapper.tx.update({"w": g["w"][0]}, state, params)[0]["w"][None] * jnp.ones(1)})
        )(grads)
    np.testing.assert_allclose(updates["w"], [-2.0, -2.0])


def test_sharded_parameters_have_sharded_state():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    params = {"w": jax.device_put(jnp.arange(8.0), sharding)}
    tx = ours()
    state = tx.init(params)
    assert optax.tree.get(state, "mu")["w"].sharding == sharding
    updates, state = jax.jit(tx.update)(params, state, params)
    expected, _ = theirs().update(params, theirs().init(params), params)
    assert_close(updates, expected)
    assert updates["w"].sharding.is_equivalent_to(sharding, 1)


def test_orbax_round_trip(tmp_path):
    tx = OptimWrapper(AdamW(lr=LR), clip_grad=dict(max_norm=1.0), accumulative_counts=2).tx
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_amp_chain_is_a_transformation_too():
    wrapper = AmpOptimWrapper(optimizer=AdamW(lr=LR, weight_decay=0.1), loss_scale=8.0, dtype="float32")
    tx, params = wrapper.tx, PARAMS
    state = tx.init(params)
    for _ in range(5):
        grads = jax.grad(lambda p, s: loss_fn(p) * optax.tree.get(s, "loss_scale"))(params, state)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(params, train(theirs()))


def test_optimizer_without_a_wrapper():
    sgd = SGD(lr=0.1)
    state = sgd.init(PARAMS)
    sgd.param_groups[0]["lr"] = 0.5
    updates, _ = sgd.update(PARAMS, state, PARAMS)
    assert_close(updates, jax.tree.map(lambda p: -0.5 * p, PARAMS))


def test_linen_model_of_optax_documentation():
    model = nn.Dense(2)
    x, y = jnp.ones((4, 3)), jnp.zeros((4, 2))
    params = model.init(jax.random.key(0), x)

    def loss(params):
        return optax.l2_loss(model.apply(params, x), y).mean()

    assert_close(train(ours(), params, loss=loss), train(theirs(), params, loss=loss))


@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_state_may_be_donated(loss_scale):
    # each array may occur only once
    wrapper = AmpOptimWrapper(
        optimizer=AdamW(lr=LR), loss_scale=loss_scale, accumulative_counts=2, clip_grad=dict(max_norm=1.0)
    )
    state = wrapper.init(PARAMS)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


def test_updates_have_the_dtype_of_optax():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx, reference = optax.apply_if_finite(ours(), 2), optax.apply_if_finite(theirs(), 2)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    expected, _ = jax.jit(reference.update)(params, reference.init(params), params)
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, expected)
    assert_close(updates, expected, rtol=2e-2, atol=1e-3)


def test_parameters_are_optional_without_weight_decay():
    tx, reference = OptimWrapper(Adam(lr=LR)).tx, optax.adam(LR)
    assert_close(tx.update(PARAMS, tx.init(PARAMS))[0], reference.update(PARAMS, reference.init(PARAMS))[0])


def test_multipliers_are_constant_while_schedules_change_the_rates():
    wrapper = OptimWrapper(SGD(lr=0.2).with_groups([{"params": "backbone"}, {"params": "head", "lr": 0.02}]))
    for group in (*wrapper.param_groups, wrapper.base_param_settings):
        group["lr"] /= 2
    multipliers = wrapper.learning_rate_multipliers(PARAMS)
    assert (float(multipliers["backbone"]["bias"]), float(multipliers["head"]["bias"])) == pytest.approx((1.0, 0.1))
    with pytest.raises(KeyError, match="lr"):
        OptimWrapper(optax.adamw(LR)).learning_rate_multipliers(PARAMS)
    with pytest.raises(KeyError, match="weight_decay"):
        OptimWrapper(optax.adamw(LR)).decay_mask(PARAMS)


def test_copies_and_pickles_have_separate_groups():
    wrapper = OptimWrapper(SGD(lr=0.1))
    wrapper.tx.init(PARAMS)
    for other in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        other.param_groups[0]["lr"] = 0.5
        assert float(optax.tree.get(other.tx.init(PARAMS), "learning_rate")) == 0.5
    assert float(optax.tree.get(wrapper.tx.init(PARAMS), "learning_rate")) == pytest.approx(0.1)


@pytest.mark.parametrize("opaque_mode", [False, True])
def test_optax_sam_trains_as_in_a_loop_by_hand(opaque_mode):
    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)

    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    tx = optax.contrib.sam(optax.adam(0.1), adversary, opaque_mode=opaque_mode)
    batch = {"x": np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3), "y": np.linspace(0, 1, 8, dtype=np.float32)}
    params = {"w": jnp.array([0.5, -0.3, 0.2])}
    model = FunctionalModel(init=lambda: params, loss=loss)
    wrapper = OptimWrapper(tx)
    state = create_train_state(*model.init(jax.random.key(0), batch), wrapper, rng=jax.random.key(0))
    step, opt_state = jax.jit(build_train_step(model, wrapper)), tx.init(params)
    for _ in range(4):
        state, _ = step(state, batch, wrapper.hyperparams)
        grads = jax.grad(loss)(params, batch)
        grad_fn = jax.grad(lambda params, _: loss(params, batch))
        updates, opt_state = tx.update(grads, opt_state, params, grad_fn=grad_fn)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-6)


def test_a_line_search_sees_the_trained_parameters_only_and_ignores_the_gradient_function():
    params = {"body": {"kernel": jnp.ones(2)}, "head": {"kernel": jnp.ones(2)}}
    rules = dict(custom_keys=dict(head=dict(requires_grad=False)))
    wrapper = build_optim_wrapper(params, dict(optimizer=dict(type="lbfgs"), paramwise_cfg=rules))

    def loss(params, grad_fn=None):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    value, grads = jax.value_and_grad(loss)(params)
    extra = dict(value=value, grad=grads, value_fn=loss, grad_fn=jax.grad(loss))
    updates, _ = wrapper.update(grads, wrapper.init(params), params, **extra)
    tx, body = optax.lbfgs(), params["body"]
    alone = dict(value=value, grad=grads["body"], value_fn=lambda body: loss({**params, "body": body}))
    expected, _ = tx.update(grads["body"], tx.init(body), body, **alone)
    assert updates["body"]["kernel"].tolist() == expected["kernel"].tolist() != [0.0, 0.0]
    assert updates["head"]["kernel"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            dict(type="DAdaptAdam", lr=0.5, weight_decay=0.1, decouple=True, d0=1e-3),
            optax.contrib.dadapt_adamw(0.5, weight_decay=0.1, estim_lr0=1e-3),
        ),
        (
            dict(type="Prodigy", weight_decay=0.1, d_coef=2.0, safeguard_warmup=True),
            optax.contrib.prodigy(weight_decay=0.1, estim_lr_coef=2.0, safeguard_warmup=True),
        ),
    ],
)
def test_mmengine_names_of_optimizers_that_estimate_the_rate(config, expected):
    params = {"w": jnp.linspace(-1, 1, 6)}
    wrapper = build_optim_wrapper(params, dict(optimizer=config))
    found, state, own = params, wrapper.init(params), expected.init(params)
    for _ in range(4):
        grads = jax.tree.map(jnp.square, found)
        updates, state = wrapper.update(grads, state, found, wrapper.hyperparams)
        own_updates, own = expected.update(grads, own, found)
        np.testing.assert_allclose(updates["w"], own_updates["w"], rtol=1e-5, atol=1e-9)
        found = optax.apply_updates(found, updates)
    with pytest.raises(ValueError, match=f"`{config['type']}.decouple` must be True with a weight_decay"):
        build_optim_wrapper(params, dict(optimizer={**config, "decouple": False}))


def test_a_mask_that_is_no_tree_of_dicts_is_refused_with_the_trees_that_fit():
    state = nnx.state(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.Param)
    mask = jax.tree.map(lambda p: p.ndim > 1, state)
    wrapper = OptimWrapper(optax.adamw(0.1, mask=mask))
    params = {"kernel": jnp.ones((2, 1)), "bias": jnp.zeros(1)}
    with pytest.raises(ValueError, match="different types") as caught:
        wrapper.init(params)
    explain(caught.value)
    assert "must be a function of parameters, `mask=lambda params: " in caught.value.__notes__[0]
    by_function = OptimWrapper(optax.adamw(0.1, weight_decay=0.5, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = by_function.update(grads, by_function.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.05 * np.ones((2, 1)), rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], [0.0])
