"""Test that a mesh with explicit, automatic or mixed axes is used as it is, with the results of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jengine.config import paths
from jengine.config.description import describe
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import LinenModel, NnxModel
from jengine.parallel import (
    DataParallel,
    Pjit,
    Placement,
    default_strategy,
    gather_replicas,
)
from tests.parallel.conftest import Net, make_loader, squared_error
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner

VOCAB, LENGTH, WIDTH, HEADS = 16, 8, 8, 2
RNG = np.random.RandomState(0)
TOKENS = RNG.randint(0, VOCAB, (22, LENGTH + 1))
TRAIN, VAL = (
    ArrayDataset(dict(x=part[:, :-1].astype(np.int32), y=part[:, 1:].astype(np.int32)))
    for part in (TOKENS[:16], TOKENS[16:])
)


class Shardings:
    """Hold the shardings of a transformer, like `ShardingConfig` in flax's gemma example; None leaves them to XLA."""

    def __init__(self, batch=None, tensor=None, is_explicit=False):
        def spec(*axes):
            return P(*axes) if is_explicit else None

        self.embedding = spec(tensor, batch)
        self.up, self.down = spec(batch, tensor), spec(tensor, batch)
        self.qkv = spec(None, tensor, batch, None)
        self.act_btd = spec(batch, None, tensor)
        self.act_btf = spec(batch, None, tensor)
        self.act_sbtnh = spec(None, batch, None, tensor, None)


class Transformer(nnx.Module):
    """A layer of a transformer, in the style of flax's gemma example."""

    def __init__(self, rngs, shd):
        def linear(n, m, sharding):
            return nnx.Linear(n, m, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": sharding})

        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, embedding_metadata={"out_sharding": shd.embedding})
        self.qkv = nnx.Einsum(
            "BTD,SNDH->SBTNH", (3, HEADS, WIDTH, WIDTH // HEADS), rngs=rngs, kernel_metadata={"out_sharding": shd.qkv}
        )
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = linear(WIDTH, 2 * WIDTH, shd.up), linear(2 * WIDTH, WIDTH, shd.down)
        self.shd = shd

    def __call__(self, tokens):
        shd = self.shd
        x = self.embed(tokens, out_sharding=shd.act_btd)
        q, k, v = self.qkv(self.norm(x), out_sharding=shd.act_sbtnh)
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), jnp.einsum("BTNH,BSNH->BNTS", q, k), -1e9)
        attended = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores), v)
        x += attended.reshape((*attended.shape[:2], WIDTH), out_sharding=shd.act_btd)
        hidden = jnp.tanh(self.up(self.norm(x), out_sharding=shd.act_btf))
        x += self.down(hidden, out_sharding=shd.act_btd)
        return self.embed.attend(x, out_sharding=shd.act_btd)


def cross_entropy(logits, batch):
    """Return the losses float[B, T]."""
    return -jnp.sum(jax.nn.one_hot(batch["y"], VOCAB) * jax.nn.log_softmax(logits), axis=-1)


def make_runner(work_dir, parallel, shardings=None, **changes):
    shardings = shardings or Shardings()
    arguments = dict(
        model=NnxModel(lambda rngs: Transformer(rngs, shardings), cross_entropy, inputs="x"),
        train_dataloader=make_loader(8, TRAIN),
        val_dataloader=make_loader(4, VAL, drop_last=False),  # the last batch is padded
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=cross_entropy),
        train_cfg=dict(by_epoch=False, max_iters=6, val_interval=3),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.1),
            accumulative_counts=2,
            clip_grad=dict(max_norm=0.5),
        ),
        custom_hooks=[dict(type="EMAHook", momentum=0.1)],
        parallel=parallel,
        log_level="ERROR",
    )
    return build_runner(work_dir, **{**arguments, **changes})


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    """Train without a mesh, once for all meshes."""
    runner = make_runner(tmp_path_factory.mktemp("one"), None)
    runner.train()
    return runner


def make_mesh(types, axes=("fsdp", "tensor")):
    return jax.make_mesh((2, 2), axes, axis_types=types, devices=jax.devices()[:4])


