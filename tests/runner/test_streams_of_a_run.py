import itertools

import grain
import numpy as np
import pytest

from jengine.config.errors import ConfigError

from .grain_ids import Ids
from .stream_cases import RecordIds, read_log, train, train_with_restart

# By default grain reads 500 elements ahead; with ten examples the index of each takes it a millisecond to shuffle.
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


def map_dataset():
    return grain.MapDataset.source(Ids()).shuffle(seed=1).batch(2)


def endless_map_dataset():  # ten of many examples, whose indices are shuffled faster than those of ten
    return grain.MapDataset.source(Ids(1000)).shuffle(seed=1)[:10].batch(2).repeat()


def iter_dataset():
    return grain.MapDataset.source(Ids()).shuffle(seed=1).repeat().to_iter_dataset(READ_AHEAD).batch(3)


def grain_loader(num_epochs=None, workers=0):
    sampler = grain.samplers.IndexSampler(10, shuffle=True, seed=0, num_epochs=num_epochs)
    arguments = dict(operations=[grain.transforms.Batch(2)], worker_count=workers, read_options=READ_AHEAD)
    return grain.DataLoader(data_source=Ids(), sampler=sampler, **arguments)


def batches():
    for k in range(5):
        yield {"id": np.arange(2 * k, 2 * k + 2, dtype=np.int32)}


def examples():
    for k in itertools.count():
        yield {"id": np.int32(k)}


SOURCES = [
    map_dataset,
    endless_map_dataset,
    iter_dataset,
    lambda: iter(iter_dataset()),
    grain_loader,
    lambda: batches,
    lambda: list(batches()),
    lambda: dict(dataset=examples, batch_size=2),
    lambda: dict(dataset=iter_dataset().map(lambda batch: {"id": batch["id"][0]}), batch_size=2),
]


@pytest.mark.parametrize("make_data", SOURCES)
@pytest.mark.parametrize("train_cfg", [dict(by_epoch=False, max_iters=12), dict(max_epochs=3, epoch_length=4)])
def test_a_resumed_run_continues_with_the_next_batch(tmp_path, make_data, train_cfg):
    whole, parts, runner = train_with_restart(tmp_path, make_data, train_cfg=train_cfg)
    assert len(whole) == 12
    assert parts == whole
    assert runner.iter == 12


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.many_processes)])
def test_workers_of_grain_continue_with_the_next_batch(tmp_path, workers):
    arguments = dict(train_cfg=dict(by_epoch=False, max_iters=6))
    first, _ = train(tmp_path, lambda: grain_loader(workers=workers), stop=5, **arguments)
    second, _ = train(tmp_path, lambda: grain_loader(workers=workers), resume=True, **arguments)
    assert second == first[3:6]


def test_chunks_of_steps_save_the_position_after_their_last_step(tmp_path):
    train_cfg = dict(by_epoch=False, max_iters=12, steps_per_call=3)
    whole, parts, _ = train_with_restart(tmp_path, iter_dataset, train_cfg=train_cfg)
    assert parts == whole


def test_each_pass_over_a_grain_map_dataset_has_another_order(tmp_path):
    ids, runner = train(tmp_path, map_dataset, train_cfg=dict(max_epochs=2), save=5)
    first, second = (list(itertools.chain(*part)) for part in (ids[:5], ids[5:]))
    assert runner.iter == 10
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_grain_loader_that_repeats_its_order_says_so_once(tmp_path):
    _, runner = train(tmp_path, lambda: grain_loader(num_epochs=1))
    (line,) = [line for line in read_log(runner).splitlines() if "each pass has the order of the first" in line]
    assert "use num_epochs=None in the sampler" in line


