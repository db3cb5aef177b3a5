import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.config import HOOKS
from jengine.extras.diagnose import NumericsGuardHook
from jengine.extras.diagnose.numerics_guard import NumericsGuardState
from jengine.hooks import EMAHook
from jengine.model import FunctionalModel
from jengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from jengine.train import build_train_step, create_train_state
from tests.refusals import check_refusal

SGD = dict(type="SGD", lr=1.0)


def linear():
    """Return a model in which the gradient of the weight is x."""
    return FunctionalModel(
        init=lambda: {"w": jnp.zeros(())}, loss=lambda params, batch: params["w"] * batch["x"] + batch["offset"]
    )


def batch(x=1.0, offset=0.0):
    return {"x": np.float32(x), "offset": np.float32(offset)}


def run_steps(batches, hook=None, wrapper=None, model=None, hooks=()):
    """Return the state and the metrics after each batch, in steps that are compiled once."""
    model = model or linear()
    wrapper = wrapper or OptimWrapper(SGD)
    hooks = [hook or NumericsGuardHook(), *hooks]
    state = create_train_state(*model.init(jax.random.key(0), batches[0]), wrapper, hooks, rng=jax.random.key(1))
    wrapper.initialize_count_status(0, len(batches))
    compiled = {
        update: jax.jit(build_train_step(model, wrapper, hooks, update=update), donate_argnums=0)
        for update in (True, False)
    }
    found = []
    for each in batches:
        state, outputs = compiled[wrapper.start_step()](state, each, wrapper.hyperparams)
        found.append((jax.device_get(state), jax.device_get(outputs)))
    assert all(step._cache_size() <= 1 for step in compiled.values())
    return found


def weights(found):
    return [float(state.params["w"]) for state, _ in found]


def guard_state(state) -> NumericsGuardState:
    return state.hook_state["NumericsGuardHook"]


@pytest.mark.parametrize("bad", [dict(x=np.nan), dict(x=np.inf), dict(offset=np.nan), dict(offset=-np.inf)])
def test_a_step_with_non_finite_values_is_dropped(bad):
    found = run_steps([batch(), batch(**bad), batch()])
    assert weights(found) == [-1.0, -1.0, -2.0]
    state, _ = found[-1]
    assert int(state.step) == 3  # dropped steps count too
    assert (guard_state(state).dropped, guard_state(state).in_row, guard_state(state).last) == (1, 1, 1)
    assert [float(outputs["dropped_steps"]) for _, outputs in found] == [0, 1, 1]


def test_the_first_non_finite_gradient_is_recorded():
    model = FunctionalModel(
        init=lambda: {"a": jnp.ones(()), "b": {"c": jnp.zeros(()), "d": jnp.zeros(())}, "w": jnp.zeros(())},
        loss=lambda params, batch: params["a"] + params["w"] + jnp.sqrt(params["b"]["c"] + params["b"]["d"]),
    )
    ((state, outputs),) = run_steps([batch()], model=model)
    assert float(outputs["loss"]) == 1.0
    assert (int(guard_state(state).reason), int(guard_state(state).leaf)) == (
        2,
        1,
    )  # a is fine, b.c is the first that is not


def test_states_of_other_hooks_do_not_change_in_a_dropped_step():
    average = EMAHook(momentum=0.5)
    found = run_steps([batch(), batch(np.nan), batch()], hooks=[average])
    assert [float(state.hook_state["EMAHook"].params["w"]) for state, _ in found] == [-1.0, -1.0, -1.5]
    assert [int(state.hook_state["EMAHook"].steps) for state, _ in found] == [1, 1, 2]


def test_after_too_many_dropped_steps_in_a_row_nothing_changes():
    x = [1, np.nan, 1, np.nan, np.nan, 1, 1]
    found = run_steps([batch(v) for v in x], NumericsGuardHook(max_in_row=2))
    assert weights(found) == [-1, -1, -2, -2, -2, -2, -2]
    assert [int(guard_state(state).in_row) for state, _ in found] == [0, 1, 1, 1, 2, 3, 4]
    unending = run_steps([batch(v) for v in x], NumericsGuardHook(max_in_row=None))
    assert weights(unending) == [-1, -1, -2, -2, -2, -3, -4]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [  # the gradient is x; the window of two is full after two steps
        ([batch(1), batch(1), batch(2.9), batch(1)], [-1, -2, -4.9, -5.9]),
        ([batch(1), batch(1), batch(3.1), batch(1)], [-1, -2, -2, -3]),
        ([batch(1), batch(9), batch(1)], [-1, -10, -11]),
        ([batch(0, offset=2), batch(0, offset=2), batch(1, offset=7)], [0, 0, 0]),
    ],
)
def test_a_spike_is_more_than_the_factor_times_the_median(batches, expected):
    found = run_steps(batches, NumericsGuardHook(spike_factor=3, window=2))
    np.testing.assert_allclose(weights(found), expected, rtol=1e-6)


