"""Test optax schedules by name and as functions: values, groups with multipliers, no device work in training."""

import json
import math

import jax
import numpy as np
import optax
import pytest

from jengine.optim.schedules import (
    OptaxLR,
    build_param_schedulers,
    load_schedulers_state_dict,
    schedulers_state_dict,
)

WARMUP_COSINE = {
    "type": "warmup_cosine_decay_schedule",
    "init_value": 0.0,
    "peak_value": 0.1,
    "warmup_steps": 10,
    "decay_steps": 50,
}


def evaluate_in_float64(schedule, count):
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return [float(schedule(np.float64(step))) for step in range(count)]


def test_values_equal_optax_in_float64(make_wrapper, build, collect):
    wrapper = make_wrapper(0.1)
    chain = build(wrapper, {"type": "OptaxLR", "schedule": WARMUP_COSINE})
    expected = evaluate_in_float64(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 50), 60)
    assert collect(wrapper, chain, 60) == pytest.approx(expected, rel=1e-12)


def test_a_group_keeps_its_multiplier(make_wrapper, build):
    wrapper = make_wrapper(0.1, 0.01, default_group={"lr": 0.1})
    polynomial = {"type": "polynomial_schedule", "init_value": 0.4, "end_value": 0.0, "power": 1, "transition_steps": 4}
    (scheduler,) = build(wrapper, {"type": "OptaxLR", "schedule": polynomial})
    scheduler.step()
    assert scheduler.get_last_value() == pytest.approx([0.3, 0.03, 0.3], rel=1e-12)


def test_schedules_to_join_can_be_a_list_of_configs(make_wrapper, build, collect):
    joined = {
        "type": "join_schedules",
        "schedules": [
            {"type": "linear_schedule", "init_value": 0.0, "end_value": 1.0, "transition_steps": 2},
            {"type": "constant_schedule", "value": 0.25},
        ],
        "boundaries": [2],
    }
    wrapper = make_wrapper(1.0)
    assert collect(wrapper, build(wrapper, {"type": "OptaxLR", "schedule": joined}), 4) == [0.0, 0.5, 0.25, 0.25]


def test_values_beyond_the_first_block(make_wrapper, build):
    wrapper = make_wrapper(1.0)
    decay = {"type": "exponential_decay", "init_value": 1.0, "transition_steps": 1000, "decay_rate": 0.5}
    (scheduler,) = build(wrapper, {"type": "OptaxLR", "schedule": decay})
    scheduler.load_state_dict({"global_step": 2999, "last_step": 2999})
    scheduler.step()
    assert wrapper.param_groups[0]["lr"] == pytest.approx(0.125, rel=1e-12)


def test_no_step_makes_an_implicit_transfer(make_wrapper, build):
    wrapper = make_wrapper(0.1)
    with jax.transfer_guard("disallow"):
        (scheduler,) = build(wrapper, {"type": "OptaxLR", "schedule": WARMUP_COSINE})
        for _ in range(1100):  # into the second block
            scheduler.step()
    assert type(wrapper.param_groups[0]["lr"]) is float


def test_another_device_computes_if_there_is_no_cpu_backend(make_wrapper, build, monkeypatch):
    devices = jax.local_devices()

    def local_devices(backend=None):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return devices

    monkeypatch.setattr(jax, "local_devices", local_devices)
    wrapper = make_wrapper(1.0)
    build(wrapper, {"type": "OptaxLR", "schedule": {"type": "constant_schedule", "value": 0.5}})
    assert wrapper.param_groups[0]["lr"] == 0.5


def test_a_schedule_continues_from_a_json_state(make_wrapper, build, collect):
    wrapper, resumed = make_wrapper(0.1), make_wrapper(0.1)
    chain = build(wrapper, {"type": "OptaxLR", "schedule": WARMUP_COSINE})
    collect(wrapper, chain, 7)
    again = build(resumed, {"type": "OptaxLR", "schedule": WARMUP_COSINE})
    again[0].load_state_dict(json.loads(json.dumps(chain[0].state_dict())))
    resumed.param_groups[0]["lr"] = wrapper.param_groups[0]["lr"]
    assert collect(resumed, again, 5) == collect(wrapper, chain, 5)


