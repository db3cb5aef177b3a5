import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoint import load
from jengine.config import MODELS
from jengine.data import ArrayDataset
from jengine.extras.augment import SwitchedLoss
from jengine.extras.serving import BaseTTAModel
from jengine.hooks import Hook
from jengine.logging import Visualizer
from jengine.model import (
    CastModel,
    CrossEntropy,
    FunctionalModel,
    LinenModel,
    Precision,
    get_model,
)
from tests.refusals import check_refusal


class Watch(Hook):
    """Record the metrics of each step."""

    priority = "LOWEST"

    def __init__(self):
        self.outputs = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.outputs.append({name: float(value) for name, value in outputs.items()})


def model_reporting(*names):
    return FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, hyperparams: {"main_loss": params["w"], **{name: hyperparams[name] for name in names}},
    )


def test_the_epoch_reaches_the_loss_without_a_new_trace(make_runner):
    watch = Watch()
    runner = make_runner(
        model=model_reporting("epoch"),
        custom_hooks=[dict(type="SetEpochInfoHook"), watch],
        train_cfg=dict(max_epochs=3),
    )
    runner.train()
    assert [out["epoch"] for out in watch.outputs] == [0] * 4 + [1] * 4 + [2] * 4
    assert runner.programs.update.traces == 1


def test_a_parameter_warms_up_without_a_new_trace(make_runner):
    watch = Watch()
    hook = dict(type="WarmupParamHook", param_name="loss_lambda", value=0.5, warmup_epochs=1.25)
    runner = make_runner(model=model_reporting("loss_lambda"), custom_hooks=[hook, watch])
    runner.train()
    # epochs of 4 iterations, so that the value is reached at iteration 5
    np.testing.assert_allclose(
        [out["loss_lambda"] for out in watch.outputs], [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5], rtol=1e-6
    )
    assert runner.programs.update.traces == 1


def switched_loss_model():
    network = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)
    loss = SwitchedLoss(
        [
            lambda outputs, batch, hyperparams: {"loss": 0 * outputs.mean(), "seen": hyperparams["mixup"]},
            lambda outputs, batch, hyperparams: {"loss": 0 * outputs.mean() + 1, "seen": hyperparams["mixup"]},
        ]
    )
    return LinenModel(network, loss, inputs="x")


RECIPE = dict(
    type="SwitchRecipeHook",
    schedule=[
        dict(action_epoch=3, hyperparams=dict(mixup=0.25)),
        dict(action_epoch=1, hyperparams=dict(mixup=0.75)),
        dict(action_epoch=2, loss=1),
    ],
)


def test_loss_and_hyperparams_change_at_their_epochs_without_a_new_trace(make_runner):
    watch = Watch()
    runner = make_runner(
        model=switched_loss_model(), custom_hooks=[RECIPE, watch], train_cfg=dict(max_epochs=3)
    )
    runner.train()
    assert [out["loss"] for out in watch.outputs] == [0] * 4 + [1] * 8
    assert [out["seen"] for out in watch.outputs] == [0.75] * 8 + [0.25] * 4
    assert runner.programs.update.traces == 1


def test_a_resumed_run_has_the_recipe_of_its_epoch(make_runner):
    saving = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None))
    make_runner(
        model=switched_loss_model(), custom_hooks=[RECIPE], train_cfg=dict(max_epochs=2), **saving
    ).train()
    watch = Watch()
    again = make_runner(
        model=switched_loss_model(),
        custom_hooks=[RECIPE, watch],
        train_cfg=dict(max_epochs=3),
        resume=True,
        **saving,
    )
    again.train()
    assert [(out["loss"], out["seen"]) for out in watch.outputs] == [(1, 0.25)] * 4


def model_reporting_batches():
    """Return a model that reports the mean of its batch."""
    return FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch: {"loss": 0 * params["w"], "seen": batch["x"].mean()},
    )


