"""Test replicas of one device each: results, collectives and the state of a replica."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.config import STRATEGIES
from jengine.data import ArrayDataset
from jengine.extras.plan import Collective
from jengine.hooks import Hook, SyncBuffersHook
from jengine.model import FunctionalModel, LinenModel
from jengine.parallel import DataParallel, convert_replica_axis
from tests.parallel.conftest import X, Y, make_loader, squared_error, step_collectives

AMP = dict(
    type="AmpOptimWrapper",
    dtype="float32",
    loss_scale=dict(init_scale=1024.0, growth_interval=5),
    optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.1),
    accumulative_counts=2,
    clip_grad=dict(max_norm=0.5),
)
LARS = dict(optimizer=dict(type="LARS", lr=1.0, momentum=0.9, eta=0.01), clip_grad=dict(max_norm=0.5))


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="down")(jnp.tanh(nn.Dense(16, name="up")(x)))


def make_plain_model():
    return LinenModel(Plain(), squared_error, inputs="x")


@pytest.mark.parametrize(
    ("impl", "devices", "optimizer"),
    [("shard_map", 4, LARS), ("pmap", 8, AMP)],
    ids=["shard_map 4, LARS", "pmap 8, AdamW"],
)
def test_twenty_steps_have_the_results_of_one_device(make_run, assert_close, impl, devices, optimizer):
    changes = dict(model=make_plain_model(), optim_wrapper=optimizer, custom_hooks=[dict(type="EMAHook", momentum=0.1)])
    expected = make_run(work_dir="one", **changes).train()
    runner = make_run(dict(type="DataParallel", impl=impl, devices=devices), work_dir="many", **changes)
    state = runner.train()
    assert runner.programs.update.traces == 1
    for part in ("params", "hook_state"):
        assert_close(getattr(state, part), getattr(expected, part))
    opt_states = state.opt_state, expected.opt_state
    if runner.optim_wrapper.accumulates:  # each replica has its own accumulated gradients
        opt_states = (optax.tree.set(s, accumulated_grads=None, weight_sum=None) for s in opt_states)
    assert_close(*opt_states)


def test_replicas_exchange_gradients_only_in_updates_and_then_once(make_run):
    runner = make_run(
        dict(type="DataParallel", devices=8), optim_wrapper=AMP, train_cfg=dict(by_epoch=False, max_iters=2)
    )
    runner.train()
    assert step_collectives(runner, runner.programs.accumulate) == [Collective("all-reduce", 1, 4)]  # the loss
    [update] = step_collectives(runner, runner.programs.update)
    leaves = jax.tree.leaves(runner.state.params)
    # XLA combines all gradients, the loss and the number of examples that they count for into one
    assert update == Collective("all-reduce", len(leaves) + 2, sum(leaf.nbytes for leaf in leaves) + 8)


def test_each_replica_has_its_own_statistics_until_they_are_averaged(make_run):
    seen = {}

    class Recorder(Hook):
        def before_val_epoch(self, runner):  # runs after SyncBuffersHook, registered later
            seen.setdefault("after", jax.device_get(runner.state.model_state["batch_stats"]["bn"]["mean"]))

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen["before"] = jax.device_get(runner.state.model_state["batch_stats"]["bn"]["mean"])

    def error(predictions, batch):
        return jnp.square(predictions - batch["y"]).sum(axis=-1)

    runner = make_run(
        dict(type="DataParallel", devices=2),
        train_cfg=dict(by_epoch=False, max_iters=1),
        val_dataloader=make_loader(8, drop_last=False),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=error),
        custom_hooks=[dict(type="SyncBuffersHook"), Recorder()],
    )
    kernel = []
    runner.register_hook(_BeforeIteration(lambda r: kernel.append(np.asarray(r.state.params["up"]["kernel"]))))
    state = runner.train()
    # momentum 0.9: a tenth of the mean over the 8 examples of the replica after the first layer
    own = 0.1 * (X @ kernel[0]).reshape(2, 8, 16).mean(axis=1)
    np.testing.assert_allclose(seen["before"], own, atol=1e-6)
    np.testing.assert_allclose(seen["after"], np.broadcast_to(own.mean(0), (2, 16)), atol=1e-6)

    stats = jax.tree.map(lambda x: x[0], jax.device_get(state.model_state))
    outputs = runner.model.predict(jax.device_get(state.params), stats, {"x": X})
    expected = float(np.square(np.asarray(outputs) - Y).sum(-1).mean())
    assert list(runner.validations[0][2].values()) == [pytest.approx(expected, rel=1e-5)]


class _BeforeIteration(Hook):
    def __init__(self, action):
        self.action = action

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.action(runner)


def test_a_config_may_use_the_former_name():
    assert type(STRATEGIES.build(dict(type="Replica", devices=2))) is DataParallel


def test_averaging_replaces_floating_leaves_by_the_mean_and_keeps_integers():
    strategy = DataParallel(devices=4)
    state = {"mean": jnp.array([0.0, 2.0, 4.0, 6.0]), "count": jnp.array([1, 2, 3, 4])}
    averaged = strategy.mean_over_replicas(state)
    assert averaged["mean"].tolist() == [3.0, 3.0, 3.0, 3.0]
    assert averaged["count"].tolist() == [1, 2, 3, 4]


def test_the_state_of_a_single_replica_is_not_averaged():
    state = {"mean": jnp.array([2.0])}
    assert DataParallel(devices=1).mean_over_replicas(state) is state


@pytest.mark.parametrize(
    ("train_cfg", "count"),
    [(dict(max_epochs=2), 2), (dict(by_epoch=False, max_iters=2, val_interval=1), 3)],
    ids=["once an epoch", "before each validation and at the end"],
)
def test_statistics_are_averaged_once_before_a_validation(make_run, train_cfg, count):
    calls = []

    class Counting(DataParallel):
        def mean_over_replicas(self, model_state):
            calls.append(1)
            return super().mean_over_replicas(model_state)

    make_run(
        Counting(devices=2),
        train_cfg=train_cfg,
        val_dataloader=make_loader(8),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=lambda p, b: jnp.square(p - b["y"]).sum(-1)),
        custom_hooks=[SyncBuffersHook()],
    ).train()
    assert len(calls) == count


# 8 sentences of up to 6 words, of very different lengths, so the mean of means differs from the mean
WORDS = (np.arange(6) < np.array([1, 6, 2, 5, 3, 3, 6, 1])[:, None]).astype("f")
TEXT = ArrayDataset(
    dict(
        x=np.random.RandomState(1).randn(8, 6, 3).astype("f"),
        t=np.random.RandomState(2).randn(8, 6).astype("f"),
        words=WORDS,
    )
)


def make_words_model():
    def loss(params, batch):
        error = jnp.square(jnp.einsum("bsi,i->bs", batch["x"], params["w"]) - batch["t"])
        return {"loss": ((error * batch["words"]).sum(), batch["words"].sum())}

    return FunctionalModel(init=lambda: {"w": jnp.array([0.5, -1.0, 2.0])}, loss=loss)


@pytest.mark.parametrize(("devices", "counts"), [(4, 2), (8, 1)])
def test_a_loss_averaged_over_words_equals_that_of_the_full_batch(make_run, devices, counts):
    seen = []

    class Recorder(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append(float(outputs["loss"]))

    def run(parallel, counts, **changes):
        return make_run(
            parallel,
            work_dir=f"by_{counts}",
            model=make_words_model(),
            train_dataloader=make_loader(8 // counts, TEXT),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0), accumulative_counts=counts),
            train_cfg=dict(by_epoch=False, max_iters=counts),
            **changes,
        ).train()

    expected = run(None, 1, custom_hooks=[Recorder()])
    found = run(dict(type="DataParallel", devices=devices), counts, custom_hooks=[Recorder()])
    np.testing.assert_allclose(found.params["w"], expected.params["w"], atol=1e-6, rtol=1e-6)
    if counts == 1:
        assert seen[1] == pytest.approx(seen[0], rel=1e-6)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_the_loss_of_an_iteration_that_only_accumulates_is_the_mean_over_replicas(make_run, steps_per_call):
    class Losses(Hook):
        acts_on = "metrics"

        def __init__(self):
            self.seen = []

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            self.seen.append(float(outputs["loss"]))

    def run(parallel, work_dir):
        losses = Losses()
        make_run(
            parallel,
            work_dir=work_dir,
            model=make_words_model(),
            train_dataloader=make_loader(4, TEXT),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0), accumulative_counts=3),
            train_cfg=dict(by_epoch=False, max_iters=6, steps_per_call=steps_per_call),
            custom_hooks=[losses],
        ).train()
        return losses.seen

    expected = run(None, "one")
    assert len(expected) == 6
    assert run(dict(type="DataParallel", devices=4), "many") == pytest.approx(expected, rel=1e-5)


def backtracking():
    return optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15))


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (optax.lbfgs, {}),
        (optax.lbfgs, dict(steps_per_call=2)),
        (backtracking, dict(steps_per_call=2)),
        (backtracking, {}),
    ],
)
def test_a_line_search_decides_alike_on_all_replicas_although_their_data_differ(make_run, settings, optimizer):
    rng = np.random.default_rng(0)
    x, kernel, head = (rng.normal(size=size).astype(np.float32) for size in ((32, 6), (6, 5), (5, 1)))
    y = np.sin(x.sum(1))

    def loss(params, batch):
        return jnp.square((jnp.tanh(batch["x"] @ params["kernel"]) @ params["head"])[:, 0] - batch["y"])

    init = {"kernel": kernel, "head": head}
    data = [dict(x=x[i : i + 8], y=y[i : i + 8]) for i in range(0, 32, 8)]
    run = make_run(
        dict(type="DataParallel", devices=4),
        model=FunctionalModel(lambda: jax.tree.map(jnp.asarray, init), loss),
        train_dataloader=data,
        optim_wrapper=optimizer(),
        train_cfg=dict(by_epoch=False, max_iters=6, **settings),
    )
    trained = run.train().params
    params, tx = jax.tree.map(jnp.asarray, init), optimizer()
    state = tx.init(params)
    for i in range(6):
        value_fn = lambda params, i=i: loss(params, data[i % 4]).mean()  # noqa: E731 - a line search reads its signature
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), trained, params)


def test_padded_examples_have_no_effect(make_run):
    data = ArrayDataset(dict(x=X[:11], y=Y[:11]))  # in a batch of 16 on 8 devices three replicas have only padding
    changes = dict(
        model=make_plain_model(),
        train_dataloader=make_loader(16, data, drop_last=False),
        train_cfg=dict(by_epoch=False, max_iters=3),
    )
    expected = make_run(work_dir="one", **changes).train()
    state = make_run(dict(type="DataParallel", devices=8), work_dir="many", **changes).train()
    np.testing.assert_allclose(state.params["up"]["kernel"], expected.params["up"]["kernel"], atol=1e-6)


def test_replicas_draw_different_random_numbers(make_run):
    model = FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch, rng: params["w"] * jax.random.normal(rng, (batch["x"].shape[0],)).mean(),
    )
    state = make_run(
        dict(type="DataParallel", devices=2),
        model=model,
        train_cfg=dict(by_epoch=False, max_iters=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0)),
    )
    key = jax.random.fold_in(jax.random.key(state.seed), 1)
    drawn = [float(jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, i), 0), (8,)).mean()) for i in range(2)]
    assert drawn[0] != drawn[1]
    assert float(state.train().params["w"]) == pytest.approx(-np.mean(drawn), abs=1e-6)


def test_a_run_resumes_with_the_statistics_of_each_replica(make_run, tmp_path):
    changes = dict(
        optim_wrapper=AMP,
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=3), logger=None),
    )
    parallel = dict(type="DataParallel", devices=2)
    expected = make_run(parallel, work_dir="one", train_cfg=dict(by_epoch=False, max_iters=6), **changes).train()

    saved = tmp_path / "one" / "iter_3"  # within a window of accumulation
    state = make_run(parallel, train_cfg=dict(by_epoch=False, max_iters=6), resume=saved, **changes).train()
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((state.params, state.model_state, state.opt_state)),
        jax.device_get((expected.params, expected.model_state, expected.opt_state)),
    )


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [(dict(type="DataParallel", devices=2), None), (None, dict(type="DataParallel", devices=2)),
     pytest.param(dict(type="DataParallel", mesh=dict(data=2, fsdp=4), fsdp_min_size=16), dict(type="DataParallel", devices=4), marks=pytest.mark.many_processes)],
    ids=["replicas to one device", "one device to replicas", "replicas of four devices to replicas of one"],
)  # fmt: skip
def test_a_run_resumes_on_another_number_of_replicas_with_their_statistics_and_gradients(make_run, saved, resumed):
    changes = dict(
        optim_wrapper=AMP,
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=3), logger=None),
        custom_hooks=[dict(type="EMAHook", update_buffers=True)],
    )
    first = make_run(saved, train_cfg=dict(by_epoch=False, max_iters=3), **changes).train()
    seen = {}

    class Recorder(Hook):
        def before_train(self, runner):
            seen["state"] = jax.device_get(runner.state.replace(rng=None))

    runner = make_run(resumed, train_cfg=dict(by_epoch=False, max_iters=4), resume=True, **changes)
    runner.register_hook(Recorder())
    assert runner.train().step == 4

    def merge(merge_replicas, tree, parallel):
        return [merge_replicas(np.asarray(x), axis=0) if parallel else np.asarray(x) for x in jax.tree.leaves(tree)]

    for merge_replicas, part in (
        (np.mean, lambda s: s.model_state),
        (np.sum, lambda s: optax.tree.get(s.opt_state, "accumulated_grads")),
        (np.sum, lambda s: optax.tree.get(s.opt_state, "weight_sum")),
        (np.mean, lambda s: s.hook_state["EMAHook"].model_state),
    ):
        for found, expected in zip(
            merge(merge_replicas, part(seen["state"]), resumed), merge(merge_replicas, part(first), saved), strict=True
        ):
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [(2, None), (None, 2), (2, 4)])
def test_typed_keys_of_the_model_state_come_from_the_first_replica(before, after):
    keys = jax.random.split(jax.random.key(0), before or 1)
    state = {"model_state": {"key": keys if before else keys[0]}}
    found = convert_replica_axis(state, before, after)["model_state"]["key"]
    assert found.shape == (() if after is None else (after,))
    expected = np.broadcast_to(jax.random.key_data(keys[0]), (*found.shape, 2))
    np.testing.assert_array_equal(jax.random.key_data(found), expected)


def test_replicas_start_from_weights_of_one_device(make_run, tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None)
    first = make_run(work_dir="one", default_hooks=hooks, train_cfg=dict(by_epoch=False, max_iters=1)).train()
    seen = {}

    class Recorder(Hook):
        def before_train(self, runner):
            seen["mean"] = jax.device_get(runner.state.model_state["batch_stats"]["bn"]["mean"])

    make_run(
        dict(type="DataParallel", devices=2),
        load_from=tmp_path / "one" / "iter_1",
        train_cfg=dict(by_epoch=False, max_iters=1),
        custom_hooks=[Recorder()],
    ).train()
    mean = np.asarray(first.model_state["batch_stats"]["bn"]["mean"])
    np.testing.assert_array_equal(seen["mean"], np.stack([mean, mean]))


def test_a_step_skipped_by_one_replica_is_skipped_by_all(make_run):
    class SkipStep(Hook):
        def traced_grads(self, ctx):
            return ctx.replace(apply_update=ctx.batch["x"].max() < X.max())  # false on one replica alone

    runner = make_run(
        dict(type="DataParallel", devices=4),
        model=make_plain_model(),
        train_cfg=dict(by_epoch=False, max_iters=1),
        custom_hooks=[SkipStep()],
    )
    before = []
    runner.register_hook(_BeforeIteration(lambda r: before.append(jax.device_get(r.state.params))))
    state = runner.train()
    assert state.step == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before[0])
    for shard in state.params["up"]["kernel"].addressable_shards:
        np.testing.assert_array_equal(shard.data, before[0]["up"]["kernel"])
