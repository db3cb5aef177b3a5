"""Test resumed schedules: the position of the checkpoint, the settings of the config or of the checkpoint."""

import json

import numpy as np
import pytest

from jengine.extras.weights.optimizer_state import seek_schedulers
from jengine.optim import SGD, OptimWrapper
from jengine.optim.schedules import (
    build_param_schedulers,
    chain_of,
    load_schedulers_state_dict,
    schedulers_state_dict,
)

LENGTH = 5


def train(wrapper, schedulers, start, stop, name="lr"):
    """Return the values during the iterations from start to stop, in epochs of `LENGTH` iterations."""
    values = []
    for iteration in range(start, stop):
        values.append(wrapper.param_groups[0][name])
        for scheduler in schedulers:
            if not scheduler.by_epoch or (iteration + 1) % LENGTH == 0:
                scheduler.step()
    return values


def start(make_wrapper, cfg, total, lr=1.0, epoch_length=LENGTH):
    wrapper = make_wrapper(lr, weight_decay=0.1, momentum=0.9)
    run = {"max_epochs": total, "max_iters": total * LENGTH, "epoch_length": epoch_length}
    return wrapper, build_param_schedulers(cfg, wrapper, **run)


def save(schedulers):
    return json.loads(json.dumps(schedulers_state_dict(schedulers)))


MIXED = [
    {"type": "LinearLR", "start_factor": 0.0, "by_epoch": False, "end": 4},
    {"type": "CosineAnnealingLR", "eta_min": 0.01},
    {"type": "MultiStepLR", "milestones": [7, 13], "by_epoch": False},
]
CHAINS = {
    "mixed": MIXED,
    "constant 0": [{"type": "ConstantLR", "factor": 0.0, "by_epoch": False, "end": 8}, {"type": "PolyLR", "power": 0.9}],
    "restarts": {"type": "CosineRestartLR", "periods": [8, 12], "restart_weights": [1, 0.5], "eta_min": 0.1, "by_epoch": False},
    "one cycle": {"type": "OneCycleLR", "eta_max": 2.0, "by_epoch": False},
    "converted": {"type": "LinearLR", "convert_to_iter_based": True},
    "overlap": [{"type": "PolyLR", "eta_min": 0.1, "by_epoch": False}, {"type": "CosineAnnealingLR", "T_max": 9, "eta_min": 0.05, "by_epoch": False}],
    "function": lambda step: 1.0 / (1 + step),
    "imix": {"type": "WarmupLinearScheduleNonZero", "t_total": 20, "warmup_iterations": 4},
}  # fmt: skip


@pytest.mark.parametrize("stop", [0, 1, 4, 7, 10, 19])
@pytest.mark.parametrize("cfg", CHAINS.values(), ids=CHAINS)
def test_a_resumed_schedule_continues_as_if_uninterrupted(stop, cfg, make_wrapper):
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    before = train(wrapper, schedulers, 0, stop)
    saved = save(schedulers)
    expected = train(wrapper, schedulers, stop, 20)
    # the groups of a checkpoint, whatever they are, have no effect: neither missing nor ahead
    for group in ({}, {"lr": 123.0, "initial_lr": 1.0}):
        wrapper, schedulers = start(make_wrapper, cfg, total=4)
        wrapper.param_groups[0].update(group)
        load_schedulers_state_dict(schedulers, saved)
        assert train(wrapper, schedulers, stop, 20) == expected
    whole = chain_of(wrapper).at(range(20))[0]["lr"]
    assert whole.tolist() == before + expected
    assert [chain_of(wrapper).at(step)[0]["lr"] for step in (0, 3, 19)] == [whole[0], whole[3], whole[19]]


def test_a_chain_of_all_hyperparameters_is_a_function_of_the_step(make_wrapper):
    cfg = [
        {"type": "CosineAnnealingLR", "by_epoch": False},
        {"type": "LinearMomentum", "start_factor": 0.5, "by_epoch": False, "end": 10},
        {"type": "CosineAnnealingWeightDecay", "eta_min": 0.4},
    ]
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    curves = chain_of(wrapper).at(np.arange(20))[0]
    for iteration in range(20):
        for name in ("lr", "momentum", "weight_decay"):
            assert wrapper.param_groups[0][name] == curves[name][iteration]
        train(wrapper, schedulers, iteration, iteration + 1)


