"""A run with `check=True`: what fails is named with its layer, its line and its examples."""

import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

from jengine.data import ArrayDataset
from jengine.extras.diagnose.check import CheckError
from jengine.extras.diagnose.leaked_tracers import LeakedTracerError
from jengine.hooks import Hook
from jengine.model import FunctionalModel, LinenModel, NnxModel
from tests.runner.conftest import build_runner

pytestmark = pytest.mark.usefixtures("only_new_garbage")  # a check looks at all objects that exist

BAD = 21  # sample 5 of the second batch, without shuffling


def make_data():
    x = np.ones((64, 8), np.float32)
    x[BAD] = 5.0
    return ArrayDataset(dict(x=x, y=np.arange(64) % 4))


def cross_entropy(outputs, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["y"][:, None], 1).mean()


def make_runner(tmp_path, model, hooks=(), **settings):
    loader = dict(batch_size=16, dataset=dict(type=make_data), sampler=dict(type="DefaultSampler", shuffle=False))
    arguments = dict(check=True, train_dataloader=loader, train_cfg=dict(max_iters=3), custom_hooks=list(hooks))
    return build_runner(tmp_path, model, **{**arguments, **settings})


def fail(runner):
    """Return the message of the error, and its notes."""
    with pytest.raises(CheckError) as caught:
        runner.train()
    return str(caught.value), caught.value.__notes__


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, h, x):
        return nn.Dense(8)(h) + jnp.log(4.0 - x)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8)(x)
        return nn.Dense(4)(LinenBlock(name="block")(h, x))


def test_a_nan_is_named_with_its_operation_layer_example_and_line(tmp_path):
    message, notes = fail(make_runner(tmp_path, LinenModel(LinenNet(), cross_entropy, inputs="x")))
    assert message.startswith("NaN from `log` in the step of iteration 1, for example 5 of the batch, in the layer block, at ")
    assert message.endswith("in __call__: return nn.Dense(8)(h) + jnp.log(4.0 - x)")
    assert __file__ in message
    assert f"in ArrayDataset of train_dataloader: example 5 is sample {BAD}" in notes


class NnxBlock(nnx.Module):
    def __init__(self, rngs, size):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.size = size

    def __call__(self, h, x):
        return self.linear(h) + jnp.ones(self.size).at[x[:, 0].astype(int)].get()[:, None]


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs, 6), NnxBlock(rngs, 4)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        h = x
        for block in self.blocks:
            h = block(h, x)
        return self.head(h)


def test_an_index_out_of_bounds_is_named_with_the_layer_of_an_nnx_module(tmp_path):
    call = NnxBlock.__call__
    message, _ = fail(make_runner(tmp_path, NnxModel(lambda rngs: NnxNet(rngs), cross_entropy, inputs="x")))
    assert message.startswith(
        "index 5 is out of bounds for an axis of size 4 (axis 0) in the step of iteration 1, for example 5 of the batch, "
        "in the layer blocks.1, at "
    )
    assert "in __call__: return self.linear(h) + jnp.ones(self.size)" in message
    assert NnxBlock.__call__ is call


def check_inputs(params, batch):
    checkify.check(jnp.all(batch["x"] < 4), "inputs must be below 4, got {most}", most=batch["x"].max())
    return jnp.square(batch["x"] @ params).mean()


def test_a_check_of_the_user_fails_with_its_message_and_example(tmp_path):
    message, _ = fail(make_runner(tmp_path, FunctionalModel(lambda: jnp.ones(8), check_inputs)))
    assert message.startswith("inputs must be below 4, got 5.0 in the step of iteration 1, for example 5 of the batch, at ")
    assert "in check_inputs: checkify.check(" in message


@jax.custom_vjp
def with_bad_gradient(params, x):
    return params * x


with_bad_gradient.defvjp(
    lambda params, x: (params * x, x), lambda x, grad: (jnp.sum(jnp.log(4.0 - x) * grad, 0), jnp.zeros_like(x))
)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda params, batch: jnp.sum(params / (5.0 - batch["x"])) * 1e-3, "a division by zero in the step of iteration 1, for example 5"),
        (lambda params, batch: jnp.sum(params * jnp.exp(100 * (batch["x"] - 4))), "an infinite value from `exp`, then NaN from `div`, in the step of iteration 1, for example 5"),
        (
            lambda params, batch: with_bad_gradient(params, batch["x"]).mean(),
            "NaN from `log` in the step of iteration 1, for example 5 of the batch, in the backward pass, at ",
        ),
    ],
    ids=["division", "infinite", "backward"],
)  # fmt: skip
def test_other_values_that_are_not_finite_are_named_with_their_example(tmp_path, loss, text):
    message, _ = fail(make_runner(tmp_path, FunctionalModel(lambda: jnp.ones(8), loss)))
    assert text in message
    assert "for example 5 of the batch" in message


def test_a_failure_within_a_scan_has_its_iteration_and_line(tmp_path):
    def loss(params, batch):
        def body(h, scale):
            return h - jnp.log(scale - batch["x"][:, 0]).mean() * 0, None

        return jax.lax.scan(body, params, jnp.array([99.0, 99.0, 4.0]))[0].mean()

    message, _ = fail(make_runner(tmp_path, FunctionalModel(lambda: jnp.ones(8), loss)))
    assert "NaN from `log`, in iteration 2 of a scan, in the step of iteration 1, for example 5 of the batch" in message
    assert 'return h - jnp.log(scale - batch["x"][:, 0]).mean() * 0, None' in message


def fine(params, batch):
    return jnp.square(batch["x"] @ params).mean()


