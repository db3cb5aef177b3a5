"""Attributes of models and losses that hooks change during training."""

import abc
import copy
import dataclasses
import logging
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel, Model, get_model
from tests.runner.conftest import build_runner

START = 5  # iterations without the dense loss


class DenseCL(Model):
    """Model with a loss as in MMSelfSup's document, which reads an attribute: 1 - 1 * lambda, and 9 * lambda."""

    loss_lambda = 0.5
    momentum = 0.0  # which is also a hyperparameter of SGD
    is_dense = True

    def init(self, rng, batch):
        return {"w": jnp.zeros(())}, {}

    def loss(self, params, model_state, batch, *, rng, hyperparams):
        zero = 0 * params["w"]
        dense = 9 + zero + self.momentum if self.is_dense else zero
        return dict(loss_single=(1 + zero) * (1 - self.loss_lambda), loss_dense=dense * self.loss_lambda), model_state

    def predict(self, params, model_state, batch):
        return jnp.full(len(batch["x"]), self.loss_lambda)


class PrintedHook(Hook):
    """The hook of MMSelfSup's document, which assigns the attribute in each iteration, and records the dense loss."""

    def __init__(self, name="loss_lambda", value=0.5, first=0.0, stage="before_train_iter", start=START):
        self.name, self.value, self.first, self.stage, self.start = name, value, first, stage, start
        self.dense = []

    def before_train_epoch(self, runner):
        if self.stage == "before_train_epoch":
            self.assign(runner)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.stage == "before_train_iter":
            self.assign(runner)

    def assign(self, runner):
        if runner.iter >= self.start:
            setattr(get_model(runner.model), self.name, self.value)
        elif self.first is not None:
            setattr(get_model(runner.model), self.name, self.first)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.dense.append(float(outputs["loss_dense"]))


def run(tmp_path, hooks, model=None, **changes):
    arguments = dict(
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(dict(x=np.zeros((40, 1), np.float32)))),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2)),
    )
    runner = build_runner(tmp_path, model or DenseCL(), custom_hooks=hooks, **{**arguments, **changes})
    runner.train()
    return runner


@pytest.mark.parametrize("stage", ["before_train_iter", "before_train_epoch"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(precision="float32", train_cfg=dict(max_epochs=2, steps_per_call=5)),
        dict(parallel=dict(type="DataParallel")),
        dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2)),
    ],
    ids=["plain", "a precision, in chunks", "replicas", "accumulation"],
)
def test_a_number_that_a_hook_assigns_holds_from_the_next_step_on_without_a_new_trace(tmp_path, stage, changes):
    hook = PrintedHook(stage=stage)
    runner = run(tmp_path, [hook], **changes)
    assert hook.dense == [0.0] * START + [4.5] * (10 - START)  # 9 * lambda
    assert runner.programs.update.traces == 1
    assert get_model(runner.model).loss_lambda == 0.5


class OwnStep(DenseCL):
    """Model with a step of its own."""

    def train_step(self, state, batch, ctx):
        def loss(params):
            return self.loss(params, {}, batch, rng=ctx.rng, hyperparams=ctx.hyperparams)

        return ctx.update(state, loss)


class TwoPhases(DenseCL):
    """Model for two optimizers."""

    def init(self, rng, batch):
        return {"a": {"w": jnp.zeros(())}, "b": {"w": jnp.zeros(())}}, {}

    def phase_loss(self, phase, params, *args, **kwargs):
        return self.loss(params[phase], *args, **kwargs)


@pytest.mark.parametrize("steps_per_call", [1, 5])
@pytest.mark.parametrize("kind", [OwnStep, TwoPhases])
def test_assigned_numbers_are_inputs_of_other_steps(tmp_path, kind, steps_per_call):
    sgd = dict(optimizer=dict(type="SGD", lr=0.1))
    hook = PrintedHook()
    changes = dict(optim_wrapper=dict(a=sgd, b=sgd)) if kind is TwoPhases else dict(optim_wrapper=sgd)
    train_cfg = dict(max_epochs=2, steps_per_call=steps_per_call)
    runner = run(tmp_path, [hook], kind(), train_cfg=train_cfg, **changes)
    assert hook.dense == [0.0] * START + [4.5] * (10 - START)
    assert runner.programs.update.traces == 1