def test_without_a_factor_nothing_is_a_spike():
    assert weights(run_steps([batch(1), batch(1e6)], NumericsGuardHook(window=1))) == [-1, -1 - 1e6]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [  # windows of two; the mean of one or two gradients of 1 is 1
        (0, [0, -1, -1, -2]),  # a dropped accumulation does not count in the mean
        (1, [0, 0, 0, -1]),  # a dropped update discards its window
    ],
)
def test_a_dropped_step_within_an_accumulation_window(bad, expected):
    batches = [batch(np.nan if i == bad else 1) for i in range(4)]
    found = run_steps(batches, wrapper=OptimWrapper(SGD, accumulative_counts=2))
    assert weights(found) == expected


def test_with_several_optimizers_the_whole_step_is_dropped():
    model = FunctionalModel(
        init=lambda: {"one": jnp.zeros(()), "w": jnp.zeros(())},
        loss={
            "one": lambda params, batch: params["one"] * batch["x"],
            "two": lambda params, batch: params["w"] * batch["y"],
        },
    )
    wrapper = OptimWrapperDict(
        one=OptimWrapper(dict(SGD)), two=OptimWrapper(dict(SGD))
    )  # each differentiates all parameters here; only its own loss depends on its own
    batches = [{"x": np.float32(1), "y": np.float32(y)} for y in (1, np.nan, np.nan, 1)]
    found = run_steps(batches, NumericsGuardHook(max_in_row=3), wrapper=wrapper, model=model)
    assert weights(found) == [-1, -1, -1, -2]
    assert [float(state.params["one"]) for state, _ in found] == [-1, -1, -1, -2]
    assert [int(guard_state(state).in_row) for state, _ in found] == [0, 1, 2, 2]  # counted once for both optimizers
    hook = NumericsGuardHook(spike_factor=2.0)
    with pytest.raises(ValueError, match="spike_factor must be None in a run with several optimizers"):
        hook.before_train(types.SimpleNamespace(optim_wrapper=wrapper))


def test_an_overflow_is_handled_by_the_loss_scale():
    scale = dict(init_scale=4.0, growth_interval=1)
    wrapper = AmpOptimWrapper(loss_scale=scale, dtype="float32", optimizer=dict(SGD))
    batches = [batch(1), batch(2e38), batch(1), batch(offset=np.nan)]  # 4 times 2e38 is beyond float32
    found = run_steps(batches, wrapper=wrapper)
    assert [float(optax.tree.get(state.opt_state, "loss_scale")) for state, _ in found] == [8, 4, 8, 8]
    assert [int(guard_state(state).dropped) for state, _ in found] == [0, 0, 0, 1]  # the loss is checked as usual
    assert [float(norm) for norm in guard_state(found[-1][0]).norms[:2]] == [1, 1]  # of the loss, not of the scaled one


def test_all_replicas_drop_the_same_steps():
    hook, model, wrapper = NumericsGuardHook(), linear(), OptimWrapper(SGD, axis_name="replicas")
    state = create_train_state(*model.init(jax.random.key(0), batch()), wrapper, [hook], rng=jax.random.key(1))
    runner = types.SimpleNamespace(optim_wrapper=wrapper, state=state, hooks=[hook])
    hook.before_train(runner)
    step = build_train_step(model, wrapper, [hook])
    batches = {name: np.stack([value, value]) for name, value in batch().items()}
    batches["x"][1] = np.nan
    mesh = jax.make_mesh((2,), ("replicas",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def one(part):
        own = {name: value[0] for name, value in part.items()}
        state_after, outputs = step(state, own, wrapper.hyperparams)
        return state_after.params["w"], outputs["dropped_steps"]

    P = jax.sharding.PartitionSpec
    weight, dropped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("replicas"), out_specs=P()))(batches)
    assert (float(weight), float(dropped)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(max_in_row=0), ["max_in_row`", "at least 1", "None", "got 0"]),
        (dict(interval=2.5), ["interval`", "at least 1", "got 2.5"]),
        (dict(window=None), ["window`", "at least 1", "got None"]),
        (dict(spike_factor=1.0), ["spike_factor`", "above 1", "None", "got 1.0"]),
    ],
)
def test_invalid_arguments_are_refused(arguments, words):
    check_refusal(lambda: HOOKS.build(dict(type="NumericsGuardHook", **arguments)), (TypeError, ValueError), *words)
