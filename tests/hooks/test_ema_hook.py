import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import HOOKS
from jengine.extras.optimizers.averages import CosineEMA
from jengine.hooks import EMAHook
from jengine.model import FunctionalModel
from jengine.optim import AmpOptimWrapper, OptimWrapper
from jengine.train import (
    Average,
    ExponentialMovingAverage,
    RecompilationGuard,
    StepContext,
    build_train_step,
    create_train_state,
)
from tests.refusals import check_refusal


def apply_updates(hook, weights, seen=None):
    """Return the states of the hook after updates to these weights, in one compiled function."""

    @jax.jit
    def update(state, step, weight, model_state):
        nothing = dict(rng=jax.random.key(0), batch=None, hyperparams={}, opt_state=None)
        ctx = StepContext(step=step, params=weight, model_state=model_state, hook_state=state, **nothing)
        return hook.traced_update(ctx).hook_state

    seen = seen or [{}] * len(weights)
    state = hook.init_traced_state(jnp.float32(0), seen[0])
    states = []
    for i, (weight, model_state) in enumerate(zip(weights, seen, strict=True)):
        state = update(state, jnp.int32(i), jnp.float32(weight), model_state)
        states.append(state)
    assert update._cache_size() == 1  # averaging begins without a new trace
    return states


@pytest.mark.parametrize(
    ("begin", "averages", "steps"),
    [  # the results of MMEngine 0.10.7 for these weights
        (2, [10, 20, 25, 32.5], [0, 1, 2, 3]),
        (0, [10, 15, 22.5, 31.25], [1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("argument", ["begin_iter", "start_iters"])
def test_the_average_is_a_copy_before_it_begins(argument, begin, averages, steps):
    hook = HOOKS.build(dict(type="EMAHook", momentum=0.5, **{argument: begin}))
    found = apply_updates(hook, [10, 20, 30, 40])
    assert [float(state.params) for state in found] == averages
    assert [int(state.steps) for state in found] == steps
    assert found[0].steps.dtype == jnp.int32


def test_start_iters_is_another_name_of_begin_iter():
    assert EMAHook(start_iters=500).begin_iter == EMAHook(begin_iter=500).begin_iter == 500


def fake_runner(**changes):
    loop = types.SimpleNamespace(dataloader=range(4), epoch_length=4)
    return types.SimpleNamespace(
        **{
            **dict(max_iters=12, max_epochs=3, train_loop=loop, optim_wrapper=OptimWrapper(dict(type="SGD", lr=1.0))),
            **changes,
        }
    )


@pytest.mark.parametrize(("begin_epoch", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (2, [0, 0, 0, 0, 1, 2])])
def test_begin_epoch_counts_from_one(begin_epoch, steps):
    hook = EMAHook(begin_epoch=begin_epoch)
    hook.before_train(fake_runner())  # epochs of 4 iterations
    assert [int(state.steps) for state in apply_updates(hook, range(6))] == steps


def test_the_model_state_is_averaged_with_update_buffers_only():
    seen = [{"mean": jnp.float32(v), "count": jnp.int32(v)} for v in (4, 8)]
    assert all(state.model_state is None for state in apply_updates(EMAHook(momentum=0.5), [0, 0], seen))
    last = apply_updates(EMAHook(momentum=0.5, update_buffers=True), [0, 0], seen)[-1]
    assert last.model_state["mean"] == 6.0
    assert last.model_state["count"] == 8


def test_the_cosine_takes_its_length_from_the_run():
    hook = EMAHook(ema_type="CosineEMA")
    hook.before_train(fake_runner())
    assert hook.average == CosineEMA(total_steps=12)
    accumulating = OptimWrapper(dict(type="SGD", lr=1.0), accumulative_counts=5)
    hook = EMAHook(ema_type="CosineEMA", count_by="update")
    hook.before_train(fake_runner(optim_wrapper=accumulating))
    assert hook.average == CosineEMA(total_steps=3)  # updates after 5, 10 and 12 iterations


def train_with_accumulation(hook, iters, counts):
    """Return `(w, average of w)` after each iteration, and the number of updates of the average; each update lowers w by 1."""
    model = FunctionalModel(init=lambda: {"w": jnp.zeros(())}, loss=lambda params: params["w"])
    wrapper = OptimWrapper(dict(type="SGD", lr=1.0), accumulative_counts=counts)
    wrapper.initialize_count_status(0, iters)
    params, model_state = model.init(jax.random.key(0), None)
    state = create_train_state(params, model_state, wrapper, [hook], rng=jax.random.key(1))
    steps = {
        update: jax.jit(
            RecompilationGuard(
                build_train_step(model, wrapper, [hook], update=update), ("state", "batch", "hyperparams")
            ),
            donate_argnums=0,
        )
        for update in (True, False)
    }
    values = []
    for _ in range(iters):
        state, _ = steps[wrapper.start_step()](state, {"x": np.zeros(1, np.float32)}, wrapper.hyperparams)
        values.append((float(state.params["w"]), float(state.hook_state["EMAHook"].params["w"])))
    return values, int(state.hook_state["EMAHook"].steps)


def test_every_iteration_updates_the_average_under_accumulation():
    found, steps = train_with_accumulation(EMAHook(momentum=0.5), iters=8, counts=4)
    # w is 0 for three iterations, -1 from the fourth, -2 at the eighth
    assert found == [(0, 0), (0, 0), (0, 0), (-1, -0.5), (-1, -0.75), (-1, -0.875), (-1, -0.9375), (-2, -1.46875)]
    assert steps == 8  # as in MMEngine


def test_the_average_before_the_update_is_that_of_a_loop_by_hand():
    # as in https://github.com/kvfrans/jax-diffusion-transformer: the average follows the parameters before each update
    found, _ = train_with_accumulation(EMAHook(momentum=0.25, before_update=True), iters=5, counts=1)
    w, average, expected = 0.0, 0.0, []
    for _ in range(5):
        old, w = w, w - 1.0
        average = 0.75 * average + 0.25 * old
        expected.append((w, average))
    assert found == expected


def test_only_updates_change_the_average_with_count_by_update():
    found, steps = train_with_accumulation(EMAHook(momentum=0.5, count_by="update"), iters=12, counts=4)
    assert [average for _, average in found] == [0, 0, 0, -1, -1, -1, -1, -1.5, -1.5, -1.5, -1.5, -2.25]
    assert steps == 3


@pytest.mark.parametrize(
    ("count_by", "averages", "steps"),
    [("update", [-1, -1, -3 / 2], 2), ("iter", [-1, -1, -4 / 3], 3)],  # the means of the values that count
)
def test_an_update_that_a_loss_scale_skips_counts_only_as_an_iteration(count_by, averages, steps):
    hook = EMAHook("StochasticWeightAverage", count_by=count_by)
    model = FunctionalModel(lambda: {"w": jnp.zeros(())}, lambda params, batch: params["w"] * batch["x"].sum())
    wrapper = AmpOptimWrapper(optimizer=dict(type="SGD", lr=1.0), dtype="float16")
    params, model_state = model.init(jax.random.key(0), None)
    state = create_train_state(params, model_state, wrapper, [hook], rng=jax.random.key(1))
    step = jax.jit(build_train_step(model, wrapper, [hook]))
    found = []
    for x in (1.0, np.inf, 1.0):
        state, _ = step(state, {"x": np.full(1, x, np.float32)}, wrapper.hyperparams)
        found.append((float(state.params["w"]), float(state.hook_state["EMAHook"].params["w"])))
    assert [w for w, _ in found] == [-1, -1, -2]
    assert [average for _, average in found] == pytest.approx(averages)
    assert int(state.hook_state["EMAHook"].steps) == steps


def runner_with_state(hook, params, model_state, averages):
    own = hook.init_traced_state(averages, model_state)
    return types.SimpleNamespace(
        state=types.SimpleNamespace(params=params, model_state=model_state, hook_state={"EMAHook": own}), hooks=[hook]
    )


@pytest.mark.parametrize(
    ("ema", "origin", "expected"),
    [
        (True, False, {"": 2.0}),
        (True, True, {"": 2.0, "_origin": 1.0}),
        (False, True, {"": 1.0}),
        (False, False, {"": 1.0}),
    ],
)
def test_the_evaluated_variables(ema, origin, expected, caplog):
    hook = EMAHook(evaluate_on_ema=ema, evaluate_on_origin=origin)
    raw = {"w": jnp.float32(1.0)}
    runner = runner_with_state(hook, raw, {}, {"w": jnp.float32(2.0)})
    runner.logger = logging.getLogger("test_ema_hook")
    hook.before_run(runner)
    assert ("the raw parameters are evaluated" in caplog.text) == (not ema and not origin)
    found = hook.eval_variables(runner, {"": (raw, {})})
    assert {suffix: float(params["w"]) for suffix, (params, _) in found.items()} == expected


def test_averages_are_evaluated_in_the_dtype_of_the_parameters():
    hook, raw = EMAHook(update_buffers=True), {"w": jnp.bfloat16(1.0)}
    runner = runner_with_state(hook, raw, {"mean": jnp.float32(3.0)}, {"w": jnp.bfloat16(2.0)})
    assert runner.state.hook_state["EMAHook"].params["w"].dtype == jnp.float32
    params, model_state = hook.eval_variables(runner, {"": (raw, {"mean": jnp.float32(0.0)})})[""]
    assert params["w"].dtype == jnp.bfloat16
    assert params["w"] == 2.0
    assert model_state["mean"] == 3.0


def test_without_training_nothing_is_swapped(runner):
    hook, variables = EMAHook(evaluate_on_origin=True), {"": ({"w": 1.0}, {})}
    assert hook.eval_variables(runner, variables) == variables
    bundle = {"state": {"params": {"w": 1.0}, "hook_state": {}}}
    hook.before_save_checkpoint(runner, bundle)
    assert bundle == {"state": {"params": {"w": 1.0}, "hook_state": {}}}


class Fixed(Average):
    """Use a constant weight, as a user's own average."""

    interval = 1

    def weight(self, steps):
        return jnp.float32(0.25)


def test_arguments_reach_the_average():
    assert EMAHook(momentum=0.1, interval=3).average == ExponentialMovingAverage(momentum=0.1, interval=3)
    assert float(apply_updates(EMAHook(ema_type=Fixed), [0, 4])[-1].params) == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(begin_iter=1, begin_epoch=1), AssertionError, ["begin_iter", "begin_epoch", "got 1 and 1"]),
        (dict(start_iters=1, begin_epoch=1), AssertionError, ["got 1 and 1"]),
        (dict(begin_iter=-1), AssertionError, ["begin_iter`", "at least 0", "got -1"]),
        (dict(begin_epoch=-1), AssertionError, ["begin_epoch`", "at least 0", "got -1"]),
        (dict(begin_iter=1, start_iters=2), ValueError, ["start_iters", "begin_iter", "got 2 and 1"]),
        (dict(begin_iter=1.5), TypeError, ["begin_iter`", "at least 0", "got 1.5"]),
        (dict(count_by="updates"), ValueError, ["count_by`", "'iter'", "'update'", "got 'updates'"]),
        (dict(ema_type="ExponentialMovingAverag"), KeyError, ["ExponentialMovingAverage"]),
        (dict(ema_type=dict), TypeError, ["ema_type"]),
        (dict(momentun=0.1), TypeError, ["'momentun'"]),
        (dict(begin_iters=5), TypeError, ["'begin_iters'"]),
        (dict(gamma=10), TypeError, ["'gamma'"]),
        (dict(momentum=2.0), AssertionError, ["momentum`", "(0, 1)", "got 2.0"]),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused_with_the_legal_values(arguments, error, words):
    check_refusal(lambda: HOOKS.build(dict(type="EMAHook", **arguments)), error, *words)
