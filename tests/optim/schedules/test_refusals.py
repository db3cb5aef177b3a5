"""What schedulers refuse: a config, the run that it is for, its error, and the words that must be in it."""

import numpy as np
import optax
import pytest

from jengine.optim.schedules import OptaxLR, build_param_schedulers

EPOCHS = {"max_epochs": 4, "max_iters": 40, "epoch_length": 10}
STEP = {"type": "StepLR", "step_size": 2}
COSINE = optax.cosine_decay_schedule(1e-3, 15)


def follows(schedule):
    return {"type": "OptaxLR", "schedule": schedule, "by_epoch": False}


REFUSED = {
    # the length of the run
    "a plateau in iterations": ({"type": "ReduceOnPlateauLR", "convert_to_iter_based": True}, {}, NotImplementedError, "ReduceOnPlateauLR cannot be converted"),
    "epochs of unknown length": ({**STEP, "convert_to_iter_based": True}, dict(max_iters=None, epoch_length=None), ValueError, "that of the train dataloader, must be a positive number .* got None"),
    "a run of unknown length": (STEP, dict(max_epochs=None, epoch_length=None), ValueError, "`end` of StepLR must be given in a run whose length in epochs is unknown"),
    # functions
    "an unknown function": (follows({"type": "warmup_cosine_schedule"}), {}, KeyError, "has no 'warmup_cosine_schedule'; did you mean"),
    "an unknown argument": (follows({"type": "constant_schedule", "values": 1.0}), {}, TypeError, "did you mean 'value'"),
    "a dict without a type": (follows({"value": 1.0}), {}, TypeError, "a dict with a 'type'"),
    "a name that needs arguments": (follows("constant_schedule"), {}, TypeError, "constant_schedule needs the argument 'value'"),
    "an array": (follows(lambda step: np.ones(3) * step), {}, TypeError, r"schedule` must return one number for a step, got ShapeDtypeStruct\(shape=\(3,\)"),
    "a pair": (follows(lambda step: (0.1, 0.2)), {}, TypeError, "must return one number for a step, got "),
    "a text": (follows(lambda step: None if step > 5 else "high"), {}, TypeError, "must return one number for a step, got 'high'"),
    "no step": (follows(lambda: 0.1), {}, TypeError, "takes 0 positional arguments"),
    "a function that makes one": (follows(optax.cosine_decay_schedule), {}, TypeError, "missing 1 required positional argument: 'decay_steps'"),
    "a class": ([OptaxLR], {}, TypeError, "must be a dict with a 'type', or a function from the iteration .*, got type"),
    # several
    "a warm-up within a function": ([dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=5), COSINE], {}, ValueError, "must not overlap with another schedule.* got OptaxLR beside LinearLR"),
    "steps within a function": ([STEP, COSINE], {}, ValueError, "must not overlap with another schedule.* got OptaxLR beside StepLR"),
    "a warm-up after the function": ([{**follows(COSINE), "begin": 2}, dict(type="LinearLR", by_epoch=False, end=2)], {}, ValueError, "got LinearLR beside OptaxLR; let each `begin` at the `end`"),
    "optimizers for one": ({"gen": {"type": "LinearLR"}}, {}, ValueError, r"must have a 'type', or the names of the optimizers, \[''\], got \['gen'\]"),
}  # fmt: skip


@pytest.mark.parametrize(("cfg", "run", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_schedulers_that_cannot_be_are_refused(cfg, run, error, words, make_wrapper):
    with pytest.raises(error, match=words):
        build_param_schedulers(cfg, make_wrapper(1.0), **{**EPOCHS, **run})


def test_a_name_that_no_optimizer_has_is_refused(make_wrapper):
    with pytest.raises(ValueError, match=r"names of the optimizers, \['gen'\], got \['generator'\]"):
        build_param_schedulers({"generator": None}, {"gen": make_wrapper(1.0)}, **EPOCHS)


def test_a_quadratic_warm_up_without_an_end_is_refused(make_wrapper, build):
    with pytest.raises(ValueError, match="`end` must be given for a quadratic warm-up"):
        build(make_wrapper(1.0), {"type": "QuadraticWarmupLR"})


def test_a_function_of_an_initial_value_of_0_is_refused(make_wrapper):
    with pytest.raises(ValueError, match="initial value must not be 0"):
        build_param_schedulers(follows(lambda step: 1.0), make_wrapper(0.0), **EPOCHS)
