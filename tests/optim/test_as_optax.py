"""A wrapper as a plain optax chain trains as the wrapper does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.optim import build_optim_wrapper

RNG = np.random.default_rng(1)
PARAMS = {"backbone": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32), "head": jnp.ones(3), "frozen": jnp.ones(2)}
GRADS = [jax.tree.map(lambda p: jnp.asarray(RNG.normal(size=p.shape), jnp.float32), PARAMS) for _ in range(6)]
CFG = {
    "optimizer": {"type": "AdamW", "lr": 0.1},
    "clip_grad": {"max_norm": 1.0},
    "paramwise_cfg": {"custom_keys": {"head": {"lr_mult": 0.1}, "frozen": {"requires_grad": False}}},
}


@pytest.mark.parametrize("counts", [1, 3])
def test_chain_trains_as_the_wrapper(counts):
    wrapper = build_optim_wrapper(PARAMS, {**CFG, "accumulative_counts": counts})
    params, state = PARAMS, wrapper.init(PARAMS)
    for grads in GRADS:
        if wrapper.start_step():
            updates, state = wrapper.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        else:
            state = wrapper.accumulate(grads, state)

    tx = wrapper.as_optax()
    plain, tx_state = PARAMS, tx.init(PARAMS)
    step = jax.jit(tx.update)
    for grads in GRADS:
        updates, tx_state = step(grads, tx_state, plain)
        plain = optax.apply_updates(plain, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, params)
    np.testing.assert_array_equal(plain["frozen"], PARAMS["frozen"])


def test_chain_takes_numbers_as_data():
    wrapper = build_optim_wrapper(PARAMS, {"optimizer": {"type": "SGD", "lr": 0.1}})
    tx = wrapper.as_optax()
    step = jax.jit(tx.update)
    state = tx.init(PARAMS)
    for lr in (0.1, 0.5):
        wrapper.param_groups[0]["lr"] = lr
        updates, state = step(GRADS[0], state, PARAMS, hyperparams=wrapper.hyperparams)
        np.testing.assert_allclose(updates["head"], -lr * GRADS[0]["head"], rtol=1e-6)
    assert step._cache_size() == 1


def test_chain_combines_with_other_transformations():
    wrapper = build_optim_wrapper(PARAMS, {"optimizer": {"type": "SGD", "lr": 0.1}})
    tx = optax.chain(optax.scale(2.0), wrapper.as_optax())
    updates, _ = tx.update(GRADS[0], tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["head"], -0.2 * GRADS[0]["head"], rtol=1e-6)
