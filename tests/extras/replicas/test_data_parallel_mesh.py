"""Test replicas of several devices each: shardings within a replica, and collectives between replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.plan import find_collectives
from jengine.hooks import Hook
from jengine.model import CrossEntropy, FunctionalModel, LinenModel
from tests.extras.replicas.test_data_parallel import (
    AMP,
    LARS,
    TEXT,
    make_plain_model,
    make_words_model,
)
from tests.parallel.conftest import X, Y, make_loader, squared_error, step_collectives
from tests.refusals import check_refusal

RULES = [("up.kernel", ("fsdp", "tensor")), ("down.kernel", ("tensor", "fsdp"))]
MESHES = {
    "data 4, tensor 2": dict(mesh=dict(tensor=2), rules=[("up.kernel", (None, "tensor"))]),
    "data 2, fsdp 2, tensor 2": dict(mesh=dict(fsdp=2, tensor=2), rules=RULES, fsdp_min_size=16),
}


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [("data 2, fsdp 2, tensor 2", AMP), ("data 4, tensor 2", {**LARS, "accumulative_counts": 2})],
    ids=["data 2, fsdp 2, tensor 2, AdamW", "data 4, tensor 2, LARS"],
)
def test_twenty_steps_have_the_results_of_one_program_on_the_same_mesh(make_run, assert_close, mesh, optimizer):
    changes = dict(model=make_plain_model(), optim_wrapper=optimizer, custom_hooks=[dict(type="EMAHook", momentum=0.1)])
    expected = make_run(dict(type="Pjit", **MESHES[mesh]), work_dir="one", **changes).train()
    runner = make_run(dict(type="DataParallel", **MESHES[mesh]), work_dir="many", **changes)
    state = runner.train()
    assert runner.programs.update.traces == 1
    assert runner.programs.accumulate.traces == 1
    for part in ("params", "hook_state"):
        assert_close(getattr(state, part), getattr(expected, part), atol=1e-6)
    assert_close(state.opt_state.hyperparams, expected.opt_state.hyperparams, atol=1e-6)
    inner, expected_inner = (s.opt_state.inner_state.inner_state for s in (state, expected))
    assert_close(inner, expected_inner, atol=1e-6)
    # within a replica shardings are those of Pjit; accumulated gradients have a leading replica axis
    kernel, summed = state.params["up"]["kernel"], optax.tree.get(state.opt_state, "accumulated_grads")["up"]["kernel"]
    assert kernel.sharding == expected.params["up"]["kernel"].sharding
    assert summed.sharding.spec == P("data", *kernel.sharding.spec)
    assert summed.shape == (runner.strategy.replicas, 8, 16)


class Words(nn.Module):
    """Predict each word from its embedding, with a head that shares the table."""

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(32, 16, name="embed")
        return embed.attend(nn.Dense(16, name="mlp")(embed(x)))


def make_words_run(make_run, parallel, **changes):
    words = np.random.RandomState(5).randint(0, 32, (16, 4))
    return make_run(
        dict(mesh=dict(data=2, fsdp=2, tensor=2), fsdp_min_size=16, **parallel),
        model=LinenModel(Words(), CrossEntropy("y"), inputs="x"),
        train_dataloader=make_loader(dataset=ArrayDataset(dict(x=words, y=words))),
        train_cfg=dict(by_epoch=False, max_iters=4),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01), accumulative_counts=2),
        **changes,
    )


TABLE_RULES = [[], [("embedding", (("fsdp", "tensor"),))], [("embedding", ("tensor",))]]


def test_a_sharded_lookup_table_is_gathered_in_a_replica_and_trains_like_one_program(make_run, assert_close):
    expected = make_words_run(make_run, dict(type="Pjit"), work_dir="one").train()
    assert expected.params["embed"]["embedding"].sharding.spec == P("fsdp")
    for number, rules in enumerate(TABLE_RULES):
        state = make_words_run(make_run, dict(type="DataParallel", rules=rules), work_dir=str(number)).train()
        assert state.params["embed"]["embedding"].sharding.spec == P(*(rules[0][1] if rules else ("fsdp",)))
        assert state.params["mlp"]["kernel"].sharding.spec == P("fsdp")
        assert_close(state.params, expected.params, atol=1e-6)


def test_a_lookup_table_that_xla_cannot_gather_is_refused_before_compiling(make_run):
    runner = make_words_run(make_run, dict(type="DataParallel", rules=[("embedding", ("fsdp", "tensor"))]))
    with pytest.raises(ConfigError, match="must shard the lookup table 'embed.embedding' along one of its axes"):
        runner.train()
    assert runner.programs is None


@pytest.mark.parametrize("kind", ["Pjit", "DataParallel"])
def test_a_chunk_contains_the_exchange_of_its_gradients_once(make_run, kind):
    data = dict(x=np.tile(X, (64, 1)), y=np.tile(Y, (64, 1)))
    runner = make_run(
        dict(type=kind, mesh=dict(data=2, fsdp=4), fsdp_min_size=16),
        train_dataloader=make_loader(1024, ArrayDataset(data)),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2),
        custom_hooks=[dict(type="NumericsGuardHook", interval=100)],
        train_cfg=dict(by_epoch=False, max_iters=4, steps_per_call=2),
    )
    matrices = [leaf for leaf in jax.tree.leaves(runner.train().params) if leaf.ndim == 2]
    program = runner.strategy.compile_train_step(runner.programs.chunk.__wrapped__, chunked=True)
    compiled = program.lower(*runner.programs.chunk.shapes).compile()
    scattered = [found for found in find_collectives(compiled.as_text()) if found.kind == "reduce-scatter"]
    size = sum(leaf.nbytes for leaf in matrices)
    assert size <= sum(found.size for found in scattered) < 2 * size


@pytest.mark.parametrize("kind", ["Pjit", "DataParallel"])
def test_replicas_exchange_gradients_once_an_update_and_pjit_in_each_iteration(make_run, kind):
    class Bare(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, use_bias=False, name="down")(jnp.tanh(nn.Dense(64, use_bias=False, name="up")(x)))

    data = dict(x=np.tile(X, (64, 1)), y=np.tile(Y, (64, 1)))
    runner = make_run(
        dict(type=kind, mesh=dict(data=2, fsdp=4), fsdp_min_size=16),
        model=LinenModel(Bare(), squared_error, inputs="x"),
        train_dataloader=make_loader(1024, ArrayDataset(data)),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2),
        train_cfg=dict(by_epoch=False, max_iters=2),
    )
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.train().params))

    def size(step, kind):
        return sum(found.size for found in step_collectives(runner, step, data) if found.kind == kind)

    for step in (runner.programs.accumulate, runner.programs.update):  # within a replica
        assert size(step, "all-gather") == size(step, "reduce-scatter") == params
    # between replicas: the shard of each gradient on a device; the loss, within a replica and between them; and
    # the number of examples of a window
    gradients = pytest.approx(params // 4, abs=12)
    losses = 8  # within a replica and between them
    assert size(runner.programs.accumulate, "all-reduce") == (losses if kind == "DataParallel" else gradients)
    assert size(runner.programs.update, "all-reduce") == gradients


@pytest.mark.parametrize("counts", [1, 2])
def test_a_loss_averaged_over_words_equals_that_of_the_full_batch(make_run, counts):
    def run(parallel, counts):
        return make_run(
            parallel,
            work_dir=f"by_{counts}",
            model=make_words_model(),
            train_dataloader=make_loader(8 // counts, TEXT),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0), accumulative_counts=counts),
            train_cfg=dict(by_epoch=False, max_iters=counts),
        ).train()

    expected = run(None, 1)
    found = run(dict(type="DataParallel", mesh=dict(fsdp=2), devices=4), counts)
    np.testing.assert_allclose(found.params["w"], expected.params["w"], atol=1e-6, rtol=1e-6)


def test_statistics_are_computed_over_all_devices_of_a_replica(make_run):
    kernel = []

    class Recorder(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            kernel.append(np.asarray(runner.state.params["up"]["kernel"]))

    runner = make_run(
        dict(type="DataParallel", mesh=dict(data=2, fsdp=2, tensor=2), rules=RULES),
        train_cfg=dict(by_epoch=False, max_iters=1),
        val_dataloader=make_loader(8),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=lambda p, b: jnp.square(p - b["y"]).sum(-1)),
        custom_hooks=[Recorder()],
    )
    state = runner.train()
    # momentum 0.9: a tenth of the mean over the 8 examples of the replica, which are on several devices
    own = 0.1 * (X @ kernel[0]).reshape(2, 8, 16).mean(axis=1)
    mean = state.model_state["batch_stats"]["bn"]["mean"]
    assert mean.sharding.spec == P("data")
    np.testing.assert_allclose(mean, own, atol=1e-6)

    # each replica has predicted its half of a batch of 8 with its own statistics
    params, stats = jax.device_get((state.params, state.model_state))
    halves = [
        runner.model.predict(params, jax.tree.map(lambda s, i=i: s[i], stats), {"x": X.reshape(4, 4, 8)[i::2]})
        for i in range(2)
    ]
    errors = [np.square(np.asarray(halves[i]) - Y.reshape(4, 4, 4)[i::2]).sum(-1) for i in range(2)]
    assert list(runner.validations[0][2].values()) == [pytest.approx(float(np.mean(errors)), rel=1e-5)]


def test_replicas_draw_different_random_numbers_and_the_devices_of_one_the_same(make_run):
    model = FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch, rng: params["w"] * jax.random.normal(rng, (batch["x"].shape[0],)).mean(),
    )
    runner = make_run(
        dict(type="DataParallel", mesh=dict(data=2, fsdp=2), devices=4),
        model=model,
        train_cfg=dict(by_epoch=False, max_iters=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0)),
    )
    key = jax.random.fold_in(jax.random.key(runner.seed), 1)
    drawn = [float(jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, i), 0), (8,)).mean()) for i in range(2)]
    assert float(runner.train().params["w"]) == pytest.approx(-np.mean(drawn), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            dict(rules=[("up", ("data",))]),
            ["'data'"],
        ),
        (dict(logical_axes=dict(mlp="data")), ["'data'"]),
        (
            dict(mesh=jax.make_mesh((8,), ("fsdp",))),
            ["'data'", "`batch_axes`", "got the axes ('fsdp',)"],
        ),
        *[
            (
                dict(mesh=mesh, devices=2),
                ["'data'", "got {'data': 1", "Pjit"],
            )
            for mesh in (dict(data=1, fsdp=2), dict(data=1, tensor=2), dict(tensor=2))
        ],
        (dict(mesh=dict(data=3)), ["got 3"]),
    ],
)
def test_illegal_meshes_and_rules_are_refused(make_run, settings, words):
    check_refusal(lambda: make_run(dict(type="DataParallel", **settings)), ConfigError, *words)
