"""Test that each family has MMEngine's values at iterations 0 to 9, from an initial value of 1 (six digits)."""

import math

import pytest

TABLE = [
    ("ConstantLR", {"factor": 0.5, "end": 4}, "0.5 0.5 0.5 1 1 1 1 1 1 1"),
    ("LinearLR", {"start_factor": 0.1, "end": 5}, "0.1 0.325 0.55 0.775 1 1 1 1 1 1"),
    ("LinearLR", {"start_factor": 0.1, "begin": 2, "end": 6}, "1 1 0.1 0.4 0.7 1 1 1 1 1"),
    ("StepLR", {"step_size": 3}, "1 1 1 0.1 0.1 0.1 0.01 0.01 0.01 0.001"),
    ("MultiStepLR", {"milestones": [3, 6, 6]}, "1 1 1 0.1 0.1 0.1 0.001 0.001 0.001 0.001"),
    ("MultiStepLR", {"milestones": [3], "begin": 2}, "1 1 1 1 1 0.1 0.1 0.1 0.1 0.1"),
    (
        "CosineAnnealingLR",
        {"end": 10},
        "1 0.975528 0.904508 0.793893 0.654508 0.5 0.345492 0.206107 0.0954915 0.0244717",
    ),
    (
        "CosineAnnealingLR",
        {"end": 10, "eta_min": 0.1},
        "1 0.977975 0.914058 0.814503 0.689058 0.55 0.410942 0.285497 0.185942 0.122025",
    ),
    (
        "CosineAnnealingLR",
        {"T_max": 4},
        "1 0.853553 0.5 0.146447 0 0.146447 0.5 0.853553 1 0.853553 0.5 0.146447",
    ),
    ("CosineAnnealingLR", {"begin": 4, "end": 10}, "1 1 1 1 1 0.933013 0.75 0.5 0.25 0.0669873"),
    (
        "PolyLR",
        {"end": 10},
        "1 0.888889 0.777778 0.666667 0.555556 0.444444 0.333333 0.222222 0.111111 0",
    ),
    (
        "PolyLR",
        {"power": 0.9, "eta_min": 0.01, "end": 10},
        "1 0.900426 0.799596 0.697311 0.593297 0.487168 0.378321 0.265708 0.14703 0.01",
    ),
    (
        "OneCycleLR",
        {"eta_max": 1.0, "end": 10},
        "0.04 0.52 1 0.950485 0.811746 0.611262 0.388742 0.188258 0.0495194 4e-6",
    ),
    (
        "OneCycleLR",
        {"eta_max": 1.0, "total_steps": 10, "anneal_strategy": "linear", "three_phase": True},
        "0.04 0.52 1 0.52 0.04 0.0320008 0.0240016 0.0160024 0.0080032 4e-6",
    ),
    (
        "CosineRestartLR",
        {"periods": [4, 6], "restart_weights": [1, 0.5], "eta_min": 0},
        "1 0.853553 0.5 0.146447 0.5 0.466506 0.375 0.25 0.125 0.0334936",
    ),
    (
        "CosineRestartLR",
        {"periods": [3, 3], "restart_weights": [1, 1], "eta_min_ratio": 0.1},
        "1 0.775 0.325 1 0.775 0.325 0.325 0.325",
    ),
]


@pytest.mark.parametrize(("name", "settings", "values"), TABLE)
def test_values_equal_the_table(name, settings, values, make_wrapper, build, collect):
    expected = [float(value) for value in values.split()]
    wrapper = make_wrapper(1.0)
    chain = build(wrapper, dict(type=name, by_epoch=False, **settings))
    assert collect(wrapper, chain, len(expected)) == pytest.approx(expected, rel=4e-6, abs=1e-15)


def test_the_exponential_family_multiplies_at_every_step(make_wrapper, build, collect):
    wrapper = make_wrapper(2.0)
    assert collect(wrapper, build(wrapper, {"type": "ExponentialLR", "gamma": 0.5}), 4) == [2.0, 1.0, 0.5, 0.25]


# closed form (initial - minimum) * (1 - t / 5) ** 0.9 + minimum, with initial 0.01 and minimum 0.001
def test_poly_with_a_ratio_has_a_minimum_for_each_group(make_wrapper, build, collect):
    wrapper = make_wrapper(0.01, 0.1)
    chain = build(wrapper, {"type": "PolyLRRatio", "power": 0.9, "eta_min_ratio": 0.1, "end": 6})
    expected = [0.01, 0.0083624693, 0.0066830128, 0.0049454496, 0.0031143141]  # T = 5 steps after the first
    assert collect(wrapper, chain, 5) == pytest.approx(expected, rel=1e-8)
    assert wrapper.param_groups[0]["lr"] == pytest.approx(0.001, rel=1e-12)
    assert wrapper.param_groups[1]["lr"] == pytest.approx(0.01, rel=1e-12)


