import numpy as np
import pytest

from jengine.data import DataLoader
from jengine.hooks import Hook
from jengine.sharding import SingleDevice

BATCH = {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}


class Ahead(Hook):
    """Record the number of batches sent to the device before the first iteration."""

    def __init__(self):
        self.sent = 0
        self.sent_before = {}

    def count(self, put):
        def put_and_count(batch):
            self.sent += 1
            return put(batch)

        return put_and_count

    def before_train_epoch(self, runner):
        self.sent = 0

    def before_val_epoch(self, runner):
        self.sent = 0

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.sent_before.setdefault("train", self.sent)

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.sent_before.setdefault("val", self.sent)


@pytest.fixture(autouse=True)
def device_with_separate_memory(monkeypatch):
    monkeypatch.setattr(SingleDevice, "takes_host_batches", False)


def count_sent(make_runner, train, val, **changes):
    hook = Ahead()
    runner = make_runner(train_dataloader=train, val_dataloader=val, custom_hooks=[hook], **changes)
    runner.strategy.put_batch = hook.count(runner.strategy.put_batch)
    runner.train()
    return hook.sent_before


@pytest.mark.parametrize("train_cfg", [dict(max_epochs=1), dict(by_epoch=False, max_iters=8, val_interval=4)])
def test_the_config_sets_the_number_of_batches_sent_ahead(make_runner, train_cfg):
    dataset = [{k: v[0] for k, v in BATCH.items()}] * 32
    train, val = dict(dataset=dataset, batch_size=4, device_prefetch=4), dict(dataset=dataset, batch_size=4)
    # the batch in use, and those ahead of it: 2 by default
    assert count_sent(make_runner, train, val, train_cfg=train_cfg) == {"train": 5, "val": 3}
    val["device_prefetch"] = 0
    assert count_sent(make_runner, train, val, train_cfg=train_cfg)["val"] == 1


def test_a_foreign_loader_sets_it_by_its_attribute(make_runner):
    class Batches(list):
        device_prefetch = 1

    assert count_sent(make_runner, Batches([BATCH] * 8), [BATCH] * 8, train_cfg=dict(max_epochs=1)) == {
        "train": 2,
        "val": 3,
    }


def test_a_number_below_zero_is_refused():
    with pytest.raises(ValueError, match="device_prefetch` must be an integer of at least 0, got -1"):
        DataLoader([1], batch_size=1, device_prefetch=-1)
