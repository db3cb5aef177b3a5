"""What schedulers refuse: a call, its error, and the words that must be in the message."""

from types import SimpleNamespace

import numpy as np
import optax
import pytest

from jengine.config import PARAM_SCHEDULERS
from jengine.optim import OptimWrapper
from jengine.optim.schedules import OptaxLR, build_param_schedulers
from tests.refusals import check_row

EPOCHS = {"max_epochs": 4, "max_iters": 40, "epoch_length": 10}
ITERS = {"max_epochs": 1, "max_iters": 45, "epoch_length": 10, "by_epoch_loop": False}
STEP = {"type": "StepLR", "step_size": 2}
WARM_UP = {"type": "LinearLR", "by_epoch": False, "end": 2}
COSINE = optax.cosine_decay_schedule(1e-3, 15)


def groups(lr=1.0):
    return SimpleNamespace(param_groups=[{"lr": lr}], base_param_settings=None)


def build(cfg, wrapper=None, **run):
    return build_param_schedulers(cfg, wrapper or groups(), **{**EPOCHS, **run})


def follow(schedule, **more):
    return build([{"type": "OptaxLR", "schedule": schedule, "by_epoch": False}], **more)


def schedule_alone(cfg, wrapper):
    PARAM_SCHEDULERS.build(cfg, optimizer=wrapper)


def step_past_the_end():
    (cycle,) = build({"type": "OneCycleLR", "eta_max": 1.0, "total_steps": 2})
    for _ in range(3):
        cycle.step()


def step_from_below_0():
    wrapper = groups()
    (warm_up,) = build(WARM_UP, wrapper)
    wrapper.param_groups[0]["lr"] = -1.0
    warm_up.step()


REFUSED = {
    # the length of the run
    "a plateau in iterations": (lambda: build({"type": "ReduceOnPlateauLR", "convert_to_iter_based": True}), NotImplementedError, "ReduceOnPlateauLR", "converted"),
    "epochs of unknown length": (lambda: build({**STEP, "convert_to_iter_based": True}, max_iters=None, epoch_length=None), ValueError, "train dataloader", "positive", "got None"),
    "a run of unknown length": (lambda: build(STEP, max_epochs=None, epoch_length=None), ValueError, "`end` of StepLR", "epochs"),
    # MMEngine sets end=1, so that the value never changes.
    "epochs in a loop over iterations": (lambda: build([STEP], **ITERS), ValueError, "by_epoch=False", "convert_to_iter_based=True", "param_scheduler[0]"),
    "epochs by name in a loop over iterations": (lambda: build([{**STEP, "by_epoch": True}], **ITERS), ValueError, "by_epoch=False", "convert_to_iter_based=True", "param_scheduler[0]"),
    "a cycle past its end": (step_past_the_end, ValueError, "finite", "got nan", "OneCycleLR", "epoch 4"),
    # functions
    "an unknown function": (lambda: follow({"type": "warmup_cosine_schedule"}), KeyError, "'warmup_cosine_schedule'", "did you mean"),
    "an unknown argument": (lambda: follow({"type": "constant_schedule", "values": 1.0}), TypeError, "did you mean 'value'"),
    "a dict without a type": (lambda: follow({"value": 1.0}), TypeError, "'type'"),
    "a name that needs arguments": (lambda: follow("constant_schedule"), TypeError, "constant_schedule", "'value'"),
    "an array": (lambda: follow(lambda step: np.ones(3) * step), TypeError, "schedule`", "one number", "shape=(3,)"),
    "a pair": (lambda: follow(lambda step: (0.1, 0.2)), TypeError, "schedule`", "one number"),
    "a text": (lambda: follow(lambda step: None if step > 5 else "high"), TypeError, "one number", "got 'high'"),
    "no step": (lambda: follow(lambda: 0.1), TypeError, "takes 0 positional arguments"),
    "a function that makes one": (lambda: follow(optax.cosine_decay_schedule), TypeError, "'decay_steps'"),
    "a class": (lambda: build([OptaxLR]), TypeError, "'type'", "function from the iteration", "got type"),
    "a function of an initial value of 0": (lambda: follow(lambda step: 1.0, wrapper=groups(0.0)), ValueError, "initial value", "0"),
    # several
    "a warm-up within a function": (lambda: build([{**WARM_UP, "end": 5}, COSINE]), ValueError, "overlap", "OptaxLR beside LinearLR"),
    "steps within a function": (lambda: build([STEP, COSINE]), ValueError, "overlap", "OptaxLR beside StepLR"),
    "a warm-up after the function": (lambda: build([{"type": "OptaxLR", "schedule": COSINE, "by_epoch": False, "begin": 2}, WARM_UP]), ValueError, "LinearLR beside OptaxLR", "`begin`", "`end`"),
    "optimizers for one": (lambda: build({"gen": {"type": "LinearLR"}}), ValueError, "'type'", "['']", "['gen']"),
    "a name that no optimizer has": (lambda: build({"generator": None}, {"gen": groups()}), ValueError, "['gen']", "got ['generator']"),
    # values
    "a quadratic warm-up without an end": (lambda: schedule_alone({"type": "QuadraticWarmupLR"}, groups()), ValueError, "`end`"),
    "a value of the hand below 0": (step_from_below_0, ValueError, "`lr`", "at least 0", "got -1.0"),
    "an optimizer without momentum": (lambda: schedule_alone({"type": "StepMomentum", "step_size": 1}, groups()), KeyError, "`momentum`", "expected one of: lr"),
    "a schedule beside one of an optax optimizer": (
        lambda: schedule_alone({"type": "CosineAnnealingLR", "end": 2}, OptimWrapper(optax.adamw(optax.cosine_decay_schedule(0.1, 8)))),
        KeyError, "lr=1e-2", "leave out `param_scheduler`", "optax.adamw(schedule)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_schedulers_that_cannot_be_are_refused(row, request):
    check_row(request, *row)