def test_epochs_without_a_known_length_end_where_they_have_ended(make_wrapper):
    cfg = [{"type": "PolyLR", "eta_min": 0.1, "by_epoch": False}, {"type": "CosineAnnealingLR", "eta_min": 0.05}]
    wrapper, schedulers = start(make_wrapper, cfg, total=4, epoch_length=None)
    train(wrapper, schedulers, 0, 12)
    saved = save(schedulers)
    expected = train(wrapper, schedulers, 12, 20)
    wrapper, schedulers = start(make_wrapper, cfg, total=4, epoch_length=None)
    load_schedulers_state_dict(schedulers, saved)
    assert train(wrapper, schedulers, 12, 20) == expected


@pytest.mark.parametrize("total", [2, 6])
@pytest.mark.parametrize(
    "cfg",
    [
        {"type": "CosineAnnealingLR"},
        {"type": "PolyLR", "by_epoch": False},
        {"type": "LinearLR", "convert_to_iter_based": True},
        {"type": "OneCycleLR", "eta_max": 2.0, "by_epoch": False},
    ],
    ids=lambda cfg: cfg["type"],
)
def test_a_schedule_without_an_end_ends_with_the_resumed_run(make_wrapper, cfg, total):
    wrapper, schedulers = start(make_wrapper, cfg, total)
    expected = train(wrapper, schedulers, 0, total * LENGTH)

    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    train(wrapper, schedulers, 0, 7)
    saved = save(schedulers)
    wrapper, schedulers = start(make_wrapper, cfg, total)
    load_schedulers_state_dict(schedulers, saved)
    assert train(wrapper, schedulers, 7, total * LENGTH) == expected[7:]


def test_the_config_may_have_other_types_and_numbers_of_schedulers(make_wrapper):
    wrapper, schedulers = start(make_wrapper, MIXED, total=4)
    expected = train(wrapper, schedulers, 0, 20)
    wrapper, schedulers = start(make_wrapper, {"type": "ExponentialLR", "gamma": 0.5}, total=4)
    train(wrapper, schedulers, 0, 12)
    saved = save(schedulers)
    wrapper, schedulers = start(make_wrapper, MIXED, total=4)
    load_schedulers_state_dict(schedulers, saved, iters=12, epochs=2)
    assert train(wrapper, schedulers, 12, 20) == expected[12:]


