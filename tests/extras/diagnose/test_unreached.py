"""Parameters that a loss does not reach, in the transformations of JAX."""

import jax
import jax.numpy as jnp
import pytest

from jengine.extras.diagnose.unreached import list_unreached

PARAMS = {"used": jnp.ones(3), "stopped": jnp.ones(3), "unused": {"w": jnp.ones(2)}, "both": jnp.ones(())}


def loss(params):
    frozen = jax.lax.stop_gradient((params["stopped"], params["both"]))
    return (params["used"] * frozen[0]).sum() * frozen[1] + params["both"]


def in_a_loop(params):
    return jax.lax.scan(lambda total, x: (total + loss({**params, "used": x * params["used"]}), None), 0.0, jnp.ones(4))[0]


@pytest.mark.parametrize(
    "function",
    [loss, jax.jit(loss), jax.checkpoint(loss), in_a_loop, lambda p: jax.vmap(loss, axis_size=2, in_axes=None)(p).sum()],
)
def test_stopped_and_unused_parameters_are_named(function):
    assert list_unreached(function, PARAMS) == ["stopped", "unused.w"]


def test_a_gradient_that_happens_to_be_zero_is_reached():
    assert list_unreached(lambda p: (p["a"] * p["b"]).sum(), {"a": jnp.zeros(2), "b": jnp.zeros(2)}) == []
