import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.plan import find_collectives
from jengine.model import LinenModel
from tests.runner.conftest import build_runner

RNG = np.random.RandomState(0)
X = RNG.randn(16, 8).astype(np.float32)
Y = X @ RNG.randn(8, 4).astype(np.float32)
DATA = ArrayDataset(dict(x=X, y=Y))


class Net(nn.Module):
    """Two layers with a BatchNorm, every axis divisible by 8 or 4."""

    statistics_axis: str | None = None  # a mapped axis over which statistics are computed

    @nn.compact
    def __call__(self, x, train=False):
        # no bias before a BatchNorm: its gradient is rounding noise, which Adam would scale up
        x = nn.Dense(16, use_bias=False, name="up")(x)
        norm = nn.BatchNorm(
            use_running_average=not train, momentum=0.9, axis_name=self.statistics_axis if train else None, name="bn"
        )
        return nn.Dense(4, name="down")(jnp.tanh(norm(x)))


def squared_error(outputs, batch):
    return jnp.square(outputs - batch["y"]).mean(axis=-1)


def step_collectives(runner, step, batch=None):
    """Return the collectives of a step of a runner that has trained."""
    batch = runner.strategy.put_batch({"x": X, "y": Y} if batch is None else batch)
    compiled = runner.strategy.compile_train_step(step.__wrapped__)
    return find_collectives(compiled.lower(runner.state, batch, runner.optim_wrapper.hyperparams).compile().as_text())


def make_loader(batch_size=16, dataset=DATA, **changes):
    return dict(
        batch_size=batch_size,
        dataset=dataset,
        sampler=dict(type="DefaultSampler", shuffle=False),
        **{"drop_last": True, **changes},
    )


@pytest.fixture
def make_run(tmp_path):
    """Build a Runner of a small regression with BatchNorm; by default 20 iterations with all 16 samples in a batch."""

    def make(parallel=None, work_dir="run", **changes):
        arguments = dict(
            model=LinenModel(Net(), squared_error, inputs="x"),
            train_dataloader=make_loader(),
            train_cfg=dict(by_epoch=False, max_iters=20),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.05)),
            parallel=parallel,
        )
        return build_runner(tmp_path / work_dir, **{**arguments, **changes})

    return make


@pytest.fixture
def assert_close():
    """Check that all leaves of two trees are equal within `atol` and a relative tolerance of 1e-5."""

    def check(found, expected, atol=1e-5):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=1e-5)

    return check
