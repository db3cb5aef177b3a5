"""Models written for `jax.pmap` name the axis of the devices, which every strategy can bind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jengine.config.errors import ConfigError
from jengine.model import LinenModel
from jengine.parallel import DataParallel, Pjit, SingleDevice
from tests.parallel.conftest import Net, squared_error


class PmapNet(nn.Module):
    """`Net` with statistics over the named axis, in training as in prediction."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(16, use_bias=False, name="up")(x)
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="batch", name="bn")
        return nn.Dense(4, name="down")(jnp.tanh(norm(x)))


@pytest.fixture
def expected(make_run):
    return make_run(dict(type="SingleDevice"), work_dir="plain").train()


@pytest.mark.parametrize(
    "parallel",
    [
        dict(type="SingleDevice"),
        dict(type="Pjit", devices=2),
        dict(type="DataParallel", devices=2),
    ],
    ids=lambda parallel: parallel["type"],
)
def test_batch_norm_over_a_named_axis_equals_batch_norm_over_the_batch(make_run, assert_close, expected, parallel):
    runner = make_run(dict(parallel, axis_names=["batch"]), model=LinenModel(PmapNet(), squared_error, inputs="x"))
    state = runner.train()
    assert_close(state.params, expected.params)
    statistics = jax.tree.map(lambda x: x[0] if x.ndim == 2 else x, state.model_state)  # of one replica
    assert_close(statistics, expected.model_state)
    assert np.isfinite(runner.predict(dict(x=np.ones((4, 8), np.float32), y=np.ones((4, 4), np.float32)))).all()


def test_chunks_bind_the_axis_too(make_run, assert_close, expected):
    cfg = dict(by_epoch=False, max_iters=20, steps_per_call=5)
    model = LinenModel(PmapNet(), squared_error, inputs="x")
    runner = make_run(dict(type="SingleDevice", axis_names=["batch", "device"]), model=model, train_cfg=cfg)
    assert_close(runner.train().params, expected.params)


def test_without_the_name_the_error_is_that_of_jax(make_run):
    model = LinenModel(PmapNet(), squared_error, inputs="x")
    runner = make_run(dict(type="SingleDevice"), model=model)
    with pytest.raises(NameError, match="batch"):
        runner.train()
    assert runner.iter == 0


def test_names_that_cannot_be_bound_are_refused():
    assert Net().statistics_axis is None
    assert SingleDevice(axis_names=["batch"]).axis_names == ("batch",)
    with pytest.raises(ConfigError, match="Pjit: axis_names must not be axes of the mesh"):
        Pjit(devices=2, axis_names=["data"])
    with pytest.raises(ConfigError, match=r"DataParallel: axis_names must be one name.* got \('batch', 'device'\)"):
        DataParallel(devices=2, axis_names=["batch", "device"])