def ten_times(batch, rng):
    return {**batch, "x": 10 * batch["x"]}


def plus_one(sample):
    return {"x": sample["x"] + 1}


ONES = ArrayDataset({"x": np.ones((8, 1), np.float32)})


@pytest.mark.parametrize("num_threads", [0, 1])
def test_pipeline_and_augmentation_change_at_their_epochs_without_a_new_trace(make_runner, num_threads):
    schedule = [
        dict(action_epoch=2, train_pipeline=[plus_one]),
        dict(action_epoch=3, batch_augments=ten_times, train_pipeline=None),
        dict(action_epoch=4, batch_augments=None),
    ]
    data = dict(type="TransformedDataset", dataset=ONES, pipeline=[plus_one, plus_one])
    settings = dict(
        model=model_reporting_batches(),
        train_dataloader=dict(batch_size=4, dataset=data, num_threads=num_threads),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None),
    )

    def train(epochs, **changes):
        watch = Watch()
        hooks = [dict(type="SwitchRecipeHook", schedule=schedule), watch]
        runner = make_runner(custom_hooks=hooks, train_cfg=dict(max_epochs=epochs), **settings, **changes)
        runner.train()
        assert runner.programs.update.traces == 1
        return [out["seen"] for out in watch.outputs]

    assert train(3) == [3.0, 3.0, 2.0, 2.0, 10.0, 10.0]
    assert train(4, resume=True) == [1.0, 1.0]


def test_a_pipeline_is_switched_once_and_a_later_resumed_run_starts_with_it(make_runner):
    hook = dict(type="PipelineSwitchHook", switch_epoch=1, switch_pipeline=plus_one)
    settings = dict(
        model=model_reporting_batches(),
        train_dataloader=dict(batch_size=4, dataset=dict(type="TransformedDataset", dataset=ONES)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None),
    )
    found = []
    for epochs, resume in ((2, False), (4, True)):
        watch = Watch()
        make_runner(custom_hooks=[hook, watch], train_cfg=dict(max_epochs=epochs), resume=resume, **settings).train()
        found.append([out["seen"] for out in watch.outputs])
    assert found == [[1.0, 1.0, 2.0, 2.0], [2.0] * 4]
    with pytest.raises(ValueError, match="the training loop must count epochs, got one that counts iterations"):
        make_runner(custom_hooks=[hook], train_cfg=dict(by_epoch=False, max_iters=2), **settings).train()


def test_each_batch_gets_one_of_several_augmentations_or_none(make_runner):
    augments = dict(augments=[ten_times, lambda batch, rng: {"x": 0 * batch["x"]}], probs=[0.4, 0.3])
    watch = Watch()
    runner = make_runner(
        model=model_reporting_batches(),
        train_dataloader=dict(batch_size=1, dataset=ONES),
        train_cfg=dict(max_epochs=10),
        custom_hooks=[dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=1, batch_augments=augments)]), watch],
    )
    runner.train()
    shares = [np.mean([out["seen"] == level for out in watch.outputs]) for level in (10, 0, 1)]
    np.testing.assert_allclose(shares, [0.4, 0.3, 0.3], atol=0.17)  # three deviations of 80 draws
    assert sum(shares) == 1


