"""Runs of plain functions in which a part of the parameters is trained."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine import Runner, load_model
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.config.registry import MODELS
from jengine.model import FunctionalModel
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner

X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
DATA = [dict(x=X, y=X[:, 0])]
ADAMW = optax.adamw(0.1, weight_decay=0.1)  # decays parameters without gradients too


class Net(typing.NamedTuple):
    body: dict
    head: list


def init(rng):
    return Net({"w": jax.random.normal(rng, (3, 2)), "order": np.arange(3)}, [jnp.ones(2), 0.5])


def loss(net, batch):
    return jnp.square(predict(net, batch) - batch["y"])


def predict(net, batch):
    return batch["x"][:, net.body["order"]] @ net.body["w"] @ net.head[0] + net.head[1]


def in_head(path, leaf):
    assert leaf.shape is not None
    return path.startswith("head")


def train(model, work_dir, iterations=4, **changes):
    arguments = dict(train_cfg=dict(by_epoch=False, max_iters=iterations), optim_wrapper=ADAMW, default_hooks={})
    runner = build_runner(work_dir, model, train_dataloader=DATA, **{**arguments, **changes})
    runner.train()
    return runner


def by_hand(body, iterations=4):
    """The head after AdamW on it alone."""
    head, opt_state = [jnp.ones(2), jnp.asarray(0.5)], ADAMW.init([jnp.ones(2), jnp.asarray(0.5)])
    for _ in range(iterations):
        grads = jax.grad(lambda head: loss(Net(body, head), DATA[0]).mean())(head)
        updates, opt_state = ADAMW.update(grads, opt_state, head)
        head = optax.apply_updates(head, updates)
    return head


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(FunctionalModel(init, loss, predict, trainable=in_head), tmp_path_factory.mktemp("trainable") / "run")


def test_what_a_predicate_does_not_select_keeps_its_bits(run, tmp_path):
    frozen = run.state.model_state["frozen"]["body"]
    untrained = Runner(
        run.model, tmp_path, train_dataloader=DATA, train_cfg=dict(max_epochs=1), optim_wrapper=ADAMW, randomness=dict(seed=run.seed)
    )
    untrained.prepare_training()  # the same program as in the run: another rounds otherwise
    before = untrained.state.model_state["frozen"]["body"]
    np.testing.assert_array_equal(frozen["w"], before["w"])
    np.testing.assert_array_equal(frozen["order"], np.arange(3))
    assert list(flatten(run.state.params)) == ["head.0", "head.1"]
    assert not any("body" in path for path in flatten(run.state.opt_state))
    for found, expected in zip(run.module().head, by_hand(before), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_functions_and_the_module_have_the_tree_of_init(run):
    net = run.module()
    assert isinstance(net, Net)
    np.testing.assert_allclose(load_model(run.work_dir, model=run.model)(DATA[0]), predict(net, DATA[0]), rtol=1e-6)


@pytest.mark.parametrize("how", ["rules", "config", "own step", "chunks", "replicas"])
def test_other_ways_train_the_same(how, run, tmp_path):
    model = FunctionalModel(init, loss, trainable=["head"])
    changes = {}
    if how == "config":
        model = MODELS.build(dict(type="FunctionalModel", init=init, loss=loss, trainable=f"{__name__}.in_head"))
    if how == "own step":
        model = FunctionalModel(
            init, train_step=lambda state, batch, ctx: ctx.update(state, lambda net: loss(net, batch)), trainable=["head"]
        )
    if how == "chunks":
        changes = dict(train_cfg=dict(by_epoch=False, max_iters=4, steps_per_call=2))
    if how == "replicas":
        changes = dict(parallel=dict(type="DataParallel", devices=2))
    state = train(model, tmp_path, **changes).state
    assert state.model_state["frozen"]["body"]["w"].shape == (3, 2)
    for path, leaf in flatten(run.state.params).items():
        np.testing.assert_allclose(flatten(state.params)[path], leaf, rtol=1e-5, err_msg=path)


def test_a_checkpoint_of_the_whole_network_fills_the_frozen_part_too(run, tmp_path):
    floats = {"w": jnp.full((3, 2), 0.5)}
    whole = train(
        FunctionalModel(lambda: Net(floats, [jnp.ones(2), 0.5]), lambda net, b: jnp.square(b["x"] @ net.body["w"] @ net.head[0])),
        tmp_path / "whole", default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=4, by_epoch=False)),
    )  # fmt: skip
    part = Runner(
        FunctionalModel(init, loss, trainable=["head"]), tmp_path / "part", train_dataloader=DATA,
        train_cfg=dict(by_epoch=False, max_iters=1), optim_wrapper=optax.sgd(0.0), load_from=str(tmp_path / "whole" / "iter_4"),
    )  # fmt: skip
    state = part.train()
    np.testing.assert_array_equal(state.model_state["frozen"]["body"]["w"], whole.state.params.body["w"])
    np.testing.assert_array_equal(state.model_state["frozen"]["body"]["order"], np.arange(3))
    np.testing.assert_array_equal(state.params["head"]["0"], whole.state.params.head[0])


def test_a_resumed_run_ends_with_the_same_bits(run, tmp_path):
    saved = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=2, by_epoch=False)))
    model = FunctionalModel(init, loss, predict, trainable=in_head)
    train(model, tmp_path / "run", 2, **saved)
    resumed = train(model, tmp_path / "run", 4, resume=True, **saved)
    for item in ("params", "model_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(resumed.state, item), getattr(run.state, item))


@pytest.mark.parametrize(
    ("trainable", "words"),
    [
        (["haed"], ["`trainable`", "got 'haed'", "closest: head"]),
        (["(head"], ["FunctionalModel", "got '(head'"]),
        (lambda path, leaf: False, ["`trainable`", "got none of body.order, body.w, head"]),
        (["order"], ["`trainable`"]),
    ],
)
def test_a_selection_of_nothing_is_an_error(trainable, words):
    check_refusal(lambda: FunctionalModel(init, loss, trainable=trainable).init(jax.random.key(0), DATA[0]), ConfigError, *words)
