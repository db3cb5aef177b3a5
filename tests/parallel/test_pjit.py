"""Test one program over a mesh: results, shardings and collectives."""

import collections
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.config import STRATEGIES
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import LinenModel
from jengine.parallel import Pjit, SingleDevice, default_strategy
from jengine.train import TrainState
from tests.parallel.conftest import X, Y, make_loader, squared_error, step_collectives

P = PartitionSpec
TENSOR_RULES = [("up.kernel", (None, "tensor")), ("down.kernel", ("tensor", None))]


def test_optimizer_state_averages_and_accumulated_gradients_are_sharded_like_their_parameters(make_run):
    runner = make_run(
        dict(type="Pjit", mesh=dict(fsdp=2, tensor=2), rules=TENSOR_RULES, fsdp_min_size=64),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.01), accumulative_counts=2),
        custom_hooks=[dict(type="EMAHook")],
        train_cfg=dict(by_epoch=False, max_iters=2),
    )
    state = runner.train()
    kernels = [
        leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
        if jax.tree_util.keystr(path).endswith("['up']['kernel']")
    ]
    assert len(kernels) == 5  # parameter, two moments, accumulated gradients, average
    assert {leaf.sharding.spec for leaf in kernels} == {P(None, "tensor")}
    assert {leaf.addressable_shards[0].data.shape for leaf in kernels} == {(8, 8)}
    assert state.model_state["batch_stats"]["bn"]["mean"].sharding.is_fully_replicated


def test_no_device_holds_a_whole_sharded_parameter():
    strategy = Pjit(mesh=dict(data=1, fsdp=8), fsdp_min_size=1)

    State = collections.namedtuple("State", "params")

    def make(rng):
        return State({"w": jax.random.normal(rng, (64, 32))})

    key = jax.random.key(0)
    text = strategy.compile_init(make, key).lower(key).compile().as_text()
    assert "f32[64,32]" not in text
    assert "f32[8,32]" in text


def test_validation_on_a_mesh_has_the_results_of_one_device(make_run):
    from tests.parallel.conftest import DATA

    def error(predictions, batch):
        return jnp.square(predictions - batch["y"]).sum(axis=-1)

    changes = dict(
        val_dataloader=make_loader(8, drop_last=False, dataset=DATA),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=error),
        train_cfg=dict(by_epoch=False, max_iters=2),
    )
    one = make_run(work_dir="one", **changes)
    one.train()
    many = make_run(dict(type="Pjit", mesh=dict(fsdp=2), fsdp_min_size=16), work_dir="many", **changes)
    many.train()
    assert many.validations[0][2] == pytest.approx(one.validations[0][2], rel=1e-5)


def test_a_run_resumes_on_another_mesh(make_run, assert_close):
    class StopAfter(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == 4:
                raise KeyboardInterrupt

    changes = dict(
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.01)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=4), logger=None),
        train_cfg=dict(by_epoch=False, max_iters=8),
    )
    expected = make_run(work_dir="one", **changes).train()
    with pytest.raises(KeyboardInterrupt):
        make_run(dict(type="Pjit"), custom_hooks=[StopAfter()], **changes).train()
    runner = make_run(dict(type="Pjit", mesh=dict(data=1, fsdp=2), devices=2, fsdp_min_size=16), resume=True, **changes)
    state = runner.train()
    assert runner.iter == 8
    assert state.params["up"]["kernel"].sharding.spec == P(None, "fsdp")
    assert_close(state.params, expected.params)


@pytest.mark.parametrize("kind", ["Pjit", "DataParallel"])
def test_a_rule_that_matches_nothing_is_an_error_before_a_strict_run_starts(make_run, kind):
    runner = make_run(dict(type=kind, mesh=dict(tensor=2), rules=[("upp.kernel", (None, "tensor"))], strict=True))
    with pytest.raises(ConfigError, match="rules: 'upp.kernel' matches no parameter; closest: up.kernel"):
        runner.train()
    assert runner.state is None


def test_only_one_step_is_in_flight_on_several_cpu_devices():
    cpus = jax.devices("cpu")
    assert [Pjit(mesh=Mesh(cpus[:count], ("data",))).max_in_flight for count in (8, 1)] == [1, 2]


