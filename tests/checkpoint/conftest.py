import jax
import jax.numpy as jnp
import optax
import pytest

from jengine.checkpoint import Checkpointer


@pytest.fixture
def checkpointer(tmp_path):
    writer = Checkpointer(tmp_path)
    yield writer
    writer.close()


def make_state(value=1.0, rng=0):
    """Return a small train state with every kind of leaf of a real one."""
    params = {
        "backbone": {"kernel": jnp.full((8, 4), value), "bias": jnp.zeros(4, jnp.bfloat16)},
        "head": [jnp.full(3, value), jnp.full(2, -value)],
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    return {
        "step": jnp.int32(3),
        "params": params,
        "model_state": {},
        "opt_state": optimizer.init(params),
        "hook_state": {"EMAHook": {"params": jax.tree.map(jnp.copy, params)}, "ProgressHook": None},
        "rng": jax.random.key(rng),
    }


def make_meta(iteration=3, **more):
    return {"meta": {"iter": iteration, "epoch": 1}, **more}


@pytest.fixture
def state():
    return make_state()


def save_and_wait(checkpointer, *args, **kwargs):
    checkpointer.save(*args, **kwargs)
    checkpointer.wait()