def test_the_reductions_of_a_plateau_are_kept_at_their_step(make_wrapper):
    cfg = [
        {"type": "PolyLR", "eta_min": 0.1, "by_epoch": False},
        {"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5},
    ]
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    for metric in (1.0, 1.0, 0.5):  # the second is not better than the first
        train(wrapper, schedulers, 0, LENGTH)
        schedulers[1].step({"loss": metric})
    saved, value = save(schedulers), wrapper.param_groups[0]["lr"]
    expected = train(wrapper, schedulers, 15, 20)
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    load_schedulers_state_dict(schedulers, saved)
    assert wrapper.param_groups[0]["lr"] == value
    assert schedulers[1].state.best == 0.5
    assert train(wrapper, schedulers, 15, 20) == expected


def test_a_group_with_a_fixed_rate_keeps_it_through_reductions_and_a_resume(make_wrapper):
    cfg = {"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5}
    run = {"max_epochs": 4, "max_iters": 20, "epoch_length": LENGTH}
    wrapper, resumed = make_wrapper(1.0, 1.0), make_wrapper(1.0, 1.0)
    for groups in (wrapper.param_groups, resumed.param_groups):
        groups[1]["fix_lr"] = True
    schedulers = build_param_schedulers(cfg, wrapper, **run)
    for metric in (1.0, 1.0):
        schedulers[0].step()
        schedulers[0].step({"loss": metric})
    load_schedulers_state_dict(build_param_schedulers(cfg, resumed, **run), save(schedulers))
    for each in (wrapper, resumed):
        assert [group["lr"] for group in each.param_groups] == [0.5, 1.0]


def test_a_value_that_is_set_by_hand_stays_and_the_schedule_goes_on_from_it(make_wrapper):
    wrapper, schedulers = start(make_wrapper, {"type": "ExponentialLR", "gamma": 0.5, "by_epoch": False}, total=4)
    train(wrapper, schedulers, 0, 3)
    wrapper.param_groups[0]["lr"] = 8.0
    assert train(wrapper, schedulers, 3, 6) == [8.0, 4.0, 2.0]
    saved = save(schedulers)
    wrapper, schedulers = start(make_wrapper, {"type": "ExponentialLR", "gamma": 0.5, "by_epoch": False}, total=4)
    load_schedulers_state_dict(schedulers, saved)
    assert train(wrapper, schedulers, 6, 8) == [1.0, 0.5]
    assert chain_of(wrapper).at(range(6))[0]["lr"].tolist() == [1.0, 0.5, 0.25, 8.0, 4.0, 2.0]


def test_a_schedule_that_sets_values_goes_on_from_the_hand_in_proportion(make_wrapper):
    wrapper, schedulers = start(make_wrapper, lambda step: 1.0 - step / 20, total=4)
    train(wrapper, schedulers, 0, 10)
    wrapper.param_groups[0]["lr"] = 0.25  # half of the scheduled value
    expected = [0.5 * (1 - step / 20) for step in range(10, 20)]
    assert train(wrapper, schedulers, 10, 15) == pytest.approx(expected[:5], rel=1e-12)
    saved = save(schedulers)
    wrapper, schedulers = start(make_wrapper, lambda step: 1.0 - step / 20, total=4)
    load_schedulers_state_dict(schedulers, saved)
    assert train(wrapper, schedulers, 15, 20) == pytest.approx(expected[5:], rel=1e-12)


def test_a_value_set_while_a_warmup_gives_0_is_treated_like_any_other(make_wrapper):
    cfg = {"type": "ConstantLR", "factor": 0.0, "by_epoch": False, "end": 6}
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    train(wrapper, schedulers, 0, 2)
    wrapper.param_groups[0]["lr"] = 0.5
    assert train(wrapper, schedulers, 2, 3) == [0.5]
    saved = save(schedulers)
    assert train(wrapper, schedulers, 3, 7) == [0.5, 0.5, 0.5, 0.5]
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    load_schedulers_state_dict(schedulers, saved)
    assert train(wrapper, schedulers, 3, 7) == [0.5, 0.5, 0.5, 0.5]
    assert chain_of(wrapper).at(range(7))[0]["lr"].tolist() == [0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_a_warmup_from_0_rises_to_the_value_that_was_set_at_its_start(make_wrapper):
    cfg = [{"type": "LinearLR", "start_factor": 0.0, "by_epoch": False, "end": 5}]
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    wrapper.param_groups[0]["lr"] = 8.0
    assert train(wrapper, schedulers, 0, 6) == [8.0, 2.0, 4.0, 6.0, 8.0, 8.0]
    assert chain_of(wrapper).at(range(6))[0]["lr"].tolist() == [8.0, 2.0, 4.0, 6.0, 8.0, 8.0]


@pytest.mark.parametrize("cfg", [lambda step: 1.0 - step / 40, {"type": "PolyLR", "eta_min": 0.1, "by_epoch": False}])
def test_only_the_newest_value_of_the_hand_is_kept(make_wrapper, cfg):
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    for iteration in range(8):
        train(wrapper, schedulers, iteration, iteration + 1)
        wrapper.param_groups[0]["lr"] *= 0.9
    saved = save(schedulers)
    assert len(saved[0]["events"]) == 1
    expected = train(wrapper, schedulers, 8, 20)
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    load_schedulers_state_dict(schedulers, saved)
    assert train(wrapper, schedulers, 8, 20) == expected


def test_a_rate_that_is_set_by_hand_keeps_the_multiplier_of_each_group():
    wrapper = OptimWrapper(SGD(lr=1.0).with_groups([dict(params="a"), dict(params="b", lr=0.1)]))
    (schedule,) = build_param_schedulers(
        dict(type="ExponentialLR", gamma=0.5, by_epoch=False), wrapper, max_epochs=1, max_iters=9, epoch_length=9
    )
    schedule.step()
    wrapper.set_lr(8.0)
    assert wrapper.get_lr() == {"base_lr": [8.0], "lr": [8.0, 0.8]}
    schedule.step()
    assert wrapper.get_lr() == {"base_lr": [4.0], "lr": [4.0, 0.4]}


def test_a_position_can_be_set_without_a_checkpoint(make_wrapper):
    wrapper, schedulers = start(make_wrapper, MIXED, total=4)
    expected = train(wrapper, schedulers, 0, 20)
    seek_schedulers(schedulers, iters=7, epochs=1)
    assert train(wrapper, schedulers, 7, 20) == expected[7:]
    seek_schedulers(schedulers, iters=0, epochs=0)
    assert wrapper.param_groups[0]["lr"] == 0.0
    assert [scheduler.global_step for scheduler in schedulers] == [0, 0, 0]


def test_schedules_that_are_built_again_start_from_the_values_before_any_schedule(make_wrapper):
    wrapper, schedulers = start(make_wrapper, MIXED, total=4)
    train(wrapper, schedulers, 0, 9)
    run = {"max_epochs": 4, "max_iters": 20, "epoch_length": LENGTH}
    build_param_schedulers({"type": "ConstantLR", "factor": 0.5}, wrapper, **run)
    assert wrapper.param_groups[0]["lr"] == 0.5
    wrapper.param_groups[0]["lr"] = 4.0  # of the user
    build_param_schedulers({"type": "ConstantLR", "factor": 0.5}, wrapper, **run)
    assert wrapper.param_groups[0]["lr"] == 2.0


def test_states_by_optimizer(make_wrapper):
    run = {"max_epochs": 4, "max_iters": 20, "epoch_length": LENGTH}
    wrappers = {"a": make_wrapper(1.0), "b": make_wrapper(2.0)}
    cfg = {"type": "ExponentialLR", "gamma": 0.5}
    schedulers = build_param_schedulers(cfg, wrappers, **run)
    schedulers["b"][0].step()
    state = schedulers_state_dict(schedulers)
    again = build_param_schedulers(cfg, wrappers, **run)
    load_schedulers_state_dict(again, state)
    assert {name: chain[0].global_step for name, chain in again.items()} == {"a": 0, "b": 1}
    assert [wrapper.param_groups[0]["lr"] for wrapper in wrappers.values()] == [1.0, 1.0]


def test_many_groups_have_the_values_of_each_alone(make_wrapper):
    cfg = [{"type": "PolyLR", "eta_min": 0.1, "by_epoch": False}, {"type": "CosineAnnealingLR", "eta_min": 0.05}]
    run = {"max_epochs": 4, "max_iters": 20, "epoch_length": LENGTH}
    rates = [0.1 * (i + 1) for i in range(12)]
    together = make_wrapper(*rates)
    build_param_schedulers(cfg, together, **run)
    curves = chain_of(together).at(range(20))
    for index, rate in enumerate(rates):
        alone = make_wrapper(rate)
        build_param_schedulers(cfg, alone, **run)
        assert chain_of(alone).at(range(20))[0]["lr"].tolist() == curves[index]["lr"].tolist()


def test_equal_groups_have_one_value_until_one_is_set_by_hand(make_wrapper):
    cfg = [{"type": "CosineAnnealingLR", "T_max": 3, "eta_min": 0.01, "by_epoch": False}]
    wrapper = make_wrapper(*[0.1] * 4, *[0.2] * 4, *(0.1 * i for i in range(3, 9)))
    [schedule] = build_param_schedulers(cfg, wrapper, max_epochs=None, max_iters=12, epoch_length=None)
    used = []
    for step in range(12):
        used.append([group["lr"] for group in wrapper.param_groups])
        if step == 5:
            wrapper.param_groups[2]["lr"] = used[5][2] = 0.5
        schedule.step()
    assert used[11][0] == used[11][1] == used[11][3] != used[11][2]
    curves = chain_of(wrapper).at(range(6, 12))
    for index in range(14):
        assert curves[index]["lr"].tolist() == [values[index] for values in used[6:]]


@pytest.mark.parametrize("order", ["wrapper, schedulers", "schedulers, wrapper", "schedulers", "before building"])
def test_the_rates_of_an_own_loop_do_not_depend_on_what_is_loaded_when(order):
    def build(wrapper):
        return build_param_schedulers(MIXED, wrapper, max_epochs=4, max_iters=20, epoch_length=LENGTH)

    wrapper = OptimWrapper(SGD(lr=1.0))
    schedulers = build(wrapper)
    before = train(wrapper, schedulers, 0, 7)
    saved, groups = save(schedulers), json.loads(json.dumps(wrapper.group_state_dict()))
    expected = train(wrapper, schedulers, 7, 20)

    resumed = OptimWrapper(SGD(lr=1.0))
    if order == "before building":  # as MMEngine's loops do
        resumed.load_group_state_dict(groups)
    schedulers = build(resumed)
    if order == "wrapper, schedulers":
        resumed.load_group_state_dict(groups)
    load_schedulers_state_dict(schedulers, saved)
    if order == "schedulers, wrapper":
        resumed.load_group_state_dict(groups)
    assert train(resumed, schedulers, 7, 20) == expected
    assert chain_of(resumed).at(range(20))[0]["lr"].tolist() == before + expected
