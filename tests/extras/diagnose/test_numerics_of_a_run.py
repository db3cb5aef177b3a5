import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.config.paths import flatten
from jengine.data import ArrayDataset
from jengine.extras.diagnose import replay_step
from jengine.extras.diagnose.replay import read_dump
from jengine.extras.diagnose.replay_command import describe
from jengine.hooks import Hook
from jengine.model import FunctionalModel

GUARD = dict(type="NumericsGuardHook", max_in_row=4)
EMA = dict(type="EMAHook", momentum=0.2)
BAD = slice(5 * 4, 8 * 4)  # the samples of the iterations 5, 6 and 7


def model(noise=0.0):
    """Return a linear model with a running mean as its state and optional noise in its loss."""

    def predict(params, batch):
        return batch["x"] @ params["w"] + params["b"]

    def loss(params, model_state, batch, rng):
        error = predict(params, batch) - batch["y"] + noise * jax.random.normal(rng, batch["y"].shape)
        return {"loss": jnp.square(error)}, {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean()}

    return FunctionalModel(
        init=lambda: ({"w": jnp.zeros(2), "b": jnp.zeros(())}, {"mean": jnp.zeros(())}), loss=loss, predict=predict
    )


def data(without_bad=False, with_nan=True):
    x = np.random.RandomState(0).randn(48, 2).astype(np.float32)
    y = x @ np.array([1.0, -2.0], np.float32)
    if without_bad:
        x, y = np.delete(x, BAD, 0), np.delete(y, BAD, 0)
    elif with_nan:
        x[BAD] = np.nan
    return dict(batch_size=4, dataset=ArrayDataset(dict(x=x, y=y)), sampler=dict(type="DefaultSampler", shuffle=False))


def arguments(*hooks, noise=0.0, **changes):
    base = dict(
        model=model(noise),
        train_dataloader=data(),
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1)),
        custom_hooks=[*hooks],
    )  # fmt: skip
    return {**base, **changes}


def bits(tree):
    return {path: np.asarray(leaf).tobytes() for path, leaf in flatten(tree).items()}


def trained_bits(state):
    """Return the bits of everything that training changes."""
    return bits((state.params, state.model_state, state.opt_state, state.hook_state["EMAHook"]))


def test_a_guarded_run_equals_one_without_the_bad_batches(make_runner, tmp_path):
    runner = make_runner(tmp_path / "nan", **arguments(GUARD, EMA))
    state = runner.train()
    without = make_runner(tmp_path / "without", **arguments(GUARD, EMA, train_dataloader=data(without_bad=True)))
    assert trained_bits(state) == trained_bits(without.train())
    assert int(state.hook_state["NumericsGuardHook"].dropped) == 3
    assert int(state.step) == 12
    assert int(optax.tree.get(state.opt_state, "count")) == 9
    assert runner.programs.update.traces == 1