def test_the_built_in_hook_controls_the_attribute_that_the_loss_reads(tmp_path):
    recorder = PrintedHook("unused", first=None, start=99)
    runner = run(tmp_path, [dict(type="DenseCLHook", start_iters=START), recorder])
    assert recorder.dense == [0.0] * START + [4.5] * (10 - START)
    assert runner.programs.update.traces == 1
    assert runner.model.loss_lambda == 0.5


def test_a_number_that_is_first_assigned_in_the_middle_compiles_the_step_once_more(tmp_path, caplog):
    hook = PrintedHook(first=None, value=0.25)
    runner = run(tmp_path, [hook], train_cfg=dict(max_epochs=2, on_recompile="warn"))
    assert hook.dense == [4.5] * START + [2.25] * (10 - START)
    assert runner.programs.update.traces == 2
    assert "loss_lambda" in caplog.text  # the warning about the new trace names what has changed


@pytest.mark.parametrize(("name", "inputs"), [("seen", {"seen": 3}), ("_seen", {})])
def test_a_public_number_is_an_input_whether_the_step_reads_it_or_not_and_a_private_one_never(tmp_path, name, inputs):
    model = DenseCL()
    setattr(model, name, 0)
    runner = run(tmp_path, [PrintedHook(name, value=3, first=0)], model)
    assert (getattr(model, name), runner.programs.update.traces, dict(runner.hyperparams)) == (3, 1, inputs)


@pytest.mark.parametrize(
    ("name", "value", "first", "error", "message", "dense"),
    [
        ("momentum", 0.5, 0.0, ConfigError, "`momentum` .* another name .* got 0.0", []),  # one of the optimizer
        ("is_dense", False, True, RuntimeError, "`DenseCL.is_dense` .* True; got False. Set a number", [4.5] * 6),  # until the next line of the log
    ],
    ids=["a name of the optimizer", "a switch"],
)
def test_an_attribute_that_cannot_be_an_input_stops_the_run(tmp_path, name, value, first, error, message, dense):
    hook = PrintedHook(name, value, first)
    with pytest.raises(error, match=message):
        run(tmp_path, [hook])
    assert hook.dense == dense


