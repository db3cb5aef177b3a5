"""Test iMIX's schedules against the values of its formulas."""

import math

import pytest

from jengine.config import PARAM_SCHEDULERS
from tests.refusals import check_refusal


def value_at(make_wrapper, step, base=1.0, **cfg):
    """Return the learning rate at `step`, after loading the counter of the previous step."""
    wrapper = make_wrapper(base)
    scheduler = PARAM_SCHEDULERS.build(cfg, optimizer=wrapper)
    assert not scheduler.by_epoch
    if step > 0:
        scheduler.load_state_dict({"global_step": step - 1, "last_step": step - 1})
        scheduler.step()
    return wrapper.param_groups[0]["lr"]


PYTHIA = {"type": "PythiaScheduler", "warmup_iterations": 1000, "warmup_factor": 0.2, "lr_steps": [14000, 19000]}
MULTI = {"type": "MultiStepScheduler", "warmup_iterations": 27000, "warmup_factor": 0.25, "lr_steps": [90000, 108000]}
WARM_STEPS = {"type": "WarmupMultiStepLR", "warmup_iters": 5, "warmup_factor": 0.001, "milestones": [10, 20]}
WARM_COSINE = {"type": "WarmupCosineLR", "max_iters": 100, "warmup_iters": 10, "warmup_factor": 0.001}
NON_ZERO = {"type": "WarmupLinearScheduleNonZero", "t_total": 100, "warmup_iterations": 10}
HF = {"num_warmup_steps": 10, "num_training_steps": 110}


@pytest.mark.parametrize(
    ("cfg", "base", "values"),
    [
        ({**PYTHIA, "lr_ratio": 0.1}, 1.0, {0: 0.2, 500: 0.6, 1000: 1.0, 14000: 0.1, 19000: 0.01}),
        ({**MULTI, "lr_ratio": 0.2}, 1.0, {0: 0.25, 13500: 0.625, 27000: 1, 90000: 0.2, 108000: 0.04}),
        (WARM_STEPS, 1.0, {0: 0.001, 1: 0.2008, 4: 0.8002, 5: 1.0, 10: 0.1, 20: 0.01}),
        (WARM_COSINE, 1.0, {0: 0.001, 5: 0.49741901, 10: 0.97552826, 50: 0.5, 100: 0.0}),
        (NON_ZERO, 1e-3, {0: 1e-5, 5: 5e-4, 10: 1e-3, 55: 5e-4, 100: 1e-5}),
        ({"type": "BertWarmupLinearLR", "max_iters": 10}, 1.0, {0: 0.5, 5: 0.25, 10: 0.0, 12: 0.0}),
        ({"type": "BertWarmupLinearLR", "max_iters": 10, "warmup": 0.2}, 1.0, {0: 0.0, 1: 0.5, 2: 1.0, 6: 0.5}),
        ({"type": "BertWarmupLinearLR", "max_iters": -1}, 1.0, {0: 1.0, 7: 1.0}),
        ({"type": "ConstantSchedule"}, 1.0, {0: 1.0, 9: 1.0}),
        ({"type": "WarmupConstantSchedule", "num_warmup_steps": 4}, 1.0, {0: 0.0, 1: 0.25, 4: 1.0, 9: 1.0}),
        ({"type": "WarmupLinearSchedule", **HF}, 1.0, {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
        ({"type": "WarmupCosineSchedule", **HF}, 1.0, {5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
        # two half cosines of 50 steps: the second starts at step 60
        ({"type": "WarmupCosineWithHardRestartsSchedule", **HF, "num_cycles": 2}, 1.0, {35: 0.5, 60: 1.0, 110: 0.0}),
        # (1 - 1e-7) * 0.5**2 + 1e-7
        ({"type": "WarmupPolynomialSchedule", **HF, "power": 2.0}, 1.0, {5: 0.5, 60: 0.250000075, 110: 1e-7}),
    ],
)  # fmt: skip
def test_values(cfg, base, values, make_wrapper):
    actual = {step: value_at(make_wrapper, step, base, **cfg) for step in values}
    assert actual == pytest.approx(values, rel=1e-8, abs=1e-15)


def test_the_plateau_schedule_has_a_mode(make_wrapper, build):
    wrapper = make_wrapper(1.0)
    cfg = {"type": "ReduceOnPlateauSchedule", "monitor": "acc", "mode": "max", "factor": 0.5, "patience": 0}
    (plateau,) = build(wrapper, cfg)
    values = []
    for metric in (0.5, 0.6, 0.6):
        plateau.step({"acc": metric})
        values.append(wrapper.param_groups[0]["lr"])
    assert values == [1.0, 1.0, 0.5]
    saved = plateau.state_dict()
    plateau.load_state_dict(saved)
    assert plateau.settings.rule == "greater"


@pytest.mark.parametrize(
    ("cfg", "error", "words"),
    [
        (
            {**MULTI, "warmup_iterations": 90000, "lr_ratio": 0.2},
            AssertionError,
            ["`warmup_iterations`", "`lr_steps`", "90000", "got 90000"],
        ),
        ({**WARM_STEPS, "milestones": [20, 10]}, ValueError, ["ascending order"]),
        ({**WARM_STEPS, "warmup_method": "lin"}, ValueError, ["warmup_method`", "got 'lin'"]),
        ({**WARM_COSINE, "max_iters": 0}, ValueError, ["max_iters`", "at least 1"]),
        ({"type": "BertWarmupLinearLR", "max_iters": 10, "warmup": 3}, ValueError, ["got 3"]),
        ({"type": "WarmupPolynomialSchedule", **HF, "lr_end": 2.0}, ValueError, ["`lr_end`"]),
        ({"type": "ReduceOnPlateauSchedule", "mode": "low"}, ValueError, ["mode`", "'min'", "'max'", "got 'low'"]),
        (
            {"type": "WarmupLinearSchedule", "num_warmup_steps": 1, "num_training_steps": -1},
            ValueError,
            ["num_training_steps`", "at least 1", "got -1"],
        ),
    ],
)
def test_bad_settings_are_rejected(cfg, error, words, make_wrapper, build):
    check_refusal(lambda: build(make_wrapper(1.0), cfg), error, *words)


def test_groups_keep_their_multiplier(make_wrapper, build):
    wrapper = make_wrapper(1.0, 0.1, default_group={"lr": 1.0})
    (poly,) = build(wrapper, {"type": "WarmupPolynomialSchedule", "num_warmup_steps": 0, "num_training_steps": 10})
    poly.step()
    first, second, own = poly.get_last_value()
    assert second / first == pytest.approx(0.1, rel=1e-12)
    assert own == first
    assert not math.isclose(first, 1.0)
