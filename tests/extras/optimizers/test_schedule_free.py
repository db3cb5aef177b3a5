import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest

from jengine import checkpoint
from jengine.config.paths import flatten

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)


def bits(tree):
    return {
        path: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()
        for path, x in flatten(tree).items()
    }


def test_schedule_free_weights_are_evaluated_and_stored(make_runner, tmp_path):
    settings = dict(
        optim_wrapper=dict(
            optimizer=dict(type="schedule_free_sgd", learning_rate=0.1),
            paramwise_cfg=dict(custom_keys={"b": dict(lr_mult=0.5)}),
        ),
        custom_hooks=[dict(type="ScheduleFreeHook", evaluate_on_origin=True)],
        default_hooks=SAVE,
    )
    runner = make_runner(**settings)
    params = runner.train().params
    kind = optax.contrib.ScheduleFreeState
    states = [
        s for s in jax.tree.leaves(runner.state.opt_state, is_leaf=lambda s: isinstance(s, kind)) if isinstance(s, kind)
    ]
    z = {name: leaf for state in states for name, leaf in state.z.items() if leaf is not None}
    assert len(states) == 2
    for name, raw in params.items():
        # x = (y - (1 - b1) z) / b1 of the paper, with b1 = 0.9
        np.testing.assert_allclose(
            runner.state.hook_state["ScheduleFreeHook"].params[name], (raw - 0.1 * z[name]) / 0.9, rtol=1e-5
        )
    metrics = runner.validations[-1][2]
    assert metrics["loss"] != metrics["loss_origin"]
    path = str(tmp_path / "run" / "epoch_2")
    averages = jax.device_get(runner.state.hook_state["ScheduleFreeHook"].params)
    assert jax.tree.map(float, checkpoint.load(path).params["b"]) == float(averages["b"])
    assert bits(make_runner(**settings, resume=path).train()) == bits(runner.state)
    plain = make_runner(custom_hooks=[dict(type="ScheduleFreeHook")], work_dir=tmp_path / "plain")
    with pytest.raises(ValueError, match="`optim_wrapper.optimizer` must be schedule-free"):
        plain.train()
