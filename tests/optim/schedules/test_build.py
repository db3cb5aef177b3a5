"""Test building schedulers from a config: defaults, conversion, several optimizers, errors."""

import math
import re

import pytest

from jengine.optim.schedules import (
    INF,
    StepLR,
    build_param_schedulers,
    check_param_schedulers,
    flatten_schedulers,
)
from tests.refusals import check_refusal

EPOCHS = {"max_epochs": 4, "max_iters": 40, "epoch_length": 10}
ITERS = {"max_epochs": 1, "max_iters": 45, "epoch_length": 10, "by_epoch_loop": False}


def test_no_config_gives_no_schedulers(make_wrapper):
    assert build_param_schedulers(None, make_wrapper(1.0), **EPOCHS) == []
    assert build_param_schedulers(None, {"a": make_wrapper(1.0)}, **EPOCHS) == {"a": []}


def test_a_single_dict_gives_one_scheduler_that_lasts_for_the_run(make_wrapper):
    (scheduler,) = build_param_schedulers({"type": "CosineAnnealingLR"}, make_wrapper(1.0), **EPOCHS)
    assert (scheduler.by_epoch, scheduler.begin, scheduler.end) == (True, 0, 4)


def test_a_scheduler_by_iteration_lasts_for_all_iterations(make_wrapper):
    warmup = {"type": "WarmupConstantSchedule", "num_warmup_steps": 1}  # counts iterations by default
    cfg = [{"type": "PolyLR", "by_epoch": False}, warmup]
    poly, warmup = build_param_schedulers(cfg, make_wrapper(1.0), **EPOCHS)
    assert (poly.end, warmup.by_epoch, warmup.end) == (40, False, 40)


def test_the_config_is_not_modified(make_wrapper):
    cfg = {"type": "StepLR", "step_size": 2, "convert_to_iter_based": True, "_delete_": True}
    before = dict(cfg)
    build_param_schedulers(cfg, make_wrapper(1.0), **EPOCHS)
    assert cfg == before


@pytest.mark.parametrize(
    ("settings", "converted"),
    [
        ({"type": "StepLR", "step_size": 2}, {"step_size": 20}),
        ({"type": "MultiStepLR", "milestones": [1, 3]}, {"milestones": (10, 30)}),
        ({"type": "CosineAnnealingLR", "T_max": 3}, {"T_max": 30}),
        (
            {"type": "CosineRestartLR", "periods": [1, 2], "restart_weights": [1, 1], "eta_min": 0},
            {"periods": (10, 20)},
        ),
        ({"type": "OneCycleLR", "eta_max": 1.0, "total_steps": 4}, {"total_steps": 40}),
        ({"type": "LinearLR"}, {}),
    ],
)
def test_a_conversion_scales_epochs_to_iterations(settings, converted, make_wrapper):
    cfg = {**settings, "begin": 0.5, "end": 3, "convert_to_iter_based": True}
    (scheduler,) = build_param_schedulers(cfg, make_wrapper(1.0), **EPOCHS)
    assert (scheduler.by_epoch, scheduler.begin, scheduler.end) == (False, 5, 30)
    assert {name: getattr(scheduler.settings, name) for name in converted} == converted


def test_a_conversion_keeps_an_infinite_end(make_wrapper):
    scheduler = StepLR.build_iter_from_epoch(make_wrapper(1.0), step_size=1, epoch_length=7)
    assert (scheduler.settings.step_size, scheduler.end) == (7, INF)


@pytest.mark.parametrize(
    "settings", [{"by_epoch": False, "epoch_length": 7}, {"epoch_length": None}, {"epoch_length": 0}]
)
def test_a_conversion_requires_epochs_and_their_length(settings, make_wrapper):
    with pytest.raises(AssertionError):
        StepLR.build_iter_from_epoch(make_wrapper(1.0), step_size=1, **settings)


def test_a_converted_scheduler_lasts_for_a_run_of_iterations(make_wrapper):
    cfg = {"type": "CosineAnnealingLR", "convert_to_iter_based": True}
    (scheduler,) = build_param_schedulers(cfg, make_wrapper(1.0), **ITERS)
    assert (scheduler.by_epoch, scheduler.end) == (False, 45)


def test_a_plateau_works_in_a_loop_over_iterations(make_wrapper):
    (plateau,) = build_param_schedulers({"type": "ReduceOnPlateauLR"}, make_wrapper(1.0), **ITERS)
    assert (plateau.by_epoch, plateau.end) == (True, INF)
    with pytest.raises(ValueError, match="must be 0 in a train loop without epochs, got 1"):
        build_param_schedulers({"type": "ReduceOnPlateauLR", "begin": 1}, make_wrapper(1.0), **ITERS)


def test_built_schedulers_pass_through(make_wrapper):
    wrapper = make_wrapper(1.0)
    built = StepLR(wrapper, step_size=2)
    first, second = build_param_schedulers([built, {"type": "StepLR", "step_size": 3}], wrapper, **EPOCHS)
    assert first is built
    assert second.settings.step_size == 3


