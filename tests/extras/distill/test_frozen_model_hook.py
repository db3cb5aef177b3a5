"""Test frozen models for losses of one's own, and in other parts of a run."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.plan.program_costs import compile_plan
from jengine.hooks import Hook
from jengine.model import FunctionalModel, LinenModel, MeanSquaredError
from tests.runner.conftest import build_runner

X = np.arange(12, dtype=np.float32).reshape(6, 2)
DATA = dict(batch_size=3, dataset=ArrayDataset(dict(x=X)))
FROZEN = FunctionalModel(lambda: {"w": jnp.ones(2)}, loss=lambda p, b: b["x"] @ p["w"])
SOURCE = dict(model=FROZEN, params={"w": np.float32([2.0, 3.0])})


def distance(params, batch, hyperparams):
    return ((params["w"] - hyperparams["reference"]["params"]["w"]) ** 2).sum()


def make(work_dir, model=None, **changes):
    cfg = dict(
        train_dataloader=DATA,
        train_cfg=dict(by_epoch=False, max_iters=3),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.25)),
        custom_hooks=[dict(type="FrozenModelHook", model=SOURCE, name="reference")],
    )
    model = model or FunctionalModel(lambda: {"w": jnp.zeros(2)}, loss=distance)
    return build_runner(work_dir, model, **{**cfg, **changes})


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_loss_reads_the_variables(tmp_path, steps_per_call):
    runner = make(tmp_path, train_cfg=dict(by_epoch=False, max_iters=3, steps_per_call=steps_per_call))
    # each step goes half of the way
    np.testing.assert_allclose(runner.train().params["w"], np.array([2.0, 3.0]) * (1 - 0.5**3), rtol=1e-6)
    assert runner.constants == {}  # the memory is free after the run


def test_a_train_step_and_a_traced_hook_read_the_variables(tmp_path):
    def train_step(state, batch, ctx):
        return ctx.update(state, lambda params: distance(params, batch, ctx.hyperparams))

    runner = make(tmp_path, FunctionalModel(lambda: {"w": jnp.zeros(2)}, train_step=train_step))
    np.testing.assert_allclose(runner.train().params["w"], np.array([2.0, 3.0]) * (1 - 0.5**3), rtol=1e-6)


def test_several_optimizers_read_the_variables(tmp_path):
    def loss(name):
        def distance(params, batch, hyperparams):
            return ((params[name] - hyperparams["reference"]["params"]["w"]) ** 2).sum()

        return distance

    model = FunctionalModel(lambda: {"a": jnp.zeros(2), "b": jnp.zeros(2)}, loss={"a": loss("a"), "b": loss("b")})
    sgd = dict(optimizer=dict(type="SGD", lr=0.25))
    params = make(tmp_path, model, optim_wrapper=dict(a=sgd, b=sgd)).train().params
    for value in params.values():
        np.testing.assert_allclose(value, np.array([2.0, 3.0]) * (1 - 0.5**3), rtol=1e-6)


def test_other_hooks_find_the_variables_in_before_train(tmp_path):
    class TraceStep(Hook):
        priority = "HIGHEST"

        def before_train(self, runner):
            found.append(runner.step_hyperparams()["reference"]["params"]["w"].tolist())

    found = []
    hook = dict(type="FrozenModelHook", model=SOURCE, name="reference")
    make(tmp_path, custom_hooks=[hook, TraceStep()], train_cfg=dict(by_epoch=False, max_iters=1)).train()
    assert found == [[2.0, 3.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(model=dict(model=FROZEN, params={"w": np.ones(3)}), name="reference"), r"shape \(2,\) of 'params.w', got \(3,\)"),
        (dict(model=SOURCE, name="learning_rate"), "must not be that of a hyperparameter, got 'learning_rate'"),
        (dict(model=7), "a frozen model must be a checkpoint or work dir"),
        (dict(model=dict(model=FROZEN, params={}, weights=1)), "a frozen model must be a checkpoint or work dir"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, settings, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        make(tmp_path, custom_hooks=[dict(type="FrozenModelHook", **settings)]).train()


def test_a_student_starts_from_its_own_pretrained_weights(tmp_path):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(nn.Dense(2, name="hidden")(x))

    model = LinenModel(Network(), MeanSquaredError(target="x"), inputs="x")
    params = jax.device_get(model.init(jax.random.key(3), dict(x=X))[0])
    features = [dict(student="hidden", project=True)]
    hook = dict(type="DistillHook", teacher=dict(model=model, params=params), features=features, task_weight=0)
    changes = dict(custom_hooks=[hook], train_cfg=dict(by_epoch=False, max_iters=1))
    frozen = dict(optimizer=dict(type="SGD", lr=0.0))
    state = make(tmp_path, model, load_from=params, optim_wrapper=frozen, **changes).train()
    jax.tree.map(np.testing.assert_array_equal, {name: state.params[name] for name in params}, params)
    assert state.params["distill_projections"]["feature_loss"]["kernel"].shape == (2, 2)


def test_a_plan_counts_a_sharded_teacher_and_needs_no_weights():
    def plan(hooks, **mesh):
        dense = dict(type="LinenModel", module=nn.Dense(64), loss=dict(type="MeanSquaredError", target="x"), inputs="x")
        cfg = dict(
            model=dense,
            train_dataloader=dict(batch_size=4, dataset=ArrayDataset(dict(x=np.zeros((8, 64), np.float32)))),
            train_cfg=dict(max_epochs=1),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
            custom_hooks=[dict(type="DistillHook", teacher=dict(model=dense, checkpoint="nowhere"))] if hooks else [],
            parallel=dict(type="Pjit", devices=2, mesh=mesh, fsdp_min_size=64 * 64),
        )
        return compile_plan(cfg, training_only=True)["programs"]["update"]["memory"]["hyperparameters and padding"]

    bias = 64 * 4
    assert plan(True, data=2) - plan(False, data=2) == pytest.approx(64 * 64 * 4 + bias, abs=32)
    assert plan(True, fsdp=2) - plan(False, fsdp=2) == pytest.approx(64 * 64 * 4 / 2 + bias, abs=32)
