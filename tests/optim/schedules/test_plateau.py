"""The reduction on a plateau: what counts as better, patience, cooldown, floors, state."""

import json

import pytest

SETTINGS = {"type": "ReduceOnPlateauLR", "monitor": "loss", "patience": 2, "factor": 0.5, "cooldown": 1}


def feed(wrapper, scheduler, metrics):
    out = []
    for metric in metrics:
        scheduler.step()
        scheduler.step({"loss": metric})
        out.append(wrapper.param_groups[0]["lr"])
    return out


# MMEngine's values for a constant metric with patience 2, factor 0.5, cooldown 1
def test_a_constant_metric_reduces_after_patience_and_cooldown(make_wrapper, build):
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, SETTINGS)
    assert feed(wrapper, plateau, [1.0] * 8) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_improvements_keep_the_value(make_wrapper, build):
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, SETTINGS)
    assert feed(wrapper, plateau, [10.0 - i for i in range(9)]) == [1.0] * 9


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
def test_better_means_better_by_the_threshold(rule, threshold_rule, first, second, better, make_wrapper, build):
    wrapper = make_wrapper(1.0)
    cfg = {**SETTINGS, "patience": 0, "rule": rule, "threshold_rule": threshold_rule, "threshold": 0.1}
    (plateau,) = build(wrapper, cfg)
    assert feed(wrapper, plateau, [first, second]) == [1.0, 1.0 if better else 0.5]


def test_the_value_has_a_floor_for_each_group(make_wrapper, build):
    shadow = {"lr": 1.0}
    wrapper = make_wrapper(1.0, 1.0, shadow=shadow)
    (plateau,) = build(wrapper, {**SETTINGS, "patience": 0, "factor": 0.1, "min_value": [0.5, 0.3]})
    feed(wrapper, plateau, [1.0, 1.0])
    assert plateau.get_last_value() == [0.5, 0.3, 0.3]


def test_a_reduction_below_eps_is_not_made(make_wrapper, build):
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, {**SETTINGS, "patience": 0, "eps": 0.6})
    assert feed(wrapper, plateau, [1.0, 1.0]) == [1.0, 1.0]


def test_metrics_outside_the_window_do_not_count(make_wrapper, build):
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, {**SETTINGS, "patience": 0, "cooldown": 0, "begin": 3, "end": 5})
    assert feed(wrapper, plateau, [1.0] * 6) == [1, 1, 1, 0.5, 0.5, 0.5]


def test_an_epoch_without_metrics_only_counts(make_wrapper, build):
    (plateau,) = build(make_wrapper(1.0), SETTINGS)
    plateau.step()
    assert (plateau.global_step, plateau.last_step) == (1, -1)


@pytest.mark.parametrize("stop", range(8))
def test_it_goes_on_after_a_load_at_any_epoch(stop, make_wrapper, build):
    wrapper = make_wrapper(1.0)
    (plateau,) = build(wrapper, SETTINGS)
    before = feed(wrapper, plateau, [1.0] * stop)
    resumed = make_wrapper(wrapper.param_groups[0]["lr"], initial_lr=1.0)
    (again,) = build(resumed, SETTINGS)
    again.load_state_dict(json.loads(json.dumps(plateau.state_dict())))
    assert before + feed(resumed, again, [1.0] * (8 - stop)) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_it_takes_metrics_and_schedules_the_momentum_as_well(make_wrapper, build):
    wrapper = make_wrapper(1.0, momentum=0.8)
    (plateau,) = build(wrapper, {**SETTINGS, "type": "ReduceOnPlateauMomentum", "patience": 0})
    assert plateau.need_val_args
    feed(wrapper, plateau, [1.0, 1.0])
    assert wrapper.param_groups[0]["momentum"] == 0.4


def test_a_missing_metric_is_named_with_the_closest(make_wrapper, build):
    (plateau,) = build(make_wrapper(1.0), {**SETTINGS, "monitor": "accuracy"})
    with pytest.raises(KeyError, match=r"no metric 'accuracy'; did you mean 'accurac'\?"):
        plateau.step({"accurac": 1.0})


def test_metrics_are_a_dict(make_wrapper, build):
    (plateau,) = build(make_wrapper(1.0), SETTINGS)
    with pytest.raises(TypeError, match="metrics are a dict"):
        plateau.step([1.0])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"factor": 1.0}, ValueError, "factor` must be a number in \\[0, 1\\)"),
        ({"rule": "smaller"}, ValueError, "rule` must be 'less' or 'greater', got 'smaller'"),
        ({"threshold_rule": "relative"}, ValueError, "threshold_rule` must be 'rel' or 'abs', got 'relative'"),
        ({"min_value": [0.1, 0.2]}, ValueError, "min_value has 2 values for 1 parameter groups"),
        ({"by_epoch": False}, AssertionError, "works with by_epoch=True only"),
    ],
)
def test_bad_settings_are_refused(settings, error, message, make_wrapper, build):
    with pytest.raises(error, match=message):
        build(make_wrapper(1.0), {**SETTINGS, **settings})