def test_the_momentum_can_follow_optax(make_wrapper, build):
    wrapper = make_wrapper(0.1, betas=(0.9, 0.99))
    build(wrapper, {"type": "OptaxMomentum", "schedule": {"type": "constant_schedule", "value": 0.5}})
    assert wrapper.param_groups[0]["betas"] == (0.5, 0.99)


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        ({"type": "warmup_cosine_schedule"}, KeyError, "has no 'warmup_cosine_schedule'; did you mean"),
        ({"type": "constant_schedule", "values": 1.0}, TypeError, "did you mean 'value'"),
        ({"value": 1.0}, TypeError, "a dict with a 'type'"),
        ("constant_schedule", TypeError, "constant_schedule needs the argument 'value'"),
        (
            lambda step: np.ones(3) * step,
            TypeError,
            r"`schedule` must return one number for a step, got ShapeDtypeStruct\(shape=\(3,\)",
        ),
        (lambda step: (0.1, 0.2), TypeError, "must return one number for a step, got "),
        (lambda step: None if step > 5 else "high", TypeError, "must return one number for a step, got 'high'"),
        (lambda: 0.1, TypeError, "takes 0 positional arguments"),
        (optax.cosine_decay_schedule, TypeError, "missing 1 required positional argument: 'decay_steps'"),
    ],
)
def test_bad_schedules_are_rejected(schedule, error, message, make_wrapper, build):
    with pytest.raises(error, match=message):
        build(make_wrapper(1.0), {"type": "OptaxLR", "schedule": schedule})


FUNCTIONS = {
    "cosine": optax.cosine_decay_schedule(1e-3, 15),
    "warmup": optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 18),
    "exponential": optax.exponential_decay(0.1, transition_steps=4, decay_rate=0.5, staircase=True),
    "joined": optax.join_schedules([optax.linear_schedule(0.0, 1.0, 4), optax.constant_schedule(0.25)], [4]),
    "piecewise": optax.piecewise_constant_schedule(1.0, {3: 0.5, 9: 0.1}),
    "of Python": lambda step: 0.1 if step < 7 else 0.01 * (1 + math.cos(step)),
    "of a constant": lambda step: 0.25,
    "of a table": lambda step: np.linspace(1.0, 0.1, 40)[step],
}


def build_for_run(wrapper, cfg, max_iters=20):
    return build_param_schedulers(cfg, wrapper, max_epochs=2, max_iters=max_iters, epoch_length=10)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_the_step_sets_the_learning_rate_of_each_iteration(make_wrapper, collect, name):
    schedule = FUNCTIONS[name]
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = [float(schedule(step)) for step in range(20)]
    assert len(set(expected)) > 1 or name == "of a constant"
    wrapper = make_wrapper(0.1)
    assert collect(wrapper, build_for_run(wrapper, schedule), 20) == pytest.approx(expected, rel=1e-12)
    wrapper = make_wrapper(0.1)
    chain = build_for_run(wrapper, dict(type="OptaxLR", schedule=schedule, by_epoch=False))
    assert collect(wrapper, chain, 20) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_resumed_function_continues_with_the_same_values(make_wrapper, collect, name):
    wrapper, resumed = make_wrapper(0.1), make_wrapper(0.1)
    expected = collect(wrapper, build_for_run(wrapper, FUNCTIONS[name]), 20)
    wrapper = make_wrapper(0.1)
    chain = build_for_run(wrapper, FUNCTIONS[name], max_iters=12)
    collect(wrapper, chain, 12)
    saved = json.loads(json.dumps(schedulers_state_dict(chain)))
    again = build_for_run(resumed, FUNCTIONS[name])
    load_schedulers_state_dict(again, saved)
    assert collect(resumed, again, 8) == expected[12:]