def test_the_default_on_cpu_is_one_device_and_elsewhere_all(monkeypatch):
    assert isinstance(default_strategy(), SingleDevice)

    class Accelerator:
        platform = "gpu"

    monkeypatch.setattr("jengine.parallel.strategy.jax.devices", lambda: [Accelerator(), Accelerator()])
    monkeypatch.setattr("jengine.parallel.pjit.Pjit.__init__", lambda self: None)
    assert type(default_strategy()) is Pjit


def test_logical_axes_of_a_flax_model_are_used(make_run):
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            x = nn.Dense(16, kernel_init=nn.with_partitioning(init, ("embed", "mlp")), name="up")(x)
            return nn.Dense(4, kernel_init=nn.with_partitioning(init, ("tensor", None)), name="down")(jnp.tanh(x))

    runner = make_run(
        dict(type="Pjit", mesh=dict(tensor=2), logical_axes=dict(mlp="tensor")),
        model=LinenModel(Named(), squared_error, inputs="x"),
        train_cfg=dict(by_epoch=False, max_iters=1),
        precision="float32",
    )
    params = runner.train().params
    # `embed` has no axis of the mesh, `mlp` the one that is configured, and `tensor` is an axis of the mesh
    assert params["up"]["kernel"].sharding.spec == P(None, "tensor")
    assert params["down"]["kernel"].sharding.spec == P("tensor", None)
    with open(f"{runner.log_dir}/{runner.timestamp}.log") as log:
        assert "Placement on the mesh {'data': 4, 'fsdp': 1, 'tensor': 2}" in log.read()


class Attention(nn.Module):
    """Self-attention whose projections are `nn.DenseGeneral`s with axis names, as in nanodo."""

    names: tuple[str | None, ...]  # of the embedding and the heads

    @nn.compact
    def __call__(self, x):
        embed, heads = self.names
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        names = nn.with_partitioning(init, (embed, heads, None))
        query, key, value = (
            nn.DenseGeneral((4, 2), use_bias=False, kernel_init=names, name=name)(x)
            for name in ("query", "key", "value")
        )
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        names = nn.with_partitioning(init, (heads, None, embed))
        return nn.DenseGeneral(8, axis=(-2, -1), use_bias=False, kernel_init=names, name="out")(mixed)


def sequence_error(outputs, batch):
    return jnp.square(outputs - batch["y"]).mean(axis=(-2, -1))


@pytest.mark.parametrize(
    ("names", "parallel"),
    [
        (("fsdp", "heads"), dict(type="Pjit", mesh=dict(data=1, fsdp=2, tensor=2), logical_axes=dict(heads="tensor"))),
        ((None, "tensor"), dict(type="DataParallel", mesh=dict(data=2, tensor=2))),
    ],
    ids=["a mesh name and a logical one", "replicas"],
)
def test_a_dense_general_with_axis_names_is_sharded_as_named_and_trains_like_one_device(make_run, names, parallel):
    module = Attention(names)
    model = LinenModel(module, sequence_error, inputs="x")
    x = np.random.RandomState(0).randn(16, 6, 8).astype(np.float32)
    strategy = STRATEGIES.build(dict(parallel, devices=4))
    axes = dict(parallel.get("logical_axes", {}))
    embed, heads = (axes.get(name, name) for name in names)
    specs = dict.fromkeys(("query", "key", "value"), P(embed, heads, None)) | dict(out=P(heads, None, embed))

    def make(rng, batch):
        params, model_state = model.init(rng, batch)
        return TrainState(jnp.zeros((), jnp.int32), params, model_state, (), {}, jax.random.key_data(rng))

    rng = jax.random.key(3)
    params = strategy.compile_init(make, rng, {"x": x}, model=model)(rng, {"x": x}).params
    expected = jax.jit(
        lambda: nn.meta.unbox(module.init(jax.random.fold_in(rng, 0), x))["params"],
        out_shardings={name: {"kernel": NamedSharding(strategy.mesh, spec)} for name, spec in specs.items()},
    )()
    for name, spec in specs.items():
        kernel = params[name]["kernel"]
        assert kernel.sharding.spec == spec
        assert kernel.addressable_shards[0].data.size == kernel.size // (4 if embed else 2)
        # equal bits, but for the last one where the tests compile quickly, which `jit_init` does not
        np.testing.assert_array_max_ulp(np.asarray(kernel), np.asarray(expected[name]["kernel"]), maxulp=2)

    changes = dict(
        model=model,
        train_dataloader=make_loader(8, dataset=ArrayDataset(dict(x=x, y=x**2))),
        train_cfg=dict(by_epoch=False, max_iters=4),
        val_dataloader=make_loader(8, dataset=ArrayDataset(dict(x=x, y=x**2))),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=sequence_error),
    )
    one = make_run(work_dir="one", **changes)
    many = make_run(dict(parallel, devices=4), **changes)
    expected, params = one.train().params, many.train().params
    for name, spec in specs.items():
        assert params[name]["kernel"].sharding.spec == spec
        np.testing.assert_allclose(params[name]["kernel"], expected[name]["kernel"], rtol=0, atol=1e-6)
    assert many.validations[-1][2] == pytest.approx(one.validations[-1][2], rel=1e-6)