def test_one_config_applies_to_several_optimizers(make_wrapper):
    wrappers = {"gen": make_wrapper(1.0), "disc": make_wrapper(2.0)}
    built = build_param_schedulers([{"type": "ConstantLR", "factor": 0.5}], wrappers, **EPOCHS)
    assert {name: len(chain) for name, chain in built.items()} == {"gen": 1, "disc": 1}
    assert [s.get_last_value() for s in flatten_schedulers(built)] == [[0.5], [1.0]]


def test_each_optimizer_can_have_its_own_schedulers(make_wrapper):
    wrappers = {"gen": make_wrapper(1.0), "disc": make_wrapper(2.0)}
    cfg = {"gen": {"type": "ConstantLR", "factor": 0.5}, "disc": [{"type": "LinearLR"}, {"type": "PolyLR"}]}
    built = build_param_schedulers(cfg, wrappers, **EPOCHS)
    assert [type(s).__name__ for s in flatten_schedulers(built)] == ["ConstantLR", "LinearLR", "PolyLR"]


@pytest.mark.parametrize(
    ("cfg", "error", "words", "path"),
    [
        ({"type": "StepLR", "step_size": 1, "begin": 5}, ValueError, ["`end`", "`begin`"], "[1]"),
        ({"type": "StepLR", "step_size": 1, "begin": 3, "end": 2}, ValueError, ["begin=3", "end=2"], "[1]"),
        ({"type": "StepLR", "step_size": 1, "begin": -1}, ValueError, ["begin`", "at least 0"], "[1]"),
        ({"type": "CosineAnnealingLR", "T_max": -5}, ValueError, ["T_max`", "above 0", "None", "got -5"], "[1]"),
        ({"type": "MultiStepLR", "milestones": [3, 1]}, ValueError, ["got [3, 1]"], "[1]"),
        ({"type": "MultiStepLR", "milestones": 3}, TypeError, ["milestones`"], "[1]"),
        ({"type": "StepLR", "step_size": 0}, ValueError, ["step_size`", "above 0"], "[1]"),
        ({"type": "LinearLR", "start_factor": 1.5}, ValueError, ["start_factor`", "[0, 1]"], "[1]"),
        ({"type": "ConstantLR", "factor": -0.5}, ValueError, ["factor`", "[0, 1]"], "[1]"),
        (
            {"type": "CosineAnnealingLR", "eta_min": 0, "eta_min_ratio": 0.1},
            AssertionError,
            ["`eta_min`", "None", "`eta_min_ratio`", "got eta_min=0 and eta_min_ratio=0.1"],
            "[1]",
        ),
        (
            {"type": "CosineRestartLR", "periods": [2]},
            AssertionError,
            ["`eta_min`", "`eta_min_ratio`"],
            "[1]",
        ),
        (
            {"type": "CosineRestartLR", "periods": [2, 2], "eta_min": 0},
            AssertionError,
            ["got 2 and 1"],
            "[1]",
        ),
        ({"type": "CosineAnnealingLR", "eta_min": -0.5}, ValueError, ["eta_min`", "at least 0"], "[1]"),
        ({"type": "CosineAnnealingLR", "eta_min_ratio": -1.5}, ValueError, ["eta_min_ratio`", "at least 0"], "[1]"),
        ({"type": "PolyLR", "power": -1}, ValueError, ["power`", "at least 0"], "[1]"),
        ({"type": "StepLR", "step_size": 1, "gamma": -1}, ValueError, ["gamma`", "at least 0"], "[1]"),
        ({"type": "ReduceOnPlateauLR", "threshold": -1}, ValueError, ["threshold`", "at least 0", "got -1"], "[1]"),
        ({"type": "OneCycleLR", "eta_max": -1.0}, ValueError, ["eta_max`", "at least 0"], "[1]"),
        ({"type": "OneCycleLR", "eta_max": [1.0, 2.0]}, ValueError, ["got 2"], ""),
        ({"type": "OneCycleLR", "eta_max": 1.0, "pct_start": 2}, ValueError, ["pct_start`", "[0, 1]"], "[1]"),
        ({"type": "OneCycleLR", "eta_max": 1.0, "anneal_strategy": "lin"}, ValueError, ["got 'lin'"], "[1]"),
        ({"type": "StepParamScheduler", "param_name": "weight", "step_size": 1}, KeyError, ["`weight`", "got one without"], "[1]"),
        (
            {"type": "StepParamScheduler", "param_name": "name", "step_size": 1},
            ValueError,
            ["`name`", "got 'x'"],
            "[1]",
        ),
        ({"type": "StepLR", "step_size": 1, "last_step": -2}, ValueError, ["last_step`", "at least -1"], "[1]"),
        ({"type": "StepLR", "step_size": 1, "last_step": 2, "end": 9}, KeyError, ["unless", "'initial_lr'"], "[1]"),
        ({"type": "StepLr", "step_size": 1}, KeyError, ["got 'StepLr'", "did you mean 'StepLR'"], "[1].type"),
        ({"type": "StepLR", "stepsize": 1}, TypeError, ["did you mean 'step_size'"], "[1]"),
        ({"type": "StepLR"}, TypeError, ["'step_size'"], "[1]"),
        ({"step_size": 1}, TypeError, ["'type'"], "[1]"),
        ("StepLR", TypeError, ["StepLR", "'step_size'"], "[1]"),
        (
            {"type": "StepLR", "step_size": 1, "convert_to_iter_based": "no"},
            TypeError,
            ["`param_scheduler[1].convert_to_iter_based`", "True or False", "got 'no'"],
            "[1]",
        ),
        ({"type": "StepLR", "step_size": 1, "convert_to_iter_based": 0.5}, TypeError, ["True or False", "got 0.5"], "[1]"),
        ({"type": "StepLR", "step_size": 1, "by_epoch": "False"}, TypeError, ["True or False", "got 'False'"], "[1]"),
        ({"type": "StepLR", "step_size": 1, "by_epoch": 0}, TypeError, ["True or False", "got 0"], "[1]"),
    ],
)  # fmt: skip
def test_bad_input_is_rejected_with_its_path(cfg, error, words, path, make_wrapper):
    wrapper = make_wrapper(1.0, name="x", momentum=0.9)
    cfgs = [{"type": "ExponentialMomentum", "gamma": 1.0}, cfg]
    check_refusal(lambda: build_param_schedulers(cfgs, wrapper, **EPOCHS), error, *words, f"`param_scheduler{path}`")


