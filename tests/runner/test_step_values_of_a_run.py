"""Test batch sizes, accumulation and lengths that change with the iteration: exact under a resume, compiled once each."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset, TransformedDataset, build_dataloader
from jengine.data.step_values import StepValues
from jengine.extras.diagnose.schedule import preview_schedules
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.optim.schedules import chain_of
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner


def steps(values, milestones):
    return dict(type="StepValues", values=values, milestones=milestones)


class Recorder(Hook):
    """Record the examples of each iteration, count the traces, and stop like a kill."""

    def __init__(self, stop=None):
        self.ids, self.shapes, self.stop, self.traces = [], [], stop, 0

    def traced_update(self, ctx):
        self.traces += 1
        return ctx

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.stop:
            raise KeyboardInterrupt
        self.ids.append(np.asarray(data_batch["id"]).tolist())
        self.shapes.append(np.shape(data_batch["x"]))


def model():
    return FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch: jnp.square(
            params["w"] - batch["id"].astype(jnp.float32).reshape(len(batch["id"]), -1)[:, 0]
        ),
    )


def data(size=48):
    return ArrayDataset(dict(id=np.arange(size, dtype=np.int32), x=np.ones((size, 8), np.float32)))


def train(work_dir, batch_size, stop=None, resume=False, max_iters=12, every=100, **changes):
    hook = Recorder(stop)
    loader = dict(batch_size=batch_size, dataset=changes.pop("dataset", data()), **changes.pop("loader", {}))
    runner = build_runner(
        work_dir,
        **{
            **dict(
                model=model(), train_dataloader=loader, resume=resume, custom_hooks=[hook],
                train_cfg=dict(by_epoch=False, max_iters=max_iters, on_recompile="raise"),
                optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)),
                default_hooks=dict(logger=None, checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=every)),
            ),
            **changes,
        },
    )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):
        runner.train()
    return hook, runner


def resume(work_dir, step, batch_size, **arguments):
    """Continue after `step` iterations of the run in `work_dir / "whole"`, in a directory of its own."""
    path = work_dir / "whole" / f"iter_{step}"
    return train(work_dir / f"from{step}", batch_size, resume=path, every=100, **arguments)


RAMP = steps([2, 4, 8], [3, 7])


def test_the_batch_size_follows_the_iteration_and_each_example_comes_once_in_a_pass(tmp_path):
    hook, runner = train(tmp_path, RAMP)
    assert [len(ids) for ids in hook.ids] == [2] * 3 + [4] * 4 + [8] * 5
    seen = list(itertools.chain(*hook.ids))
    assert len(set(seen[:46])) == 46  # 48 examples in a pass, of which the last 2 do not fill a batch of 8
    assert runner.programs.update.traces == 3  # each size compiles once, without a warning
    logged, _ = runner.message_hub.get_scalar("train/batch_size").data
    assert logged.tolist() == [2] * 3 + [4] * 4 + [8] * 5


@pytest.mark.parametrize("train_cfg", [dict(by_epoch=False, max_iters=12), dict(max_epochs=3, epoch_length=4)])
def test_a_resume_lands_on_the_same_example(tmp_path, train_cfg):
    whole, runner = train(tmp_path / "whole", RAMP, every=1, train_cfg=train_cfg)
    for step in (1, 3, 6, 7, 8):
        rest, again = resume(tmp_path, step, RAMP, train_cfg=train_cfg)
        assert rest.ids == whole.ids[step:]
        np.testing.assert_array_equal(again.state.params["w"], runner.state.params["w"])


def test_a_killed_run_continues_with_the_examples_after_its_last_checkpoint(tmp_path):
    whole, runner = train(tmp_path / "whole", RAMP)
    train(tmp_path / "parts", RAMP, stop=8, every=3)
    rest, again = train(tmp_path / "parts", RAMP, resume=True, every=3)
    assert rest.ids == whole.ids[6:]
    np.testing.assert_array_equal(again.state.params["w"], runner.state.params["w"])


def test_an_infinite_sampler_repeats_no_example_where_the_batch_size_changes(tmp_path):
    settings = dict(sampler=dict(type="InfiniteSampler", shuffle=False))
    ramp = steps([2, 5, 3], [3, 7])  # 6 and 26 examples before a change, which 5 and 3 do not divide
    whole, _ = train(tmp_path / "whole", ramp, dataset=data(12), loader=settings, every=1)
    assert list(itertools.chain(*whole.ids)) == [k % 12 for k in range(41)]
    for step in (2, 4, 8):
        rest, _ = resume(tmp_path, step, ramp, dataset=data(12), loader=settings)
        assert rest.ids == whole.ids[step:]
    # a worker, which reads ahead, is replaced where the size changes
    settings["num_workers"] = 1
    rest, _ = resume(tmp_path, 2, ramp, dataset=data(12), loader=settings, max_iters=5)
    assert rest.ids == whole.ids[2:5]


def test_chunks_of_steps_end_where_the_batch_size_changes(tmp_path):
    _, runner = train(tmp_path / "whole", RAMP)
    _, chunks = train(
        tmp_path / "chunks", RAMP, train_cfg=dict(by_epoch=False, max_iters=12, steps_per_call=2), custom_hooks=[]
    )
    np.testing.assert_allclose(chunks.state.params["w"], runner.state.params["w"], rtol=1e-6)


def crop(sample, ctx):
    return {**sample, "x": sample["x"][: ctx.length]}


def test_transforms_read_the_length_that_follows_the_iteration(tmp_path):
    dataset = TransformedDataset(data(), [crop])
    lengths = dict(loader=dict(example_length=steps([2, 4, 8], [3, 5])))
    whole, runner = train(tmp_path / "whole", 4, dataset=dataset, **lengths, max_iters=8)
    assert whole.shapes == [(4, 2)] * 3 + [(4, 4)] * 2 + [(4, 8)] * 3
    assert runner.programs.update.traces == 3
    train(tmp_path / "parts", 4, stop=5, every=2, dataset=TransformedDataset(data(), [crop]), **lengths, max_iters=8)
    rest, _ = train(
        tmp_path / "parts", 4, resume=True, dataset=TransformedDataset(data(), [crop]), **lengths, max_iters=8
    )
    assert (rest.ids, rest.shapes) == (whole.ids[4:], whole.shapes[4:])


def resize(sample, ctx):
    step = sample["img"].shape[0] // ctx.length
    return {**sample, "img": sample["img"][::step, ::step]}


def test_a_convolution_trains_on_small_images_first(tmp_path):
    def loss(params, batch):
        features = jax.lax.conv(batch["img"].transpose(0, 3, 1, 2), params["kernel"], (1, 1), "SAME")
        return jnp.square(features.mean((1, 2, 3)) - batch["y"])

    images = np.random.default_rng(0).standard_normal((32, 16, 16, 1)).astype(np.float32)
    dataset = TransformedDataset(ArrayDataset(dict(img=images, y=images.mean((1, 2, 3)))), [resize])
    sides = []

    class Sides(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            sides.append(data_batch["img"].shape[1])

    _, runner = train(
        tmp_path, 8, dataset=dataset, loader=dict(example_length=steps([4, 8, 16], [2, 5])), max_iters=8,
        model=FunctionalModel(lambda: {"kernel": jnp.ones((1, 1, 3, 3))}, loss), custom_hooks=[Sides()],
    )  # fmt: skip
    assert sides == [4] * 2 + [8] * 3 + [16] * 3
    assert np.isfinite(runner.message_hub.get_scalar("train/loss").data[0]).all()


def rows_of():
    return ({"id": np.full(8, i, np.int32), "x": np.ones(8, np.float32)} for i in range(40))


def test_a_stream_follows_the_iteration_and_its_rows_are_divided(tmp_path):
    arguments = dict(dataset=rows_of, max_iters=10)
    sizes = steps([2, 4], [3])
    whole, _ = train(tmp_path / "whole", sizes, every=1, loader=dict(example_length=steps([2, 8], [5])), **arguments)
    assert whole.shapes == [(8, 2)] * 3 + [(16, 2)] * 2 + [(4, 8)] * 5
    rows = [row[0] for ids in whole.ids[5:] for row in ids]
    assert rows == list(range(14, 34))  # 3 * 2 + 2 * 4 rows before
    for step in (2, 3, 6, 9):
        rest, _ = resume(tmp_path, step, sizes, loader=dict(example_length=steps([2, 8], [5])), **arguments)
        assert (rest.ids, rest.shapes) == (whole.ids[step:], whole.shapes[step:])


def accumulate(counts):
    return dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01), accumulative_counts=counts))


def test_the_accumulation_follows_the_iteration(tmp_path):
    counts = steps([1, 2, 4], [2, 7])  # windows 0 | 1 | 2 3 | 4 5 | 6 | 7 8 9 10 | 11
    updates = []

    class Updates(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            updates.append(runner.optim_wrapper.should_sync())

    _, runner = train(tmp_path / "whole", 4, custom_hooks=[Updates()], every=1, **accumulate(counts))
    ends = [index for index, is_update in enumerate(updates) if is_update]
    assert ends == [0, 1, 3, 5, 6, 10, 11]
    assert runner.optim_wrapper.count_updates(12) == 7
    logged, _ = runner.message_hub.get_scalar("train/accumulative_counts").data
    assert logged.tolist() == [1] * 2 + [2] * 5 + [4] * 5
    for step in (1, 4, 6, 9):
        _, again = resume(tmp_path, step, 4, **accumulate(counts))
        np.testing.assert_array_equal(again.state.params["w"], runner.state.params["w"])


def test_a_window_that_a_change_cuts_short_has_the_mean_of_its_iterations(tmp_path):
    # iterations 0 to 2 are one window of 4 that ends at the change; then each iteration updates
    _, short = train(tmp_path / "short", 4, max_iters=3, **accumulate(steps([4, 1], [3])))
    _, three = train(tmp_path / "three", 4, max_iters=3, **accumulate(3))
    np.testing.assert_array_equal(short.state.params["w"], three.state.params["w"])


@pytest.mark.parametrize("sampler", ["DefaultSampler", "InfiniteSampler"])
def test_a_continued_loop_takes_its_place_in_the_data_of_all_batch_sizes(tmp_path, sampler):
    settings = dict(sampler=dict(type=sampler))
    arguments = dict(dataset=data(20), optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.01)))
    whole, _ = train(tmp_path / "whole", RAMP, every=1, loader=dict(settings), **arguments)
    for step in (3, 5, 10):
        load_from = dict(path=tmp_path / "whole" / f"iter_{step}", optimizer=True)
        rest, _ = train(tmp_path / f"{step}", RAMP, load_from=load_from, loader=dict(settings), every=100, **arguments)
        assert rest.ids == whole.ids[step:]


class Examples:
    """Examples in a row, with a length and without access by index."""

    def __len__(self):
        return 10

    def __iter__(self):
        return ({"id": np.int32(i), "x": np.ones(8, np.float32)} for i in range(10))


def test_a_stream_with_a_length_drops_what_fills_no_batch_of_the_new_size(tmp_path):
    arguments = dict(dataset=Examples(), max_iters=5, optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.01)))
    hook, _ = train(tmp_path / "whole", steps([3, 4], [1]), every=1, **arguments)
    assert hook.ids == [[0, 1, 2], [3, 4, 5, 6], [0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    for step in (1, 2, 3):
        load_from = dict(path=tmp_path / "whole" / f"iter_{step}", optimizer=True)
        rest, _ = train(tmp_path / f"from{step}", steps([3, 4], [1]), load_from=load_from, **arguments)
        assert rest.ids == hook.ids[step:]


def test_a_window_over_several_batch_sizes_has_the_mean_of_its_examples(tmp_path):
    # one window of two batches, of examples 0 to 1 and 2 to 7; the loss is (w - id)**2, at w = 0
    sampler = dict(loader=dict(sampler=dict(type="DefaultSampler", shuffle=False)))
    for kind, mean in (("examples", np.arange(8).mean()), ("equal", (0.5 + 4.5) / 2)):
        wrapper = dict(optimizer=dict(type="SGD", lr=0.25), accumulative_counts=2, accumulation_weight=kind)
        sizes = steps([2, 6], [1])
        _, runner = train(tmp_path / kind, sizes, max_iters=2, optim_wrapper=wrapper, **sampler)
        np.testing.assert_allclose(runner.state.params["w"], 0.25 * 2 * mean, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(batch_size=steps([2, 4], [3, 7])), ["`milestones`", "`values`", "got 2 and 2"]),
        (dict(batch_size=steps([2, 4, 8], [7, 3])), ["`milestones`", "got [7, 3]"]),
        (dict(batch_size=steps([2, 0], [3])), ["values"]),
        (dict(batch_size=4, **accumulate(dict(type="StepValue", values=[1]))), ["dict(type='StepValues'"]),
        (dict(batch_size=4, **accumulate(0)), ["accumulative_counts"]),
        (dict(batch_size=4, loader=dict(example_length=steps([2, 4], [3]))), ["the argument"]),
        (dict(batch_size=RAMP, train_cfg=dict(max_epochs=2)), ["`train_cfg.epoch_length`"]),
        (dict(batch_size=steps([2, 64], [3])), ["`batch_size`", "48", "got 64"]),
        (dict(batch_size=2, dataset=rows_of, loader=dict(example_length=3)), ["the rows", "(2, 8)"]),
    ],
)
def test_illegal_values_are_refused(tmp_path, changes, words):
    check_refusal(lambda: train(tmp_path, **changes), (ConfigError, ValueError, TypeError), *words)


@pytest.mark.parametrize(("rule", "factors"), [("linear", [1, 2, 4]), ("sqrt", [1, 2**0.5, 2])])
@pytest.mark.parametrize("schedule", [None, dict(type="ExponentialLR", gamma=0.9, by_epoch=False), lambda step: 0.02])
def test_rates_scale_with_the_batch_by_the_rule(tmp_path, schedule, rule, factors):
    scale = dict(auto_scale_lr=dict(enable=True, base_batch_size=2, rule=rule), param_scheduler=schedule)
    _, runner = train(tmp_path / "whole", RAMP, every=2 if rule == "linear" else 100, **scale)
    base = 0.02 if callable(schedule) else 0.01
    decay = 0.9 if isinstance(schedule, dict) else 1.0
    expected = [base * decay**step * factors[(step >= 3) + (step >= 7)] for step in range(12)]
    logged, _ = runner.message_hub.get_scalar("train/lr").data
    np.testing.assert_allclose(logged, expected, rtol=1e-6)
    np.testing.assert_allclose(chain_of(runner.optim_wrapper).at(range(12))[0]["lr"], expected, rtol=1e-9)
    if rule == "linear":
        for step in (2, 8):
            _, again = resume(tmp_path, step, RAMP, **scale)
            rest, _ = again.message_hub.get_scalar("train/lr").data
            assert rest.tolist() == logged.tolist()


def test_the_preview_has_the_numbers_of_each_iteration():
    cfg = dict(
        train_dataloader=dict(batch_size=RAMP, dataset=data()), train_cfg=dict(by_epoch=False, max_iters=9),
        **accumulate(steps([1, 2], [4])),
    )  # fmt: skip
    curves = preview_schedules(cfg)
    assert curves["batch_size"] == [2] * 3 + [4] * 4 + [8] * 2
    assert curves["accumulative_counts"] == [1] * 4 + [2] * 5


def test_a_global_batch_size_is_divided_among_the_processes():
    cfg = dict(global_batch_size=StepValues([4, 8], [10]), dataset=data())
    loader = build_dataloader(cfg, train=True, process_index=1, process_count=2)
    assert loader.batch_size == 2
    assert loader.set_step(10)
    assert (loader.batch_size, len(loader)) == (4, 6)
