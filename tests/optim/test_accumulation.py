"""Gradient accumulation: windows, including a shorter last one, and replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jengine.optim import SGD, Adam, AmpOptimWrapper, OptimWrapper
from tests.devices import take_devices


def loss_of(params, x):
    """Return a loss with the gradient `x`."""
    return jnp.sum(params["w"] * x)


def train(wrapper, iterations):
    params = {"w": jnp.zeros(())}
    state = wrapper.init(params)
    seen, syncs = [], []
    for i in range(iterations):
        syncs.append(wrapper.should_sync())
        params, state, _ = wrapper.update_params(loss_of, params, state, jnp.float32(i + 1))
        seen.append(float(params["w"]))
    return seen, syncs


def test_last_window_is_divided_by_its_own_length():
    wrapper = OptimWrapper(SGD(lr=1.0), accumulative_counts=3)
    wrapper.initialize_count_status(0, 10)
    seen, syncs = train(wrapper, 10)
    # minus the means of (1, 2, 3), (4, 5, 6), (7, 8, 9) and (10)
    np.testing.assert_allclose([seen[2], seen[5], seen[8], seen[9]], [-2, -7, -15, -25], rtol=1e-6)
    assert seen[0] == seen[1] == 0.0
    assert [i + 1 for i, sync in enumerate(syncs) if sync] == [3, 6, 9, 10]


def test_incomplete_window_is_not_applied_if_the_end_is_unknown():
    seen, _ = train(OptimWrapper(SGD(lr=1.0), accumulative_counts=3), 10)
    np.testing.assert_allclose(seen[-2:], [-15, -15], rtol=1e-6)


def test_updates_of_ten_iterations_in_windows_of_four():
    wrapper = OptimWrapper(SGD(lr=1.0), accumulative_counts=4)
    wrapper.initialize_count_status(0, 10)
    updates = [wrapper.start_step() for _ in range(10)]
    assert [i + 1 for i, update in enumerate(updates) if update] == [4, 8, 10]


def test_the_first_update_of_a_longer_run_is_the_mean_of_the_iterations_since_the_last_one():
    wrapper = OptimWrapper(SGD(lr=1.0), accumulative_counts=4)
    params = {"w": jnp.zeros(())}
    state = wrapper.init(params)
    for first, last in ((0, 18), (18, 24)):  # 18 iterations end with a window of two, and the next update is at 20
        wrapper.initialize_count_status(first, last)
        for i in range(first, last):
            params, state, _ = wrapper.update_params(loss_of, params, state, jnp.float32(1 if i < 18 else 2))
            if i == 17:
                assert float(params["w"]) == -5
            if i == 19:
                assert float(params["w"]) == -5 - 2
    assert float(params["w"]) == -5 - 2 - 2


def test_counting_continues_after_a_restart():
    wrapper = OptimWrapper(SGD(lr=1.0), accumulative_counts=4)
    wrapper.initialize_count_status(6, 10)
    assert [wrapper.start_step() for _ in range(4)] == [False, True, False, True]
    assert wrapper.inner_count == 10


def test_iterations_after_the_announced_end_update_with_the_mean_since_the_last_update():
    wrapper = OptimWrapper(SGD(lr=1.0), accumulative_counts=3)
    wrapper.initialize_count_status(0, 4)
    seen, _ = train(wrapper, 9)
    # minus the means of (1, 2, 3), (4), (5, 6) and (7, 8, 9)
    assert [seen[2], seen[3], seen[5], seen[8]] == [-2, -6, -11.5, -19.5]


@pytest.mark.parametrize(("counts", "error"), [(0, AssertionError), (-1, AssertionError), (1.5, TypeError)])
def test_accumulative_counts_must_be_a_positive_int(counts, error):
    with pytest.raises(error, match="accumulative_counts"):
        OptimWrapper(SGD(lr=1.0), accumulative_counts=counts)


def test_four_small_batches_train_as_one_large():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 3)).astype("f"), rng.normal(size=16).astype("f")

    def loss(params, x, y):
        return jnp.mean((x @ params["w"] - y) ** 2)

    def run(counts):
        wrapper = OptimWrapper(Adam(lr=0.1), accumulative_counts=counts)
        params = {"w": jnp.ones(3)}
        state = wrapper.init(params)
        for _ in range(3):
            for part in range(counts):
                batch = slice(part * 16 // counts, (part + 1) * 16 // counts)
                params, state, _ = wrapper.update_params(loss, params, state, x[batch], y[batch])
        return params["w"]

    np.testing.assert_allclose(run(4), run(1), atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicas_exchange_gradients_once_a_window(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    wrapper = OptimWrapper(SGD(lr=0.5), accumulative_counts=2, axis_name="data")
    params = {"w": jnp.arange(3.0)}
    state = wrapper.init(params)
    shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    replicated, split = PartitionSpec(), PartitionSpec("data")
    state_spec = optax.tree.set(jax.tree.map(lambda _: replicated, state), accumulated_grads={"w": split})

    def grads_of(params, opt_state, x):
        return wrapper.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]))(params, opt_state, x)[1]

    @jax.jit
    @functools.partial(shard, in_specs=(replicated, state_spec, split), out_specs=state_spec)
    def accumulate(params, opt_state, x):
        return wrapper.accumulate(grads_of(params, opt_state, x), opt_state)

    @jax.jit
    @functools.partial(shard, in_specs=(replicated, state_spec, split, replicated), out_specs=(replicated, state_spec))
    def update(params, opt_state, x, hyperparams):
        updates, opt_state = wrapper.update(grads_of(params, opt_state, x), opt_state, params, hyperparams)
        return jax.tree.map(jnp.add, params, updates), opt_state

    # the sums of the four replicas are concatenated
    state = optax.tree.set(state, accumulated_grads={"w": jnp.zeros(12)})
    x = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("f")
    assert accumulate.lower(params, state, x[0]).compile().as_text().count("all-reduce(") == 0
    text = update.lower(params, state, x[1], wrapper.hyperparams).compile().as_text()
    assert text.count("all-reduce(") + text.count("all-reduce-start(") == 1
    state = accumulate(params, state, x[0])
    new, _ = update(params, state, x[1], wrapper.hyperparams)
    np.testing.assert_allclose(new["w"], np.arange(3.0) - 0.5 * x.mean((0, 1)), atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(OptimWrapper, SGD(lr=0.1, momentum=0.9), clip_grad=dict(max_norm=1.0)),
        functools.partial(OptimWrapper, optax.adamw(0.1)),
        functools.partial(AmpOptimWrapper, optimizer=Adam(lr=0.1), loss_scale=8.0, dtype="float32"),
    ],
    ids=["clipped", "optax", "scaled"],
)
def test_windows_that_the_chain_counts_train_replicas_as_one_device(make, check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated, split = PartitionSpec(), PartitionSpec("data")
    x = np.random.default_rng(0).normal(size=(4, 8, 3)).astype("f")

    def run(axis_name):
        wrapper = make(accumulative_counts=2, axis_name=axis_name)
        params = {"w": jnp.ones(3)}
        state = wrapper.init(params)

        def step(params, state, x):
            _, grads = wrapper.value_and_grad(lambda p: jnp.mean((x @ p["w"] - 1) ** 2))(params, state)
            updates, state = wrapper.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        if axis_name is not None:
            specs = optax.tree.set(jax.tree.map(lambda _: replicated, state), accumulated_grads={"w": split})
            state = optax.tree.set(state, accumulated_grads={"w": jnp.zeros(12)})
            step = jax.shard_map(
                step, mesh=mesh, in_specs=(replicated, specs, split), out_specs=(replicated, specs), check_vma=check_vma
            )
        step = jax.jit(step)
        for batch in x:
            params, state = step(params, state, batch)
        return params["w"]

    one = run(None)
    assert np.abs(one - 1).max() > 0.05
    np.testing.assert_allclose(run("data"), one, rtol=1e-5)


def test_the_sum_of_backward_calls_is_averaged_over_replicas():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    wrapper = OptimWrapper(SGD(lr=0.5), axis_name="data")
    params = {"w": jnp.arange(3.0)}
    x = np.random.default_rng(0).normal(size=(4, 2, 3)).astype("f")

    def run(params, opt_state, x):
        for part in x[0]:  # two calls on each replica, whose gradients are added
            opt_state, _ = wrapper.backward(loss_of, params, opt_state, part)
        return wrapper.step(params, opt_state)[0]

    replicated = PartitionSpec()
    specs = (replicated, replicated, PartitionSpec("data"))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=replicated, check_vma=False)
    new = jax.jit(mapped)(params, wrapper.init(params), x)
    np.testing.assert_allclose(new["w"], np.arange(3.0) - 0.5 * x.sum(1).mean(0), atol=1e-6)


def test_replicas_of_pmap_train_on_the_mean_gradient():
    wrapper = OptimWrapper(SGD(lr=0.5), axis_name="data")
    params = {"w": jnp.arange(3.0)}
    x = np.random.default_rng(0).normal(size=(4, 2, 3)).astype("f")

    def step(params, opt_state, x, hyperparams):
        _, grads = wrapper.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]))(params, opt_state, x)
        return wrapper.apply_gradients(grads, opt_state, params, hyperparams)[0]

    devices = take_devices(4)
    step = jax.pmap(step, axis_name="data", in_axes=(None, None, 0, None), out_axes=None, devices=devices)
    new = step(params, wrapper.init(params), x, wrapper.hyperparams)
    np.testing.assert_allclose(new["w"], np.arange(3.0) - 0.5 * x.mean((0, 1)), atol=1e-6)


def test_step_after_two_backwards_uses_the_summed_gradients():
    wrapper = OptimWrapper(SGD(lr=0.1))
    params = {"w": jnp.ones(())}
    state = wrapper.init(params)
    for x in (2.0, 3.0):
        state, _ = wrapper.backward(loss_of, params, state, jnp.float32(x))
    assert wrapper.inner_count == 2
    new, state = wrapper.step(params, state)
    assert float(new["w"]) == pytest.approx(1 - 0.1 * 5)
    unchanged, _ = wrapper.step(params, wrapper.zero_grad(state))
    assert float(unchanged["w"]) == 1.0


def test_backward_takes_a_dict_of_losses():
    def losses(params, x):
        return {"loss_a": jnp.sum(params["w"] * x), "loss_b": jnp.sum(2 * params["w"] * x), "accuracy": params["w"]}

    wrapper = OptimWrapper(SGD(lr=0.1))
    params = {"w": jnp.ones(())}
    state, actual = wrapper.backward(losses, params, wrapper.init(params), jnp.float32(2.0))
    assert sorted(actual) == ["accuracy", "loss_a", "loss_b"]
    new, _ = wrapper.step(params, state)
    assert float(new["w"]) == pytest.approx(1 - 0.1 * 6)
    with pytest.raises(ValueError, match="a loss must have 'loss' in its name, got \\['accuracy'\\]"):
        wrapper.backward(lambda p, x: {"accuracy": p["w"]}, params, state, jnp.float32(2.0))


def test_ten_steps_from_zeros_to_ones_change_only_the_bias():
    # Linear(1, 1), input 0, target 1, L1 loss, lr 0.01: each step changes the bias by 0.01
    def l1(params, x):
        return jnp.abs(x * params["kernel"] + params["bias"] - 1.0).mean()

    wrapper = OptimWrapper(SGD(lr=0.01))
    params = {"kernel": jnp.float32(0.3), "bias": jnp.float32(0.2)}
    state = wrapper.init(params)
    for _ in range(10):
        params, state, _ = wrapper.update_params(l1, params, state, jnp.zeros(4))
    assert float(params["kernel"]) == pytest.approx(0.3)
    assert float(params["bias"]) == pytest.approx(0.3, abs=1e-6)


def test_forward_context_yields_whether_the_iteration_updates():
    wrapper = OptimWrapper(SGD(lr=0.1), accumulative_counts=2)
    seen = []
    for _ in range(4):
        with wrapper.optim_context() as syncs:
            seen.append(syncs)
        wrapper.start_step()
    assert seen == [False, True, False, True]


@pytest.mark.parametrize(("accumulation_weight", "mean"), [("examples", (4 * 1 + 2 * 4) / 6), ("equal", (1 + 4) / 2)])
def test_a_partial_batch_counts_by_its_examples_or_as_a_whole_batch(accumulation_weight, mean):
    wrapper = OptimWrapper(SGD(lr=1.0), accumulative_counts=2, accumulation_weight=accumulation_weight)
    params = {"w": jnp.zeros(())}
    state = wrapper.accumulate({"w": jnp.float32(1)}, wrapper.init(params), jnp.float32(4))  # of 4 examples
    updates, _ = wrapper.update({"w": jnp.float32(4)}, state, params, weight=jnp.float32(2))  # of 2
    np.testing.assert_allclose(updates["w"], -mean, rtol=1e-6)


def test_replicas_count_by_their_examples_with_equal_weights_of_iterations():
    wrapper = OptimWrapper(SGD(lr=1.0), accumulative_counts=2, accumulation_weight="equal", axis_name="data")
    params = {"w": jnp.zeros(())}

    def step(grads, weights):
        state = wrapper.accumulate({"w": grads[0]}, wrapper.init(params), weights[0])
        return wrapper.update({"w": grads[1]}, state, params, weight=weights[1])[0]["w"]

    # The first iteration has 4 + 2 examples on the two replicas, the second 1 + 1
    grads, weights = jnp.array([[1.0, 2.0], [4.0, 6.0]]), jnp.array([[4.0, 1.0], [2.0, 1.0]])
    updates = jax.vmap(step, axis_name="data")(grads, weights)
    np.testing.assert_allclose(updates, -((4 * 1 + 2 * 4) / 6 + (2 + 6) / 2) / 2, rtol=1e-6)