def test_logical_axes_of_an_nnx_model_are_used(make_run):
    from flax import nnx

    from jengine.model import NnxModel

    class Named(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            self.up = nnx.Linear(8, 16, rngs=rngs, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")))
            self.mid = nnx.List([nnx.Param(jnp.eye(16), out_sharding=P(("data", "mlp"), None))])
            rules = (("out", "tensor"),)
            self.down = nnx.Param(init(rngs.params(), (16, 4)), out_sharding=(None, "out"), sharding_rules=rules)

        def __call__(self, x):
            return jnp.tanh(self.up(x)) @ self.mid[0][...] @ self.down[...]

    changes = dict(model=NnxModel(Named, squared_error, inputs="x"), train_cfg=dict(by_epoch=False, max_iters=1))
    expected = make_run(work_dir="one", **changes).train().params  # without a mesh names have no effect
    runner = make_run(
        dict(type="Pjit", mesh=dict(tensor=2), logical_axes=dict(mlp="tensor")), precision="float32", **changes
    )
    params = runner.train().params
    assert params["up"]["kernel"].sharding.spec == P(None, "tensor")
    assert params["up"]["bias"].sharding.spec == P()
    assert params["mid"]["0"].sharding.spec == P(("data", "tensor"), None)
    assert params["down"].sharding.spec == P(None, "tensor")
    assert params["mid"]["0"].addressable_shards[0].data.shape == (2, 16)
    np.testing.assert_allclose(params["down"], expected["down"], atol=1e-6)


def test_replicated_parameters_are_updated_with_one_exchange(make_run):
    runner = make_run(dict(type="Pjit", devices=4), train_cfg=dict(by_epoch=False, max_iters=1))
    params = runner.train().params
    found = step_collectives(runner, runner.programs.update)
    assert {collective.kind for collective in found} == {"all-reduce"}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # in addition to the gradients: mean and mean square of 16 features, their gradients, and the loss
    assert sum(collective.size for collective in found) <= size + 4 * (4 * 16 + 1)


@pytest.mark.parametrize("mesh", [dict(data=1, fsdp=4), dict(data=2, fsdp=4)], ids=["fsdp 4", "data 2, fsdp 4"])
def test_a_sharded_parameter_is_gathered_once_and_its_gradient_scattered_once(make_run, mesh):
    class Bare(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, use_bias=False, name="down")(jnp.tanh(nn.Dense(64, use_bias=False, name="up")(x)))

    # so many examples that activations are larger than parameters: XLA exchanges the smaller
    data = dict(x=np.tile(X, (64, 1)), y=np.tile(Y, (64, 1)))
    runner = make_run(
        dict(type="Pjit", mesh=mesh, devices=mesh["data"] * 4, fsdp_min_size=16),
        model=LinenModel(Bare(), squared_error, inputs="x"),
        train_dataloader=make_loader(1024, ArrayDataset(data)),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3), clip_grad=dict(max_norm=1.0)),
        train_cfg=dict(by_epoch=False, max_iters=1),
    )
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.train().params))
    arrays, sizes = Counter(), Counter()
    for collective in step_collectives(runner, runner.programs.update, data):
        if collective.size > 4 * collective.arrays:  # the loss and the norms are scalars
            arrays[collective.kind] += collective.arrays
            sizes[collective.kind] += collective.size
    between = {} if mesh["data"] == 1 else {"all-reduce": 2}  # groups of `fsdp` average the shard of each device
    assert arrays == {"all-gather": 2, "reduce-scatter": 2, **between}
    assert sizes == {"all-gather": params, "reduce-scatter": params, **dict.fromkeys(between, params // 4)}
