"""Schedules of optax by name: their values, groups with multipliers, and nothing on a device while training."""

import json

import jax
import numpy as np
import optax
import pytest

WARMUP_COSINE = {
    "type": "warmup_cosine_decay_schedule",
    "init_value": 0.0,
    "peak_value": 0.1,
    "warmup_steps": 10,
    "decay_steps": 50,
}


def reference(schedule, count):
    with jax.enable_x64(True):
        return [float(schedule(np.float64(step))) for step in range(count)]


def test_values_are_those_of_optax_in_float64(make_wrapper, build, collect):
    wrapper = make_wrapper(0.1)
    chain = build(wrapper, {"type": "OptaxLR", "schedule": WARMUP_COSINE})
    expected = reference(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 50), 60)
    assert collect(wrapper, chain, 60) == pytest.approx(expected, rel=1e-12)


def test_a_group_keeps_its_multiplier(make_wrapper, build):
    wrapper = make_wrapper(0.1, 0.01, shadow={"lr": 0.1})
    polynomial = {"type": "polynomial_schedule", "init_value": 0.4, "end_value": 0.0, "power": 1, "transition_steps": 4}
    (scheduler,) = build(wrapper, {"type": "OptaxLR", "schedule": polynomial})
    scheduler.step()
    assert scheduler.get_last_value() == pytest.approx([0.3, 0.03, 0.3], rel=1e-12)


def test_joined_schedules_are_lists_of_configs(make_wrapper, build, collect):
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


def test_without_a_cpu_backend_another_device_computes(make_wrapper, build, monkeypatch):
    devices = jax.local_devices()

    def local_devices(backend=None):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return devices

    monkeypatch.setattr(jax, "local_devices", local_devices)
    wrapper = make_wrapper(1.0)
    build(wrapper, {"type": "OptaxLR", "schedule": {"type": "constant_schedule", "value": 0.5}})
    assert wrapper.param_groups[0]["lr"] == 0.5


def test_the_state_fits_json_and_goes_on(make_wrapper, build, collect):
    wrapper, resumed = make_wrapper(0.1), make_wrapper(0.1)
    chain = build(wrapper, {"type": "OptaxLR", "schedule": WARMUP_COSINE})
    collect(wrapper, chain, 7)
    again = build(resumed, {"type": "OptaxLR", "schedule": {**WARMUP_COSINE, "peak_value": 9.0}})
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
        ({"type": "warmup_cosine_schedule"}, KeyError, "no schedule called 'warmup_cosine_schedule'; did you mean"),
        ({"type": "constant_schedule", "values": 1.0}, TypeError, "did you mean 'value'"),
        ({"value": 1.0}, TypeError, "a dict with a 'type'"),
        ("constant_schedule", TypeError, "a dict with a 'type', found 'constant_schedule'"),
    ],
)
def test_bad_schedules_are_refused(schedule, error, message, make_wrapper, build):
    with pytest.raises(error, match=message):
        build(make_wrapper(1.0), {"type": "OptaxLR", "schedule": schedule})


def test_an_initial_value_of_0_is_refused(make_wrapper, build):
    with pytest.raises(ValueError, match="initial value is not 0"):
        build(make_wrapper(0.0), {"type": "OptaxLR", "schedule": {"type": "constant_schedule", "value": 1.0}})
