"""Test resumed schedules: the choice between settings of the checkpoint and the config, and replays."""

import json

import pytest

from jengine.optim.schedules import (
    build_param_schedulers,
    load_schedulers_state_dict,
    replay_schedulers,
    schedulers_state_dict,
)

LENGTH = 5


def train(wrapper, schedulers, start, stop):
    """Return the values during the iterations from start to stop, in epochs of `LENGTH` iterations."""
    values = []
    for iteration in range(start, stop):
        values.append(wrapper.param_groups[0]["lr"])
        for scheduler in schedulers:
            if not scheduler.by_epoch or (iteration + 1) % LENGTH == 0:
                scheduler.step()
    return values


def start(make_wrapper, cfg, total, lr=1.0):
    wrapper = make_wrapper(lr)
    run = {"max_epochs": total, "max_iters": total * LENGTH, "epoch_length": LENGTH}
    return wrapper, build_param_schedulers(cfg, wrapper, **run)


def resume(make_wrapper, saved, cfg, total, **kwargs):
    wrapper, schedulers = start(make_wrapper, cfg, total)
    wrapper.param_groups[0].update(saved["group"])
    return wrapper, schedulers, load_schedulers_state_dict(schedulers, saved["schedulers"], **kwargs)


def save(wrapper, schedulers):
    return json.loads(json.dumps({"group": wrapper.param_groups[0], "schedulers": schedulers_state_dict(schedulers)}))


MIXED = [
    {"type": "LinearLR", "start_factor": 0.0, "by_epoch": False, "end": 4},
    {"type": "CosineAnnealingLR", "eta_min": 0.01},
    {"type": "MultiStepLR", "milestones": [7, 13], "by_epoch": False},
]


