import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.hooks import Hook

BATCH = {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}


class Ahead(Hook):
    """Record the number of batches sent to the device before the first iteration."""

    def __init__(self):
        self.sent = 0
        self.sent_before = {}

    def count(self, put):
        def put_and_count(batch, **settings):
            self.sent += 1
            return put(batch, **settings)

        return put_and_count

    def before_train_epoch(self, runner):
        self.sent = 0

    def before_val_epoch(self, runner):
        self.sent = 0

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.sent_before.setdefault("train", self.sent)

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.sent_before.setdefault("val", self.sent)


def count_sent(make_runner, train, val, **changes):
    hook = Ahead()
    runner = make_runner(train_dataloader=train, val_dataloader=val, custom_hooks=[hook], **changes, validates=True)
    runner.strategy.put_batch = hook.count(runner.strategy.put_batch)
    runner.strategy.takes_host_batches = False  # as on an accelerator
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


class Produced:
    """Batches that are made from the parameters: their `y` is the first weight."""

    def __init__(self, device_prefetch=None, begin=0):
        self.weights, self.begin, self.runner = [], begin, None
        if device_prefetch is not None:
            self.device_prefetch = device_prefetch

    def __iter__(self):
        for k in range(8):
            weight = 0.0
            if k >= self.begin and self.runner.state is not None:
                weight = float(self.runner.state.params["w"][0])
            self.weights.append(weight)
            yield {**BATCH, "y": np.full(4, 1 - weight, np.float32)}


class Weights(Hook):
    def __init__(self):
        self.seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.seen.append(float(runner.state.params["w"][0]))


@pytest.mark.parametrize("as_function", [False, True])
def test_data_without_read_ahead_are_made_from_the_current_parameters(make_runner, as_function):
    data, hook = Produced(device_prefetch=0), Weights()
    source = data
    if as_function:

        def source():
            return iter(data)

        source.device_prefetch = 0
    data.runner = make_runner(train_dataloader=source, custom_hooks=[hook], train_cfg=dict(max_epochs=1))  # fmt: skip
    data.runner.train()
    assert len(set(hook.seen)) == 8
    assert data.weights[-8:] == hook.seen  # those before are of the batches that determine the shapes


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize(
    ("ahead", "steps", "message"),
    [
        (None, 1, "got 2 and 1: the data are read ahead"),
        (0, 2, "`train_dataloader.device_prefetch` must be 0 and `train_cfg.steps_per_call` 1 for data that read `runner.state`, got 0 and 2: the data"),
        (1, 2, "got 1 and 2: the data are read ahead"),
    ],
)
def test_data_that_read_the_state_must_not_be_read_ahead(make_runner, ahead, steps, message, begin):
    data = Produced(ahead, begin)
    data.runner = make_runner(train_dataloader=data, train_cfg=dict(max_epochs=1, steps_per_call=steps))
    with pytest.raises(ConfigError, match=message):
        data.runner.train()
    if begin == 0:
        assert data.runner.state is None  # refused with the first batch, before anything is made


def test_samples_that_are_made_in_threads_must_not_read_the_state(make_runner):
    class Samples:
        runner, reads, weights = None, 0, []

        def __len__(self):
            return 16

        def __getitem__(self, index):
            self.reads += 1
            if self.reads > 8:  # after those for the shapes
                self.weights.append(self.runner.state.params["w"])
            return {k: v[0] for k, v in BATCH.items()}

    samples = Samples()
    loader = dict(dataset=samples, batch_size=4, device_prefetch=0, num_threads=1)
    samples.runner = make_runner(train_dataloader=loader, train_cfg=dict(max_epochs=2))
    with pytest.raises(ConfigError, match="`train_dataloader.num_threads` must be 0"):
        samples.runner.train()
    assert samples.weights == []  # no thread got them
    samples.runner.train_dataloader.close()
