"""Define the hand-written loop in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.common import CLASSES, FEATURES, HIDDEN, LOG_EVERY, MOMENTUM, RATE, Log


def init():
    """Initialize the parameters and their momentum."""
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w": jax.random.normal(first, (FEATURES, HIDDEN)) / FEATURES**0.5,
        "b": jnp.zeros(HIDDEN),
        "v": jax.random.normal(second, (HIDDEN, CLASSES)) / HIDDEN**0.5,
        "c": jnp.zeros(CLASSES),
    }
    return params, jax.tree.map(jnp.zeros_like, params)


@functools.partial(jax.jit, donate_argnums=0)
def step(state, x, y):
    """Return `(state, loss)` after one iteration."""

    def loss_fn(params):
        logits = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] + params["c"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean()

    params, trace = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    trace = jax.tree.map(lambda t, g: MOMENTUM * t + g, trace, grads)
    return (jax.tree.map(lambda p, t: p - RATE * t, params, trace), trace), loss


def run(data):
    """Train on the data once."""
    state = init()
    losses = []
    log = Log()
    for i, (x, y) in enumerate(data, 1):
        state, loss = step(state, x, y)
        losses.append(loss)
        if i % LOG_EVERY == 0:
            log.write(i, float(np.mean(jax.device_get(losses))))
            losses.clear()
    jax.block_until_ready(state)


LOOP = (run, lambda x, y: (x, y))