def test_labels_become_soft_in_training_alone(make_runner):
    images = np.random.RandomState(0).rand(8, 4, 4, 1).astype(np.float32)
    data = ArrayDataset({"image": images, "label": np.arange(8, dtype=np.int32) % 3})

    def logits(params, batch):
        return params["w"] * batch["image"].reshape(4, -1)[:, :3]

    def loss(params, batch):
        assert batch["label"].shape == (4, 3)
        return {"loss": CrossEntropy()(logits(params, batch), batch)["loss"], "top": batch["label"].max()}

    def predict(params, batch):
        assert batch["label"].dtype == jnp.int32
        return logits(params, batch)

    mixes = dict(augments=[dict(type="MixUp", alpha=1.0), dict(type="CutMix")], probs=[0.5, 0.5])
    augments = [dict(type="SoftLabels", num_classes=3), mixes, dict(type="RandomErasing")]
    found = []
    for steps_per_call in (1, 2):
        watch = Watch()
        runner = make_runner(
            model=FunctionalModel(lambda: {"w": jnp.ones(())}, loss, predict),
            train_dataloader=dict(batch_size=4, dataset=data),
            train_cfg=dict(max_epochs=2, steps_per_call=steps_per_call),
            val_dataloader=dict(batch_size=4, dataset=data),
            val_evaluator=dict(type="Accuracy"),
            custom_hooks=[dict(type="BatchAugmentHook", augments=augments), *[watch] * (steps_per_call == 1)], validates=True,
        )
        found.append(float(runner.train().params["w"]))
        if watch.outputs:
            tops = [out["top"] for out in watch.outputs]
            assert len(set(tops)) > 1
            assert min(tops) < 1  # mixed
    assert found[0] == pytest.approx(found[1], rel=1e-6)  # chunks draw the same
    assert found[0] != 1


@pytest.mark.parametrize(
    ("item", "changes", "words"),
    [
        (
            dict(train_pipeline=[plus_one]),
            {},
            ["`pipeline`", "got ArrayDataset"],
        ),
        (
            dict(loss=1),
            dict(train_cfg=dict(by_epoch=False, max_iters=2)),
            ["got one that counts iterations"],
        ),
        (
            dict(batch_augments=lambda batch, rng: {"x": batch["x"].astype(jnp.float16)}),
            {},
            ["'x'", "float32", "[4, 1]", "float16"],
        ),
        (dict(batch_augments=lambda batch, rng: {}), {}, ["'x'", "float32", "[4, 1]"]),
    ],
)
def test_a_recipe_that_does_not_match_the_run_is_refused(make_runner, item, changes, words):
    hook = dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, **item)])
    data = dict(batch_size=4, dataset=ONES)
    runner = make_runner(
        model=model_reporting_batches(), train_dataloader=data, custom_hooks=[hook], **changes
    )
    check_refusal(lambda: runner.train(), ValueError, *words)


def test_the_steps_of_a_chunk_have_the_hyperparams_of_single_steps(make_runner, tmp_path):
    def loss(params, batch, hyperparams):
        away = params["w"] - hyperparams["teacher"]["params"]["w"]
        numbers = hyperparams["lam"] + hyperparams["mixup"] + hyperparams["epoch"]
        return jnp.square(params["w"] - batch["x"].mean()) + 0.1 * numbers * away**2 + 0.01 * numbers * params["w"]

    def noisy(batch, rng):
        return {"x": batch["x"] + jax.random.normal(rng, batch["x"].shape)}

    schedule = [
        dict(action_epoch=1, hyperparams=dict(mixup=0.5), batch_augments=noisy),
        dict(action_epoch=2, hyperparams=dict(mixup=0.25), train_pipeline=[plus_one]),
        dict(action_epoch=3, batch_augments=None),
    ]
    found = []
    for steps in (1, 3):
        runner = make_runner(
            tmp_path / f"steps_{steps}",
            model=FunctionalModel(init=lambda: {"w": jnp.zeros(())}, loss=loss),
            train_dataloader=dict(batch_size=1, dataset=dict(type="TransformedDataset", dataset=ONES)),
            train_cfg=dict(max_epochs=3, steps_per_call=steps),
            custom_hooks=[
                dict(type="SwitchRecipeHook", schedule=schedule),
                dict(type="WarmupParamHook", param_name="lam", value=1.0, warmup_epochs=2),
                dict(type="SetEpochInfoHook"),
                dict(type="MeanTeacherHook", momentum=0.3),
            ],
        )
        state = runner.train()
        found.append((float(state.params["w"]), float(state.hook_state["MeanTeacherHook"].params["w"])))
    assert found[0] == found[1]
    assert 1.5 < found[0][0] < 2.1  # towards 2, the data of the last recipe


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        return nn.Dense(1, kernel_init=nn.initializers.zeros)(x)[..., 0]