def assert_equal_results(runner, expected, atol=1e-6):
    """Check parameters, their averages, and the losses of both validations."""
    for item in ("params", "hook_state"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol),
            getattr(runner.state, item),
            getattr(expected.state, item),
        )
    found, wanted = ({step: values["loss"] for _, step, values in each.validations} for each in (runner, expected))
    assert found == pytest.approx({step: wanted[step] for step in found}, abs=atol)
    assert 6 in found


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize(
    ("types", "shardings", "steps_per_call"),
    [
        ((EXPLICIT, EXPLICIT), Shardings("fsdp", "tensor", is_explicit=True), 3),
        pytest.param((EXPLICIT, AUTO), Shardings("fsdp", None, is_explicit=True), 1, marks=pytest.mark.many_processes),
        pytest.param((AUTO, EXPLICIT), Shardings(None, "tensor", is_explicit=True), 3, marks=pytest.mark.many_processes),
    ],
    ids=["explicit, chunks", "mixed", "mixed, chunks"],
)
def test_a_mesh_is_used_with_its_axis_types(tmp_path, on_one_device, types, shardings, steps_per_call):
    mesh = make_mesh(types)
    train_cfg = dict(by_epoch=False, max_iters=6, val_interval=3, steps_per_call=steps_per_call)
    runner = make_runner(
        tmp_path,
        dict(type="Pjit", mesh=mesh, rules=[("embedding", P("tensor", "fsdp"))]),
        shardings,
        train_cfg=train_cfg,
    )
    runner.train()
    assert runner.strategy.mesh is mesh
    tables = [leaf for path, leaf in paths.flatten(runner.state).items() if path.endswith("embed.embedding")]
    assert [leaf.sharding.spec for leaf in tables] == [P("tensor", "fsdp")] * 5  # also Adam's, the sum and the average
    assert {leaf.sharding.mesh.axis_types for leaf in tables} == {types}
    assert_equal_results(runner, on_one_device)


class StopAt4(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 4:
            raise KeyboardInterrupt


def test_a_run_with_explicit_axes_resumes_within_an_accumulation_window(tmp_path, on_one_device):
    parallel = dict(type="Pjit", mesh=make_mesh((EXPLICIT, EXPLICIT)))
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=3)
    arguments = tmp_path, parallel, Shardings("fsdp", "tensor", is_explicit=True)
    changes = dict(default_hooks=dict(checkpoint=checkpoint, logger=None))
    hooks = [dict(type="EMAHook", momentum=0.1)]
    with pytest.raises(KeyboardInterrupt):
        make_runner(*arguments, custom_hooks=[*hooks, StopAt4()], **changes).train()
    runner = make_runner(*arguments, custom_hooks=hooks, resume=True, **changes)
    runner.train()
    assert runner.iters_this_session == 3
    assert_equal_results(runner, on_one_device)


def test_the_mesh_of_the_context_is_the_default_and_its_axes_may_have_any_names(tmp_path, on_one_device, caplog):
    mesh = make_mesh((EXPLICIT, EXPLICIT), ("x", "y"))
    with jax.set_mesh(mesh):
        runner = make_runner(
            tmp_path, dict(type="Pjit", batch_axes=("x",)), Shardings("x", "y", is_explicit=True), log_level="INFO"
        )
        runner.train()
        assert default_strategy_error() == "the mesh must have the axis 'data' or 'fsdp', or `batch_axes` must name"
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        assert default_strategy().mesh_description == "{'fsdp': 2, 'tensor': 2} of jax.set_mesh"
    assert runner.strategy.mesh is mesh
    assert (runner.programs.update.traces, runner.programs.accumulate.traces) == (1, 1)
    assert runner.strategy.put_batch({"x": np.zeros((4, 2))})["x"].sharding == NamedSharding(mesh, P(("x",)))
    assert "4 x cpu, mesh {'x': 2, 'y': 2} with explicit x, y of jax.set_mesh" in caplog.text
    assert_equal_results(runner, on_one_device)