def test_a_changed_function_replaces_that_of_the_checkpoint(make_wrapper, collect):
    wrapper, resumed = make_wrapper(0.1), make_wrapper(0.1)
    chain = build_for_run(wrapper, optax.linear_schedule(1.0, 0.0, 20))
    collect(wrapper, chain, 12)
    again = build_for_run(resumed, optax.linear_schedule(2.0, 0.0, 20))
    load_schedulers_state_dict(again, json.loads(json.dumps(schedulers_state_dict(chain))))
    assert resumed.param_groups[0]["lr"] == pytest.approx(2.0 * 8 / 20)
    again[0].step()
    assert resumed.param_groups[0]["lr"] == pytest.approx(2.0 * 7 / 20)


def test_functions_can_be_combined_with_other_schedulers_and_used_inside_configs(make_wrapper, collect):
    joined = dict(
        type="join_schedules",
        schedules=[optax.linear_schedule(0.0, 1.0, 2), dict(type="constant_schedule", value=0.25)],
        boundaries=[2],
    )
    wrapper = make_wrapper(1.0, weight_decay=0.5)
    decay = dict(type="StepParamScheduler", param_name="weight_decay", step_size=3, by_epoch=False)
    chain = build_for_run(wrapper, [decay, dict(type="OptaxLR", schedule=joined, by_epoch=False)])
    assert collect(wrapper, chain, 4) == [0.0, 0.5, 0.25, 0.25]
    assert wrapper.param_groups[0]["weight_decay"] == pytest.approx(0.05)
    wrapper = make_wrapper(1.0, weight_decay=0.5)
    assert collect(wrapper, build_for_run(wrapper, [FUNCTIONS["joined"], decay]), 5) == [0.0, 0.25, 0.5, 0.75, 0.25]
    wrapper = make_wrapper(1.0)
    warm_up = dict(type="LinearLR", start_factor=0.5, by_epoch=False, end=2)
    after = dict(type="OptaxLR", schedule=optax.linear_schedule(1.0, 0.0, 4), by_epoch=False, begin=2)
    assert collect(wrapper, build_for_run(wrapper, [warm_up, after]), 5) == [0.5, 1.0, 1.0, 0.75, 0.5]


@pytest.mark.parametrize(
    "other", [dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=5), dict(type="StepLR", step_size=1)]
)
def test_overlapping_schedules_of_one_value_are_rejected(make_wrapper, other):
    with pytest.raises(ValueError, match=rf"must not overlap with another schedule.* got {other['type']}"):
        build_for_run(make_wrapper(0.1), [other, FUNCTIONS["cosine"]])


def test_each_of_several_optimizers_may_follow_a_function(make_wrapper):
    wrappers = {"gen": make_wrapper(0.1), "disc": make_wrapper(0.1)}
    build_param_schedulers(
        {"gen": optax.constant_schedule(0.5), "disc": [optax.constant_schedule(0.25)]},
        wrappers, max_epochs=None, max_iters=None, epoch_length=None, by_epoch_loop=False,
    )  # fmt: skip
    assert [wrapper.param_groups[0]["lr"] for wrapper in wrappers.values()] == [0.5, 0.25]


def test_a_class_instead_of_a_function_is_rejected(make_wrapper):
    with pytest.raises(TypeError, match="must be a dict with a 'type', or a function from the iteration .*, got type"):
        build_for_run(make_wrapper(0.1), [OptaxLR])


def test_an_initial_value_of_0_is_rejected(make_wrapper, build):
    with pytest.raises(ValueError, match="initial value must not be 0"):
        build(make_wrapper(0.0), {"type": "OptaxLR", "schedule": {"type": "constant_schedule", "value": 1.0}})