def train_batch_norm(make_runner, tmp_path, name, changes=None, /, **hook):
    x = np.random.RandomState(0).randn(16, 2).astype(np.float32)
    data = dict(batch_size=4, dataset=ArrayDataset(dict(x=x)), sampler=dict(type="DefaultSampler", shuffle=False))
    model = LinenModel(Normed(), lambda outputs, batch: outputs, inputs="x")
    changes = {"custom_hooks": [dict(type="PreciseBNHook", **hook)], **(changes or {})}
    runner = make_runner(tmp_path / name, model=model, train_dataloader=data, **changes)
    return x, runner, runner.train().model_state["batch_stats"]["norm"]


@pytest.mark.parametrize(("num_samples", "batches"), [(8192, 4), (8, 2), (1, 1)])
def test_statistics_are_the_mean_of_those_of_the_batches(make_runner, tmp_path, num_samples, batches):
    x, runner, found = train_batch_norm(make_runner, tmp_path, "run", num_samples=num_samples)
    parts = x.reshape(4, 4, 2)[:batches]
    np.testing.assert_allclose(found["mean"], parts.mean(axis=1).mean(axis=0), atol=2e-6)
    np.testing.assert_allclose(found["var"], parts.var(axis=1).mean(axis=0), rtol=1e-5)
    assert runner.programs.update.traces == 1


def test_replicas_all_get_the_statistics_of_whole_batches(make_runner, tmp_path):
    x, _, found = train_batch_norm(
        make_runner, tmp_path, "run", dict(parallel=dict(type="DataParallel", devices=2)), num_samples=8
    )
    exact = x.reshape(4, 4, 2)[:2].mean(axis=1).mean(axis=0)
    np.testing.assert_allclose(found["mean"], [exact, exact], atol=2e-6)


def test_statistics_are_of_batches_as_the_traced_hooks_make_them(make_runner, tmp_path):
    def ten_times_x(batch, rng):
        return {**batch, "x": 10 * batch["x"]}

    recipe = dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=1, batch_augments=ten_times_x)])
    x, _, found = train_batch_norm(
        make_runner, tmp_path, "run", dict(custom_hooks=[dict(type="PreciseBNHook"), recipe])
    )
    np.testing.assert_allclose(found["mean"], 10 * x.mean(axis=0), atol=1e-5)


def test_statistics_are_not_recomputed_between_two_intervals(make_runner, tmp_path):
    _, _, found = train_batch_norm(make_runner, tmp_path, "run", interval=3)  # the run has two epochs
    x, _, _ = train_batch_norm(make_runner, tmp_path, "other", interval=2)
    assert not np.allclose(found["mean"], x.reshape(4, 4, 2).mean(axis=1).mean(axis=0), atol=1e-3)


@pytest.mark.parametrize("interval", [4, 5, 6, 7])
def test_an_iteration_loop_recomputes_statistics_at_the_interval(make_runner, tmp_path, interval):
    # six iterations over data of four batches, two of which they are computed from
    by_iter = dict(train_cfg=dict(by_epoch=False, max_iters=6))
    x, runner, found = train_batch_norm(make_runner, tmp_path, "run", by_iter, interval=interval, num_samples=8)
    means = x.reshape(4, 4, 2).mean(axis=1)
    done = interval if interval <= 6 else 0
    expected = means[:2].mean(axis=0) if done else np.zeros(2)
    for i in range(done, 6):  # the running means continue from there
        expected = 0.9 * expected + 0.1 * means[i % 4]
    np.testing.assert_allclose(found["mean"], expected, atol=2e-6)
    assert runner.programs.update.traces == 1