def test_an_epoch_of_data_without_a_length_is_a_pass_and_its_iterations_are_counted(tmp_path):
    ids, runner = train(tmp_path, lambda: batches, train_cfg=dict(max_epochs=2), save=100)
    assert ids == 2 * [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert (runner.epoch, runner.iter) == (2, 10)
    assert "Epoch 1 had 5 iterations: one pass over the data." in read_log(runner)


def test_what_cannot_be_saved_is_logged_at_the_start_and_at_the_resume(tmp_path):
    _, first = train(tmp_path, lambda: batches, stop=4)
    start = "The position in function batches cannot be saved: a resumed run reads and drops the batches"
    assert read_log(first).count(start) == 1
    _, second = train(tmp_path, lambda: batches, resume=True)
    assert "The position in function batches was not saved: 6 examples of this pass are read" in read_log(second)


def test_a_position_that_cannot_be_saved_is_an_error_if_it_must_be_exact(tmp_path):
    record = RecordIds()
    with pytest.raises(ConfigError, match="data whose position can be saved .* got function batches"):
        train(tmp_path, lambda: batches, resume="exact", custom_hooks=[record])
    assert record.ids == []
    ids, _ = train(tmp_path, map_dataset, resume="exact")
    assert len(ids) == 12


def test_data_that_allow_one_pass_end_with_an_error_and_what_was_done_is_saved(tmp_path):
    with pytest.raises(ConfigError, match="yielded no batch in pass 2 over the data: its iterator is exhausted"):
        train(tmp_path, batches, save=100)
    assert (tmp_path / "iter_5").is_dir()


def test_a_loader_that_is_shorter_than_its_length_is_an_error_and_not_a_whole_epoch(tmp_path):
    class Short:
        def __len__(self):
            return 9

        def __iter__(self):
            return batches()

    hooks = dict(logger=None, checkpoint=dict(type="CheckpointHook"))
    with pytest.raises(ConfigError, match="Short must yield as many batches as its length, 9, got 5 in pass 1"):
        train(tmp_path, Short, train_cfg=dict(max_epochs=2), default_hooks=hooks)
    assert (tmp_path / "iter_5").is_dir()
    assert not (tmp_path / "epoch_1").exists()


def test_an_error_of_the_data_names_them_and_the_batches_before_it_are_saved(tmp_path):
    def dying():
        yield from itertools.islice(batches(), 3)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as info:
        train(tmp_path, lambda: dying, save=100)
    assert any("train_dataloader (function dying), batch 4 of pass 1" in note for note in info.value.__notes__)
    assert (tmp_path / "iter_3").is_dir()


def test_an_evaluation_of_an_endless_stream_has_a_length(tmp_path):
    evaluation = dict(
        val_dataloader=dict(dataset=examples, batch_size=4),
        val_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: batch["id"] * 1.0),
    )
    _, runner = train(tmp_path, map_dataset, val_cfg=dict(epoch_length=3), **evaluation)
    assert runner.val()["loss"] == np.arange(12).mean()


def columns(k):
    return {"id": np.arange(k, k + 2, dtype=np.int32)[:, None]}


class StopTraining(RecordIds):
    """Record the ids and the ends of epochs, and set `stop_training` in an iteration, or not."""

    acts_on = "hyperparams"  # chunks are not limited

    def __init__(self, stop):
        super().__init__()
        self.stop_in, self.ends = stop, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.train_loop.stop_training = runner.iter == self.stop_in

    def after_train_epoch(self, runner):
        self.ends.append(runner.iter)


@pytest.mark.parametrize(
    ("make_data", "train_cfg", "ends"),
    [
        (lambda: dict(dataset=Ids(8), batch_size=2), dict(max_epochs=3), [4, 8, 12]),
        (lambda: dict(dataset=Ids(8), batch_size=2), dict(max_epochs=3, steps_per_call=2), [4, 8, 12]),
        (iter_dataset, dict(by_epoch=False, max_iters=12, steps_per_call=2, val_interval=4), [12]),
        (iter_dataset, dict(max_epochs=3, epoch_length=4), [4, 8, 12]),
        (lambda: batches, dict(max_epochs=3), [5, 10, 15]),  # whose length is not known
        # chunks that a batch of another shape cuts short: their batches are taken together, and run one by one
        (
            lambda: [columns(0), *list(batches())[1:3], columns(6)],
            dict(max_epochs=3, steps_per_call=3, on_recompile="warn"),
            [4, 8, 12],
        ),
    ],
)
def test_an_epoch_that_is_cut_short_by_stop_training_continues_in_the_resumed_run(tmp_path, make_data, train_cfg, ends):
    def run(folder, stop, **changes):
        hook = StopTraining(stop)
        _, runner = train(
            tmp_path / folder,
            make_data,
            train_cfg=train_cfg,
            custom_hooks=[hook],
            val_dataloader=list(batches()),
            val_cfg=dict(),
            val_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: batch["id"] * 1.0),
            param_scheduler=dict(type="StepLR", step_size=1, gamma=0.5, by_epoch=train_cfg.get("by_epoch", True)),
            default_hooks=dict(logger=None, checkpoint=dict(type="CheckpointHook", interval=-1)),
            **changes,
        )
        return hook, runner

    whole, expected = run("whole", None)
    first, _ = run("parts", 5)
    assert (tmp_path / "parts" / "iter_6").is_dir()
    second, runner = run("parts", None, resume=True)
    assert first.ids + second.ids == whole.ids
    assert first.ends + second.ends == whole.ends == ends
    assert runner.iter == expected.iter
    assert runner.validations == expected.validations
    assert runner.state.params["w"] == expected.state.params["w"]