class PassOver(Hook):
    """Undo the iterations 5, 6 and 7 except for the count, like a run without their batches."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.state = jax.tree.map(jnp.copy, runner.state) if runner.iter in (5, 6, 7) else None

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.state is not None:
            runner.state = self.state.replace(step=self.state.step + 1)


def test_schedules_and_random_keys_advance_in_a_dropped_step(make_runner, tmp_path):
    schedule = dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=12)
    same = dict(noise=0.3, param_scheduler=schedule)
    guarded = make_runner(tmp_path / "guarded", **arguments(GUARD, EMA, **same))
    passing = make_runner(
        tmp_path / "passing", **arguments(GUARD, EMA, PassOver(), train_dataloader=data(with_nan=False), **same)
    )
    assert trained_bits(guarded.train()) == trained_bits(passing.train())


@pytest.mark.full_optimization
def test_without_bad_batches_the_guard_changes_nothing(make_runner, tmp_path):
    finals = []
    for name, hooks in (("with", [GUARD, EMA]), ("without", [EMA])):
        runner = make_runner(tmp_path / name, **arguments(*hooks, train_dataloader=data(with_nan=False)))
        state = runner.train()
        finals.append((state.params, state.model_state, state.hook_state["EMAHook"]))
    # another program, in which XLA may order sums differently
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *finals)


@pytest.mark.parametrize("interval", [1, 3, 50])
def test_too_many_dropped_steps_end_the_run_with_a_dump_to_replay(make_runner, tmp_path, interval):
    hook = dict(type="NumericsGuardHook", max_in_row=3, interval=interval)
    runner = make_runner(**arguments(hook, EMA))
    with pytest.raises(FloatingPointError) as caught:
        runner.train()
    message = str(caught.value)
    assert "the steps of iterations 5 to 7 were dropped: the loss is not finite" in message
    assert "the first non-finite gradient is that of 'b'" in message
    path = re.search(r"jengine replay CONFIG (\S+)", message)[1]
    assert path == str(tmp_path / "run" / "numerics_iter_7.dump")
    # regardless of the interval the state is that after the last good step
    good = make_runner(tmp_path / "good", **arguments(GUARD, EMA, train_cfg=dict(by_epoch=False, max_iters=5)))
    assert trained_bits(runner.state) == trained_bits(good.train())

    dump = read_dump(path)
    assert int(dump["state"].step) == 7
    assert dump["state"].rng.tolist() == runner.state.rng.tolist()
    np.testing.assert_array_equal(dump["batch"]["x"], np.full((4, 2), np.nan, np.float32))
    findings = replay_step(
        runner.model, runner.optim_wrapper, runner.hooks, dump["state"], dump["batch"], dump["hyperparams"]
    )
    assert findings.non_finite == {"batch.x": 8, "loss": 1, "grads.b": 1, "grads.w": 2}
    assert "NaN from `" in findings.operation


def list_warnings(caplog):
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [message for message in messages if message.startswith("NumericsGuardHook")]


def test_dropped_steps_are_logged_once_and_counted_across_a_restart(make_runner, tmp_path, caplog):
    saving = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None))
    runner = make_runner(**arguments(GUARD, **saving))
    runner.logger.addHandler(caplog.handler)
    runner.train()
    warnings = list_warnings(caplog)
    assert len(warnings) == 1
    assert "3 of the last 10 steps were dropped, 3 in total; the last one was iteration 7" in warnings[0]
    caplog.clear()
    longer = dict(train_cfg=dict(max_epochs=2), train_dataloader=data(with_nan=False))
    again = make_runner(**arguments(GUARD, resume=True, **{**saving, **longer}))
    again.logger.addHandler(caplog.handler)
    assert int(again.train().hook_state["NumericsGuardHook"].dropped) == 3
    assert list_warnings(caplog) == []


def test_a_bad_batch_of_one_replica_is_dropped_by_all(make_runner, tmp_path):
    x = np.ones((12, 2), np.float32)
    x[4] = np.nan  # an example of the first replica in iteration 1, and of the second in iteration 2
    x[10] = np.inf
    loader = dict(
        batch_size=4,
        dataset=ArrayDataset(dict(x=x, y=np.zeros(12, np.float32))),
        sampler=dict(type="DefaultSampler", shuffle=False),
    )
    hook = dict(type="NumericsGuardHook", max_in_row=2, interval=1)
    runner = make_runner(
        **arguments(hook, EMA, train_dataloader=loader, parallel=dict(type="DataParallel", devices=2))
    )
    with pytest.raises(FloatingPointError, match="iterations 1 to 2 were dropped"):
        runner.train()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((runner.state.params, runner.state.model_state)))
    dump = read_dump(tmp_path / "run" / "numerics_iter_2.dump")
    findings = replay_step(
        runner.model, runner.optim_wrapper, runner.hooks, dump["state"], dump["batch"], dump["hyperparams"],
        compile_step=runner.strategy.compile_train_step,
    )  # fmt: skip
    assert findings.non_finite["batch.x"] == 2  # both elements of one example, on either replica


def two_optimizers(**changes):
    """Return a model whose parts are trained by one optimizer each, and their wrappers."""
    parts = {
        name: lambda params, batch, name=name: jnp.square(batch["x"] @ params[name] - batch["y"])
        for name in ("first", "second")
    }
    model = FunctionalModel(init=lambda: {name: jnp.zeros(2) for name in parts}, loss=parts)
    wrapper = {name: dict(optimizer=dict(type="SGD", lr=0.1)) for name in parts}
    return dict(model=model, optim_wrapper=wrapper, **changes)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_guard_of_several_optimizers_counts_the_drops_of_any_replica(make_runner, tmp_path, steps_per_call):
    x = np.ones((48, 2), np.float32)
    x[[7, 11, 15]] = np.nan  # examples of the second replica only, in the iterations 1, 2 and 3
    loader = dict(
        batch_size=4,
        dataset=ArrayDataset(dict(x=x, y=np.ones(48, np.float32))),
        sampler=dict(type="DefaultSampler", shuffle=False),
    )
    base = dict(
        train_dataloader=loader,
        parallel=dict(type="DataParallel", devices=2),
        train_cfg=dict(max_epochs=1, steps_per_call=steps_per_call),
    )
    limited = dict(type="NumericsGuardHook", max_in_row=3, interval=3)
    with pytest.raises(FloatingPointError, match="iterations 1 to 3 were dropped: the loss is not finite"):
        make_runner(tmp_path / "limited", **arguments(limited, **two_optimizers(**base))).train()
    state = make_runner(tmp_path / "unlimited", **arguments(GUARD, **two_optimizers(**base))).train()
    guard = state.hook_state["NumericsGuardHook"]
    assert (int(guard.dropped), int(guard.in_row), int(guard.last)) == (3, 3, 3)
    assert all(len({shard.data.item() for shard in leaf.addressable_shards}) == 1 for leaf in guard if leaf.ndim == 0)
    # nine updates of 12: each of two equal weights w has the error 1 - 2 w, which an update multiplies by 0.6
    error = 0.6**9
    for name in ("first", "second"):
        np.testing.assert_allclose(state.params[name], np.full(2, (1 - error) / 2), rtol=1e-5)


def test_no_checkpoint_is_saved_after_the_limit_is_exceeded(make_runner, tmp_path):
    saving = dict(checkpoint=dict(type="CheckpointHook", interval=3, by_epoch=False), logger=None)
    hook = dict(type="NumericsGuardHook", max_in_row=3, interval=50)
    runner = make_runner(**arguments(hook, default_hooks=saving))
    with pytest.raises(FloatingPointError, match="iterations 5 to 7"):
        runner.train()
    assert {path.name for path in (tmp_path / "run").glob("iter_*")} == {"iter_3", "iter_6"}


def test_a_replay_finds_the_operation_with_a_non_finite_result():
    from jengine.optim import OptimWrapper
    from jengine.train import create_train_state

    failing = FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch: jnp.log(params["w"] - batch["x"]),  # the logarithm of -1
    )
    wrapper = OptimWrapper(dict(type="SGD", lr=1.0))
    batch = {"x": np.ones(2, np.float32)}
    state = create_train_state(*failing.init(jax.random.key(0), batch), wrapper, rng=jax.random.key(1))
    findings = replay_step(failing, wrapper, [], state, batch, wrapper.hyperparams)
    assert findings.non_finite == {"loss": 1}
    assert "NaN from `log`" in findings.operation
    assert "the logarithm of -1" in findings.operation  # the line itself
    text = describe(0, findings)
    assert (
        "the step of iteration 0:\n  loss: nan\nnot finite, in the order of the computation:\n  loss: 1 element" in text
    )

    fine = replay_step(failing, wrapper, [], state, {"x": -np.ones(2, np.float32)}, wrapper.hyperparams)
    assert fine.non_finite == {}
    assert describe(3, fine).endswith("every number is finite")


def falling_data(bad):
    """Return 16 batches of one example; the gradient is x, and those of the iterations `bad` have a NaN offset."""
    offset = np.where(np.isin(np.arange(16), bad), np.nan, 0).astype(np.float32)
    dataset = ArrayDataset(dict(x=np.ones(16, np.float32), offset=offset))
    return dict(batch_size=1, dataset=dataset, sampler=dict(type="DefaultSampler", shuffle=False))


def falling(bad=(), loss=lambda params, batch: params["w"] * batch["x"] + batch["offset"], **changes):
    base = dict(
        model=FunctionalModel(init=lambda: {"w": jnp.ones(())}, loss=loss),
        train_dataloader=falling_data(bad),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.25)),
    )
    return arguments(**{**base, **changes})


SAVING = dict(
    logger=dict(type="LoggerHook", interval=2), checkpoint=dict(type="CheckpointHook", interval=4, by_epoch=False)
)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_non_finite_loss_stops_the_run_and_names_the_checkpoint_before_it(make_runner, tmp_path, steps_per_call):
    train_cfg = dict(max_epochs=1, steps_per_call=steps_per_call)
    runner = make_runner(**falling([6], default_hooks=SAVING, train_cfg=train_cfg))
    with pytest.raises(FloatingPointError) as caught:
        runner.train()
    path = tmp_path / "run" / "iter_4"
    assert str(caught.value) == (
        "the loss of iteration 6, counted from 0, is nan (noticed at iteration 7)"
    )
    place, newest, note = caught.value.__notes__
    assert place.startswith(
        "In iteration 6, the first value that is not finite is in the entry 'offset' of the batch"
    )
    assert newest == f"The newest checkpoint from before it is {path}."
    assert note == "the entry 'offset' of the batch has values that are not finite, in example 0: look at the data"
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == ["iter_4"]  # that of iteration 8 is not saved
    guard = dict(guard=dict(type="NumericsGuardHook"))
    state = make_runner(**falling([6], default_hooks={**SAVING, **guard}, resume=str(path))).train()
    assert float(state.params["w"]) == 1 - 0.25 * 15


def test_a_checkpoint_with_which_the_loss_is_not_finite_is_not_named(make_runner, tmp_path):
    # w is 1, 0.5, 0 and, since the gradient of the root at 0 is infinite while its value is finite, minus infinity
    def loss(params):
        return jnp.where(params["w"] > 0.25, params["w"], jnp.sqrt(params["w"]))

    saving = dict(logger=None, checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False))
    runner = make_runner(
        **falling(loss=loss, default_hooks=saving, optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.5)))
    )
    with pytest.raises(FloatingPointError, match=r"(?s)iteration 3, .* is nan.* before it is \S*/iter_2\."):
        runner.train()
    assert not all(np.isfinite(leaf) for leaf in jax.tree.leaves(runner.state.params))
    assert sorted(path.name for path in (tmp_path / "run").glob("iter_*")) == ["iter_1", "iter_2", "iter_3"]


def test_a_run_without_log_lines_and_checkpoints_is_checked_at_its_end(make_runner):
    runner = make_runner(**falling([15]))
    with pytest.raises(FloatingPointError, match=r"(?s)iteration 15, .* is nan.*No checkpoint was saved"):
        runner.train()
    assert runner.iter == 16


@pytest.mark.parametrize(("on_nonfinite", "warnings"), [("warn", 1), ("ignore", 0)])
def test_a_run_may_continue_with_a_non_finite_loss(make_runner, caplog, on_nonfinite, warnings):
    train_cfg = dict(max_epochs=1, on_nonfinite=on_nonfinite)
    runner = make_runner(**falling([3, 6, 9], default_hooks=SAVING, train_cfg=train_cfg))
    runner.train()
    assert runner.iter == 16
    found = [record.getMessage() for record in caplog.records if "counted from 0" in record.getMessage()]
    assert [text.startswith("The loss of iteration 3, counted from 0, is nan") for text in found] == [True] * warnings


@pytest.mark.parametrize(("steps_per_call", "counts"), [(1, 1), (1, 3), (4, 3)])
@pytest.mark.parametrize("bad", [0, 2, 3])  # in the first or the last iteration of a window, or in the second
def test_steps_that_a_loss_scale_skips_do_not_count(make_runner, steps_per_call, counts, bad):
    amp = dict(type="AmpOptimWrapper", dtype="float32", loss_scale=2.0**126, accumulative_counts=counts)
    huge = falling_data([])
    huge["dataset"].arrays["x"][bad] = 1e38  # twice 1e38 overflows, and so does the gradient of a loss that is scaled
    huge["dataset"].arrays["offset"][bad] = np.inf
    runner = make_runner(
        **falling(
            train_dataloader=huge,
            optim_wrapper={**amp, "optimizer": dict(type="SGD", lr=0.25)},
            default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
            train_cfg=dict(max_epochs=1, steps_per_call=steps_per_call),
        )
    )
    state = runner.train()
    assert int(optax.tree.get(state.opt_state, "skipped_steps")) == 1
    assert np.isinf(runner.message_hub.get_scalar("train/loss").data[0][bad])


def test_a_window_that_the_end_cuts_short_does_not_stop_a_run_with_a_loss_scale(make_runner):
    class Stop(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            runner.train_loop.stop_training = runner.iter == 4

    huge = falling_data([])
    huge["dataset"].arrays["x"][4] = 1e38
    huge["dataset"].arrays["offset"][4] = np.inf
    amp = dict(type="AmpOptimWrapper", dtype="float32", loss_scale=2.0**126, accumulative_counts=3)
    runner = make_runner(
        **falling(
            train_dataloader=huge,
            optim_wrapper={**amp, "optimizer": dict(type="SGD", lr=0.25)},
            custom_hooks=[Stop()],
        )
    )
    runner.train()
    assert runner.iter == 5
    assert np.isinf(runner.message_hub.get_scalar("train/loss").data[0][4])