class ReadsLoss(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.loss = float(outputs["loss"]) if runner.iter == 1 else None


def test_a_hook_that_waits_for_the_device_is_named_with_its_line(tmp_path):
    message, _ = fail(make_runner(tmp_path, FunctionalModel(lambda: jnp.ones(8), fine), [ReadsLoss()]))
    assert message.startswith("ReadsLoss.after_train_iter moves values between host and device in iteration 1, at ")
    assert 'float(outputs["loss"])' in message


class GetsLoss(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.loss = float(jax.device_get(outputs["loss"]))


def test_an_explicit_transfer_of_a_hook_is_no_error_and_the_losses_are_those_of_a_run_without_checks(tmp_path):
    losses = []
    for check in (True, False):
        hook = GetsLoss()
        adam = dict(optimizer=dict(type="AdamW", lr=1e-2))  # with a root and a division
        model = FunctionalModel(lambda: jnp.ones(8), fine)
        make_runner(tmp_path / str(check), model, [hook], check=check, optim_wrapper=adam).train()
        losses.append(hook.loss)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_the_rules_of_jax_are_its_own_after_a_checked_step(tmp_path):
    rules = vars(sys.modules[checkify.checkify.__module__])
    before = {name: rule for name, rule in rules.items() if callable(rule)}
    make_runner(tmp_path, LinenModel(nn.Dense(4), loss=cross_entropy, inputs="x"), train_cfg=dict(max_iters=1)).train()
    assert {name: rule for name, rule in rules.items() if callable(rule)} == before


def test_a_tracer_that_is_left_behind_is_an_error(tmp_path):
    kept = []

    def loss(params, batch):
        kept.append(batch["x"] @ params)
        return kept[-1].mean()

    said = r"`kept` of .*loss in .*test_check.py keeps a value of the trace, float32\[16\], made at .*kept\.append"
    runner = make_runner(tmp_path, FunctionalModel(lambda: jnp.ones(8), loss))
    with pytest.raises(LeakedTracerError, match=said):
        runner.train()
    assert runner.iter == 0


def test_another_shape_is_an_error_before_it_compiles(tmp_path):
    batches = [dict(x=np.ones((4, n), np.float32)) for n in (8, 8, 9)]
    model = FunctionalModel(lambda: jnp.ones(()), lambda params, batch: params * batch["x"].mean())
    runner = make_runner(tmp_path, model, train_dataloader=batches)
    with pytest.raises(TypeError, match="is compiled again"):
        runner.train()
    assert runner.iter == 2


def test_chunks_run_as_single_steps(tmp_path):
    runner = make_runner(tmp_path, FunctionalModel(lambda: jnp.ones(8), fine), train_cfg=dict(max_iters=4, steps_per_call=2))
    runner.train()
    assert runner.train_loop.steps_per_call == 1
    assert runner.iter == 4


MESHES = {
    "Pjit": dict(type="Pjit", devices=2),
    "fsdp": dict(type="Pjit", mesh=dict(fsdp=4), fsdp_min_size=1),
    "DataParallel": dict(type="DataParallel", devices=2),
}


@pytest.mark.parametrize("parallel", MESHES)
def test_a_step_over_several_devices_is_checked(tmp_path, parallel):
    model = LinenModel(LinenNet(), cross_entropy, inputs="x")
    message, notes = fail(make_runner(tmp_path, model, parallel=MESHES[parallel]))
    assert re.match("NaN from `log` in the step of iteration 1, for example 5 of the batch, in the layer block, at .*in __call__", message)
    assert f"in ArrayDataset of train_dataloader: example 5 is sample {BAD}" in notes


EVALUATION = dict(
    val_dataloader=dict(batch_size=16, dataset=dict(type=make_data)),
    val_cfg=dict(),
    val_evaluator=dict(type="MeanLoss", loss=cross_entropy),
)


@pytest.mark.parametrize("parallel", [None, MESHES["DataParallel"]], ids=["one device", "DataParallel"])
def test_a_validation_is_checked(tmp_path, parallel):
    runner = make_runner(tmp_path, LinenModel(LinenNet(), cross_entropy, inputs="x"), parallel=parallel, **EVALUATION)
    with pytest.raises(CheckError) as caught:
        runner.val()
    assert re.match("NaN from `log` in the validation, for example 5 of the batch, in the layer block, at .*in __call__", str(caught.value))
    assert f"in ArrayDataset of val_dataloader, batch 1: example 5 is sample {BAD}" in caught.value.__notes__
    assert runner.validations == []


def test_overflows_under_a_loss_scale_are_no_errors(tmp_path):
    scale = dict(init_scale=2.0**40)  # above float16's largest number
    wrapper = dict(type="AmpOptimWrapper", dtype="float16", loss_scale=scale, optimizer=dict(type="SGD", lr=1e-3))
    runner = make_runner(tmp_path, LinenModel(nn.Dense(4), cross_entropy, inputs="x"), optim_wrapper=wrapper)
    runner.train()
    assert runner.iter == 3


def test_an_input_that_is_not_finite_is_named(tmp_path):
    def make_bad_data():
        x = np.ones((64, 8), np.float32)
        x[BAD, 3] = np.nan
        return ArrayDataset(dict(x=x))

    loader = dict(batch_size=16, dataset=dict(type=make_bad_data), sampler=dict(type="DefaultSampler", shuffle=False))
    message, notes = fail(make_runner(tmp_path, FunctionalModel(lambda: jnp.ones(8), fine), train_dataloader=loader))
    assert "for example 5 of the batch" in message
    assert "before the step, the entry 'x' of the batch has values that are not finite, in example 5: look at the data" in notes
