"""A run that moves from eight devices to two and to four goes on with the same losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jengine.checkpoint import Checkpointer, restore
from jengine.model import FunctionalModel
from jengine.optim import build_optim_wrapper
from jengine.train import TrainState, build_train_step, create_train_state

MODEL = FunctionalModel(
    init=lambda rng: {"w": jax.random.normal(rng, (8, 16)), "v": jnp.ones((16,))},
    loss=lambda params, batch: jnp.square(jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]),
)
WRAPPER = dict(optimizer=dict(type="AdamW", lr=0.02), clip_grad=dict(max_norm=1.0))


def batches(count):
    x = np.random.default_rng(0).standard_normal((count, 8, 8)).astype(np.float32)
    return [{"x": x[i], "y": x[i].sum(axis=1)} for i in range(count)]


def placed(tree, devices):
    """Matrices in shards over `devices`, the rest on all of them."""
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def place(leaf):
        spec = PartitionSpec("fsdp") if leaf.ndim == 2 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def as_dict(state):
    return {name: getattr(state, name) for name in TrainState.__dataclass_fields__}


def test_a_run_goes_on_with_the_same_losses_on_other_numbers_of_devices(tmp_path):
    params, model_state = MODEL.init(jax.random.key(0), None)
    wrapper = build_optim_wrapper(params, WRAPPER)
    step = jax.jit(build_train_step(MODEL, wrapper))
    fresh = create_train_state(params, model_state, wrapper, rng=jax.random.key(1))
    checkpointer = Checkpointer(tmp_path)

    def train(state, data):
        losses = []
        for batch in data:
            state, outputs = step(state, batch, wrapper.hyperparams)
            losses.append(float(outputs["loss"]))
        return state, losses

    _, expected = train(fresh, batches(9))
    state, losses = placed(fresh, 8), []
    for stage, devices in enumerate((8, 2, 4)):
        if stage:
            arrays, _ = restore(tmp_path / f"iter_{stage}", as_dict(placed(fresh, devices)))
            state = TrainState(**arrays)
        assert len(state.params["w"].sharding.device_set) == devices
        state, found = train(state, batches(9)[3 * stage : 3 * stage + 3])
        losses += found
        checkpointer.save(tmp_path / f"iter_{stage + 1}", as_dict(state), {"meta": {"iter": 3 * stage + 3}})
        checkpointer.wait()
    checkpointer.close()
    assert losses == pytest.approx(expected, rel=1e-6)
