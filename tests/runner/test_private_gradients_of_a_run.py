"""Clipped gradients of single examples, with noise, on each strategy against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jengine.model import FunctionalModel
from tests.runner.conftest import build_runner

X = np.random.default_rng(0).standard_normal((24, 3)).astype(np.float32)
DATA = [dict(x=X[i : i + 8], y=X[i : i + 8].sum(axis=1)) for i in (0, 8, 16)]
CLIP, NOISE, RATE, STEPS = 0.8, 0.5, 0.1, 6


def init():
    return {"w": jnp.zeros(3), "b": jnp.zeros(())}, {"noise": jnp.zeros((STEPS, 4)), "keys": jnp.zeros((2, 2), "uint32")}


def loss(params, x, y):
    return jnp.square(x @ params["w"] + params["b"] - y)


def clipped_sum(params, batch):
    """The losses, and the sum of the clipped gradients, of the examples in `batch`."""
    losses, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, batch["x"], batch["y"])
    leaves, treedef = jax.tree.flatten(grads)
    return losses, treedef.unflatten(optax.per_example_global_norm_clip(leaves, CLIP)[0])


def private(state, batch, ctx):
    losses, total = clipped_sum(state.params, batch)
    noise = CLIP * NOISE * jax.random.normal(ctx.shared_rng, 4)
    total = ctx.sum(total)
    count = len(losses) * ctx.replicas
    grads = {"w": (total["w"] + noise[:3]) / count, "b": (total["b"] + noise[3]) / count}
    keys = jnp.stack([jax.random.key_data(ctx.rng), jax.random.key_data(ctx.shared_rng)])
    seen = {"noise": state.model_state["noise"].at[state.step].set(noise), "keys": keys}
    return ctx.apply(state.replace(model_state=seen), grads, {"loss": losses.mean()})


def in_parts(state, batch, ctx):
    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    losses, sums = jax.lax.map(lambda part: clipped_sum(state.params, part), parts)
    grads = jax.tree.map(lambda g: ctx.sum(g.sum(axis=0)) / 8, sums)
    return ctx.apply(state, grads, {"loss": losses.mean()})


def train(work_dir, train_step, optimizer=None, parallel=None, chunk=1):
    """Return the state after training; `parallel` None is a single device."""
    runner = build_runner(
        work_dir, FunctionalModel(init, train_step=train_step), train_dataloader=DATA,
        train_cfg=dict(by_epoch=False, max_iters=STEPS, steps_per_call=chunk), default_hooks=dict(checkpoint=None),
        optim_wrapper=optimizer or optax.sgd(RATE), parallel=parallel or dict(type="SingleDevice"),
    )  # fmt: skip
    return jax.device_get(runner.train())


def reference(noise, every=1):
    """Return the parameters, w and then b, after SGD with clipped gradients in NumPy."""
    params, total = np.zeros(4), np.zeros(4)
    for step in range(STEPS):
        batch = DATA[step % 3]
        inputs = np.concatenate([batch["x"], np.ones((8, 1))], axis=1).astype(np.float64)
        grads = 2 * (inputs @ params - batch["y"])[:, None] * inputs
        norms = np.linalg.norm(grads, axis=1, keepdims=True)
        total += (grads * np.minimum(1.0, CLIP / norms)).sum(axis=0)
        if (step + 1) % every == 0:
            params = params - RATE * (total / every + noise[step]) / 8
            total = np.zeros(4)
    return params


def assert_params(state, expected):
    np.testing.assert_allclose(np.append(state.params["w"], state.params["b"]), expected, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train(tmp_path_factory.mktemp("private"), private)


def test_private_training_equals_a_loop_in_numpy(single):
    noise = single.model_state["noise"]
    assert_params(single, reference(noise))
    assert np.abs(noise).min() > 0
    assert np.unique(noise).size == noise.size


@pytest.mark.parametrize(
    ("parallel", "chunk"),
    [
        (dict(type="DataParallel", devices=4), 1),
        (dict(type="DataParallel", devices=4), 2),
        (dict(type="DataParallel", devices=4, impl="pmap"), 1),
        (dict(type="DataParallel", devices=4, mesh=dict(data=2, fsdp=2)), 1),
        (dict(type="Pjit", devices=4, mesh=dict(fsdp=4), fsdp_min_size=1), 2),
    ],
)  # fmt: skip
def test_private_training_is_the_same_on_each_strategy(parallel, chunk, single, tmp_path):
    state = train(tmp_path, private, parallel=parallel, chunk=chunk)
    noise = state.model_state["noise"]
    np.testing.assert_allclose(noise, np.broadcast_to(single.model_state["noise"], noise.shape), rtol=1e-6)
    assert_params(state, reference(single.model_state["noise"]))


def test_the_shared_key_is_the_same_on_all_replicas_and_the_others_differ(single, tmp_path):
    keys = train(tmp_path, private, parallel=dict(type="DataParallel", devices=4)).model_state["keys"]
    own, shared = keys[:, 0], keys[:, 1]
    assert len(np.unique(own, axis=0)) == 4
    np.testing.assert_array_equal(shared, np.broadcast_to(single.model_state["keys"][1], (4, 2)))
    assert (single.model_state["keys"][0] != single.model_state["keys"][1]).any()


@pytest.mark.parametrize("devices", [1, 4])
def test_noise_in_the_optimizer_is_added_once_per_window(devices, tmp_path):
    noisy = optax.chain(optax.add_noise((CLIP * NOISE / 8) ** 2, 0.0, jax.random.key(3)), optax.sgd(RATE))
    parallel = dict(type="DataParallel", devices=devices)
    state = train(tmp_path / "noise", in_parts, optax.MultiSteps(noisy, every_k_schedule=2), parallel)
    # The noise of optax, from updates without gradients and a rate of 1
    zeros, noise, per_step = {"w": jnp.zeros(3), "b": jnp.zeros(())}, np.zeros((STEPS, 4)), noisy.init(init()[0])
    for step in range(1, STEPS, 2):
        updates, per_step = noisy.update(zeros, per_step)
        noise[step] = -8 / RATE * np.append(updates["w"], updates["b"])
    assert np.abs(noise[1::2]).min() > 0
    assert_params(state, reference(noise, every=2))


def aggregated(state, batch, ctx):
    losses, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(state.params, batch["x"], batch["y"])
    return ctx.apply(state, grads, {"loss": losses.mean()})


@pytest.mark.parametrize("parallel", [None, dict(type="DataParallel", devices=1)])
def test_an_optimizer_for_single_examples_gets_their_gradients_from_the_step(parallel, tmp_path):
    state = train(tmp_path, aggregated, optax.contrib.dpsgd(RATE, CLIP, 0.0, seed=0), parallel)
    assert_params(state, reference(np.zeros((STEPS, 4))))
