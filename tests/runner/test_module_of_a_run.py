import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine.data import ArrayDataset
from jengine.model import CrossEntropy, LinenModel, NnxModel
from tests.runner.conftest import build_runner

IMAGES = np.random.RandomState(0).randn(16, 6).astype(np.float32)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


def make_runner(model, work_dir, **changes):
    data = dict(batch_size=8, dataset=ArrayDataset(dict(image=IMAGES, label=np.arange(16) % 3)))
    return build_runner(work_dir, model, train_dataloader=data, **changes)


def test_an_nnx_run_returns_a_module_with_its_weights(tmp_path):
    runner = make_runner(NnxModel(NnxNet(nnx.Rngs(0)), CrossEntropy()), tmp_path)
    with pytest.raises(RuntimeError, match="call train, val or test before `module`"):
        runner.module()
    state = runner.train()
    module, training = runner.module(), runner.module(train=True)
    assert isinstance(module, NnxNet)
    assert (module.dropout.deterministic, training.dropout.deterministic) == (True, False)
    batch = {"image": IMAGES}
    np.testing.assert_allclose(
        module(IMAGES), runner.model.predict(state.params, state.model_state, batch), rtol=1e-5, atol=1e-6
    )
    training(IMAGES)  # draws a mask and updates the statistics of this copy
    assert not np.allclose(training.norm.mean[...], module.norm.mean[...])
    np.testing.assert_array_equal(module.norm.mean[...], state.model_state["norm"]["mean"])


def test_a_module_holds_averages_and_outlives_the_state(tmp_path):
    average = dict(type="EMAHook", momentum=0.5)
    runner = make_runner(LinenModel(LinenNet(), CrossEntropy()), tmp_path, custom_hooks=[average])
    runner.train()
    average = jax.tree.map(np.asarray, runner.state.hook_state["EMAHook"].params)
    module = runner.module()
    jax.tree.map(lambda x: x.delete(), runner.state)  # as the next step would
    jax.tree.map(np.testing.assert_array_equal, module.variables["params"], average)
    assert module(IMAGES).shape == (16, 3)


def test_a_module_of_several_replicas_has_their_mean_statistics(tmp_path):
    runner = make_runner(
        LinenModel(LinenNet(), CrossEntropy()), tmp_path, parallel=dict(type="DataParallel", devices=2)
    )
    state = runner.train()
    statistics = state.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    assert statistics.shape == (2, 6)
    mean = runner.module().variables["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, np.asarray(statistics).mean(0), rtol=1e-6)
