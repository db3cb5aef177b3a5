"""Test that a chunk of steps has exactly the results of single steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import stack_batches
from jengine.model import FunctionalModel
from jengine.optim import OptimWrapper
from jengine.train import build_scanned_step, build_train_step, create_train_state

STEPS = 5
# From JAX 0.11 on XLA may round an operation of an optimizer differently within a loop.
ROUNDING = dict(rtol=0, atol=0) if jax.__version_info__ < (0, 11) else dict(rtol=1e-6, atol=1e-7)


def make_noisy_model():
    """Return a linear model with noise from the key of the step, to detect a wrong key."""

    def loss(params, batch, rng):
        noise = 0.1 * jax.random.normal(rng, batch["y"].shape)
        return jnp.square(batch["x"] @ params["w"] - batch["y"] + noise)

    return FunctionalModel(init=lambda: {"w": jnp.zeros(3)}, loss=loss, predict=lambda params, batch: batch["x"])


def make_batches():
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(4, 3)).astype(np.float32), "y": np.ones(4, np.float32)} for _ in range(STEPS)]


@pytest.mark.full_optimization
@pytest.mark.parametrize("counts", [1, 2])
def test_a_chunk_equals_its_steps(counts):
    model = make_noisy_model()
    wrapper = OptimWrapper(dict(type="Adam", lr=0.1), accumulative_counts=counts, clip_grad=dict(max_norm=1.0))
    params, _ = model.init(jax.random.key(0), None)
    update, accumulate = (build_train_step(model, wrapper, update=u) for u in (True, False))
    wrapper.initialize_count_status(0, STEPS)

    def start():
        return create_train_state(jax.tree.map(jnp.copy, params), {}, wrapper, rng=jax.random.key(1))

    single, is_update, hyperparams, metrics = start(), [], [], []
    steps = {True: jax.jit(update), False: jax.jit(accumulate)}
    for batch in make_batches():
        is_update.append(wrapper.start_step())
        hyperparams.append(wrapper.hyperparams)
        single, step_metrics = steps[is_update[-1]](single, batch, hyperparams[-1])
        metrics.append(step_metrics)
    chunk = jax.jit(build_scanned_step(update, accumulate if counts > 1 else None))
    stacked = stack_batches(make_batches()), jax.tree.map(lambda *x: np.stack(x), *hyperparams), np.array(is_update)
    state, scanned = chunk(start(), *stacked)
    for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(state), strict=True):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_allclose(a, b, **ROUNDING)
    assert scanned.update_only == (() if counts == 1 else ("grad_norm",))
    for name, values in scanned.values.items():
        np.testing.assert_allclose(values, [step.get(name, np.nan) for step in metrics], **ROUNDING)


def test_batches_are_stacked_along_a_new_first_axis():
    stacked = stack_batches([dict(x=np.full((2, 3), i, np.float32), n=np.int32(i)) for i in range(3)])
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in stacked.items()} == {
        "x": ((3, 2, 3), np.float32),
        "n": ((3,), np.int32),
    }
    np.testing.assert_array_equal(stacked["x"][:, 0, 0], [0, 1, 2])


def test_batches_on_the_device_are_stacked_there():
    first, (second,) = stack_batches([(jnp.full(2, i), [np.full((2, 1), i)]) for i in range(2)])
    assert isinstance(first, jax.Array)
    assert (first.tolist(), second[:, 0, 0].tolist()) == ([[0, 0], [1, 1]], [0, 1])
