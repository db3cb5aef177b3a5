"""Resume with another batch size or dataset: the run continues at the same example, or logs what it repeats."""

import itertools
import types

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset, build_dataloader
from jengine.hooks import Hook
from jengine.parallel import DataShard
from jengine.runner.resume_data import restore_position

from .stream_cases import RecordIds, read_log, train


def dataset(size):
    return ArrayDataset({"id": np.arange(size, dtype=np.int32)})


def loader(size, batch_size, **settings):
    return lambda: dict(dataset=dataset(size), batch_size=batch_size, **settings)


def stream(size, batch_size):
    def examples():
        return ({"id": np.int32(k)} for k in range(size))

    return lambda: dict(dataset=examples, batch_size=batch_size)


class SizedStream:
    """Iterate over examples, with a length but without access by index."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return ({"id": np.int32(k)} for k in range(self.size))


def sized_stream(size, batch_size):
    return lambda: dict(dataset=SizedStream(size), batch_size=batch_size)


def flat(batches):
    return list(itertools.chain(*batches))


def resume(tmp_path, first, second, at, train_cfg, **changes):
    """Return the ids up to iteration `at`, those of the continuation with other data, the run and what it logged."""
    before, _ = train(tmp_path, first, stop=at, save=at, train_cfg=train_cfg, **changes)
    after, runner = train(tmp_path, second, save=1000, train_cfg=train_cfg, resume=True, **changes)
    return before[:at], after, runner, read_log(runner)


PASSES = dict(max_epochs=2)


@pytest.mark.parametrize("make", [loader, stream])
@pytest.mark.parametrize(("old", "new", "at"), [(8, 4, 3), (4, 8, 2), (4, 8, 4), (8, 4, 8)])
def test_an_epoch_has_each_example_once_with_another_batch_size(tmp_path, make, old, new, at):
    before, after, runner, log = resume(tmp_path, make(64, old), make(64, new), at, PASSES)
    rest = (64 - at * old) // new
    assert sorted(flat(before + after[:rest])) == list(range(64))
    assert sorted(flat(after[rest:])) == list(range(64))
    assert (runner.epoch, runner.iter) == (2, at + rest + 64 // new)
    assert f"The data differ from those of the checkpoint: batch size {new} ({old} in the checkpoint)" in log
    assert "the run continues at the same example" in log
    if make is loader:
        lengths = f"an epoch has {64 // new} iterations instead of {64 // old}"
        assert f"{lengths}, and {rest + 64 // new} iterations remain" in log
    else:
        assert "and the run ends after 2 epochs" in log


def test_the_order_of_the_rest_of_the_epoch_is_that_of_the_first_batch_size(tmp_path):
    whole, _ = train(tmp_path / "whole", loader(64, 8), train_cfg=PASSES, save=1000)
    before, after, _, _ = resume(tmp_path / "parts", loader(64, 8), loader(64, 4), 3, PASSES)
    assert flat(before + after) == flat(whole)


@pytest.mark.parametrize("settings", [dict(), dict(drop_last=False)], ids=["drop_last", "padded"])
def test_a_batch_size_that_does_not_divide_the_rest(tmp_path, settings):
    first, second = loader(22, 4, **settings), loader(22, 3, **settings)
    before, after, runner, log = resume(tmp_path, first, second, 2, PASSES)
    rest = 4 if not settings else 5  # batches of 3 in the 14 examples that are left
    own = flat(before + after[:rest])
    if settings:
        assert set(own) == set(range(22))
    else:
        assert len(own) == len(set(own)) == 20  # two examples are dropped at the end, as in each epoch
    assert runner.iter == 2 + rest + len(after[rest:])
    assert "the run continues at the same example" in log


@pytest.mark.parametrize("make", [loader, stream])
def test_a_loop_over_iterations_continues_at_the_same_example(tmp_path, make):
    train_cfg = dict(by_epoch=False, max_iters=12)
    before, after, runner, log = resume(tmp_path, make(64, 8), make(64, 4), 3, train_cfg)
    assert runner.iter == 12
    assert len(after) == 9
    seen = flat(before + after)  # 24 and 36 examples of the first pass
    assert len(seen) == len(set(seen)) == 60
    assert "continues at the same example" in log
    assert "9 iterations remain" in log


def test_an_infinite_sampler_continues_at_the_same_example(tmp_path):
    sampler = dict(type="InfiniteSampler")
    train_cfg = dict(by_epoch=False, max_iters=12)
    whole, _ = train(tmp_path / "whole", loader(20, 4, sampler=sampler), train_cfg=train_cfg, save=1000)
    data = loader(20, 4, sampler=sampler), loader(20, 2, sampler=sampler)
    before, after, _, log = resume(tmp_path / "parts", *data, 6, train_cfg)
    assert flat(before + after) == flat(whole)[: 6 * 4 + 6 * 2]
    assert "continues at the same example" in log


def test_an_infinite_sampler_repeats_nothing_with_a_batch_size_that_does_not_divide_the_position(tmp_path):
    settings = dict(sampler=dict(type="InfiniteSampler"))
    train_cfg = dict(by_epoch=False, max_iters=20)
    whole, _ = train(tmp_path / "whole", loader(20, 4, **settings), train_cfg=train_cfg, save=4)
    for num_workers in (0, 1):
        second = loader(20, 3, num_workers=num_workers, **settings)
        start = tmp_path / "whole" / "iter_4"
        after, runner = train(tmp_path / f"{num_workers}", second, save=1000, train_cfg=train_cfg, resume=start)
        assert flat(whole[:4] + after) == flat(whole)[: 4 * 4 + 16 * 3]
        assert "continues at the same example" in read_log(runner)
        assert "over the data are repeated" not in read_log(runner)


@pytest.mark.parametrize("make", [loader, sized_stream])
def test_another_dataset_starts_the_epoch_again(tmp_path, make):
    _, after, runner, log = resume(tmp_path, make(64, 8), make(40, 8), 3, PASSES)
    assert [sorted(flat(part)) for part in (after[:5], after[5:])] == [list(range(40))] * 2
    assert (runner.epoch, runner.iter) == (2, 3 + 5 + 5)
    assert "24 examples of pass 1 over the data are repeated, an epoch has 5 iterations instead of 8" in log
    assert "10 iterations remain" in log


def test_batches_of_another_size_continue_with_the_batch_that_the_example_is_in(tmp_path):
    def batches(size):
        return lambda: [{"id": np.arange(k, k + size, dtype=np.int32)} for k in range(0, 24, size)]

    before, after, _, log = resume(tmp_path, batches(4), batches(6), 2, PASSES)
    assert flat(before) == list(range(8))
    assert flat(after[:3]) == list(range(6, 24))
    assert "2 examples of pass 1 over the data are repeated" in log


def test_epochs_with_a_length_keep_the_number_of_their_iterations(tmp_path):
    train_cfg = dict(max_epochs=2, epoch_length=6)
    before, after, runner, log = resume(tmp_path, stream(64, 8), stream(64, 4), 3, train_cfg)
    assert (runner.epoch, runner.iter) == (2, 12)
    assert flat(before + after) == list(range(24 + 36))
    assert "9 iterations remain" in log


def test_schedules_converted_from_epochs_keep_their_place_in_the_epoch(tmp_path):
    class Rates(Hook):
        def __init__(self):
            self.rates = []

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            self.rates.append(runner.optim_wrapper.param_groups[0]["lr"])

    factors = dict(start_factor=1.0, end_factor=0.0)
    schedule = dict(type="LinearLR", **factors, by_epoch=True, end=2, convert_to_iter_based=True)
    hook = Rates()
    arguments = dict(param_scheduler=schedule, train_cfg=PASSES)
    train(tmp_path, loader(64, 8), stop=3, save=3, **arguments)
    train(tmp_path, loader(64, 4), resume=True, save=1000, custom_hooks=[RecordIds(), hook], **arguments)
    # 24 of 64 examples are iteration 6 of 16 with the new batch size; the schedule ends with the last of its 32.
    expected = [0.1 * (1 - k / 31) for k in range(6, 32)]
    assert hook.rates == pytest.approx(expected, rel=1e-5)


def test_another_batch_size_is_an_error_if_the_resume_must_be_exact(tmp_path):
    train(tmp_path, loader(64, 8), stop=3, save=3, train_cfg=PASSES)
    record = RecordIds()
    with pytest.raises(ConfigError, match="train_dataloader.batch_size: 4 in the config, 8 in the checkpoint"):
        train(tmp_path, loader(64, 4), resume="exact", train_cfg=PASSES, custom_hooks=[record])
    assert record.ids == []


class Messages:
    """Collect the messages of a run."""

    def __init__(self):
        self.texts = []

    def warning(self, text):
        self.texts.append(text)

    info = warning


def restore(saved, data, index, count, exact=False, devices=1):
    """Restore a position in a run of `count` processes; return its loader, loop and messages."""
    loader = build_dataloader(data(), train=True, process_index=index, process_count=count)
    loop = types.SimpleNamespace(
        by_epoch=True, iter=saved["inner_iter"], epoch=0, epoch_start=0, max_epochs=1, position=None,
        epoch_length=len(loader), max_iters=len(loader), dataloader=loader,
    )  # fmt: skip
    strategy = types.SimpleNamespace(data_shard=DataShard(index, count), batch_multiple=devices)
    run = types.SimpleNamespace(strategy=strategy, resume_is_exact=exact, logger=Messages())
    restore_position(run, loop, saved)
    return loader, loop, run.logger.texts


def train_on_processes(data, count, num_batches):
    """Return the ids that `count` processes saw in some batches, and their position as a checkpoint has it."""
    loaders = [build_dataloader(data(), train=True, process_index=k, process_count=count) for k in range(count)]
    ids = [batch["id"].tolist() for loader in loaders for batch in itertools.islice(loader, num_batches)]
    first = loaders[0]
    return flat(ids), {
        "positions": [loader.state_dict() for loader in loaders], "inner_iter": num_batches,
        "batch_size": first.batch_size, "dataset_size": first.dataset_size, "epoch_length": len(first),
    }  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_another_number_of_processes_continues_at_the_same_example(old, new):
    data = loader(64, 4)
    before, saved = train_on_processes(data, old, num_batches=2)
    rest = []
    for index in range(new):
        batches, loop, (message,) = restore(saved, data, index, new)
        batches.load_state_dict(loop.position)
        rest += flat(batch["id"].tolist() for batch in batches)
        assert f"data shards: {new} ({old} in the checkpoint): the run continues at the same example" in message
        assert f"an epoch has {16 // new} iterations instead of {16 // old}" in message
    assert sorted(before + rest) == list(range(64))


@pytest.mark.parametrize("processes", [1, 2])
def test_another_number_of_devices_is_one_line(processes):
    _, saved = train_on_processes(loader(64, 4), processes, num_batches=2)
    *_, messages = restore({**saved, "devices": 2 * processes}, loader(64, 4), 0, processes, devices=4)
    total = 4 * processes
    assert messages == [
        f"The run continues at the same example with the same global batch of {total}: 1 examples on each of {total} "
        f"devices, instead of 2 on {2 * processes}."
    ]
    for old in (saved, {**saved, "devices": total}):  # of an earlier version, and without a change
        assert restore(old, loader(64, 4), 0, processes, devices=4)[2] == []


def test_a_position_between_the_examples_of_the_processes_repeats_a_few():
    data = loader(60, 3)
    _, saved = train_on_processes(data, 1, num_batches=3)
    _, loop, (message,) = restore(saved, data, 0, 2)
    assert loop.position["examples"] == 4  # of 9 examples on one process
    assert "1 examples of pass 1 over the data are repeated" in message


def test_a_stream_starts_its_pass_again_on_another_number_of_processes():
    _, saved = train_on_processes(sized_stream(64, 4), 2, num_batches=3)
    _, loop, (message,) = restore(saved, sized_stream(64, 4), 0, 4)
    assert (loop.position["position"], loop.iter - loop.epoch_start) == (0, 0)
    assert "24 examples of pass 1 over the data are repeated" in message


def test_each_process_continues_at_its_own_position():
    data = sized_stream(64, 4)
    _, saved = train_on_processes(data, 2, num_batches=3)
    batches, loop, messages = restore(saved, data, 1, 2)
    batches.load_state_dict(loop.position)
    assert next(iter(batches))["id"].tolist() == [25, 27, 29, 31]
    assert messages == ["The position in SizedStream was not saved: 24 examples of this pass are read and dropped."]


def test_another_number_of_processes_is_an_error_if_the_position_must_be_exact():
    _, saved = train_on_processes(loader(64, 4), 2, num_batches=2)
    with pytest.raises(ConfigError, match=r"data shards: 4 \(2 in the checkpoint\)"):
        restore(saved, loader(64, 4), 0, 4, exact=True)
    for index in range(2):
        assert restore(saved, loader(64, 4), index, 2, exact=True)[1].position == saved["positions"][index]
