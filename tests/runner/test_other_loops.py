"""Continue the training of plain Flax and optax loops: parameters, optimizer states and steps of their files."""

import pathlib

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from jengine.config.errors import ConfigError
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from tests.runner.conftest import build_runner

RNG = np.random.RandomState(0)
X = RNG.randn(32, 3).astype(np.float32)
Y = RNG.randn(32, 2).astype(np.float32)
BATCH, STEPS, MORE = 8, 5, 4  # four batches in a pass: the fifth step is in the second one
SCHEDULE = optax.linear_schedule(0.1, 0.0, 20)  # reaches 0 after 20 steps; LinearLR does at `end - 1`


def init():
    return {"dense": {"kernel": jnp.full((3, 2), 0.5), "bias": jnp.zeros(2)}, "out": {"kernel": jnp.eye(2)}}


def predict(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["dense"]["kernel"] + params["dense"]["bias"])
    return hidden @ params["out"]["kernel"]


def loss(params, batch):
    return jnp.square(predict(params, batch) - batch["y"]).mean(axis=-1)


class Losses(Hook):
    def __init__(self):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(float(outputs["loss"]))


@jax.jit
def step(state, batch):
    value, grads = jax.value_and_grad(lambda params: loss(params, batch).mean())(state.params)
    return state.apply_gradients(grads=grads), value


def train_by_hand(tx, state=None, steps=STEPS):
    state = state or TrainState.create(apply_fn=None, params=init(), tx=tx)
    losses = []
    for _ in range(steps):
        rows = slice(int(state.step) % 4 * BATCH, int(state.step) % 4 * BATCH + BATCH)
        state, value = step(state, dict(x=X[rows], y=Y[rows]))
        losses.append(float(value))
    return state, losses


ADAMW = optax.adamw(SCHEDULE, b2=0.99, weight_decay=0.1)


@pytest.fixture(scope="module")
def by_hand():
    """Return the state after five steps of AdamW, and the losses of the next four."""
    state, _ = train_by_hand(ADAMW)
    return state, train_by_hand(ADAMW, state, MORE)[1]


def continue_in_jengine(tmp_path, load_from, **changes):
    hook = Losses()
    data = dict(batch_size=BATCH, dataset=dict(type="ArrayDataset", arrays=dict(x=X, y=Y)))
    runner = build_runner(
        tmp_path / "run",
        **{
            "model": FunctionalModel(init, loss, predict),
            "train_dataloader": {**data, "sampler": dict(type="DefaultSampler", shuffle=False)},
            "train_cfg": dict(by_epoch=False, max_iters=STEPS + MORE),
            "optim_wrapper": dict(optimizer=dict(type="AdamW", lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)),
            "param_scheduler": dict(type="LinearLR", start_factor=1.0, end_factor=0.0, end=21, by_epoch=False),
            "custom_hooks": [hook],
            "load_from": load_from,
            **changes,
        },
    )
    runner.train()
    return runner, hook.losses


def write_orbax(state, path):
    ocp.PyTreeCheckpointer().save(path / "checkpoint", state)
    return path / "checkpoint"


def write_manager(state, path):
    with ocp.CheckpointManager(path / "steps") as manager:
        manager.save(int(state.step), args=ocp.args.StandardSave(state))
    return path / "steps"


def write_msgpack(state, path):
    (path / "state.msgpack").write_bytes(flax.serialization.to_bytes(state))
    return path / "state.msgpack"


def write_own_names(state, path):
    """Write the pytree of a loop without a TrainState."""
    tree = dict(model=state.params, optimizer=state.opt_state, iteration=state.step)
    ocp.PyTreeCheckpointer().save(path / "own", tree)
    return dict(path=path / "own", item="model")


@pytest.mark.parametrize("write", [write_orbax, write_manager, write_msgpack, write_own_names])
def test_the_losses_of_a_continued_loop_are_those_of_the_loop(tmp_path, by_hand, write):
    state, expected = by_hand
    source = write(state, tmp_path)
    options = source if isinstance(source, dict) else dict(path=source)
    runner, losses = continue_in_jengine(tmp_path, dict(**options, optimizer=True))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert runner.iter == int(runner.state.step) == STEPS + MORE
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    name = "optimizer" if source == options else "opt_state"
    assert f"| loaded    | inner_state.scale_by_adam.mu    | {name}.0.mu    |" in log
    assert f"| loaded    | inner_state.scale_by_adam.count | {name}.0.count |" in log
    assert f"| not used  |                                 | {name}.2.count |" in log  # that of the schedule


def test_an_epoch_continues_at_its_place(tmp_path, by_hand):
    state, expected = by_hand
    config = dict(train_cfg=dict(by_epoch=True, max_epochs=3))
    runner, losses = continue_in_jengine(tmp_path, dict(path=state, optimizer=True), **config)
    np.testing.assert_allclose(losses[:MORE], expected, rtol=1e-6)
    assert len(losses) == 12 - STEPS
    assert runner.epoch == 3