# MMSegmentation's default schedule, run with MMEngine
def test_the_poly_schedule_of_160_000_iterations(make_wrapper, build):
    wrapper = make_wrapper(0.01)
    (poly,) = build(wrapper, {"type": "PolyLR", "power": 0.9, "eta_min": 1e-4, "end": 160_000, "by_epoch": False})
    seen = {0: wrapper.param_groups[0]["lr"]}
    for step in range(1, 160_001):
        poly.step()
        if step in (1, 80_000, 159_999, 160_000):
            seen[step] = wrapper.param_groups[0]["lr"]
    expected = {0: 0.01, 1: 0.00999994431213455, 80_000: 0.005405248797165972, 159_999: 1e-4, 160_000: 1e-4}
    assert seen == pytest.approx(expected, rel=1e-9)


# initial * (t + 1)**2 / T**2 with initial 0.01 and T = 4, as in MMDetection
def test_the_quadratic_warmup(make_wrapper, build, collect):
    wrapper = make_wrapper(0.01)
    chain = build(wrapper, {"type": "QuadraticWarmupLR", "end": 4})
    assert collect(wrapper, chain, 5) == pytest.approx([0.000625, 0.0025, 0.005625, 0.01, 0.01], rel=1e-12)


def test_weight_decay_follows_a_cosine_unless_it_is_0(make_wrapper, build):
    wrapper = make_wrapper(0.1, 0.1)
    wrapper.param_groups[0]["weight_decay"], wrapper.param_groups[1]["weight_decay"] = 0.04, 0.0
    (cosine,) = build(wrapper, {"type": "CosineAnnealingWeightDecay", "T_max": 4, "eta_min": 0.2})
    cosine.step()
    cosine.step()
    assert [group["weight_decay"] for group in wrapper.param_groups] == [pytest.approx(0.12), 0.0]
    assert [group["lr"] for group in wrapper.param_groups] == [0.1, 0.1]


def test_a_named_value_of_the_groups_can_be_scheduled(make_wrapper, build, collect):
    wrapper = make_wrapper(0.1, eps=1e-8)
    chain = build(wrapper, {"type": "StepParamScheduler", "param_name": "eps", "step_size": 1, "gamma": 10.0})
    assert collect(wrapper, chain, 3, name="eps") == pytest.approx([1e-8, 1e-7, 1e-6], rel=1e-12)


def test_one_cycle_accepts_a_maximum_for_each_group_and_sets_the_initial_values(make_wrapper, build):
    wrapper = make_wrapper(0.1, 0.1, default_group={"lr": 0.1})
    (cycle,) = build(wrapper, {"type": "OneCycleLR", "eta_max": [1.0, 2.0, 3.0], "total_steps": 10})
    assert cycle.get_last_value() == pytest.approx([0.04, 0.08, 0.12], rel=1e-12)
    assert [group["initial_lr"] for group in wrapper.param_groups] == [0.04, 0.08]


def test_all_groups_and_the_optimizers_own_settings_are_scheduled(make_wrapper, build):
    default_group = {"lr": 0.01}
    wrapper = make_wrapper(0.01, 0.001, 0.1, default_group=default_group)
    (scheduler,) = build(wrapper, {"type": "MultiStepLR", "milestones": [1], "gamma": 0.1})
    scheduler.step()
    assert [group["lr"] for group in wrapper.param_groups] == pytest.approx([0.001, 0.0001, 0.01], rel=1e-12)
    assert default_group["lr"] == pytest.approx(0.001, rel=1e-12)


# SimSiam: cosine over 10 epochs from 0.05, with a constant rate for the predictor
def test_learning_rate_schedules_skip_groups_with_fix_lr(make_wrapper, build, collect):
    wrapper = make_wrapper(0.05, 0.05)
    wrapper.param_groups[1]["fix_lr"] = True
    chain = build(wrapper, {"type": "CosineAnnealingLR", "T_max": 10})
    expected = [0.05, 0.048776, 0.045225, 0.039695, 0.032725, 0.025, 0.017275, 0.010305, 0.004775, 0.001224]
    assert collect(wrapper, chain, 10) == pytest.approx(expected, abs=5e-7)
    assert wrapper.param_groups[1]["lr"] == 0.05


def test_fix_lr_does_not_affect_other_values(make_wrapper, build):
    wrapper = make_wrapper(0.05, weight_decay=0.1, fix_lr=True)
    build(wrapper, {"type": "ConstantParamScheduler", "param_name": "weight_decay", "factor": 0.5})
    assert wrapper.param_groups[0]["weight_decay"] == 0.05


def test_cosine_with_eta_min_ratio_has_a_minimum_for_each_group(make_wrapper, build):
    wrapper = make_wrapper(1.0, 0.1)
    (cosine,) = build(wrapper, {"type": "CosineAnnealingLR", "T_max": 2, "eta_min_ratio": 0.2})
    cosine.step()
    cosine.step()
    assert [group["lr"] for group in wrapper.param_groups] == pytest.approx([0.2, 0.02], rel=1e-12)


def test_values_are_python_floats(make_wrapper, build):
    wrapper = make_wrapper(1.0)
    (cosine,) = build(wrapper, {"type": "CosineAnnealingLR", "T_max": 7})
    cosine.step()
    assert type(wrapper.param_groups[0]["lr"]) is float
    assert wrapper.param_groups[0]["lr"] == pytest.approx((1 + math.cos(math.pi / 7)) / 2, rel=1e-15)
