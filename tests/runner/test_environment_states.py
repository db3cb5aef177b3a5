"""Test that data from an environment follow the current parameters, and that states with arrays are in checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.hooks import Hook
from jengine.model import FunctionalModel


class Environment:
    """Batches that depend on the current parameters, a random generator, a JAX key and a large buffer."""

    device_prefetch, batch_axis = 0, None

    def __init__(self):
        self.random, self.key = np.random.RandomState(0), jax.random.key(0)
        self.buffer, self.seen, self.runner = np.zeros(5000), [], None

    def __iter__(self):
        while True:
            w = 0.0 if self.runner is None or self.runner.state is None else float(self.runner.state.params["w"])
            self.seen.append((self.runner.iter if self.runner else -1, w))
            self.key, drawn = jax.random.split(self.key)
            noise = float(jax.random.normal(drawn)) + self.random.randn()
            self.buffer = np.roll(self.buffer, 1)
            self.buffer[0] = w + noise
            yield {"x": self.buffer[:4].astype(np.float32), "count": 1.0}

    def state_dict(self):
        kind, keys, position, *_ = self.random.get_state()
        return {"random": (kind, keys, position), "key": self.key, "buffer": self.buffer, "log": b"\x00" * 6000}

    def load_state_dict(self, state):
        self.random.set_state(state["random"])
        self.key, self.buffer = state["key"], state["buffer"]
        assert state["log"] == b"\x00" * 6000


class Statistics(Hook):
    """Hook with arrays in its state."""

    def __init__(self):
        self.total, self.tag = np.zeros(3000, np.float16), b""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.total, self.tag = self.total + np.float16(1), self.tag + bytes([runner.iter])

    def state_dict(self):
        return {"total": jnp.asarray(self.total), "tag": self.tag, "shape": (3, 4)}

    def load_state_dict(self, state):
        self.total, self.tag = np.asarray(state["total"]), state["tag"]
        assert tuple(state["shape"]) == (3, 4)


@pytest.fixture
def train(make_runner, tmp_path):
    def run(name, max_iters, **changes):
        environment, statistics = Environment(), Statistics()
        runner = make_runner(
            work_dir=tmp_path / name,
            model=FunctionalModel(lambda: {"w": jnp.ones(())}, lambda p, b: jnp.square(p["w"] - b["x"]).sum() * b["count"]),
            train_dataloader=environment,
            train_cfg=dict(by_epoch=False, max_iters=max_iters),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)),
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=3, by_epoch=False), logger=None),
            custom_hooks=[statistics], **changes,
        )  # fmt: skip
        environment.runner = runner
        state = runner.train()
        return state, environment, statistics

    return run


def test_each_batch_is_made_from_the_parameters_that_it_is_used_with(train):
    _, environment, _ = train("run", 5)
    w = 1.0
    for iteration, (at, seen) in enumerate(environment.seen[-5:]):  # those before show the shapes
        assert at == iteration
        assert seen == pytest.approx(w, rel=1e-6)
        buffer = environment.buffer[4 - iteration : 8 - iteration]  # of this iteration
        w = float(np.float32(w) - np.float32(0.01) * (2 * (w - buffer.astype(np.float32))).sum())


def test_a_resumed_run_has_the_states_of_data_and_hooks_with_their_arrays(train, tmp_path):
    whole, environment, statistics = train("whole", 8)
    train("cut", 4)
    resumed, again, restored = train("cut", 8, resume=True)
    np.testing.assert_array_equal(resumed.params["w"], whole.params["w"])
    np.testing.assert_array_equal(again.buffer, environment.buffer)
    np.testing.assert_array_equal(restored.total, statistics.total)
    assert restored.tag == statistics.tag == bytes(range(8))
    newest = tmp_path / "cut" / "iter_6"
    assert (newest / "states.bin").stat().st_size == 5000 * 8 + 6000 + 3000 * 2  # the rest is text
    meta = json.loads((newest / "meta.json").read_text())
    assert len(json.dumps([meta["data"], meta["hooks"]])) < 6000
    assert "states.bin" in json.loads((newest / "manifest.json").read_text())["files"]


def test_a_damaged_file_of_states_is_noticed(train, tmp_path):
    train("run", 3)
    path = tmp_path / "run" / "iter_3" / "states.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Exception, match="states.bin"):
        train("run", 6, resume=str(tmp_path / "run" / "iter_3"))
    assert not (tmp_path / "run" / "iter_6").exists()
