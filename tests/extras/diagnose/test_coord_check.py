"""`jengine coord-check`: changes of activations over widths, and outputs of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine.extras.diagnose.coord_check import check_coordinates, fit_slope
from jengine.extras.diagnose.layer_outputs import find_outputs

RNG = np.random.default_rng(0)
DATA = dict(x=RNG.normal(size=(64, 12)).astype("f"), label=RNG.integers(0, 5, 64))


class MLP(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width, name="first")(x))
        x = nn.relu(nn.Dense(self.width, name="second")(x))
        return nn.Dense(5, name="head", kernel_init=nn.initializers.zeros)(x)


class NnxMLP(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Linear(12, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 5, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))


def config(model="LinenModel"):
    module = dict(type=MLP if model == "LinenModel" else NnxMLP, width=32)
    return dict(
        model=dict(type=model, module=module, loss=dict(type="CrossEntropy"), inputs="x"),
        train_dataloader=dict(batch_size=64, dataset=dict(type="ArrayDataset", arrays=DATA)),
        train_cfg=dict(by_epoch=False, max_iters=100),
        optim_wrapper=dict(
            optimizer=dict(type="Adam", lr=0.005),
            paramwise_cfg=dict(parametrization="mup", base=dict(width={"model.module.width": 32})),
        ),
    )


def slopes(model, **options):
    found = check_coordinates(config(model), [32, 256], 5, **options)
    return {layer: fit_slope(found.widths, changes) for layer, changes in found.changes.items()}


@pytest.mark.parametrize("model", ["LinenModel", "NnxModel"])
def test_activations_of_wide_networks_move_as_far_with_mup_and_farther_without(model):
    with_mup, standard = slopes(model), slopes(model, standard=True)
    assert set(with_mup) == {"first", "second", "head"}
    assert max(map(abs, with_mup.values())) < 0.2, with_mup
    assert min(standard["second"], standard["head"]) > 0.4, standard


def test_outputs_of_layers_are_found_in_scans_and_calls():
    params = {"stack.kernel": jnp.asarray(RNG.normal(size=(2, 3, 3)).astype("f")), "table": jnp.eye(3) * 2}

    def loss(params):
        @jax.jit
        @jax.checkpoint
        def run(kernels, x):
            return jax.lax.scan(lambda x, kernel: (jax.nn.relu(x @ kernel), None), x, kernels)[0]

        return run(params["stack.kernel"], params["table"][jnp.array([0, 2])]).sum()

    found = jax.jit(lambda params: find_outputs(loss, params))(params)
    x = np.eye(3)[[0, 2]] * 2
    np.testing.assert_allclose(found["table"], x)
    first = x @ params["stack.kernel"][0]
    np.testing.assert_allclose(found["stack[0]"], first, rtol=1e-6)
    np.testing.assert_allclose(found["stack[1]"], np.maximum(first, 0) @ params["stack.kernel"][1], rtol=1e-5)
