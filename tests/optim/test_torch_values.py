"""Values computed by PyTorch; w=(3,4), gradients (.6,.8), (1,0), (.5,-.5) by default."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.optim import build_optim_wrapper

GRADS = ((0.6, 0.8), (1.0, 0.0), (0.5, -0.5))


def run(optimizer, grads=GRADS, w=(3.0, 4.0)):
    params = {"w": jnp.asarray(w)}
    wrapper = build_optim_wrapper(params, {"optimizer": optimizer})
    state = wrapper.init(params)
    seen = []
    for grad in grads:
        updates, state = wrapper.update({"w": jnp.asarray(grad)}, state, params, wrapper.hyperparams)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params["w"]))
    return np.stack(seen)


# torch.optim 2.13, float64
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (
            {"type": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            [(2.937, 3.916), (2.777363, 3.836484), (2.580912337, 3.811083116)],
        ),
        (
            {"type": "AdamW", "lr": 0.1, "weight_decay": 0.01},
            [(2.8970000017, 3.8960000013), (2.7958238169, 3.825098177), (2.6980255101, 3.8112441805)],
        ),
        # dampening: the first momentum is the gradient itself
        (
            {"type": "SGD", "lr": 0.1, "momentum": 0.9, "dampening": 0.5},
            [(2.94, 3.92), (2.836, 3.848), (2.7174, 3.8082)],
        ),
    ],
)
def test_optimizer_matches_torch(optimizer, expected):
    np.testing.assert_allclose(run(optimizer), expected, rtol=2e-7)


def test_amsgrad_takes_the_maximum_before_the_bias_correction():
    # torch.optim.Adam(amsgrad=True); optax.amsgrad returns 2.84736842 at the second step
    seen = run({"type": "Adam", "lr": 0.1, "amsgrad": True}, grads=((1.0,), (0.1,), (0.1,)), w=(3.0,))
    np.testing.assert_allclose(seen[:, 0], [2.9, 2.82591894, 2.76260458], rtol=2e-7)


def test_groups_with_and_without_momentum():
    params = {"backbone": jnp.zeros(()), "head": jnp.zeros(())}
    wrapper = build_optim_wrapper(
        params,
        {
            "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
            "paramwise_cfg": {"custom_keys": {"head": {"momentum": 0.0}}},
        },
    )
    state = wrapper.init(params)
    steps = []
    for _ in range(3):
        updates, state = wrapper.update({"backbone": jnp.ones(()), "head": jnp.ones(())}, state, params)
        steps.append((float(updates["backbone"]), float(updates["head"])))
    # the momentum is 1, 1.9, 2.71; without momentum the gradient is used
    np.testing.assert_allclose(steps, [(-0.1, -0.1), (-0.19, -0.1), (-0.271, -0.1)], rtol=1e-6)
