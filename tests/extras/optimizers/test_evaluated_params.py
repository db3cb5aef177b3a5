"""Parameters that optimizers define for evaluation, against the loops of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jengine import checkpoint
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.evaluation import MeanLoss
from jengine.model import FunctionalModel
from jengine.optim import build_optim_wrapper
from tests.runner.conftest import build_runner

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
    runner = make_runner(**settings, validates=True)
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
    assert bits(make_runner(**settings, resume=path, validates=True).train()) == bits(runner.state)
    plain = make_runner(custom_hooks=[dict(type="ScheduleFreeHook")], work_dir=tmp_path / "plain", validates=True)
    with pytest.raises(ValueError, match="`optim_wrapper.optimizer` must be schedule-free"):
        plain.train()


def lookahead(chain=True):
    fast = optax.lookahead(optax.adamw(0.05, weight_decay=0.1), 3, 0.5)
    return optax.chain(optax.clip(0.5), fast) if chain else fast


def slow_and_fast(params, batches, frozen=()):
    """Return the slow and the fast parameters after optax's own loop."""
    tx = lookahead()
    trained = {name: leaf for name, leaf in params.items() if name not in frozen}
    pair = optax.LookaheadParams.init_synced(trained)
    opt_state = tx.init(pair)
    for batch in batches:
        grads = jax.grad(lambda fast: squared_error({**params, **fast}, batch).mean())(pair.fast)  # noqa: B023
        updates, opt_state = tx.update(grads, opt_state, pair)
        pair = optax.apply_updates(pair, updates)
    return {**params, **pair.slow}, {**params, **pair.fast}


def squared_error(params, batch):
    return jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"])


def init_params():
    return {"w": jnp.array([0.5, -0.3, 0.2]), "b": jnp.zeros(())}


X = np.random.default_rng(0).standard_normal((7, 8, 3)).astype(np.float32)
BATCHES = [dict(x=x, y=x.sum(axis=1)) for x in X]


def run_lookahead(work_dir, optimizer=None, iterations=7, rules=None, **changes):
    evaluation = dict(val_dataloader=BATCHES[:1], val_cfg=dict(), val_evaluator=MeanLoss(lambda outputs, batch: outputs))
    runner = build_runner(
        work_dir, FunctionalModel(init_params, squared_error, squared_error),
        train_dataloader=BATCHES, custom_hooks=[dict(type="LookaheadHook", evaluate_on_origin=True)],
        optim_wrapper=dict(optimizer=optimizer or lookahead(), paramwise_cfg=rules),
        **{"train_cfg": dict(by_epoch=False, max_iters=iterations), **evaluation, **changes},
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=4, by_epoch=False)),
    )  # fmt: skip
    runner.train()
    return runner


def assert_lookahead(runner, frozen=()):
    slow, fast = slow_and_fast(init_params(), BATCHES, frozen)
    for name in slow:
        np.testing.assert_allclose(runner.state.hook_state["LookaheadHook"].params[name], slow[name], rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(runner.state.params[name], fast[name], rtol=2e-6, err_msg=name)


def test_lookahead_trains_the_fast_parameters_and_evaluates_the_slow_ones(tmp_path):
    runner = run_lookahead(tmp_path / "run")
    assert_lookahead(runner)
    slow, fast = slow_and_fast(init_params(), BATCHES)
    metrics = runner.validations[-1][2]
    assert metrics["loss"] == pytest.approx(float(squared_error(slow, BATCHES[0]).mean()), rel=1e-5)
    assert metrics["loss_origin"] == pytest.approx(float(squared_error(fast, BATCHES[0]).mean()), rel=1e-5)
    resumed = run_lookahead(tmp_path / "resumed", resume=str(tmp_path / "run" / "iter_4"))
    assert bits(resumed.state) == bits(runner.state)


@pytest.mark.parametrize("how", ["chunks", "replicas", "frozen"])
def test_lookahead_is_the_same(how, tmp_path):
    changes = {
        "chunks": dict(train_cfg=dict(by_epoch=False, max_iters=7, steps_per_call=7)),
        "replicas": dict(parallel=dict(type="DataParallel", devices=4)),
        "frozen": dict(rules=dict(custom_keys={"b": dict(requires_grad=False)})),
    }[how]
    assert_lookahead(run_lookahead(tmp_path, **changes), frozen=("b",) if how == "frozen" else ())


def test_lookahead_by_its_factory_has_a_step_size_that_can_be_set(tmp_path):
    optimizer = dict(type=optax.lookahead, fast_optimizer=optax.sgd(0.05), sync_period=3, slow_step_size=0.5)
    wrapper = build_optim_wrapper(init_params(), dict(optimizer=optimizer))
    state, params = wrapper.init(init_params()), init_params()
    assert wrapper.hyperparams["slow_step_size"] == 0.5
    for batch in BATCHES[:3]:
        grads = jax.grad(lambda p: squared_error(p, batch).mean())(params)  # noqa: B023
        params, state = wrapper.apply_gradients(grads, state, params, {"slow_step_size": jnp.float32(0.0)})
    for name, leaf in init_params().items():
        np.testing.assert_allclose(params[name], leaf, atol=1e-7)  # a step of size 0 goes back to the start


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: optax.masked(inner, {"w": True, "b": False}),
        lambda inner: optax.partition({"a": inner, "z": optax.sgd(0.1)}, {"w": "a", "b": "z"}),
    ],
    ids=["masked", "partition"],
)
def test_lookahead_for_a_part_of_the_parameters_is_refused_with_the_way_to_go(make):
    params = init_params()
    with pytest.raises(ConfigError, match="optax.lookahead around what treats parameters differently"):
        build_optim_wrapper(params, make(lookahead(chain=False))).init(params)
    around = optax.lookahead(make(optax.sgd(0.05)), 3, 0.5)
    wrapper = build_optim_wrapper(params, around)
    updates, _ = wrapper.update(jax.tree.map(jnp.ones_like, params), wrapper.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