def test_a_chain_of_optax_is_restored_with_all_its_counts(tmp_path, by_hand):
    state, expected = by_hand
    config = dict(optim_wrapper=dict(optimizer=ADAMW), param_scheduler=None)
    runner, losses = continue_in_jengine(tmp_path, dict(path=state, optimizer=True), **config)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    counts = [
        leaf for leaf in jax.tree.leaves(runner.state.opt_state) if jnp.ndim(leaf) == 0 and leaf.dtype == jnp.int32
    ]
    assert list(map(int, counts)) == [STEPS + MORE] * 2


@pytest.mark.parametrize("parallel", ["DataParallel", "Pjit"])
def test_a_loop_continues_on_several_devices_and_in_chunks(tmp_path, by_hand, parallel):
    state, expected = by_hand
    config = dict(parallel=dict(type=parallel, devices=2), optim_wrapper=dict(optimizer=ADAMW), param_scheduler=None)
    train_cfg = dict(by_epoch=False, max_iters=STEPS + MORE, steps_per_call=2)
    _, losses = continue_in_jengine(tmp_path, dict(path=state, optimizer=True), **config, train_cfg=train_cfg)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_states_are_renamed_and_transposed_like_their_parameters(tmp_path, by_hand):
    state, expected = by_hand

    def rename(tree):
        return {"fc": {"weight": tree["dense"]["kernel"].T, "bias": tree["dense"]["bias"]}, "head": tree["out"]}

    adam, *rest = state.opt_state
    tree = dict(
        params=rename(state.params),
        opt_state=(adam._replace(mu=rename(adam.mu), nu=rename(adam.nu)), *rest),
        step=state.step,
    )
    rules = [("fc", "dense"), ("head", "out")]
    _, losses = continue_in_jengine(tmp_path, dict(path=tree, rename=rules, optimizer=True))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_states_of_several_transformations_are_joined(tmp_path):
    labels = {"dense": "a", "out": "b"}
    tx = optax.multi_transform({name: optax.adam(0.1) for name in "ab"}, labels)
    state, _ = train_by_hand(tx)
    expected = train_by_hand(tx, state, MORE)[1]
    config = dict(optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.1)), param_scheduler=None)
    _, losses = continue_in_jengine(tmp_path, dict(path=state, optimizer=True), **config)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_an_optimizer_that_is_not_stored_is_an_error_with_the_table_or_starts_anew(tmp_path, by_hand):
    momentum, _ = train_by_hand(optax.sgd(0.1, momentum=0.9))
    message = r"optimizer` must be False .*does not fit(.|\n)*missing .*scale_by_adam\.mu(.|\n)*not used .*opt_state\.0\.trace"
    with pytest.raises(ConfigError, match=message):
        continue_in_jengine(tmp_path, dict(path=momentum, optimizer=True))
    config = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)), param_scheduler=None)
    _, losses = continue_in_jengine(tmp_path / "sgd", dict(path=momentum, optimizer=True), **config)
    np.testing.assert_allclose(losses, train_by_hand(optax.sgd(0.1, momentum=0.9), momentum, MORE)[1], rtol=1e-6)
    with pytest.raises(ConfigError, match="max_iters` must be at least 5"):
        continue_in_jengine(
            tmp_path / "end", dict(path=momentum, optimizer=True), **config, train_cfg=dict(by_epoch=False, max_iters=3)
        )


def test_an_optimizer_without_its_count_is_an_error(tmp_path, by_hand):
    state, _ = by_hand
    adam = state.opt_state[0]
    tree = dict(params=state.params, opt_state=dict(mu=adam.mu, nu=adam.nu), step=state.step)
    hook = Losses()
    with pytest.raises(ConfigError, match=r"\| missing +\| inner_state\.scale_by_adam\.count"):
        continue_in_jengine(tmp_path, dict(path=tree, optimizer=True), custom_hooks=[hook])
    assert hook.losses == []


def test_the_state_of_a_new_head_starts_anew(tmp_path, by_hand):
    state, _ = by_hand
    tree = dict(params=state.params, opt_state=state.opt_state, step=state.step)
    load_from = dict(path=tree, exclude=["out"], strict=False, optimizer=True)
    config = dict(train_cfg=dict(by_epoch=False, max_iters=STEPS), custom_hooks=[])
    runner, _ = continue_in_jengine(tmp_path, load_from, **config)
    mu = runner.state.opt_state.inner_state["scale_by_adam"].mu
    np.testing.assert_array_equal(mu["out"]["kernel"], np.zeros((2, 2)))
    np.testing.assert_array_equal(mu["dense"]["kernel"], state.opt_state[0].mu["dense"]["kernel"])
