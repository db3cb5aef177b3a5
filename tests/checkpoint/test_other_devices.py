"""Move a run from eight devices to two and to four: the losses stay the same."""

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
    loss=lambda params, batch: jnp.square(
        jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]
    ),
)
WRAPPER = dict(optimizer=dict(type="AdamW", lr=0.02), clip_grad=dict(max_norm=1.0))


def make_batches(count):
    x = np.random.default_rng(0).standard_normal((count, 8, 8)).astype(np.float32)
    return [{"x": x[i], "y": x[i].sum(axis=1)} for i in range(count)]


def put_on(tree, devices):
    """Shard the matrices of `tree` over `devices`; replicate the other arrays."""
    mesh = jax.make_mesh(
        (devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )

    def put(leaf):
        spec = PartitionSpec("fsdp") if leaf.ndim == 2 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def to_dict(state):
    return {name: getattr(state, name) for name in TrainState.__dataclass_fields__}


def test_a_run_continues_with_the_same_losses_on_another_number_of_devices(tmp_path):
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

    _, expected = train(fresh, make_batches(9))
    state, losses = put_on(fresh, 8), []
    for stage, devices in enumerate((8, 2, 4)):
        if stage:
            arrays, _ = restore(tmp_path / f"iter_{stage}", to_dict(put_on(fresh, devices)))
            state = TrainState(**arrays)
        assert len(state.params["w"].sharding.device_set) == devices
        state, new_losses = train(state, make_batches(9)[3 * stage : 3 * stage + 3])
        losses += new_losses
        checkpointer.save(
            tmp_path / f"iter_{stage + 1}", to_dict(state), {"meta": {"iter": 3 * stage + 3}}
        )
        checkpointer.wait()
    checkpointer.close()
    assert losses == pytest.approx(expected, rel=1e-6)
