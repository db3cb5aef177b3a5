import pathlib

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jengine.config import load_config
from jengine.config.errors import ConfigError
from jengine.hooks import Hook
from jengine.model import NnxModel
from jengine.runner import Runner

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)
WEIGHTS = {"w": np.array([3.0, -1.0], np.float32), "b": np.float32(2)}


class Record(Hook):
    """Record the weights before the first step."""

    def before_train(self, runner):
        self.params = jax.device_get(runner.state.params)


def test_a_run_starts_from_arrays_in_memory_and_leaves_them_alone(make_runner):
    weights = {"params": {name: jax.numpy.asarray(value) for name, value in WEIGHTS.items()}}
    for load_from in (WEIGHTS, weights, dict(path=weights, rename=[("w", "w")])):
        record = Record()
        runner = make_runner(load_from=load_from, custom_hooks=[record])
        runner.train()
        jax.tree.map(np.testing.assert_array_equal, record.params, WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, weights["params"], {"w": [3.0, -1.0], "b": 2.0})
    jax.tree.map(np.testing.assert_array_equal, WEIGHTS, {"w": [3.0, -1.0], "b": 2.0})
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert "Loaded the weights of the dict in memory: 2 match, 0 missing, 0 unexpected, 0 mismatched\n" in log


@pytest.mark.parametrize("parallel", ["DataParallel", "Pjit"])
def test_weights_of_a_file_are_placed_on_all_devices(make_runner, tmp_path, parallel):
    save_file({"model.w": WEIGHTS["w"], "model.b": np.asarray(WEIGHTS["b"])}, tmp_path / "model.safetensors")
    runner = make_runner(
        load_from=dict(path=tmp_path / "model.safetensors", rename=[("model", "")]),
        parallel=dict(type=parallel, devices=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
    )
    state = runner.train()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), WEIGHTS)
    assert len(state.params["w"].sharding.device_set) == 2


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(2, 1, rngs=rngs)
        self.bn = nnx.BatchNorm(1, rngs=rngs)

    def __call__(self, x):
        return self.bn(self.dense(x))[:, 0]


def squared_error(outputs, batch):
    return (outputs - batch["y"]) ** 2


def test_a_run_from_a_module_is_resumed_from_its_own_checkpoint(make_runner, tmp_path):
    def run(**changes):
        runner = make_runner(model=NnxModel(Net, squared_error, inputs="x"), default_hooks=SAVE, **changes)
        return runner, jax.device_get(runner.train())

    module = Net(nnx.Rngs(5))
    module.bn.mean[...] = jax.numpy.ones(1)
    record = Record()
    straight, expected = run(load_from=module, custom_hooks=[record], work_dir=tmp_path / "straight")
    np.testing.assert_array_equal(record.params["dense"]["kernel"], module.dense.kernel[...])
    assert not module.dense.kernel[...].is_deleted()
    run(load_from=module, custom_hooks=[record], train_cfg=dict(max_epochs=1))
    resumed, state = run(load_from=module, resume=True)
    assert resumed.iters_this_session == straight.iter // 2
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, state.model_state, expected.model_state)


def test_weights_in_memory_are_asked_for_by_the_config_file(make_runner, tmp_path):
    cfg = dict(
        model=make_runner().model,
        work_dir=str(tmp_path / "cfg"),
        val_dataloader=dict(batch_size=4, dataset=[dict(x=np.ones(2, np.float32), y=np.float32(0))] * 4),
        val_cfg={},
        val_evaluator=dict(type="MeanLoss", loss=squared_error),
        load_from=dict(path=WEIGHTS),
    )
    assert Runner.from_cfg(cfg).val()["loss"] == 16.0  # (3 - 1 + 2) ** 2
    written = load_config(tmp_path / "cfg" / "config.py")
    with pytest.raises(ConfigError, match="`load_from`.*which the run that wrote it had in memory only"):
        Runner.from_cfg({**cfg, "load_from": written["load_from"]})
    Runner.from_cfg({**cfg, "load_from": None}).val()


@pytest.mark.parametrize("load_from", [5, [1, 2], {"w": "text"}])
def test_other_objects_are_refused(make_runner, load_from):
    with pytest.raises(TypeError) as error:
        make_runner(load_from=load_from)
    assert "in the config at `load_from`" in error.value.__notes__