@pytest.mark.parametrize("num_threads", [0, 2])
def test_recomputing_statistics_does_not_change_the_order_of_the_data(make_runner, tmp_path, num_threads):
    class Seen(Hook):
        def __init__(self):
            self.batches = []

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            self.batches.append(np.asarray(data_batch["x"]).ravel().tolist())

    x = np.arange(16, dtype=np.float32)[:, None]
    model = LinenModel(Normed(), lambda outputs, batch: outputs, inputs="x")
    data = dict(batch_size=4, dataset=ArrayDataset(dict(x=x)), num_threads=num_threads)
    orders = []
    for train_cfg in (dict(by_epoch=False, max_iters=10), dict(max_epochs=3)):
        for hooks in ([], [dict(type="PreciseBNHook", num_samples=8, interval=1)]):
            seen = Seen()
            runner = make_runner(
                tmp_path / f"run{len(orders)}", model=model, train_dataloader=data, train_cfg=train_cfg,
                custom_hooks=[*hooks, seen],
            )  # fmt: skip
            runner.train()
            orders.append(seen.batches)
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
    assert orders[0] == orders[2][:10]


def test_a_model_without_batch_norms_logs_a_warning(make_runner, caplog):
    runner = make_runner(custom_hooks=[dict(type="PreciseBNHook")])
    runner.logger.addHandler(caplog.handler)
    runner.train()
    assert caplog.text.count("the model has no batch norm") == 1
    assert runner.iter == 8


def test_a_teacher_is_part_of_the_step_and_is_validated(make_runner):
    def loss(params, batch, hyperparams):
        away = params["w"] - hyperparams["teacher"]["params"]["w"]
        return {"loss": jnp.square(params["w"] - 1), "away": jnp.abs(away)}

    model = FunctionalModel(
        init=lambda: {"w": jnp.zeros(())}, loss=loss, predict=lambda params, batch: params["w"] + 0 * batch["y"]
    )
    watch = Watch()
    runner = make_runner(
        model=model, custom_hooks=[dict(type="MeanTeacherHook", momentum=0.5), watch], train_cfg=dict(max_epochs=1),
        val_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: predictions), validates=True,
    )  # fmt: skip
    state = runner.train()
    # with the rate 0.1 the weight is 0.2, 0.36, 0.488, 0.5904; the teacher goes half of the way each time
    np.testing.assert_allclose([out["away"] for out in watch.outputs], [0, 0.1, 0.13, 0.129], atol=1e-6)
    np.testing.assert_allclose(float(state.hook_state["MeanTeacherHook"].params["w"]), 0.4747, atol=1e-6)
    np.testing.assert_allclose(runner.validations[-1][2]["loss"], 0.4747, atol=1e-6)


@MODELS.register_module(force=True)
class Mirrored(BaseTTAModel):
    def augment(self, batch):
        return [batch, {**batch, "x": -batch["x"]}, {**batch, "x": batch["x"] + 1}]

    def merge_preds(self, predictions):
        return sum(predictions) / len(predictions)


def test_a_test_merges_the_predictions_of_all_views_and_validation_does_not(make_runner):
    model = FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params: params["w"],
        predict=lambda params, batch: batch["x"][:, 0],
    )
    x = np.array([[1.0], [2.0]], np.float32)
    data = dict(batch_size=2, dataset=ArrayDataset(dict(x=x)))
    metric = dict(type="MeanLoss", loss=lambda predictions, batch: predictions)
    runner = make_runner(
        model=model, custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=dict(type="Mirrored"))],
        val_dataloader=data, val_evaluator=metric, test_dataloader=data, test_cfg=dict(), test_evaluator=metric, validates=True,
    )  # fmt: skip
    assert runner.test()["loss"] == pytest.approx((1.5 - 1.5 + 2.5) / 3)
    assert runner.val()["loss"] == 1.5
    other = make_runner(
        custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=dict(type=lambda module: module))],
        test_dataloader=data, test_cfg=dict(), test_evaluator=metric, validates=True,
    )  # fmt: skip
    with pytest.raises(TypeError, match="tta_cfg must build a BaseTTAModel, got FunctionalModel"):
        other.test()


