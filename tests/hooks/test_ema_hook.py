import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.averaging import Average, CosineEMA, ExponentialMovingAverage
from jengine.hooks import EMAHook
from jengine.model import FunctionalModel
from jengine.optim import OptimWrapper
from jengine.registry import HOOKS
from jengine.train import RecompilationGuard, StepContext, build_train_step, create_train_state


def replay(hook, weights, seen=None):
    """The average and its steps after each update that leaves these weights, in one compiled function."""

    @jax.jit
    def update(state, step, weight, model_state):
        nothing = dict(rng=jax.random.key(0), batch=None, hyperparams={}, opt_state=None)
        ctx = StepContext(step=step, params=weight, model_state=model_state, hook_state=state, **nothing)
        return hook.traced_update(ctx).hook_state

    seen = seen or [{}] * len(weights)
    state = hook.init_traced_state(jnp.float32(0), seen[0])
    found = []
    for i, (weight, model_state) in enumerate(zip(weights, seen, strict=True)):
        state = update(state, jnp.int32(i), jnp.float32(weight), model_state)
        found.append(state)
    assert update._cache_size() == 1  # nothing is traced anew where the average begins
    return found


@pytest.mark.parametrize(
    ("begin", "averages", "steps"),
    [  # what MMEngine 0.10.7 gives for these weights
        (2, [10, 20, 25, 32.5], [0, 1, 2, 3]),
        (0, [10, 15, 22.5, 31.25], [1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("argument", ["begin_iter", "start_iters"])
def test_before_it_begins_the_average_is_a_copy(argument, begin, averages, steps):
    hook = HOOKS.build(dict(type="EMAHook", momentum=0.5, **{argument: begin}))
    found = replay(hook, [10, 20, 30, 40])
    assert [float(state.params) for state in found] == averages
    assert [int(state.steps) for state in found] == steps
    assert found[0].steps.dtype == jnp.int32


def test_start_iters_is_begin_iter():
    assert EMAHook(start_iters=500).begin_iter == EMAHook(begin_iter=500).begin_iter == 500


def fake_runner(**changes):
    loop = types.SimpleNamespace(dataloader=range(4))
    return types.SimpleNamespace(
        **{
            **dict(max_iters=12, max_epochs=3, train_loop=loop, optim_wrapper=OptimWrapper(dict(type="SGD", lr=1.0))),
            **changes,
        }
    )


@pytest.mark.parametrize(("begin_epoch", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (2, [0, 0, 0, 0, 1, 2])])
def test_an_epoch_to_begin_with_is_counted_from_one(begin_epoch, steps):
    hook = EMAHook(begin_epoch=begin_epoch)
    hook.before_train(fake_runner())  # epochs of 4 iterations
    assert [int(state.steps) for state in replay(hook, range(6))] == steps


@pytest.mark.parametrize(("argument", "last"), [("begin_iter", 12), ("begin_epoch", 3)])
def test_a_begin_after_the_end_is_refused(argument, last):
    EMAHook(**{argument: last}).before_train(fake_runner())
    unit = argument.removeprefix("begin_")
    with pytest.raises(
        AssertionError, match=rf"{argument}={last + 1} must be before the end of training \(max_{unit}s={last}"
    ):
        EMAHook(**{argument: last + 1}).before_train(fake_runner())


def test_the_state_of_the_model_is_averaged_only_if_asked():
    seen = [{"mean": jnp.float32(v), "count": jnp.int32(v)} for v in (4, 8)]
    assert all(state.model_state is None for state in replay(EMAHook(momentum=0.5), [0, 0], seen))
    last = replay(EMAHook(momentum=0.5, update_buffers=True), [0, 0], seen)[-1]
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


def accumulated(hook, iters, counts):
    """The state after so many iterations of which each window of `counts` makes one update: w goes down by 1."""
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
    found = []
    for _ in range(iters):
        state, _ = steps[wrapper.start_step()](state, {"x": np.zeros(1, np.float32)}, wrapper.hyperparams)
        found.append((float(state.params["w"]), float(state.hook_state["EMAHook"].params["w"])))
    return found, int(state.hook_state["EMAHook"].steps)


def test_every_iteration_moves_the_average_under_accumulation():
    found, steps = accumulated(EMAHook(momentum=0.5), iters=8, counts=4)
    # w is 0 for three iterations, -1 from the fourth, -2 at the eighth
    assert found == [(0, 0), (0, 0), (0, 0), (-1, -0.5), (-1, -0.75), (-1, -0.875), (-1, -0.9375), (-2, -1.46875)]
    assert steps == 8  # as in MMEngine


def test_only_updates_move_the_average_if_they_are_what_counts():
    found, steps = accumulated(EMAHook(momentum=0.5, count_by="update"), iters=12, counts=4)
    assert [average for _, average in found] == [0, 0, 0, -1, -1, -1, -1, -1.5, -1.5, -1.5, -1.5, -2.25]
    assert steps == 3


def state_of(hook, params, model_state, averages):
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
def test_what_is_evaluated(ema, origin, expected):
    hook = EMAHook(evaluate_on_ema=ema, evaluate_on_origin=origin)
    raw = {"w": jnp.float32(1.0)}
    runner = state_of(hook, raw, {}, {"w": jnp.float32(2.0)})
    found = hook.eval_variables(runner, {"": (raw, {})})
    assert {suffix: float(params["w"]) for suffix, (params, _) in found.items()} == expected


def test_averages_are_evaluated_in_the_dtype_of_the_parameters():
    hook, raw = EMAHook(update_buffers=True), {"w": jnp.bfloat16(1.0)}
    runner = state_of(hook, raw, {"mean": jnp.float32(3.0)}, {"w": jnp.bfloat16(2.0)})
    assert runner.state.hook_state["EMAHook"].params["w"].dtype == jnp.float32
    params, model_state = hook.eval_variables(runner, {"": (raw, {"mean": jnp.float32(0.0)})})[""]
    assert params["w"].dtype == jnp.bfloat16
    assert params["w"] == 2.0
    assert model_state["mean"] == 3.0


def test_without_training_there_is_nothing_to_exchange():
    hook, variables = EMAHook(evaluate_on_origin=True), {"": ({"w": 1.0}, {})}
    runner = types.SimpleNamespace(state=types.SimpleNamespace(hook_state={}))
    assert hook.eval_variables(runner, variables) == variables
    bundle = {"state": {"params": {"w": 1.0}, "hook_state": {}}}
    hook.before_save_checkpoint(runner, bundle)
    assert bundle == {"state": {"params": {"w": 1.0}, "hook_state": {}}}


def test_a_second_average_is_refused():
    runner = types.SimpleNamespace(hooks=[EMAHook(), EMAHook()])
    with pytest.raises(ValueError, match="at most one EMAHook"):
        runner.hooks[0].before_run(runner)


def test_evaluating_nothing_is_warned_about(caplog):
    import logging

    hook = EMAHook(evaluate_on_ema=False)
    hook.before_run(types.SimpleNamespace(hooks=[hook], logger=logging.getLogger("test_ema_hook")))
    assert "the raw parameters are evaluated" in caplog.text


class Fixed(Average):
    """A user's own kind."""

    interval = 1

    def weight(self, steps):
        return jnp.float32(0.25)


def test_arguments_reach_the_average():
    assert EMAHook(momentum=0.1, interval=3).average == ExponentialMovingAverage(momentum=0.1, interval=3)
    assert float(replay(EMAHook(ema_type=Fixed), [0, 4])[-1].params) == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(begin_iter=1, begin_epoch=1), AssertionError, "begin_iter or begin_epoch, not both; got 1 and 1"),
        (dict(start_iters=1, begin_epoch=1), AssertionError, "not both"),
        (dict(begin_iter=-1), AssertionError, "begin_iter` must be an integer of at least 0, got -1"),
        (dict(begin_epoch=-1), AssertionError, "begin_epoch` must be an integer of at least 0, got -1"),
        (dict(begin_iter=1, start_iters=2), ValueError, "start_iters is another name for begin_iter; got both, 2 and 1"),
        (dict(begin_iter=1.5), TypeError, "begin_iter` must be an integer of at least 0, got 1.5"),
        (dict(count_by="updates"), ValueError, "count_by` must be 'iter' or 'update', got 'updates'; did you mean 'update'?"),
        (dict(ema_type="ExponentialMovingAverag"), KeyError, "did you mean 'ExponentialMovingAverage'?"),
        (dict(ema_type=dict), TypeError, "ema_type must be a kind of average"),
        (dict(momentun=0.1), TypeError, "neither EMAHook nor ExponentialMovingAverage .* did you mean 'momentum'?"),
        (dict(begin_iters=5), TypeError, "did you mean 'begin_iter'?"),
        (dict(gamma=10), TypeError, "neither EMAHook nor ExponentialMovingAverage has an argument 'gamma'"),
        (dict(momentum=2.0), AssertionError, r"momentum` must be a number in \(0, 1\), got 2.0"),
    ],
)  # fmt: skip
def test_bad_arguments_say_what_is_expected(arguments, error, message):
    with pytest.raises(error, match=message):
        HOOKS.build(dict(type="EMAHook", **arguments))
