import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine import checkpoint
from jengine.config.paths import flatten
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)
EMA = dict(type="EMAHook", momentum=0.2)


def model_with_state(dtype=jnp.float32):
    """Return a linear model whose results depend on everything to restore: noise in the loss, and a running mean."""

    def predict(params, model_state, batch):
        return batch["x"] @ params["w"].astype(jnp.float32) + model_state["mean"]

    def loss(params, model_state, batch, rng):
        error = predict(params, model_state, batch) - batch["y"] + 0.1 * jax.random.normal(rng, batch["y"].shape)
        return {"loss": jnp.square(error)}, {"mean": 0.9 * model_state["mean"] + 0.1 * batch["y"].mean()}

    return FunctionalModel(
        init=lambda: ({"w": jnp.zeros(2, dtype)}, {"mean": jnp.zeros(())}), loss=loss, predict=predict
    )


class Watch(Hook):
    """Record the average after each iteration, and end the run before iteration `stop`, like a kill."""

    priority = "LOW"

    def __init__(self, stop=None):
        self.stop, self.params, self.averages = stop, [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.stop:
            raise KeyboardInterrupt

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.params.append(np.asarray(runner.state.params["w"]))
        if "EMAHook" in runner.state.hook_state:
            self.averages.append(np.asarray(runner.state.hook_state["EMAHook"].params["w"]))


def bits(tree):
    return {
        path: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()
        for path, x in flatten(tree).items()
    }


def ema_state(state):
    return state.hook_state["EMAHook"]


def arguments(*hooks, **changes):
    return {
        **dict(
            model=model_with_state(),
            train_cfg=dict(max_epochs=4),
            optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.05)),
            default_hooks=SAVE,
            custom_hooks=list(hooks),
        ),
        **changes,
    }


@pytest.mark.full_optimization
@pytest.mark.parametrize("optimizer", [dict(type="SGD", lr=0.1, momentum=0.9), dict(type="AdamW", lr=0.05)])
def test_training_has_the_same_bits_with_and_without_the_average(make_runner, tmp_path, optimizer):
    finals, validations = [], []
    for hooks in ([], [{**EMA, "update_buffers": True}]):
        runner = make_runner(
            work_dir=tmp_path / str(len(hooks)), model=model_with_state(), train_cfg=dict(max_epochs=5),
            optim_wrapper=dict(optimizer=optimizer), custom_hooks=hooks, validates=True,
        )  # fmt: skip
        finals.append(runner.train())
        validations.append(runner.validations[-1][2])
    assert finals[0].step == 20
    assert bits(finals[0].replace(hook_state={})) == bits(finals[1].replace(hook_state={}))
    assert finals[0].hook_state == {}  # no leaves where there is no average
    assert validations[0] != validations[1]


def test_the_average_has_the_values_of_its_formula_and_begins_without_a_new_trace(make_runner):
    watch = Watch()
    runner = make_runner(model=model_with_state(), custom_hooks=[{**EMA, "begin_iter": 3}, watch], validates=True)
    state = runner.train()
    expected = watch.params[:3]  # copies; the third is the first value of the average
    for params in watch.params[3:]:
        expected.append(0.8 * expected[-1] + 0.2 * params)
    np.testing.assert_allclose(watch.averages, expected, rtol=1e-5)
    assert ema_state(state).steps == 6  # of 8 iterations, from the third on
    assert runner.programs.update.traces == 1


def test_validation_and_test_use_the_averages_without_changing_the_state(make_runner):
    x = np.ones((4, 2), np.float32)
    runner = make_runner(
        model=model_with_state(), custom_hooks=[{**EMA, "evaluate_on_origin": True}],
        test_dataloader=dict(batch_size=4, dataset=ArrayDataset(dict(x=x, y=x[:, 0]))),
        test_cfg=dict(), test_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: predictions), validates=True,
    )  # fmt: skip
    state = runner.train()
    before = bits(state)
    metrics = runner.test()
    # the prediction for (1, 1): both weights and the running mean, which is the newest and not averaged
    assert metrics["loss"] == pytest.approx(
        float(ema_state(state).params["w"].sum() + state.model_state["mean"]), rel=1e-6
    )
    assert metrics["loss_origin"] == pytest.approx(float(state.params["w"].sum() + state.model_state["mean"]), rel=1e-6)
    assert metrics["loss"] != metrics["loss_origin"]
    assert runner.val() == runner.validations[-2][2]
    assert bits(runner.state) == before


