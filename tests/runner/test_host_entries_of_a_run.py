"""Train and evaluate on batches with entries that are not arrays: they reach hooks and host metrics, not the step."""

import datetime

import numpy as np
import pytest

from jengine.evaluation import HostMetric
from jengine.hooks import Hook
from jengine.model import FunctionalModel

DAY = datetime.date(2024, 5, 1)
KEYS = ("x", "y", "name", "day", "boxes")


def make_samples(container, count=16):
    """Return samples of a number, its square, a file name, a date and an object."""
    samples = []
    for k in range(count):
        boxes = np.empty((), object)
        boxes[()] = [k] * (k % 3)
        values = np.float32(k), np.float32(k * k), f"{k}.png", DAY + datetime.timedelta(k), boxes
        samples.append(dict(zip(KEYS, values, strict=True)) if container is dict else values)
    return samples


def as_dict(batch):
    return batch if isinstance(batch, dict) else dict(zip(KEYS, batch, strict=False))


class Seen(Hook):
    """Record whether the host entries of the batches belong to their numbers, and where the numbers are."""

    def __init__(self, interval):
        self.interval = interval
        self.train, self.val = [], []

    def next_step(self, runner, step):
        return -(-step // self.interval) * self.interval  # the start of a chunk

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.train.append(matches(data_batch))

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.val.append(matches(data_batch))


def matches(batch):
    batch = as_dict(batch)
    numbers = [int(x) for x in np.asarray(batch["x"])]
    return (
        [f"{k}.png" for k in numbers] == list(batch["name"])
        and [DAY + datetime.timedelta(k) for k in numbers] == list(batch["day"])
        and [[k] * (k % 3) for k in numbers] == list(batch["boxes"])
    )


class Names(HostMetric):
    """Collect the names of the examples."""

    def process(self, data_batch, data_samples):
        self.results += list(as_dict(data_batch)["name"])

    def compute_metrics(self, results):
        return {"names": sorted(results)}


@pytest.mark.parametrize("container", [dict, tuple])
@pytest.mark.parametrize("steps_per_call", [1, 2], ids=["single steps", "chunks"])
def test_entries_that_are_not_arrays_reach_hooks_and_host_metrics_and_not_the_step(
    make_runner, container, steps_per_call
):
    structures = set()

    def loss(params, batch):
        structures.add(tuple(key for key, leaf in as_dict(batch).items() if leaf is not None))
        batch = as_dict(batch)
        return (params["w"] * batch["x"] - batch["y"]) ** 2

    model = FunctionalModel(
        init=lambda: {"w": np.float32(0)}, loss=loss, predict=lambda params, batch: params["w"] * as_dict(batch)["x"]
    )
    hook = Seen(steps_per_call)
    runner = make_runner(
        model=model,
        train_dataloader=dict(dataset=make_samples(container), batch_size=4),
        val_dataloader=dict(dataset=make_samples(container, 6), batch_size=4),
        val_evaluator=Names(),
        train_cfg=dict(max_epochs=2, steps_per_call=steps_per_call),
        custom_hooks=[hook],
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e-5)), validates=True,
    )
    runner.train()
    assert structures == {("x", "y")}
    assert len(hook.train) == (8 if steps_per_call == 1 else 4)
    assert all(hook.train)
    assert len(hook.val) == 4
    names = runner.validations[-1][2]["names"]
    assert names == sorted(f"{k}.png" for k in range(6))  # without the padding of the last batch
