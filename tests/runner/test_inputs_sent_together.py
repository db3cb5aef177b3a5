"""Iterations with a call each whose inputs go to the device together: the same as one by one, where that pays."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.parallel.resident import ResidentRows
from jengine.runner import stepping
from tests.runner.test_several_steps_per_call import FULL, Every, Third, assert_same_run, noisy_model, samples, scalars

ITERS = 40  # the first 13 are timed


@pytest.fixture
def train(make_runner, tmp_path, monkeypatch):
    """Trains 40 iterations, from the 14th on with inputs sent together if that spares `spares` seconds an iteration."""

    def run(spares, expected=None, **changes):
        monkeypatch.setattr(stepping, "_STACKING_SPARES", spares)
        runner = make_runner(
            tmp_path / f"spares_{spares}",
            **{
                **FULL,
                "model": noisy_model(),
                "train_dataloader": dict(batch_size=4, dataset=samples(32)),
                "train_cfg": dict(by_epoch=False, max_iters=ITERS, val_interval=17),
                **changes,
            },
        )
        if expected is None:
            runner.train()
        else:
            with pytest.raises(type(expected), match=str(expected)):
                runner.train()
        return runner

    return run


@pytest.mark.parametrize("train_cfg", [None, dict(by_epoch=True, max_epochs=5)], ids=["iterations", "epochs"])
def test_parameters_logs_and_checkpoints_are_those_of_one_by_one(train, train_cfg):
    changes = {} if train_cfg is None else dict(train_cfg=train_cfg)
    apart, together = train(0.0, **changes), train(100.0, **changes)
    assert_same_run(apart, together)
    assert (apart.step.row.traces, apart.step.update.traces) == (0, 1)
    assert (together.step.row.traces, together.step.update.traces) == (1, 1)


@pytest.mark.parametrize("kind", [Every, Third])
def test_a_hook_sees_the_same(train, kind):
    hooks = kind(), kind()
    runs = [train(spares, custom_hooks=[hook]) for spares, hook in zip((0.0, 100.0), hooks, strict=True)]
    assert_same_run(*runs)
    assert hooks[0].seen == hooks[1].seen


def test_groups_and_scalars_of_hooks(train):
    class Scaled(Hook):
        in_windows = "ahead"

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            runner.hyperparams["scale"] = 1 / (runner.iter + 1)

    def loss(params, batch, hyperparams):
        return hyperparams["scale"] * jnp.square(batch["x"] @ params["w"] - batch["y"])

    runs = [
        train(
            spares,
            model=FunctionalModel(
                init=lambda: {"w": jnp.zeros((2,))}, loss=loss, predict=lambda params, batch: batch["x"] @ params["w"]
            ),
            custom_hooks=[Scaled()],
            optim_wrapper=dict(
                optimizer=dict(type="SGD", lr=0.1, momentum=0.9),
                paramwise_cfg=dict(custom_keys={"w": dict(lr_mult=0.5)}),
                clip_grad=dict(max_norm=1.0),
            ),
        )
        for spares in (0.0, 100.0)
    ]
    assert_same_run(*runs)
    assert runs[1].step.row.traces == 1


@pytest.mark.parametrize(
    "changes",
    [
        dict(train_dataloader=dict(batch_size=600, dataset=samples(2400))),  # 4 bytes of each of 3 numbers: 7,200
        dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2)),
        dict(parallel=dict(type="Pjit", devices=2)),
    ],
    ids=["large batches", "accumulation", "several devices"],
)
def test_where_it_is_of_no_use_inputs_go_one_by_one(train, monkeypatch, changes):
    monkeypatch.setattr(stepping, "_SMALL_BATCH", 7_199)
    assert train(100.0, **changes).step.row.traces == 0


def test_no_more_is_sent_together_than_a_cache_holds(train, monkeypatch):
    monkeypatch.setattr(stepping, "_MOST_SENT", 239)  # a batch has 48 bytes
    counts = []

    def counted(self, state, batches, hyperparams, count, run=ResidentRows.run):
        counts.append((len(batches["x"]), count))
        return run(self, state, batches, hyperparams, count)

    monkeypatch.setattr(ResidentRows, "run", counted)
    together = train(100.0)
    assert max(counts) == (4, 4)
    monkeypatch.undo()
    assert_same_run(train(0.0), together)


def test_a_short_run_does_not_compile_for_it(train):
    assert train(1e-5).step.row.traces == 0  # 26 iterations would gain a fourth of a millisecond


def test_what_came_before_an_error_of_a_hook_is_done_and_logged(train):
    class Fails(Hook):
        in_windows = "ahead"
        priority = "VERY_LOW"

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 31:
                raise KeyError("a hook's own error")

    apart, together = (train(s, KeyError("a hook's own error"), custom_hooks=[Fails()]) for s in (0.0, 100.0))
    assert together.step.row.traces == 1
    lines = scalars(together)
    assert lines == scalars(apart)
    assert lines[-1]["step"] == 30


def test_what_came_before_an_error_of_a_step_is_logged(train, monkeypatch):
    compile_rows = ResidentRows._compile

    def failing(self, form):
        compiled, calls = compile_rows(self, form), itertools.count(14)

        def call(*args):
            if next(calls) == 31:
                raise ZeroDivisionError("the step's own error")
            return compiled(*args)

        return call

    monkeypatch.setattr(ResidentRows, "_compile", failing)
    hooks = dict(checkpoint=None, logger=dict(type="LoggerHook", interval=3))
    runner = train(100.0, ZeroDivisionError("the step's own error"), default_hooks=hooks)
    lines = [line for line in scalars(runner) if "lr" in line]
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    assert runner.iter == 31


def test_a_search_for_nans_is_not_misled(train):
    with jax.debug_nans(True):
        assert train(100.0).step.row.traces == 0
