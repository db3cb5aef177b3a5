"""Test several schedulers of one value: order, overlap, ranges, and warm-ups from 0."""

import pytest

WARMUP = {"type": "LinearLR", "start_factor": 0.1, "end": 4}
# MMEngine's values at iterations 0 to 9
CHAINS = [
    (
        [WARMUP, {"type": "CosineAnnealingLR", "begin": 4, "end": 10}],
        "0.1 0.4 0.7 1 1 0.933013 0.75 0.5 0.25 0.0669873",
    ),
    ([WARMUP, {"type": "MultiStepLR", "milestones": [2, 6]}], "0.1 0.4 0.07 0.1 0.1 0.1 0.01 0.01 0.01 0.01"),
    ([WARMUP, {"type": "CosineAnnealingLR", "end": 10}], "0.1 0.390211 0.633156 0.793893 0.654508 0.5"),
]


@pytest.mark.parametrize(("cfgs", "values"), CHAINS)
def test_a_chain_changes_the_current_value_in_list_order(cfgs, values, make_wrapper, build, collect):
    expected = [float(value) for value in values.split()]
    wrapper = make_wrapper(1.0)
    assert collect(wrapper, build(wrapper, *cfgs), len(expected)) == pytest.approx(expected, rel=4e-6)


def compute_recursive_poly_and_cosine(count):
    """Apply MMEngine's recursive rules: Poly(eta_min 0.1, end 12), then CosineAnnealing(T_max 9, eta_min 0.05)."""
    from math import cos, pi

    value, out = 1.0, [1.0]
    for t in range(1, count):
        if t < 12:
            value = (value - 0.1) * (1 - 1 / (11 - t + 1)) + 0.1
        if (t - 1 - 9) % 18 == 0:
            value += (1.0 - 0.05) * (1 - cos(pi / 9)) / 2
        else:
            value = (1 + cos(pi * t / 9)) / (1 + cos(pi * (t - 1) / 9)) * (value - 0.05) + 0.05
        out.append(value)
    return out


OVERLAP = [{"type": "PolyLR", "eta_min": 0.1, "end": 12}, {"type": "CosineAnnealingLR", "T_max": 9, "eta_min": 0.05}]


def test_overlapping_schedules_with_minimum_values_follow_the_recursive_rule(make_wrapper, build, collect):
    wrapper = make_wrapper(1.0)
    chain = build(wrapper, *OVERLAP)
    assert collect(wrapper, chain, 20) == pytest.approx(compute_recursive_poly_and_cosine(20), rel=1e-12)


@pytest.mark.parametrize("stop", range(20))
def test_a_chain_continues_after_a_load_at_any_step(stop, make_wrapper, build, collect):
    wrapper = make_wrapper(1.0)
    chain = build(wrapper, *OVERLAP)
    before = collect(wrapper, chain, stop)
    states, group = [scheduler.state_dict() for scheduler in chain], dict(wrapper.param_groups[0])

    resumed = make_wrapper(1.0)
    again = build(resumed, *OVERLAP)
    resumed.param_groups[0].update(group)
    for scheduler, state in zip(again, states, strict=True):
        scheduler.load_state_dict(state)
    after = collect(resumed, again, 20 - stop)
    assert before + after == pytest.approx(compute_recursive_poly_and_cosine(20), rel=1e-9)


def test_a_warmup_from_0_is_linear(make_wrapper, build, collect):
    wrapper = make_wrapper(2.0)
    assert collect(wrapper, build(wrapper, {"type": "LinearLR", "start_factor": 0, "end": 5}), 6) == [
        0.0,
        0.5,
        1.0,
        1.5,
        2.0,
        2.0,
    ]


@pytest.mark.parametrize("warmup_first", [True, False])
def test_a_warmup_from_0_multiplies_with_an_overlapping_schedule(warmup_first, make_wrapper, build, collect):
    # min(t / 4, 1) * 0.9 ** t in either order of the list
    cfgs = [{"type": "LinearLR", "start_factor": 0.0, "end": 5}, {"type": "ExponentialLR", "gamma": 0.9}]
    wrapper = make_wrapper(1.0)
    chain = build(wrapper, *(cfgs if warmup_first else cfgs[::-1]))
    expected = [min(t / 4, 1.0) * 0.9**t for t in range(8)]
    assert collect(wrapper, chain, 8) == pytest.approx(expected, rel=1e-12)


def test_a_constant_factor_of_0_restores_the_value(make_wrapper, build, collect):
    cfgs = [{"type": "ConstantLR", "factor": 0.0, "end": 4}, {"type": "StepLR", "step_size": 2, "gamma": 0.5}]
    wrapper = make_wrapper(1.0)
    assert collect(wrapper, build(wrapper, *cfgs), 6) == pytest.approx([0, 0, 0, 0.5, 0.25, 0.25], rel=1e-12)


@pytest.mark.parametrize("stop", range(6))
def test_a_warmup_from_0_continues_after_a_load_at_any_step(stop, make_wrapper, build, collect):
    cfgs = [{"type": "StepLR", "step_size": 1, "gamma": 0.5}, {"type": "LinearLR", "start_factor": 0.0, "end": 5}]
    wrapper = make_wrapper(1.0)
    chain = build(wrapper, *cfgs)
    collect(wrapper, chain, stop)
    states = [scheduler.state_dict() for scheduler in chain]
    resumed = make_wrapper(1.0)
    again = build(resumed, *cfgs)
    resumed.param_groups[0]["lr"] = 9.0  # a product of some other step, as a file may have it
    for scheduler, state in zip(again, states, strict=True):
        scheduler.load_state_dict(state)
    expected = [min(t / 4, 1.0) * 0.5**t for t in range(stop, 9)]
    assert collect(resumed, again, 9 - stop) == pytest.approx(expected, rel=1e-12)
    assert type(resumed.param_groups[0]["lr"]) is float


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        # the only step is the last one
        ({"type": "LinearLR", "start_factor": 0.1, "end_factor": 0.5, "begin": 2, "end": 3}, [1, 1, 0.5, 0.5]),
        ({"type": "LinearLR", "start_factor": 0.1, "end": 1}, [1, 1, 1]),
        ({"type": "LinearLR", "start_factor": 0.0, "end": 1}, [1, 1, 1]),
        ({"type": "ConstantLR", "factor": 0.1, "end": 1}, [1, 1, 1]),
        ({"type": "ConstantLR", "factor": 0.1, "begin": 1, "end": 2}, [1, 1, 1]),
    ],
)
def test_a_schedule_of_one_step_ends_at_the_end_value(cfg, expected, make_wrapper, build, collect):
    wrapper = make_wrapper(1.0)
    assert collect(wrapper, build(wrapper, cfg), len(expected)) == expected


def test_a_scheduler_can_continue_from_a_last_step(make_wrapper, build, collect):
    uninterrupted, cfg = make_wrapper(1.0), {"type": "ExponentialLR", "gamma": 0.5}
    assert collect(uninterrupted, build(uninterrupted, cfg), 4)[3] == 0.125
    resumed = make_wrapper(0.25, initial_lr=1.0)  # the value of step 2
    (scheduler,) = build(resumed, {**cfg, "last_step": 2})
    assert (scheduler.last_step, scheduler.global_step, resumed.param_groups[0]["lr"]) == (3, 3, 0.125)