def test_an_attribute_that_the_step_does_not_read_may_change_and_one_of_a_hook_that_it_reads_may_not(tmp_path):
    class Scale(Hook):
        scale, mode, calls = 1.0, "a", 0

        def traced_grads(self, ctx):
            return ctx.replace(metrics={**ctx.metrics, "scaled": self.scale * ctx.metrics["loss"]})

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            self.calls += 1
            self.mode = f"mode {self.calls}"
            if runner.iter == self.until:
                self.scale = 2.0

    hook = Scale()
    hook.until = 99
    runner = run(tmp_path / "unread", [hook])
    assert (hook.calls, runner.programs.update.traces) == (10, 1)
    hook.until = START
    with pytest.raises(RuntimeError, match=r"`Scale.scale`.* must not change during training"):
        run(tmp_path / "read", [hook])


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a loss."""

    weight: float = 1.0
    activation: object = jnp.tanh  # which is not compared


class Container(DenseCL):
    """Model whose loss reads a value in a container."""

    def __init__(self, value, read):
        self.value, self.read = value, read
        self.traces = [1.0]  # changes in each trace
        self.cache = {}  # gets an entry in each trace

    def loss(self, params, *args, **kwargs):
        self.traces[0] += 1
        self.cache[len(self.cache)] = 1.0
        return {"loss_dense": self.read(self.value) * (9 + 0 * params["w"])}, {}


@pytest.mark.parametrize(
    ("value", "read", "change"),
    [
        ([0.5, 1.0], lambda value: value[1], lambda model: model.value.__setitem__(1, 0.0)),
        ([0.5, 1.0], lambda value: value[1], lambda model: setattr(model, "value", [0.5, 0.0])),
        ([[1.0]], lambda value: value[0][0], lambda model: model.value[0].__setitem__(0, 0.0)),
        ({"a": 1.0}, lambda value: value["a"], lambda model: model.value.update(a=0.0)),
        ({"a": 1.0}, lambda value: value["a"], lambda model: model.value.pop("a")),
        (types.SimpleNamespace(a=1.0), lambda value: value.a, lambda model: setattr(model.value, "a", 0.0)),
        (Settings(), lambda value: value.weight, lambda model: setattr(model, "value", Settings(0.0))),
    ],
    ids=["item", "list", "nested list", "dict", "removed item", "namespace", "frozen dataclass"],
)
def test_a_value_in_a_container_that_changes_stops_the_run(tmp_path, value, read, change):
    class Change(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == START:
                change(runner.model)

    recorder = PrintedHook("unused", first=None, start=99)
    with pytest.raises(RuntimeError, match=r"`Container.value` must not change during training"):
        run(tmp_path, [Change(), recorder], Container(copy.deepcopy(value), read))
    assert recorder.dense == [9.0] * 6  # until the next line of the log


def test_what_a_trace_changes_itself_and_items_that_are_added_do_not_stop_the_run(tmp_path):
    class Append(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            runner.model.value.append(2.0)
            runner.model.cache[f"later {runner.iter}"] = 2.0

    model = Container([1.0], lambda value: value[0])
    run(tmp_path, [Append()], model)
    assert model.value == [1.0] + [2.0] * 10


def test_a_property_is_assigned_like_the_attribute_behind_it(tmp_path):
    class Property(DenseCL):
        _value = 0.5

        @property
        def loss_lambda(self):
            return self._value

        @loss_lambda.setter
        def loss_lambda(self, value):
            self._value = value

    for first in (0.0, None):
        hook = PrintedHook(first=first, value=0.25)
        run(tmp_path / str(first), [hook], Property(), train_cfg=dict(max_epochs=2, on_recompile="warn"))
        assert hook.dense == [9 * (0.5 if first is None else first)] * START + [2.25] * (10 - START)


class Loss(abc.ABC):
    """Base class with a metaclass of Python."""

    @abc.abstractmethod
    def __call__(self, params, batch):
        """Return the losses."""


class Weighted(Loss):
    """Loss object with an attribute."""

    weight = 1.0

    def __call__(self, params, batch):
        return {"loss_dense": self.weight * (9 + 0 * params["w"])}


class Inner:
    """Loss object that holds another one."""

    def __init__(self, losses):
        self.losses = losses

    def compute(self, params, batch):
        return self.losses[0](params, batch)


def test_an_assignment_just_before_a_log_line_holds_from_the_next_iteration_on(tmp_path):
    class Late(PrintedHook):
        priority = "HIGHEST"

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            super().after_train_iter(runner, batch_idx, data_batch, outputs)
            if runner.iter == START:
                runner.model.loss_lambda = 0.25

    hook = Late("unused", first=None, start=99)
    run(tmp_path, [hook], train_cfg=dict(max_epochs=2, on_recompile="warn"))
    assert hook.dense == [4.5] * (START + 1) + [2.25] * (9 - START)


@pytest.mark.parametrize("nested", [False, True])
def test_an_attribute_of_a_loss_object_that_changes_stops_the_run(tmp_path, nested):
    weighted = Weighted()

    class Change(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            weighted.weight = 1.0 if runner.iter < START else 2.0

    model = FunctionalModel(lambda: {"w": jnp.zeros(())}, Inner([weighted]).compute if nested else weighted)
    recorder = PrintedHook("unused", first=None, start=99)
    with pytest.raises(RuntimeError, match=r"`Weighted.weight` must not change .* 1.0; got 2.0"):
        run(tmp_path, [Change(), recorder], model)
    assert recorder.dense == [9.0] * 6  # until the next line of the log


def test_a_python_branch_on_an_assigned_number_says_that_it_is_an_array(tmp_path):
    class Branch(DenseCL):
        def loss(self, *args, **kwargs):
            losses, state = super().loss(*args, **kwargs)
            return (losses if self.loss_lambda > 0 else {"loss_dense": losses["loss_dense"]}), state

    hook = PrintedHook()
    with pytest.raises(Exception, match="bool") as error:
        run(tmp_path, [hook], Branch())
    assert "hooks assign the attributes ['loss_lambda']" in "\n".join(error.value.__notes__)
    assert hook.dense == []


def test_after_a_resume_without_the_hook_the_attribute_has_the_value_of_the_model(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    default_hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)
    run(tmp_path, [PrintedHook(start=99)], train_cfg=dict(max_epochs=1), default_hooks=default_hooks)
    recorder = PrintedHook("unused", first=None, start=99)
    run(tmp_path, [recorder], default_hooks=default_hooks, resume=True)
    assert recorder.dense == [4.5] * 5
    assert "`DenseCL.loss_lambda`, which was 0 when " in caplog.text
    assert "is 0.5 until a hook assigns it again" in caplog.text


def test_a_hyperparameter_that_nothing_reads_is_reported_once(tmp_path, caplog):
    class Publish(Hook):
        def before_train(self, runner):
            runner.hyperparams.update(unread=1.0, read=1.0, traced=1.0)

        def traced_grads(self, ctx):
            return ctx.replace(metrics={**ctx.metrics, "traced": ctx.hyperparams["traced"]})

    def loss(params, batch, hyperparams):
        return {"loss_dense": hyperparams.get("read") * params["w"]}

    with caplog.at_level(logging.WARNING):
        runner = run(tmp_path, [Publish()], FunctionalModel(lambda: {"w": jnp.zeros(())}, loss))
    (report,) = [record.message for record in caplog.records if "has no effect" in record.message]
    assert "read hyperparams['unread'] in the loss" in report
    assert (runner.iter, runner.programs.update.traces) == (10, 1)


def test_validations_and_predictions_use_the_current_attributes(tmp_path):
    means = []

    class Mean(Hook):
        def after_val_epoch(self, runner, metrics=None):
            means.append(metrics["loss"])

    def mean(predictions, batch):
        return predictions

    loader = dict(batch_size=8, dataset=ArrayDataset(dict(x=np.zeros((8, 1), np.float32))))
    evaluation = dict(val_dataloader=loader, val_cfg=dict(), val_evaluator=dict(type="MeanLoss", loss=mean))
    runner = run(tmp_path, [PrintedHook(), Mean()], **evaluation)
    assert means == [0.0, 0.5]
    assert runner.predict(dict(x=np.zeros((2, 1), np.float32))).tolist() == [0.5, 0.5]
    runner.model.loss_lambda = 0.75
    assert runner.predict(dict(x=np.zeros((2, 1), np.float32))).tolist() == [0.75, 0.75]


def test_what_a_trace_of_the_prediction_sets_does_not_compile_the_validation_again(tmp_path):
    class Counting(DenseCL):
        traces = 0

        def predict(self, params, model_state, batch):
            self.traces += 1
            return super().predict(params, model_state, batch)

    loader = dict(batch_size=8, dataset=ArrayDataset(dict(x=np.zeros((8, 1), np.float32))))
    evaluator = dict(type="MeanLoss", loss=lambda predictions, batch: predictions)
    model = Counting()
    traces = []

    class Traces(Hook):
        def after_val_epoch(self, runner, metrics=None):
            traces.append(model.traces)

    train_cfg = dict(max_epochs=3)
    run(tmp_path, [Traces()], model, val_dataloader=loader, val_cfg=dict(), val_evaluator=evaluator, train_cfg=train_cfg)
    assert traces[0] == traces[1] == traces[2] > 0