def default_strategy_error():
    with pytest.raises(ConfigError) as error:
        default_strategy()
    return str(error.value).partition(" the axes that")[0]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Pjit(mesh=make_mesh((AUTO, AUTO), ("x", "y"))), ["`batch_axes`", "batch_axes", "('x',)"]),
        (lambda: Pjit(mesh=dict(x=2, y=4)), ["`batch_axes`", "got 'x'"]),
        (lambda: Pjit(mesh=dict(rows=2, y=4), batch_axes=("row",)), ["('rows', 'y')", "got ('row',)"]),
        (lambda: Pjit(mesh=make_mesh((AUTO, AUTO)), batch_axes=("fsdb",)), ["('fsdp', 'tensor')", "got ('fsdb',)"]),
        (lambda: Pjit(batch_axes=()), ["batch_axes"]),
        (lambda: Pjit(mesh=make_mesh((AUTO, AUTO)), devices=8), ["got 8"]),
        (lambda: DataParallel(mesh=make_mesh((AUTO, AUTO))), ["`batch_axes`"]),
        (
            lambda: DataParallel(mesh=make_mesh((AUTO, EXPLICIT), ("data", "fsdp"))),
            ["AxisType.Auto", "got explicit fsdp:", "use Pjit"],
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(build, words):
    check_refusal(lambda: build(), ConfigError, *words)


def test_partition_specs_are_rules_with_the_same_meaning_and_description():
    spec, axes = [("up.kernel", P(None, "fsdp")), ("w", P())], [("up.kernel", (None, "fsdp")), ("w", ())]
    assert describe(spec) == describe(axes)
    params = {"up": {"kernel": jnp.zeros((4, 8))}, "w": jnp.zeros(8)}
    placed = [Placement(make_mesh((AUTO, AUTO)), rules).place(params) for rules in (spec, axes)]
    assert placed[0] == placed[1]
    assert placed[0]["up.kernel"].spec == P(None, "fsdp")


def test_an_operation_without_a_sharding_is_refused_by_jax(tmp_path):
    shardings = Shardings("fsdp", "tensor", is_explicit=True)
    shardings.act_btd = None  # of a lookup in a sharded table
    runner = make_runner(tmp_path, dict(type="Pjit", mesh=make_mesh((EXPLICIT, EXPLICIT))), shardings)
    with pytest.raises(Exception, match="out_sharding"):
        runner.train()
    assert not list(tmp_path.glob("**/iter_*"))  # only the log


@pytest.mark.parametrize("types", [(EXPLICIT, EXPLICIT), (AUTO, AUTO)], ids=["explicit", "automatic"])
def test_linen_names_are_for_automatic_axes_within_the_context_too(make_run, types):
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.Dense(4, kernel_init=kernel_init, name="up")(x)

    changes = dict(model=LinenModel(Named(), squared_error, inputs="x"), train_cfg=dict(by_epoch=False, max_iters=1))
    with jax.set_mesh(make_mesh(types)):
        runner = make_run(dict(type="Pjit", logical_axes=dict(mlp="tensor")), **changes)
        if types == (EXPLICIT, EXPLICIT):
            with pytest.raises(ValueError, match="embed"):
                runner.train()
        else:
            assert runner.train().params["up"]["kernel"].sharding.spec == P(None, "tensor")


@pytest.mark.parametrize(
    "names", [["names"], pytest.param(["explicit"], marks=pytest.mark.many_processes)], ids="-".join
)
def test_replicas_along_any_axis_are_those_along_data(make_run, assert_close, names):
    meshes = dict(
        explicit=dict(mesh=jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])),
        names=dict(mesh=dict(rows=4, columns=1), batch_axes=("rows", "columns"), devices=4),
    )

    def gathered_error(outputs, batch):
        return jnp.square(outputs - batch["y"]).mean(axis=-1) + 0.1 * gather_replicas(outputs).mean()

    changes = dict(
        model=LinenModel(Net(), gathered_error, inputs="x"),
        train_cfg=dict(by_epoch=False, max_iters=3),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.05), accumulative_counts=2),
        custom_hooks=[dict(type="PreciseBNHook", num_samples=16, interval=2), dict(type="SyncBuffersHook")],
    )
    expected = make_run(dict(type="DataParallel", devices=4), work_dir="data", **changes).train()
    for name in names:
        state = make_run(dict(type="DataParallel", **meshes[name]), work_dir=name, **changes).train()
        assert_close((state.params, state.model_state), (expected.params, expected.model_state), atol=1e-7)