def test_a_checkpoint_has_the_averages_as_its_parameters(make_runner, tmp_path):
    state = make_runner(**arguments({**EMA, "update_buffers": True})).train()
    saved = checkpoint.load(tmp_path / "run")
    assert bits(saved.params) == bits(ema_state(state).params)
    assert bits(saved.state["model_state"]) == bits(ema_state(state).model_state)
    raw = saved.state["hook_state"]["EMAHook"]
    assert bits(raw["params"]) == bits(state.params)
    assert bits(raw["model_state"]) == bits(state.model_state)
    assert raw["steps"] == 16
    assert saved.meta["exchanged"] == {
        "params": "hook_state.EMAHook.params",
        "model_state": "hook_state.EMAHook.model_state",
    }
    restored, _ = checkpoint.restore(tmp_path / "run", vars(state))  # a whole state: both are in their places again
    assert bits(restored) == bits(dict(vars(state)))
    weights, _ = checkpoint.restore(tmp_path / "run", {"params": state.params})
    assert bits(weights["params"]) == bits(ema_state(state).params)
    without, _ = checkpoint.restore(tmp_path / "run", {"params": state.params, "hook_state": {}})
    assert bits(without["params"]) == bits(state.params)


@pytest.mark.parametrize(
    ("ema", "changes", "saved"),
    [
        (dict(), dict(), 8),
        (dict(begin_iter=10, update_buffers=True), dict(), 8),  # before averaging begins
        (dict(begin_iter=5), dict(model=model_with_state(jnp.bfloat16)), 12),  # with averages in float32
        (dict(ema_type="CosineEMA", momentum=0.3), dict(), 12),
        (dict(count_by="iter"), dict(accumulate=3), 10),
        (dict(count_by="update"), dict(accumulate=3), 10),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(make_runner, tmp_path, ema, changes, saved):
    ema, changes = {**EMA, **ema}, dict(changes)
    saving = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=2), logger=None)
    counts = changes.pop("accumulate", 1)
    changes["optim_wrapper"] = dict(optimizer=dict(type="Adam", lr=0.05), accumulative_counts=counts)
    changes["train_cfg"] = dict(by_epoch=False, max_iters=16, val_interval=4)
    expected = make_runner(work_dir=tmp_path / "whole", **arguments(ema, default_hooks=saving, **changes), validates=True).train()
    start = tmp_path / "whole" / f"iter_{saved}"
    again = make_runner(**arguments(ema, default_hooks=saving, **changes), resume=start, validates=True)
    assert bits(again.train()) == bits(expected)


@pytest.mark.full_optimization
def test_without_the_hook_a_resumed_run_continues_from_the_raw_weights(make_runner, tmp_path, caplog):
    expected = make_runner(work_dir=tmp_path / "plain", **arguments()).train()
    make_runner(**arguments({**EMA, "update_buffers": True}, train_cfg=dict(max_epochs=2))).train()
    runner = make_runner(**arguments(), resume=True)
    assert bits(runner.train()) == bits(expected)
    assert read_log(runner).count("has a state of EMAHook, which is not a hook of this run") == 1


@pytest.mark.full_optimization
def test_without_an_average_in_the_checkpoint_it_starts_from_the_weights(make_runner, tmp_path):
    first = make_runner(**arguments(train_cfg=dict(max_epochs=2))).train()
    watch = Watch()
    runner = make_runner(**arguments(EMA, watch), resume=True)
    state = runner.train()
    assert read_log(runner).count("has no state of EMAHook, which starts from the weights of the checkpoint") == 1
    assert ema_state(state).steps == 8  # counted from the resume on
    np.testing.assert_array_equal(watch.averages[0], watch.params[0])  # the first of them is a copy
    plain = make_runner(work_dir=tmp_path / "plain", **arguments()).train()
    assert bits(state.replace(hook_state={})) == bits(plain)
    assert first.step == 8


def test_buffers_missing_in_the_checkpoint_are_an_error_that_names_them(make_runner):
    make_runner(**arguments(EMA, train_cfg=dict(max_epochs=1))).train()
    watch = Watch()
    runner = make_runner(**arguments({**EMA, "update_buffers": True}, watch), resume=True)
    with pytest.raises(checkpoint.CheckpointMismatchError, match=r"missing +hook_state\.EMAHook\.model_state\.mean"):
        runner.train()
    assert watch.params == []  # nothing is trained


