"""Test the reduction on a plateau: comparison, patience, cooldown, minimum values, state."""

import json
from types import SimpleNamespace

import pytest

from jengine.config import PARAM_SCHEDULERS
from tests.refusals import check_refusal

SETTINGS = {"type": "ReduceOnPlateauLR", "monitor": "loss", "patience": 2, "factor": 0.5, "cooldown": 1}


def make_wrapper(*lrs, default_group=None, **settings):
    groups = [{"lr": lr, **settings} for lr in lrs]
    return SimpleNamespace(param_groups=groups, base_param_settings=default_group)


def build(wrapper, *cfgs):
    return [PARAM_SCHEDULERS.build(cfg, optimizer=wrapper) for cfg in cfgs]


def run_epochs(wrapper, scheduler, metrics):
    """Return the value after each of several epochs whose validations have the given metrics."""
    out = []
    for metric in metrics:
        scheduler.step()
        scheduler.step({"loss": metric})
        out.append(wrapper.param_groups[0]["lr"])
    return out


# MMEngine's values for a constant metric with patience 2, factor 0.5, cooldown 1
def test_a_constant_metric_reduces_after_patience_and_cooldown():
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, SETTINGS)
    assert run_epochs(wrapper, plateau, [1.0] * 8) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_improvements_keep_the_value():
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, SETTINGS)
    assert run_epochs(wrapper, plateau, [10.0 - i for i in range(9)]) == [1.0] * 9


@pytest.mark.parametrize(
    ("rule", "threshold_rule", "first", "second", "better"),
    [  # threshold 0.1
        ("less", "rel", 2.0, 1.79, True),
        ("less", "rel", 2.0, 1.81, False),
        ("less", "abs", 2.0, 1.89, True),
        ("less", "abs", 2.0, 1.91, False),
        ("greater", "rel", 2.0, 2.21, True),
        ("greater", "rel", 2.0, 2.19, False),
        ("greater", "abs", 2.0, 2.11, True),
        ("greater", "abs", 2.0, 2.09, False),
    ],
)
def test_an_improvement_must_exceed_the_threshold(rule, threshold_rule, first, second, better):
    wrapper = make_wrapper(1.0)
    cfg = {**SETTINGS, "patience": 0, "rule": rule, "threshold_rule": threshold_rule, "threshold": 0.1}
    (plateau,) = build(wrapper, cfg)
    assert run_epochs(wrapper, plateau, [first, second]) == [1.0, 1.0 if better else 0.5]


@pytest.mark.parametrize(("rule", "worse"), [("less", 0.0005), ("greater", -0.0005)])
def test_a_negative_metric_that_stays_or_gets_worse_is_no_improvement(rule, worse):
    for sign in (1, -1):
        for step in (0.0, worse):
            wrapper = make_wrapper(1.0)
            (plateau,) = build(wrapper, {**SETTINGS, "rule": rule})  # relative, by default
            metrics = [sign * 10.0 + step * i for i in range(8)]
            assert run_epochs(wrapper, plateau, metrics) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25], (sign, step)
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, {**SETTINGS, "rule": "less"})
    assert run_epochs(wrapper, plateau, [-10.0 - 0.01 * i for i in range(8)]) == [1.0] * 8


def test_each_group_can_have_its_own_minimum():
    wrapper = make_wrapper(1.0, 1.0, default_group={"lr": 1.0})
    (plateau,) = build(wrapper, {**SETTINGS, "patience": 0, "factor": 0.1, "min_value": [0.5, 0.3]})
    run_epochs(wrapper, plateau, [1.0, 1.0])
    assert plateau.get_last_value() == [0.5, 0.3, 0.3]


def test_a_reduction_smaller_than_eps_is_skipped():
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, {**SETTINGS, "patience": 0, "eps": 0.6})
    assert run_epochs(wrapper, plateau, [1.0, 1.0]) == [1.0, 1.0]


def test_metrics_before_begin_and_after_end_do_not_count():
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, {**SETTINGS, "patience": 0, "cooldown": 0, "begin": 3, "end": 5})
    assert run_epochs(wrapper, plateau, [1.0] * 6) == [1, 1, 1, 0.5, 0.5, 0.5]


def test_an_epoch_without_metrics_only_counts():
    (plateau,) = build(make_wrapper(1.0), SETTINGS)
    plateau.step()
    assert (plateau.global_step, plateau.last_step) == (1, -1)


@pytest.mark.parametrize("stop", range(8))
def test_a_plateau_schedule_continues_after_a_load_at_any_epoch(stop):
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, SETTINGS)
    before = run_epochs(wrapper, plateau, [1.0] * stop)
    resumed = make_wrapper(wrapper.param_groups[0]["lr"], initial_lr=1.0)
    (again,) = build(resumed, SETTINGS)
    again.load_state_dict(json.loads(json.dumps(plateau.state_dict())))
    assert before + run_epochs(resumed, again, [1.0] * (8 - stop)) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_the_momentum_can_be_reduced():
    wrapper = make_wrapper(1.0, momentum=0.8)
    (plateau,) = build(wrapper, {**SETTINGS, "type": "ReduceOnPlateauMomentum", "patience": 0})
    assert plateau.need_val_args
    run_epochs(wrapper, plateau, [1.0, 1.0])
    assert wrapper.param_groups[0]["momentum"] == 0.4


def test_schedules_go_on_from_a_reduction_in_proportion():
    wrapper = make_wrapper(1.0)
    plateau, linear = build(
        wrapper,
        {**SETTINGS, "patience": 0, "cooldown": 0},
        {"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.0, "end": 11},
    )
    values = []
    for metric in (1.0, 1.0, 0.5, 0.4):  # the second is not better than the first
        linear.step()
        plateau.step()
        plateau.step({"loss": metric})
        values.append(wrapper.param_groups[0]["lr"])
    assert values == pytest.approx([0.9, 0.4, 0.35, 0.3], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"factor": 1.0}, ValueError, ["factor`"]),
        ({"rule": "smaller"}, ValueError, ["rule`", "'less'", "'greater'", "got 'smaller'"]),
        ({"threshold_rule": "relative"}, ValueError, ["threshold_rule`", "'rel'", "'abs'", "got 'relative'"]),
        ({"min_value": [0.1, 0.2]}, ValueError, ["got 2"]),
        ({"by_epoch": False}, AssertionError, ["`by_epoch`", "ReduceOnPlateauLR", "got False"]),
    ],
)
def test_bad_settings_are_rejected(settings, error, words):
    check_refusal(lambda: build(make_wrapper(1.0), {**SETTINGS, **settings}), error, *words)


@pytest.mark.parametrize(("rule", "metrics"), [("less", [2e9, 1.9e9, 1.8e9]), ("greater", [-2e9, -1.9e9, -1.8e9])])
def test_a_metric_of_any_size_improves_on_none(rule, metrics):
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, {**SETTINGS, "rule": rule, "patience": 0})
    for metric in metrics:
        plateau.step({"loss": metric})
    assert wrapper.param_groups[0]["lr"] == 1.0


def test_a_finite_metric_improves_on_an_infinite_one():
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, {**SETTINGS, "patience": 0})
    for metric in [float("inf"), 5.0, 4.0]:
        plateau.step({"loss": metric})
    assert wrapper.param_groups[0]["lr"] == 1.0