@pytest.mark.parametrize("stop", range(21))
@pytest.mark.parametrize("settings", ["checkpoint", "config"])
def test_a_resumed_schedule_continues_as_if_uninterrupted(stop, settings, make_wrapper):
    wrapper, schedulers = start(make_wrapper, MIXED, total=4)
    expected = train(wrapper, schedulers, 0, 20)

    wrapper, schedulers = start(make_wrapper, MIXED, total=4)
    before = train(wrapper, schedulers, 0, stop)
    progress = {"iters": stop, "epochs": stop // LENGTH, "epoch_length": LENGTH}
    saved = save(wrapper, schedulers)
    wrapper, schedulers, differences = resume(make_wrapper, saved, MIXED, 4, settings=settings, **progress)
    assert differences == []
    assert before + train(wrapper, schedulers, stop, 20) == expected


# as in MMEngine, a cosine of 3 epochs resumed in a run of 6 keeps its 3 epochs
def test_settings_of_the_checkpoint_can_be_used(make_wrapper):
    cfg = {"type": "CosineAnnealingLR", "eta_min": 0.1}
    saved = save(*start(make_wrapper, cfg, total=3))
    _, (cosine,), differences = resume(make_wrapper, saved, cfg, total=6)
    assert cosine.end == 3
    assert differences == ["param_scheduler[0].end: 6 in the config, 3 in the checkpoint"]


def test_settings_of_the_config_can_be_used(make_wrapper):
    wrapper, schedulers = start(make_wrapper, {"type": "CosineAnnealingLR"}, total=6)
    expected = train(wrapper, schedulers, 0, 30)

    wrapper, schedulers = start(make_wrapper, {"type": "CosineAnnealingLR"}, total=3)
    train(wrapper, schedulers, 0, 10)
    progress = {"settings": "config", "iters": 10, "epochs": 2, "epoch_length": LENGTH}
    wrapper, schedulers, differences = resume(
        make_wrapper, save(wrapper, schedulers), {"type": "CosineAnnealingLR"}, 6, **progress
    )
    assert differences == ["param_scheduler[0].end: 6 in the config, 3 in the checkpoint"]
    assert train(wrapper, schedulers, 10, 30) == expected[10:]


def test_the_config_may_have_other_types_and_numbers_of_schedulers(make_wrapper):
    wrapper, schedulers = start(make_wrapper, MIXED, total=4)
    expected = train(wrapper, schedulers, 0, 20)
    wrapper, schedulers = start(make_wrapper, {"type": "ExponentialLR", "gamma": 0.5}, total=4)
    train(wrapper, schedulers, 0, 12)
    progress = {"settings": "config", "iters": 12, "epochs": 2, "epoch_length": LENGTH}
    wrapper, schedulers, differences = resume(make_wrapper, save(wrapper, schedulers), MIXED, 4, **progress)
    assert differences == ["param_scheduler: 3 schedulers in the config, 1 in the checkpoint"]
    assert train(wrapper, schedulers, 12, 20) == expected[12:]


def test_a_replay_repeats_the_reductions_of_a_plateau(make_wrapper):
    cfg = [{"type": "ExponentialLR", "gamma": 0.9}, {"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5}]
    wrapper, schedulers = start(make_wrapper, cfg, total=4)
    for metric in (1.0, 1.0, 0.5):  # the second is not better than the first
        for scheduler in schedulers:
            scheduler.step()
        schedulers[1].step({"loss": metric})
    assert wrapper.param_groups[0]["lr"] == pytest.approx(0.9**3 * 0.5, rel=1e-12)
    saved = save(wrapper, schedulers)
    wrapper, schedulers, _ = resume(make_wrapper, saved, cfg, 4, settings="config", epochs=3)
    assert wrapper.param_groups[0]["lr"] == pytest.approx(0.9**3 * 0.5, rel=1e-12)
    assert schedulers[1].state.best == 0.5


def test_a_replay_restores_the_initial_value_of_the_config(make_wrapper):
    saved = save(*start(make_wrapper, {"type": "ExponentialLR", "gamma": 0.5}, total=4, lr=8.0))
    wrapper, _schedulers, differences = resume(
        make_wrapper, saved, {"type": "ExponentialLR", "gamma": 0.5}, 4, settings="config", epochs=1
    )
    assert wrapper.param_groups[0] == {"lr": 0.5, "initial_lr": 1.0}
    assert differences == ["param_scheduler[0].base_values: [1.0] in the config, [8.0] in the checkpoint"]


def test_a_replay_of_zero_steps_restores_the_start(make_wrapper):
    wrapper, schedulers = start(make_wrapper, MIXED, total=4)
    train(wrapper, schedulers, 0, 9)
    replay_schedulers(schedulers, iters=0)
    assert wrapper.param_groups[0]["lr"] == 0.0
    assert [scheduler.global_step for scheduler in schedulers] == [0, 0, 0]


def test_states_by_optimizer(make_wrapper):
    run = {"max_epochs": 4, "max_iters": 20, "epoch_length": LENGTH}
    wrappers = {"a": make_wrapper(1.0), "b": make_wrapper(2.0)}
    schedulers = build_param_schedulers({"type": "ExponentialLR", "gamma": 0.5}, wrappers, **run)
    schedulers["b"][0].step()
    state = schedulers_state_dict(schedulers)
    again = build_param_schedulers({"type": "ExponentialLR", "gamma": 0.5}, wrappers, **run)
    load_schedulers_state_dict(again, state)
    assert {name: chain[0].global_step for name, chain in again.items()} == {"a": 0, "b": 1}
    with pytest.raises(ValueError, match=r"for the optimizers \['a', 'b'\] as in the config, got .* for one optimizer"):
        load_schedulers_state_dict(again, state["a"])


def test_other_schedulers_are_rejected_unless_the_settings_of_the_config_are_used(make_wrapper):
    saved = save(*start(make_wrapper, {"type": "ExponentialLR", "gamma": 0.5}, total=4))
    with pytest.raises(ValueError, match="must be PolyLR of 'lr' .*, got ExponentialLR of 'lr'") as error:
        resume(make_wrapper, saved, {"type": "PolyLR"}, 4)
    assert "param_scheduler[0]" in error.value.__notes__[0]
    with pytest.raises(ValueError, match="must have the 1 schedulers of the checkpoint, got 3"):
        resume(make_wrapper, saved, MIXED, 4)


def test_an_unknown_choice_is_rejected(make_wrapper):
    with pytest.raises(ValueError, match="got 'configs'; did you mean 'config'"):
        load_schedulers_state_dict([], [], settings="configs")


def test_another_number_of_groups_is_rejected(make_wrapper, build):
    (one,) = build(make_wrapper(1.0), {"type": "PolyLR"})
    (two,) = build(make_wrapper(1.0, 2.0), {"type": "PolyLR"})
    with pytest.raises(ValueError, match="must have the 1 parameter groups of the saved schedule, got 2"):
        two.load_state_dict(one.state_dict())