class Start(Hook):
    """Record the initial state of training."""

    def before_train(self, runner):
        self.state = jax.tree.map(jnp.copy, runner.state)
        self.iter = runner.iter


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loading_weights_starts_both_from_the_averages(make_runner, tmp_path, dtype):
    trained = make_runner(**arguments(EMA, model=model_with_state(dtype))).train()
    start = Start()
    runner = make_runner(
        work_dir=tmp_path / "tuned", **arguments(EMA, start, model=model_with_state(dtype)), load_from=tmp_path / "run"
    )
    runner.train()
    assert start.iter == 0
    assert start.state.params["w"].dtype == dtype
    np.testing.assert_array_equal(start.state.params["w"], ema_state(trained).params["w"].astype(dtype))
    np.testing.assert_array_equal(ema_state(start.state).params["w"], start.state.params["w"].astype(jnp.float32))
    assert ema_state(start.state).steps == 0
    assert "Loaded the averaged weights" in read_log(runner)


def test_a_later_run_evaluates_to_the_same_metrics(make_runner, tmp_path):
    trained = make_runner(**arguments(EMA), validates=True)
    trained.train()
    runner = make_runner(work_dir=tmp_path / "test", **arguments(EMA), load_from=tmp_path / "run", validates=True)
    assert runner.val() == trained.validations[-1][2]


def test_early_stopping_ends_a_run_and_a_resumed_one_at_the_same_epoch(make_runner, tmp_path):
    stopping = dict(type="EarlyStoppingHook", monitor="loss", min_delta=1e6, patience=3)
    changes = dict(train_cfg=dict(max_epochs=9))
    whole = make_runner(work_dir=tmp_path / "whole", **arguments(stopping, **changes), validates=True)
    whole.train()
    assert whole.epoch == 4  # the first validation is the best, three more do not improve
    broken = make_runner(**arguments(stopping, Watch(13), **changes), validates=True)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    runner = make_runner(**arguments(stopping, **changes), resume=True, validates=True)
    runner.train()
    assert runner.epoch == 4
    assert "did not improve in the last 3 validations" in read_log(runner)


def read_log(runner):
    return pathlib.Path(runner.log_dir, f"{runner.timestamp}.log").read_text()


def test_several_averages_are_evaluated_and_stored_by_name(make_runner, tmp_path):
    others = dict(fast=dict(momentum=0.4), uniform=dict(ema_type="StochasticWeightAverage"))
    watch = Watch()
    runner = make_runner(
        model=model_with_state(),
        custom_hooks=[dict(EMA, others=others, begin_iter=2, evaluate_on_origin=True), watch],
        default_hooks=SAVE, validates=True,
    )
    runner.train()
    fast = slow = mean = watch.params[1]  # a copy, in the second iteration
    for count, params in enumerate(watch.params[2:], 2):
        slow, fast, mean = slow + 0.2 * (params - slow), fast + 0.4 * (params - fast), mean + (params - mean) / count
    state = ema_state(runner.state)
    for found, expected in (
        (state.params, slow),
        (state.others["fast"].params, fast),
        (state.others["uniform"].params, mean),
    ):
        np.testing.assert_allclose(found["w"], expected, rtol=1e-5)
    names = ["loss", "loss_fast", "loss_uniform", "loss_origin"]
    assert list(runner.validations[-1][2]) == names
    assert len({runner.validations[-1][2][name] for name in names}) == 4
    path = str(tmp_path / "run" / "epoch_2")
    item = checkpoint.load(path).state["hook_state"]["EMAHook"]["others"]["fast"]["params"]
    np.testing.assert_array_equal(item["w"], state.others["fast"].params["w"])
    resumed = make_runner(
        model=model_with_state(), custom_hooks=[dict(EMA, others=others, begin_iter=2)], resume=path, default_hooks=SAVE, validates=True
    )
    assert bits(resumed.train()) == bits(runner.state)
    loaded = make_runner(
        load_from=dict(path=path, item="hook_state.EMAHook.others.fast.params", exclude=["mean"]),
        model=model_with_state(), validates=True,
    )
    loaded.val()
    np.testing.assert_array_equal(loaded.state.params["w"], state.others["fast"].params["w"])


def test_strict_load_false_also_lets_load_from_keep_what_it_has_no_values_for(make_runner):
    model = FunctionalModel(
        lambda: {"w": jnp.ones(()), "b": jnp.full((), 2.0)}, lambda p, batch: p["w"] * p["b"] * batch
    )

    def build(hook):
        return make_runner(
            model=model, train_dataloader=[np.ones(2, np.float32)], train_cfg=dict(max_epochs=1), custom_hooks=[hook],
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)), load_from={"w": np.float32(5)},
        )  # fmt: skip

    with pytest.raises(ValueError, match="does not fit"):
        build(dict(type="EMAHook")).train()
    runner = build(dict(type="EMAHook", strict_load=False))
    assert {name: float(value) for name, value in runner.train().params.items()} == {"w": 5.0, "b": 2.0}