def test_get_model_returns_the_model_inside_wrappers():
    model = model_reporting()
    assert get_model(model) is model
    assert get_model(CastModel(Mirrored(CastModel(model, Precision())), Precision())) is model


class Pictures(Visualizer):
    """Write the image unchanged."""

    def add_datasample(
        self, name, image, data_sample=None, draw_gt=True, draw_pred=True, show=False, wait_time=0, step=0
    ):
        self.add_image(name, image, step)


@pytest.mark.usefixtures("only_new_garbage")  # EmptyCacheHook collects it
def test_a_run_with_the_host_hooks_traces_once_and_draws_its_test(make_runner, caplog):
    images = np.random.RandomState(0).randint(0, 255, (6, 4, 4, 3), np.uint8)
    data = dict(batch_size=4, dataset=ArrayDataset(dict(image=images), dict(classes=("a", "b"))))
    model = FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch: params["w"] * batch["image"].astype(jnp.float32),
        predict=lambda params, batch: batch["image"].mean(axis=(1, 2, 3)),
    )
    model.num_classes = 2
    metric = dict(type="MeanLoss", loss=lambda predictions, batch: predictions)
    names = ("EmptyCacheHook", "ClassNumCheckHook", "NaiveVisualizationHook")
    runner = make_runner(
        model=model, train_dataloader={**data, "drop_last": True}, val_dataloader=data, val_evaluator=metric,
        test_dataloader=data, test_cfg=dict(), test_evaluator=metric, visualizer=dict(type=Pictures),
        custom_hooks=[*(dict(type=name) for name in names), *(dict(type=name, interval=1) for name in ("CheckInvalidLossHook", "MemoryProfilerHook"))], validates=True,
    )  # fmt: skip
    runner.logger.addHandler(caplog.handler)
    runner.train()
    assert runner.programs.update.traces == 1
    assert "Memory " in caplog.text
    runner.test()
    pictures = pathlib.Path(runner.log_dir, "vis_data", "vis_image")
    assert sorted(path.name for path in pictures.iterdir()) == [
        f"sample_{i}_2.png" for i in range(6)
    ]  # padding is not drawn


def test_a_trace_is_written_for_tensorboard(make_runner, tmp_path):
    hook = dict(type="ProfilerHook", by_epoch=False, schedule=dict(skip_first=2, active=2))
    runner = make_runner(custom_hooks=[hook])
    runner.train()
    traces = list(pathlib.Path(runner.log_dir, "tf_tracing_logs", "iter_2").glob("plugins/profile/*/*.xplane.pb"))
    assert len(traces) == 1


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_run_that_diverges_between_two_checks_of_the_loss_keeps_a_finite_checkpoint(make_runner, steps_per_call):
    batches = [
        {"x": np.ones((4, 2), np.float32), "y": np.full(4, np.nan if i == 6 else 1, np.float32)} for i in range(8)
    ]
    runner = make_runner(
        train_dataloader=batches,
        train_cfg=dict(by_epoch=False, max_iters=16, steps_per_call=steps_per_call, on_nonfinite="ignore"),
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=2, max_keep_ckpts=2), logger=None
        ),
        custom_hooks=[dict(type="CheckInvalidLossHook", interval=16)],
    )
    with pytest.raises(FloatingPointError):
        runner.train()
    paths = [path.parent for path in pathlib.Path(runner.work_dir).glob("*/manifest.json")]
    names = {path.name for path in paths}
    finite = {path.name for path in paths if np.isfinite(load(path).params["w"]).all()}
    assert finite == {"iter_4", "iter_6"}
    assert names - finite == {"iter_14"}  # the newest; those between them are removed
