"""What a Runner refuses: a call, its error, and the words that must be in the message. No row compiles a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jengine.config.errors import ConfigError, UnknownNameError
from jengine.config.registry import LOOPS
from jengine.data import ArrayDataset, DataLoader, IterableLoader
from jengine.hooks import Hook
from jengine.model import CrossEntropy, FunctionalModel, LinenModel, NnxModel
from tests.refusals import check_refusal, check_row
from tests.runner.conftest import build_runner, make_dataset

X = np.zeros((16, 2), np.float32)
SGD = dict(optimizer=dict(type="SGD", lr=0.1))
SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=3), logger=None)


@pytest.fixture(scope="module")
def epoch_3(tmp_path_factory):
    """The checkpoint of a run of three epochs."""
    work_dir = tmp_path_factory.mktemp("trained")
    build_runner(work_dir, train_cfg=dict(max_epochs=3), default_hooks=SAVE).train()
    return str(work_dir / "epoch_3")


class Short(Hook):
    """Take fewer arguments than its call has."""

    def after_train_iter(self, runner):
        """Do nothing."""


class MisspeltStage(Hook):
    """Have a stage that no run calls."""

    def after_train_itr(self, runner, batch_idx, data_batch=None, outputs=None):
        """Do nothing."""


class Freeze(Hook):
    """Freeze parameters whose paths have a part."""

    def __init__(self, part):
        self.part = part

    def before_train(self, runner):
        """Freeze them."""
        runner.hyperparams[f"frozen:{self.part}"] = 1.0


class Linear(nn.Module):
    @nn.compact
    def __call__(self, image):
        return nn.Dense(2)(image)


class HalfNet(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(2, 2, rngs=rngs)
        self.layer(self.missing)


class Batches(list):
    """Batches that shall be prefetched."""

    device_prefetch = -1


def run_epoch(self):
    """Do nothing."""


def two_parts(names=()):
    """Return a model with a head and a body, with one loss, or one for each of several optimizers."""

    def loss(params, batch):
        return params["head"]["w"] + params["body"]["w"]

    return FunctionalModel(
        init=lambda: {name: {"w": jnp.zeros(())} for name in ("head", "body")},
        loss=dict.fromkeys(names, loss) if names else loss,
    )


def hooks(*hooks):
    return dict(custom_hooks=list(hooks))


def images(**arrays):
    """Return a model of images with labels, and its data."""
    arrays = dict(image=np.zeros((16, 3), np.float32), label=np.zeros(16, int)) | arrays
    loader = dict(dataset=ArrayDataset(arrays), batch_size=4)
    return dict(model=LinenModel(Linear(), CrossEntropy()), train_dataloader=loader)


def float32_model():
    """Return a model that computes in float32 whatever the policy is."""
    return FunctionalModel(lambda: {"w": jnp.ones(2)}, lambda params, batch: batch["x"] @ params["w"] - batch["y"])


def step_of_single_examples(state, batch, ctx):
    losses, grads = jax.vmap(jax.value_and_grad(lambda params, x: params["w"] @ x), (None, 0))(state.params, batch["x"])
    return ctx.apply(state, grads, {"loss": losses.mean()})


def linen(module):
    return dict(model=dict(type="LinenModel", module=module, loss=dict(type="CrossEntropy")))


def prepare(runner):
    runner.prepare_training()
    return runner


ACCURACY = dict(type="Accuracy", label="y")
VALIDATES = dict(val_dataloader=dict(batch_size=4, dataset=make_dataset(6)), val_cfg=dict(), val_evaluator=ACCURACY)
STEP = dict(type="StepLR", step_size=1)
SECOND = "a second"
CANNOT_AUTOCAST = (ValueError, "bfloat16", "got float32", "`outputs = jengine.model.autocast(apply_fn)")
ON_HOST = "train_dataloader yields entries that stay on the host"
# By the constructor: the changes, the error and the words
CONFIGS = {
    "hooks": {
        "an interval of 0": (hooks(dict(type="CheckInvalidLossHook", interval=0)), ValueError, "`custom_hooks[0].interval`", "at least 1", "got 0"),
        "a misspelt default hook": (dict(default_hooks=dict(loggger=dict(type="LoggerHook"))), ConfigError, "`default_hooks`", "'loggger'", "did you mean 'logger'"),
        "a second logger": (dict(default_hooks={}) | hooks(dict(type="LoggerHook", interval=5)), ConfigError, "LoggerHook", SECOND, "default_hooks=dict(logger=...)"),
        "a second hook of schedules": (hooks(dict(type="ParamSchedulerHook")), ConfigError, "ParamSchedulerHook", SECOND),
        "a second average": (hooks(dict(type="EMAHook"), dict(type="EMAHook")), ConfigError, "EMAHook", SECOND),
        "two hooks that write the same files": (dict(default_hooks={}) | hooks("CheckpointHook"), ConfigError, "`CheckpointHook.out_dir`", "same file names"),
        "a misspelt stage": (hooks(MisspeltStage()), ConfigError, "`MisspeltStage.after_train_itr`", "did you mean 'after_train_iter'"),
        "a stage without its arguments": (hooks(Short()), ConfigError, "`Short.after_train_iter`", "(self, runner, batch_idx, data_batch, outputs)", "got (self, runner)"),
        "a misspelt metric": (VALIDATES | hooks(dict(type="EarlyStoppingHook", monitor="acuracy/top1")), ConfigError, "`EarlyStoppingHook.monitor`", "val_evaluator", "did you mean 'accuracy/top1'"),
        "the best of a metric without a rule": (
            VALIDATES | dict(val_evaluator=dict(type="ConfusionMatrix", num_classes=10), default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best="auto"))),
            ValueError, "'confusion_matrix'", "greater or less",
        ),
    },
    "loops": {
        "intervals in another order": (dict(train_cfg=dict(max_epochs=9, dynamic_intervals=[(5, 2), (3, 1)])), ConfigError, "`train_cfg.dynamic_intervals`", "ascending", "[(5, 2), (3, 1)]"),
        "two intervals from one epoch": (dict(train_cfg=dict(max_epochs=9, dynamic_intervals=[(5, 2), (5, 1)])), ConfigError, "`train_cfg.dynamic_intervals`", "duplicates"),
        "an interval of 0 from an epoch": (dict(train_cfg=dict(max_epochs=2, dynamic_intervals=[(1, 0)])), ConfigError, "`train_cfg.dynamic_intervals[0][1]`", "at least 1", "got 0"),
        "iterations by epoch": (dict(train_cfg=dict(by_epoch=True, max_iters=9)), ConfigError, "`train_cfg.by_epoch`", "False", "max_iters"),
        "a number as a loop": (VALIDATES | dict(val_cfg=5), TypeError, "`val_cfg`", "`run`", "got 5"),
        "a time that is no duration": (dict(train_cfg=dict(max_epochs=2, max_time="24")), ConfigError, "`train_cfg.max_time`", "'90s'", "got '24'"),
        "more iterations than the step counts": (dict(train_cfg=dict(by_epoch=False, max_iters=2**31)), ConfigError, "`train_cfg.max_iters`", "2147483647", "got 2147483648"),
        "what follows a new compilation": (dict(train_cfg=dict(max_epochs=1, on_recompile="Warn")), ValueError, "on_recompile`", "'warn'", "'raise'", "None", "got 'Warn'"),
        **{
            f"steps_per_call={value!r}": (dict(train_cfg=dict(max_epochs=1, steps_per_call=value)), (TypeError, ValueError), "steps_per_call`", f"got {value!r}")
            for value in (0, -1, 2.5, True, "many")
        },
    },
    "other sections": {
        "a type of a module that is a number": (linen(dict(type=5)), TypeError, "`type`", "name or a class", "got 5"),
        "a module that is a number": (linen(5), TypeError, "`module`", "Linen module", "got 5"),
        "a constructor that is a number": (dict(optim_wrapper=dict(constructor=5, **SGD)), TypeError, "`constructor`", "name or a class", "got 5"),
        "a schedule of no steps": (dict(param_scheduler=[dict(type="StepLR", step_size=0)]), ConfigError, "`param_scheduler[0].step_size`", "above 0", "got 0"),
        "a sampler that shuffles a text": (
            dict(train_dataloader=dict(batch_size=4, dataset=make_dataset(16), sampler=dict(type="DefaultSampler", shuffle="no"))),
            TypeError, "`train_dataloader.sampler.shuffle`", "True or False", "got 'no'",
        ),
    },
}  # fmt: skip
# By `train`, before its first step
RUNS = {
    "a schedule that ends before it begins": (dict(param_scheduler=dict(**STEP, begin=2, end=1)), ValueError, "`end`", "begin=2", "end=1"),
    "milestones in another order": (dict(param_scheduler=dict(type="MultiStepLR", milestones=[3, 1])), ValueError, "`milestones`", "ascending"),
    "a schedule of an unknown setting": (dict(param_scheduler=dict(type="StepParamScheduler", param_name="mometum", step_size=1)), KeyError, "`mometum`"),
    "a plateau of an unknown metric": (VALIDATES | dict(param_scheduler=dict(type="ReduceOnPlateauLR", monitor="accuracy/top5")), ConfigError, "`param_scheduler.monitor`", "val_evaluator"),
    "a scale for batches of unknown size": (
        dict(train_dataloader=dict(dataset=make_dataset(16), batch_axis=None), auto_scale_lr=dict(enable=True, base_batch_size=16)), ConfigError, "`auto_scale_lr.enable`", "unknown size",
    ),
    "images that stay on the host": (images(image=np.array([[None], [1]] * 8, object)), UnknownNameError, ON_HOST, "image (object)"),
    "labels that stay on the host": (images(label=np.array(["cat", "dog"] * 8)), UnknownNameError, ON_HOST, "label (<U3)"),
    "integers beyond int32": (
        dict(train_dataloader=dict(dataset=ArrayDataset(dict(x=X, y=X[:, 0], id=np.arange(16) + 2**40)), batch_size=4)), ValueError, "`train_dataloader`", "int32", "'id'",
    ),
    "a network in float32 with AMP": (dict(model=float32_model(), optim_wrapper=dict(type="AmpOptimWrapper", **SGD)), *CANNOT_AUTOCAST),
    "a network in float32 with a policy": (dict(model=float32_model(), precision="bfloat16"), *CANNOT_AUTOCAST),
    "a part that no parameter has": (dict(model=two_parts(), **hooks(Freeze("heads"))), ValueError, "hyperparams['frozen:heads']", "'head.w'"),
    "a part that no parameter of several optimizers has": (
        dict(model=two_parts(["head", "body"]), optim_wrapper=dict(head=SGD, body=SGD), **hooks(Freeze("heads"))), ValueError, "hyperparams['frozen:heads']", "'head.w'",
    ),
    "a network whose constructor is wrong": (dict(model=NnxModel(HalfNet, loss=lambda outputs, batch: 0.0)), AttributeError, "missing"),
    "gradients of single examples on replicas": (
        dict(
            model=FunctionalModel(lambda: {"w": jnp.ones(2)}, train_step=step_of_single_examples),
            optim_wrapper=optax.contrib.dpsgd(0.1, 1.0, 1.0, seed=0), parallel=dict(type="DataParallel", devices=4),
        ),
        ValueError, "`grads`", "float32[1,2] for 'w'",
    ),
    "one loss for several optimizers": (
        dict(model=two_parts(), optim_wrapper=dict(head=optax.sgd(0.1), body=optax.sgd(0.1))), KeyError, "one loss", "one optimizer", "optax.partition",
    ),
}  # fmt: skip
WITHOUT_AVERAGE = dict(type="EMAHook", strict_load=True)
# By other calls
CALLS = {
    "an epoch of a loop over iterations": (lambda: type("Wrong", (LOOPS.get("IterBasedTrainLoop"),), {"run_epoch": run_epoch}), TypeError, "`Wrong.run_epoch`", "epoch-based"),
    "a prefetch below 0": (lambda: DataLoader([1], batch_size=1, device_prefetch=-1), ValueError, "device_prefetch`", "at least 0", "got -1"),
    "a prefetch of other data below 0": (lambda: IterableLoader(Batches(), train=True), ConfigError, "`device_prefetch`", "at least 0", "got -1 of Batches"),
    "predictions of a number": (lambda make_runner: make_runner().predict(7), TypeError, "`data`", "arrays, a dataset, a dataloader", "got int"),
    "predictions without a batch axis": (
        lambda make_runner: make_runner(model=FunctionalModel(lambda: {"w": jnp.ones(())}, lambda params: params["w"], lambda batch: {"mean": batch["x"].mean()})).predict(dict(x=X[:10])),
        ValueError, "10 examples", "{'mean': ()}",
    ),
    "the module of functions": (lambda make_runner: prepare(make_runner()).module(), TypeError, "LinenModel", "NnxModel", "got FunctionalModel"),
    "the rate of an unknown optimizer": (lambda make_runner: make_runner().set_lr(0.1, optimizer="gen"), ValueError, "`optimizer`", "['']", "got 'gen'"),
    # resumes
    "fewer epochs than are trained": (lambda make_runner, epoch_3: make_runner(resume=epoch_3).train(), ConfigError, "`train_cfg.max_epochs`", "at least 3", "epoch_3", "got 2"),
    "fewer iterations than are trained": (
        lambda make_runner, epoch_3: make_runner(resume=epoch_3, train_cfg=dict(by_epoch=False, max_iters=11)).train(), ConfigError, "`train_cfg.max_iters`", "at least 12", "got 11",
    ),
    "no average where it is required": (
        lambda make_runner, epoch_3: make_runner(resume=epoch_3, train_cfg=dict(max_epochs=9), **hooks(WITHOUT_AVERAGE)).train(), ValueError, "checkpoint", "average", "strict_load=True",
    ),
    "groups that the optimizer does not have": (lambda make_runner: prepare(make_runner()).reset_optimizer(["head"]), ValueError, "`groups`", "[0]", "got ['head']"),
}  # fmt: skip


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for rows in CONFIGS.values() for name, row in rows.items()])
def test_what_a_config_of_a_run_cannot_be_is_refused_by_the_constructor(row, make_runner):
    changes, *expected = row
    check_refusal(lambda: make_runner(**changes), *expected)


@pytest.mark.parametrize("row", RUNS.values(), ids=RUNS)
def test_what_depends_on_the_model_and_the_data_is_refused_before_the_first_step(row, make_runner):
    changes, *expected = row
    runner = make_runner(**changes)
    check_refusal(runner.train, *expected)
    assert runner.iter == 0


@pytest.mark.parametrize("row", CALLS.values(), ids=CALLS)
def test_what_a_run_cannot_do_is_refused(row, request):
    check_row(request, *row)
