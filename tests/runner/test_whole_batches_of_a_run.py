"""Test that a run trains, evaluates, predicts and resumes with batches of any form (`batch_axis=None`)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.model import FunctionalModel, LinenModel


class Graphs(NamedTuple):
    nodes: Any
    edges: Any
    n_node: Any
    kl: Any
    globals: Any = None


def make_graphs(i, size=8):
    rng = np.random.RandomState(i)
    nodes = rng.randn(size, 3).astype(np.float32)
    return Graphs(nodes, {"length": rng.rand(5).astype(np.float32)}, np.array([3, size - 3]), 0.1 * i)


BATCHES = [make_graphs(i) for i in range(6)]
IN_ORDER = dict(type="DefaultSampler", shuffle=False)
RULES = [("nodes", ("data",))]
SGD = dict(type="SGD", lr=0.1)


def graph_loss(params, batch):
    return jnp.square(batch.nodes @ params["w"] - batch.edges["length"].mean()).mean() + batch.kl * params["w"].sum()


def graph_model(loss=graph_loss):
    return FunctionalModel(
        init=lambda: {"w": jnp.ones(3)}, loss=loss, predict=lambda params, batch: batch.nodes @ params["w"]
    )


class Stream:
    """Batches with a position, as an environment or a packer would have."""

    batch_axis = None

    def __init__(self, batches=BATCHES):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def arguments(data=None, **changes):
    data = dict(dataset=BATCHES, batch_axis=None, sampler=IN_ORDER) if data is None else data
    base = dict(
        model=graph_model(),
        train_dataloader=data,
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=SGD),
    )  # fmt: skip
    return {**base, **changes}


def train_by_hand(updates, loss=graph_loss):
    """Return the weights after SGD; each update has the batches whose mean gradient it uses, or their weights too."""
    w = {"w": jnp.ones(3)}
    for batches, weights in updates:
        grads = [jax.grad(loss)(w, batch)["w"] for batch in batches]
        w = {"w": w["w"] - 0.1 * np.average(grads, axis=0, weights=weights)}
    return w["w"]


EACH = [([batch], None) for batch in BATCHES]


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(train_dataloader=Stream()),
        dict(train_cfg=dict(max_epochs=1, steps_per_call=3)),
        dict(train_cfg=dict(by_epoch=False, max_iters=6), parallel=dict(type="Pjit")),
        dict(rules=RULES, parallel=dict(type="Pjit")),
        dict(rules=RULES, parallel=dict(type="Pjit"), train_cfg=dict(max_epochs=1, steps_per_call=2)),
    ],
    ids=["dataset", "iterable", "chunks", "mesh", "rules", "rules and chunks"],
)
def test_a_run_on_graphs_equals_a_loop_by_hand(make_runner, changes):
    changes = dict(changes)
    if rules := changes.pop("rules", None):
        changes["train_dataloader"] = dict(dataset=BATCHES, batch_axis=None, batch_rules=rules, sampler=IN_ORDER)
    state = make_runner(**arguments(**changes)).train()
    np.testing.assert_allclose(state.params["w"], train_by_hand(EACH), rtol=1e-5, atol=1e-6)


def test_rules_divide_the_entry_over_the_devices(make_runner):
    data = dict(dataset=BATCHES, batch_axis=None, batch_rules=RULES, sampler=IN_ORDER)
    runner = make_runner(**arguments(data, parallel=dict(type="Pjit", devices=4)))
    batch = runner.strategy.put_batch(BATCHES[0], rules=RULES)
    assert batch.nodes.sharding.shard_shape((8, 3)) == (2, 3)
    assert batch.n_node.sharding.is_fully_replicated
    with pytest.raises(ValueError, match="partitioned 4 times, but the dimension size is 7"):
        runner.strategy.put_batch(make_graphs(0, 7), rules=RULES)


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_accumulated_batches_weigh_one_or_what_the_loss_says(make_runner, steps_per_call, weighted):
    def loss(params, batch):  # (sum, weight) over the first nodes
        count = batch.n_node[0] + 10 * batch.kl
        return {"loss": (graph_loss(params, batch) * count, count)} if weighted else {"loss": graph_loss(params, batch)}

    runner = make_runner(
        **arguments(
            model=graph_model(loss),
            optim_wrapper=dict(optimizer=SGD, accumulative_counts=3),
            train_cfg=dict(max_epochs=1, steps_per_call=steps_per_call),
        )
    )
    weights = [3 + 10 * batch.kl for batch in BATCHES]
    updates = [(BATCHES[i : i + 3], weights[i : i + 3] if weighted else None) for i in (0, 3)]
    np.testing.assert_allclose(runner.train().params["w"], train_by_hand(updates), rtol=1e-5)


def test_validation_counts_each_batch_once_and_prediction_returns_one_result_per_batch(make_runner):
    batches = [make_graphs(0, 4), make_graphs(1, 6), make_graphs(2, 4)]
    runner = make_runner(
        **arguments(
            train_cfg=dict(max_epochs=1, on_recompile="warn"), val_dataloader=Stream(batches), val_cfg=dict(),
            val_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: jnp.square(predictions)),
        ), validates=True
    )  # fmt: skip
    w = np.asarray(runner.train().params["w"])
    expected = [batch.nodes @ w for batch in batches]
    means = [np.square(prediction).mean() for prediction in expected]
    assert runner.validations[-1][2]["loss"] == pytest.approx(np.mean(means), rel=1e-5)
    found = runner.predict(dict(dataset=batches, batch_axis=None))
    assert isinstance(found, list)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_metrics_count_every_label_of_a_batch(make_runner):
    batches = [dict(nodes=make_graphs(i, 4 + i).nodes, label=np.arange(4 + i) % 3, mask=np.zeros(2)) for i in range(2)]
    model = FunctionalModel(lambda: {"w": jnp.ones(())}, lambda p, b: p["w"], lambda p, b: p["w"] * b["nodes"])
    cfg = dict(max_epochs=1, on_recompile="warn")
    data = dict(dataset=batches, batch_axis=None)
    evaluation = dict(val_dataloader=data, val_cfg=dict(), val_evaluator=dict(type="Accuracy"))
    runner = make_runner(**{**arguments(data, model=model, train_cfg=cfg), **evaluation}, validates=True)
    runner.train()
    correct = [batch["nodes"].argmax(axis=1) == batch["label"] for batch in batches]
    assert runner.validations[-1][2]["accuracy/top1"] == pytest.approx(np.mean(np.concatenate(correct)))


@pytest.mark.parametrize(("stop", "is_stream"), [(1, True), (6, True), (4, False), (9, False)])
def test_a_resumed_run_is_bit_equal(make_runner, tmp_path, stop, is_stream):
    saving = dict(checkpoint=dict(type="CheckpointHook", interval=stop, by_epoch=False), logger=None)

    def train(name, **changes):
        data = Stream() if is_stream else dict(dataset=BATCHES, batch_axis=None)
        cfg = dict(by_epoch=False, max_iters=12)
        return make_runner(
            work_dir=tmp_path / name, **arguments(data, train_cfg=cfg, default_hooks=saving, **changes)
        ).train()

    whole = train("whole", randomness=dict(seed=1))
    resumed = train("rest", randomness=dict(seed=1), resume=tmp_path / "whole" / f"iter_{stop}")
    assert int(resumed.step) == 12
    np.testing.assert_array_equal(resumed.params["w"], whole.params["w"])


def test_data_parallel_needs_a_rule_and_then_averages_over_replicas(make_runner):
    parallel = dict(type="DataParallel", devices=4)
    with pytest.raises(ConfigError, match="DataParallel: with batch_axis=None a rule .* over 'data'.* use Pjit"):
        make_runner(**arguments(parallel=parallel)).train()
    data = dict(dataset=BATCHES, batch_axis=None, batch_rules=RULES, sampler=IN_ORDER)
    state = make_runner(**arguments(data, parallel=parallel)).train()
    np.testing.assert_allclose(state.params["w"], train_by_hand(EACH), rtol=1e-5, atol=1e-6)


def test_an_entry_named_mask_is_the_models_own(make_runner):
    batches = [dict(x=np.arange(4.0, dtype=np.float32), mask=np.array([True, False, False, False]))] * 2

    def loss(params, batch):
        return params["w"].sum() * batch["x"]  # the mean over all of x, also where `mask` is False

    data = dict(dataset=batches, batch_axis=None)
    state = make_runner(**arguments(data, model=graph_model(loss))).train()
    np.testing.assert_allclose(state.params["w"], 1 - 0.1 * 1.5 * 2, rtol=1e-6)


def test_other_sizes_compile_again_with_bucketing_as_the_remedy(make_runner, caplog):
    data = dict(dataset=[make_graphs(i, size) for i, size in enumerate((4, 4, 6))], batch_axis=None, sampler=IN_ORDER)
    runner = make_runner(**arguments(data, train_cfg=dict(max_epochs=1, on_recompile="warn")))
    runner.train()
    (found,) = [record.getMessage() for record in caplog.records if "is compiled again" in record.getMessage()]
    assert "batch.nodes: was float32[4,3], is float32[6,3]" in found
    assert "(bucketing)" in found
    assert (runner.iter, runner.programs.update.traces) == (3, 2)


def test_precise_statistics_are_computed_from_whole_batches(make_runner):
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            return nn.BatchNorm(use_running_average=not train)(x)

    model = LinenModel(Net(), lambda outputs, batch: {"loss": jnp.square(outputs).mean()}, inputs="nodes")
    hook = dict(type="PreciseBNHook", num_samples=6)
    data = dict(dataset=[batch._asdict() for batch in BATCHES], batch_axis=None, sampler=IN_ORDER)
    state = make_runner(**arguments(data, model=model, custom_hooks=[hook])).train()
    means = np.mean([batch.nodes.mean(axis=0) for batch in BATCHES], axis=0)
    np.testing.assert_allclose(jax.tree.leaves(state.model_state)[0], means, atol=1e-5)


@pytest.mark.foreign
def test_jraph_trains_as_its_documentation_writes_it(make_runner):
    jraph = pytest.importorskip("jraph")

    def graph(i, size):
        return jraph.GraphsTuple(
            nodes=np.full((size, 2), i, np.float32), edges=None, receivers=np.arange(size), senders=np.arange(size)[::-1],
            n_node=np.array([size]), n_edge=np.array([size]), globals=np.array([[float(i)]], np.float32),
        )  # fmt: skip

    def collate(graphs):
        return jraph.pad_with_graphs(jraph.batch_np(graphs), n_node=16, n_edge=16, n_graph=4)

    def loss(params, batch):
        net = jraph.GraphConvolution(update_node_fn=lambda nodes: nodes @ params["w"])
        out = jraph.segment_sum(
            net(batch).nodes[:, 0], jnp.repeat(jnp.arange(4), batch.n_node, total_repeat_length=16), 4
        )
        mask = jraph.get_graph_padding_mask(batch)
        return {"loss": (jnp.where(mask, jnp.square(out - batch.globals[:, 0]), 0).sum(), mask.sum())}

    model = FunctionalModel(init=lambda: {"w": jnp.ones((2, 1))}, loss=loss)
    data = dict(dataset=[graph(i, 2 + i % 3) for i in range(9)], batch_size=3, collate_fn=collate, batch_axis=None)
    runner = make_runner(
        **arguments(
            data, model=model, train_cfg=dict(max_epochs=2, on_recompile="raise"),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e-4)),
        )
    )  # fmt: skip
    params, batches = {"w": jnp.ones((2, 1))}, []
    loader = runner.train_dataloader
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches += list(loader)
    for batch in batches:
        grads = jax.grad(lambda params, batch=batch: loss(params, batch)["loss"][0] / loss(params, batch)["loss"][1])(
            params
        )
        params = jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads)
    loader.set_epoch(0)
    np.testing.assert_allclose(runner.train().params["w"], params["w"], rtol=1e-5)