@pytest.mark.parametrize(
    ("cfg", "steps", "words"),
    [
        ({"type": "ExponentialLR", "gamma": 1e200}, 1, "`lr` must be finite and at least 0, got 1e+200 from ExponentialLR in epoch 2"),
        # float32 on the device ends at 3.4e38, and 1.26 ** 383 = 2.8e38
        ({"type": "ExponentialLR", "gamma": 1.26, "by_epoch": False}, 384, "from ExponentialLR in iteration 385"),
        (lambda step: 1.0 - step / 200, 201, "`lr` must be finite and at least 0, got -0.005 from OptaxLR in iteration 202"),
        (lambda step: 1.0 if step < 90 else math.nan, 90, "got nan from OptaxLR in iteration 91"),
        ({"type": "CosineAnnealingMomentum", "eta_min": 2.0}, 8, "`momentum` must be from 0 to 1, got 1.00504 from CosineAnnealingMomentum in epoch 9"),
    ],
)  # fmt: skip
def test_an_illegal_value_is_refused_in_the_step_that_would_have_it(cfg, steps, words, make_wrapper):
    wrapper = make_wrapper(1.0, momentum=0.9)
    (scheduler,) = build_param_schedulers(cfg, wrapper, max_epochs=40, max_iters=400, epoch_length=10)
    for _ in range(steps - 1):
        scheduler.step()
    before = dict(wrapper.param_groups[0])
    with pytest.raises(ValueError, match=re.escape(words)):
        scheduler.step()
    assert wrapper.param_groups[0] == before


@pytest.mark.parametrize(
    ("cfg", "error", "words"),
    [
        ({"type": "StepLr", "step_size": 1}, KeyError, ["did you mean 'StepLR'"]),
        ({"type": "StepLR", "stepsize": 1, "by_epoch": False}, TypeError, ["did you mean 'step_size'"]),
        ([{"type": "StepLR", "step_size": 0, "by_epoch": False}], ValueError, ["step_size`", "above 0"]),
        ({"type": "StepLR", "step_size": 1}, ValueError, ["by_epoch=False"]),
        ({"main": None}, ValueError, ["the optimizers"]),
        (5, TypeError, ["'type'"]),
    ],
)
def test_names_and_arguments_are_checked_before_the_optimizer_is_known(cfg, error, words):
    check_refusal(lambda: check_param_schedulers(cfg, [""], by_epoch_loop=False), error, *words)
    check_param_schedulers([{"type": "LinearLR", "by_epoch": False}, lambda step: 0.1], [""], by_epoch_loop=False)
    check_param_schedulers({"a": None, "b": {"type": "PolyLR"}}, ["a", "b"], by_epoch_loop=True)


def test_a_long_run_is_checked_when_its_values_are_set(make_wrapper):
    wrapper = make_wrapper(1.0)
    run = {"max_epochs": None, "max_iters": 10**9, "epoch_length": None, "by_epoch_loop": False}
    (scheduler,) = build_param_schedulers(lambda step: 1.0 - step / 150_000, wrapper, **run)
    scheduler.global_step = scheduler.last_step = 149_999
    scheduler.step()
    assert wrapper.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-15)
    with pytest.raises(
        ValueError, match="`lr` must be finite and at least 0, got -6.66667e-06 from OptaxLR in iteration 150002"
    ):
        scheduler.step()
    assert wrapper.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-15)


def test_verbose_logs_each_new_value(make_wrapper, build, caplog):
    caplog.set_level("INFO", logger="jengine")
    wrapper = make_wrapper(1.0)
    (step,) = build(wrapper, {"type": "StepLR", "step_size": 1, "verbose": True})
    step.step()
    assert wrapper.param_groups[0]["lr"] == pytest.approx(0.1)
    assert caplog.messages == ["Adjusting lr of group 0 to 1.0000e-01"]
