"""Compare chunks of steps with single steps: parameters, logs, checkpoints and hooks are the same."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel

pytestmark = pytest.mark.full_optimization

FULL = dict(
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1), clip_grad=dict(max_norm=1.0)),
    param_scheduler=[
        dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=5),
        dict(type="CosineAnnealingLR", by_epoch=False, begin=5, end=20),
    ],
    custom_hooks=[dict(type="EMAHook")],
    default_hooks=dict(
        logger=dict(type="LoggerHook", interval=3), checkpoint=dict(type="CheckpointHook", interval=5, by_epoch=False)
    ),
)


def noisy_model():
    """Return a linear model with noise from the key of the step, which reveals a wrong key."""

    def predict(params, batch):
        return batch["x"] @ params["w"] + params["b"]

    def loss(params, batch, rng):
        return jnp.square(predict(params, batch) - batch["y"] + 0.1 * jax.random.normal(rng, batch["y"].shape))

    return FunctionalModel(init=lambda: {"w": jnp.zeros((2,)), "b": jnp.zeros(())}, loss=loss, predict=predict)


def make_dataset(count):
    x = np.random.RandomState(0).randn(count, 2).astype(np.float32)
    return ArrayDataset(dict(x=x, y=x @ np.array([1.0, -2.0], np.float32)))


@pytest.fixture
def train(make_runner, tmp_path):
    """Return a function that trains 3 epochs of 8 iterations and returns the runner."""

    def run(steps_per_call, by_epoch=True, **changes):
        length = dict(max_epochs=3) if by_epoch else dict(max_iters=24, val_interval=7)
        runner = make_runner(
            tmp_path / f"steps_{steps_per_call}",
            **{
                **FULL,
                "model": noisy_model(),
                "train_dataloader": dict(batch_size=4, dataset=make_dataset(32)),
                "train_cfg": dict(by_epoch=by_epoch, steps_per_call=steps_per_call, **length),
                **changes,
            }, validates=True,
        )
        runner.train()
        return runner

    return run


def scalars(runner):
    path = next(pathlib.Path(runner.log_dir).glob("vis_data/scalars.json"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    timed = re.compile("time|data_time|seconds/.*|speed/.*")
    return [{k: v for k, v in line.items() if not timed.fullmatch(k)} for line in lines]


# From 0.11 on XLA may round an operation of an optimizer differently within a loop, in the last bit.
ROUNDING = dict(rtol=0, atol=0) if jax.__version_info__ < (0, 11) else dict(rtol=1e-6, atol=1e-7)


def assert_same_run(one, several):
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(several.state), strict=True):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_allclose(a, b, **ROUNDING)
    for line, other in zip(scalars(one), scalars(several), strict=True):
        assert line.pop("mode", None) == other.pop("mode", None)
        assert line == pytest.approx(other, rel=ROUNDING["rtol"], abs=ROUNDING["atol"])
    for name in ("train/loss", "train/lr", "train/grad_norm"):
        history, other = (run.message_hub.get_scalar(name).data[0] for run in (one, several))
        np.testing.assert_allclose(history, other, **ROUNDING)
    assert one.message_hub.get_scalar("train/time").updates == several.message_hub.get_scalar("train/time").updates
    assert sorted(p.name for p in pathlib.Path(one.work_dir).glob("iter_*")) == sorted(
        p.name for p in pathlib.Path(several.work_dir).glob("iter_*")
    )


def count_traces(runner):
    programs = runner.programs
    return programs.chunk.traces, programs.update.traces, programs.accumulate.traces


@pytest.mark.parametrize("by_epoch", [True, False])
def test_parameters_logs_and_checkpoints_are_those_of_single_steps(train, by_epoch):
    one, four = train(1, by_epoch), train(4, by_epoch)
    assert_same_run(one, four)
    assert count_traces(four) == (1, 1, 0)  # remaining steps run as single steps
    assert count_traces(one) == (0, 1, 0)


def test_gradients_accumulate_over_calls(train):
    wrapper = dict(
        optimizer=dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=3, clip_grad=dict(max_norm=1.0)
    )
    one, five = train(1, optim_wrapper=wrapper), train(5, optim_wrapper=wrapper)
    assert_same_run(one, five)
    assert five.message_hub.get_scalar("train/grad_norm").updates == 8  # of 24 iterations those that update
    assert count_traces(five) == (1, 1, 1)  # chunks of 5 in epochs of 8 iterations, whose ends are single steps


@pytest.mark.parametrize(
    "parallel",
    [
        dict(type="Pjit", mesh=dict(data=2, fsdp=2), devices=4),
        dict(type="DataParallel", devices=2),
    ],
    ids=["pjit", "shard_map"],
)
def test_several_devices(train, parallel):
    one, four = train(1, parallel=parallel), train(4, parallel=parallel)
    assert_same_run(one, four)


class EachStep(Hook):
    """Record the arguments of its stages."""

    def __init__(self):
        self.seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        lr = runner.optim_wrapper.get_lr()["lr"][0]
        self.seen.append(("before", runner.iter, batch_idx, lr, float(np.sum(data_batch["x"])), int(runner.state.step)))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        x = float(np.sum(data_batch["x"]))
        self.seen.append(("after", runner.iter, batch_idx, x, float(outputs["loss"]), int(runner.state.step)))


class EachThirdStep(EachStep):
    """Record every third iteration."""

    def next_step(self, runner, step):
        return self.next_multiple(3, step)


def test_a_hook_sees_the_same_at_every_iteration(train):
    hooks = EachStep(), EachStep()
    one, four = (train(n, custom_hooks=[hook]) for n, hook in zip((1, 4), hooks, strict=True))
    assert_same_run(one, four)
    assert hooks[0].seen == hooks[1].seen
    assert len(hooks[0].seen) == 48


def test_a_hook_with_next_step_is_called_only_at_these_steps_and_ends_chunks_there(train, monkeypatch):
    hooks = EachThirdStep(), EachThirdStep()
    runs = []
    for steps, hook in zip((1, 8), hooks, strict=True):
        runs.append(train(steps, custom_hooks=[hook], default_hooks=dict(checkpoint=None, logger=None)))
    assert hooks[0].seen == hooks[1].seen
    assert [iteration for when, iteration, *_ in hooks[1].seen if when == "after"] == [2, 5, 8, 11, 14, 17, 20, 23]


def test_chunks_are_complete_and_other_iterations_are_single_steps(train, monkeypatch):
    calls = []

    class Watch(Hook):
        def before_train(self, runner):
            single, chunk = runner.train_step, runner.train_chunk
            monkeypatch.setattr(runner, "train_step", lambda batch: calls.append(1) or single(batch))
            monkeypatch.setattr(runner, "train_chunk", lambda b, *args: calls.append(len(b)) or chunk(b, *args))

    invalid = dict(type="CheckInvalidLossHook", interval=5)
    train(3, custom_hooks=[invalid, Watch()], default_hooks=dict(checkpoint=None))
    # epochs of 8 iterations; no chunk crosses the iterations 5, 10, 15 and 20
    assert calls == [3, 1, 1, 3, *[1, 1, 3, 1, 1, 1], *[3, 1, 3, 1]]
    calls.clear()
    train(
        6, by_epoch=False, custom_hooks=[Watch()],
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=100)),
    )  # fmt: skip
    assert calls == [6, 1, 6, 1, 6, 1, 1, 1, 1]  # a validation after each 7


def test_a_smaller_last_batch_runs_as_a_single_step(train):
    loader = dict(batch_size=4, dataset=make_dataset(30), drop_last=False)
    one, four = train(1, train_dataloader=loader), train(4, train_dataloader=loader)
    assert_same_run(one, four)


def test_a_chunk_that_another_batch_cuts_short_compiles_nothing(train):
    batch = {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}
    other = {**batch, "x": np.ones((4, 2), np.float16)}
    runner = train(
        4, by_epoch=False, train_dataloader=[batch, batch, other, *[batch] * 8], default_hooks=dict(checkpoint=None),
        train_cfg=dict(by_epoch=False, max_iters=11, val_interval=99, steps_per_call=4, on_recompile="warn"),
    )  # fmt: skip
    assert count_traces(runner) == (1, 2, 0)


def test_a_run_can_be_resumed_in_the_middle_of_a_chunk(train, make_runner):
    uninterrupted, start = train(4), train(1)
    resumed = train(3, resume=str(pathlib.Path(start.work_dir) / "iter_10"))
    for a, b in zip(jax.tree.leaves(uninterrupted.state.params), jax.tree.leaves(resumed.state.params), strict=True):
        np.testing.assert_allclose(a, b, **ROUNDING)


@pytest.mark.usefixtures("only_new_garbage")  # EmptyCacheHook collects it after each iteration
def test_hooks_that_limit_chunks_to_one_step_are_named_once(train):
    runner = train(
        4,
        custom_hooks=[EachStep(), dict(type="EmptyCacheHook", after_iter=True)],
        train_cfg=dict(by_epoch=False, max_iters=4, steps_per_call=4),
    )
    log = next(pathlib.Path(runner.log_dir).glob("*.log")).read_text()
    assert log.count("steps_per_call=4 has no effect: EachStep, EmptyCacheHook may act at each step") == 1
    assert count_traces(runner) == (0, 1, 0)


def test_convolutions_run_in_chunks_too(train):
    def predict(params, batch):
        image = batch["x"].reshape(-1, 2, 1)
        return jax.lax.conv_general_dilated(image, params["w"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))

    def convolution():
        return FunctionalModel(
            init=lambda: {"w": jnp.zeros((2, 1, 1))},
            loss=lambda params, batch: jnp.square(predict(params, batch)[:, 0, 0] - batch["y"]),
            predict=lambda params, batch: predict(params, batch)[:, 0, 0],
        )

    one, four = train(1, model=convolution()), train(4, model=convolution())
    assert_same_run(one, four)
    assert four.programs.chunk.traces == 1


def test_a_hook_that_reads_metrics_is_called_once_before_a_chunk_and_after_it_for_each_step(make_runner):
    class Calls(Hook):
        acts_on = "metrics"

        def __init__(self):
            self.calls = []

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            self.calls.append(("before", runner.iter))

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            self.calls.append(("after", runner.iter, float(outputs["loss"])))

    chunks, single = Calls(), Calls()
    for hook, steps in ((chunks, 3), (single, 1)):
        make_runner(custom_hooks=[hook], train_cfg=dict(by_epoch=False, max_iters=6, steps_per_call=steps)).train()
    losses = [call for call in single.calls if call[0] == "after"]
    assert [call for call in chunks.calls if call[0] == "before"] == [("before", 0), ("before", 3)]
    for found, expected in zip([call for call in chunks.calls if call[0] == "after"], losses, strict=True):
        assert found[:2] == expected[:2]
        assert found[2] == pytest.approx(expected[2], rel=1e-6)
    assert [call[0] for call in chunks.calls] == (["before"] + ["after"] * 3) * 2
