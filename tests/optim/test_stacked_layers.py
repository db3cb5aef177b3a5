"""Rules by the class of a module and by the shape of a parameter, in layers that transformations stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine.extras import imix  # noqa: F401 - its constructors
from jengine.extras.networks import MixtureOfExperts
from jengine.model import CrossEntropy, LinenModel
from jengine.optim import build_optim_wrapper
from jengine.optim.param_groups.modules import get_params, module_tree

DECAY = 0.05
FLAT = dict(flat_decay_mult=0.0)


def decays(params, rules, types=None, **cfg):
    cfg = dict(optimizer=dict(type="SGD", lr=0.1, weight_decay=DECAY), paramwise_cfg=rules, **cfg)
    settings = build_optim_wrapper(params, cfg, module_types=types).param_settings
    return {path: entry["weight_decay"] for path, entry in settings.items()}


def exempt(*arguments, **cfg):
    """Return the parameters without decay."""
    return {path for path, decay in decays(*arguments, **cfg).items() if decay == 0.0}


def init(module, shape=(4, 4)):
    model = LinenModel(module, CrossEntropy())
    batch = dict(image=jnp.ones(shape), label=jnp.zeros(len(jnp.ones(shape)), jnp.int32))
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    return params, model.module_types


def layer_shapes(params, types):
    root = module_tree(*get_params(params, types))
    return {parameter.path: parameter.layer_shape for _, parameter in root.named_parameters()}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = nn.Dense(4, name="fc")(nn.LayerNorm(name="ln")(x))
        return x * self.param("gamma", nn.initializers.ones, (4,)), None


def scan(block, axis=0, length=4):
    return nn.scan(block, variable_axes={"params": axis}, split_rngs={"params": True}, length=length)


class Scanned(nn.Module):
    """Blocks of equal sizes along all axes, so that sizes alone do not tell which one stacks layers."""

    axis: int = 0
    remat: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        x, _ = scan(nn.remat(Block) if self.remat else Block, self.axis)(name="blocks")(x, None)
        return nn.Dense(3, name="head")(x)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_scanned_vector_is_flat_along_whichever_axis_it_is_stacked(axis, remat):
    params, types = init(Scanned(axis, remat))
    vectors = {"blocks.ln.scale", "blocks.ln.bias", "blocks.fc.bias", "blocks.gamma", "head.bias"}
    assert exempt(params, FLAT, types) == vectors
    assert layer_shapes(params, types)["blocks.fc.kernel"] == (4, 4)


def test_the_stacked_axis_is_found_where_sizes_tell_it():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return nn.Dense(4, name="narrow")(nn.Dense(8, name="wide")(x)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return scan(Wide, axis=1, length=3)(name="blocks")(x, None)[0]

    params, types = init(Net())
    assert params["blocks"]["wide"]["kernel"].shape == (4, 3, 8)
    assert {path: kind.stacked for path, kind in types.items() if kind == "Dense"} == {
        "blocks.narrow": (1,), "blocks.wide": (1,)
    }  # fmt: skip


class Experts(nn.Module):
    """Layers with experts, each by a transformation of its own."""

    @nn.compact
    def __call__(self, x, _=None):
        vmapped = nn.vmap(
            nn.Dense, in_axes=None, out_axes=0, axis_size=5, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        return vmapped(4, name="experts")(x).mean(axis=0), None


class ScannedExperts(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return scan(Experts, length=3)(name="blocks")(x, None)[0]


def test_a_scan_over_vmapped_experts_stacks_two_axes():
    params, types = init(ScannedExperts())
    assert params["blocks"]["experts"]["bias"].shape == (3, 5, 4)
    assert layer_shapes(params, types) == {"blocks.experts.kernel": (4, 4), "blocks.experts.bias": (4,)}
    assert exempt(params, FLAT, types) == {"blocks.experts.bias"}


def test_a_module_with_experts_of_its_own_says_so():
    params, types = init(MixtureOfExperts(experts=3, top_k=1, width=8), (1, 2, 4))
    shapes = layer_shapes(params, types)
    assert shapes == {"router.kernel": (4, 3), "gate": (4, 8), "up": (4, 8), "down": (8, 4)}


def test_parameters_that_all_iterations_share_are_not_stacked():
    class Shared(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            shared = nn.scan(Block, variable_broadcast="params", split_rngs={"params": False}, length=3)
            return shared(name="block")(x, None)[0]

    params, types = init(Shared())
    assert layer_shapes(params, types)["block.fc.kernel"] == (4, 4)
    assert exempt(params, FLAT, types) == {"block.ln.scale", "block.ln.bias", "block.fc.bias", "block.gamma"}


def test_a_stacked_depthwise_convolution_is_one():
    class Convolutions(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            x = nn.Conv(4, (3, 3), feature_group_count=4, name="depthwise")(x)
            return nn.Conv(4, (1, 1), name="pointwise")(x), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return scan(Convolutions)(name="blocks")(x, None)[0]

    params, types = init(Net(), (1, 8, 8, 4))
    depthwise = {"blocks.depthwise.kernel", "blocks.depthwise.bias"}
    assert exempt(params, dict(dwconv_decay_mult=0.0), types) == depthwise


def test_a_bare_pytree_tells_stacked_layers_by_names_and_shapes():
    params, _ = init(Scanned())
    params["blocks"].pop("gamma")  # whose name tells nothing
    vectors = {"blocks.ln.scale", "blocks.ln.bias", "blocks.fc.bias", "head.bias"}
    assert exempt(params, FLAT) == vectors
    assert exempt(params, dict(norm_decay_mult=0.0)) == {"blocks.ln.scale", "blocks.ln.bias"}
    single = {"conv": {"kernel": np.ones((3, 3, 3, 8), np.float32), "bias": np.ones(8, np.float32)},
              "attention": {"kernel": np.ones((8, 2, 4), np.float32), "bias": np.ones((2, 4), np.float32)}}  # fmt: skip
    assert layer_shapes(single, None) == {
        "conv.kernel": (3, 3, 3, 8), "conv.bias": (8,), "attention.kernel": (8, 2, 4), "attention.bias": (2, 4)
    }  # fmt: skip


# --- Layer decay ---


def test_layer_decay_of_scanned_layers_exempts_their_vectors():
    params, types = init(Scanned())
    rules = dict(layer_pattern=r"blocks_(\d+)", layer_decay_rate=0.5, flat_decay_mult=0.0)
    cfg = dict(optimizer=dict(type="SGD", lr=1.0, weight_decay=DECAY), paramwise_cfg=rules)
    wrapper = build_optim_wrapper(
        params, dict(cfg, constructor="LearningRateDecayOptimWrapperConstructor"), module_types=types
    )
    assert wrapper.param_settings["blocks.gamma[0]"]["weight_decay"] == 0.0
    assert wrapper.param_settings["blocks.fc.kernel[0]"]["weight_decay"] == DECAY
    assert [wrapper.param_settings[f"blocks.fc.kernel[{i}]"]["lr"] for i in range(4)] == [0.5**i for i in (4, 3, 2, 1)]


# --- NNX ---


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.ln = nnx.LayerNorm(4, rngs=rngs)
        self.fc = nnx.Linear(4, 8, rngs=rngs)
        self.gamma = nnx.Param(jnp.ones(8))


class NnxNet(nnx.Module):
    def __init__(self, rngs, axis=0):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=nnx.StateAxes({...: axis}))
        def make(rngs):
            return NnxBlock(rngs)

        self.blocks = make(rngs)
        self.embed = nnx.Embed(3, 4, rngs=rngs)
        self.position = nnx.Param(jnp.ones((3, 4)))  # as long as there are layers
        self.head = nnx.Linear(8, 3, rngs=rngs)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmapped_modules_of_nnx_are_stacked_as_a_whole(axis):
    model = NnxNet(nnx.Rngs(0), axis)
    vectors = {"blocks.ln.scale", "blocks.ln.bias", "blocks.fc.bias", "blocks.gamma", "head.bias"}
    assert exempt(model, FLAT) == vectors
    assert layer_shapes(model, None)["blocks.fc.kernel"] == (4, 8)


class OwnLayer(nnx.Module):
    """Layer without one of the library, whose size nothing tells."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.bias = nnx.Param(jnp.zeros(4))


def test_layers_of_nnx_without_one_of_the_library_tell_by_names():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(5, 4, rngs=rngs)
            self.blocks = nnx.vmap(OwnLayer)(rngs.split(3))
            self.own = OwnLayer(rngs)

    assert exempt(Net(nnx.Rngs(0)), FLAT) == {"blocks.bias", "own.bias"}


def test_a_scanned_constructor_of_nnx_stacks_its_layers():
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), length=3)
    def make(carry, rngs):
        return carry, NnxBlock(rngs)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = make(0, rngs.split(3))[1]

    vectors = {"blocks.ln.scale", "blocks.ln.bias", "blocks.fc.bias", "blocks.gamma"}
    assert exempt(Net(nnx.Rngs(0)), FLAT) == vectors


def test_all_layers_of_nnx_know_their_shapes():
    rngs = nnx.Rngs(0)
    layers = nnx.List([
        nnx.Conv(2, 4, (3, 3), rngs=rngs), nnx.ConvTranspose(2, 4, (3, 3), rngs=rngs), nnx.Embed(3, 4, rngs=rngs),
        nnx.LinearGeneral((2,), (3, 4), rngs=rngs), nnx.BatchNorm(3, rngs=rngs), nnx.GroupNorm(4, 2, rngs=rngs),
        nnx.Einsum("ab,bc->ac", (2, 3), (3,), rngs=rngs), nnx.LoRA(3, 2, 4, rngs=rngs), nnx.RMSNorm(3, rngs=rngs),
        nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False), nnx.WeightNorm(nnx.Linear(2, 3, rngs=rngs), rngs=rngs),
        nnx.SpectralNorm(nnx.Linear(2, 3, rngs=rngs), rngs=rngs), nnx.InstanceNorm(3, rngs=rngs),
        nnx.GRUCell(2, 3, rngs=rngs),
    ])  # fmt: skip
    shapes = layer_shapes(layers, None)
    full = {parameter.path: parameter.shape for _, parameter in module_tree(*get_params(layers)).named_parameters()}
    assert len(shapes) > 20
    assert shapes == full


# --- Norms ---


class FP32LayerNorm(nn.LayerNorm):
    pass


class Running(nn.BatchNorm):
    pass


class LayerNormedDense(nn.Dense):
    pass


class RootMeanSquareNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (x.shape[-1],))


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.remat(FP32LayerNorm)(name="fp32")(Running(use_running_average=not train, name="running")(x))
        x = RootMeanSquareNorm(name="rms")(LayerNormedDense(4, name="dense")(x))
        return nn.RMSNorm(name="flax_rms")(nn.RMSNorm(name="named")(x))


def test_a_subclass_of_a_norm_is_one_and_another_class_with_norm_in_its_name_is_reported(caplog):
    params, types = init(Norms())
    rules = dict(norm_decay_mult=0.0, bias_lr_mult=2.0, custom_keys={"named": dict(decay_mult=0.5)})
    cfg = dict(optimizer=dict(type="SGD", lr=0.1, weight_decay=DECAY), paramwise_cfg=rules)
    settings = build_optim_wrapper(params, cfg, module_types=types).param_settings
    actual = {path: (entry["lr"], entry["weight_decay"]) for path, entry in settings.items()}
    assert actual == {
        "fp32.scale": (0.1, 0.0), "fp32.bias": (0.1, 0.0), "running.scale": (0.1, 0.0), "running.bias": (0.1, 0.0),
        "dense.kernel": (0.1, DECAY), "dense.bias": (0.2, DECAY), "rms.scale": (0.1, DECAY),
        "flax_rms.scale": (0.1, DECAY), "named.scale": (0.1, DECAY / 2),
    }  # fmt: skip
    reports = [message for message in caplog.messages if "norm_decay_mult` does not apply to" in message]
    assert sorted(report.partition(" to ")[2].partition(":")[0] for report in reports) == [
        "LayerNormedDense (dense)", "RMSNorm (flax_rms)", "RootMeanSquareNorm (rms)",
    ]  # fmt: skip


def test_names_that_a_user_gives_for_a_bare_pytree_are_those_of_classes(caplog):
    params = {name: {"scale": np.ones(4, np.float32)} for name in ("a", "b")}
    assert exempt(params, dict(norm_decay_mult=0.0), {"a": "LayerNorm2d", "b": "MyNorm"}) == {"a.scale"}
    assert "norm_decay_mult` does not apply to MyNorm (b)" in caplog.text


def test_subclasses_of_norms_in_nnx():
    class NnxNorm(nnx.LayerNorm):
        pass

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = NnxNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    assert exempt(Net(nnx.Rngs(0)), dict(norm_decay_mult=0.0)) == {"a.scale", "a.bias"}


def test_subclasses_of_norms_in_the_constructors_of_imix():
    params, types = init(Norms())
    cfg = dict(constructor="OscarPreTrainOptimizerConstructor")
    rules = dict(weight_decay=0.1)
    assert exempt(params, rules, types, **cfg) == {"fp32.scale", "fp32.bias", "running.bias", "dense.bias"}


# --- Equinox ---


@pytest.mark.foreign
def test_stacked_layers_and_norms_of_equinox():
    eqx = pytest.importorskip("equinox")

    class Norm(eqx.nn.LayerNorm):
        pass

    class EqxBlock(eqx.Module):
        norm: Norm
        fc: eqx.nn.Linear
        gamma: jax.Array

        def __init__(self, key):
            self.norm, self.fc, self.gamma = Norm(4), eqx.nn.Linear(4, 8, key=key), jnp.ones(8)

    class Net(eqx.Module):
        blocks: EqxBlock
        conv: eqx.nn.Conv2d
        head: eqx.nn.Linear

        def __init__(self, key):
            self.blocks = eqx.filter_vmap(EqxBlock)(jax.random.split(key, 3))
            self.conv, self.head = eqx.nn.Conv2d(2, 4, 3, key=key), eqx.nn.Linear(8, 3, key=key)

    net = Net(jax.random.key(0))
    vectors = {"blocks.norm.weight", "blocks.norm.bias", "blocks.fc.bias", "blocks.gamma", "conv.bias", "head.bias"}
    assert exempt(net, FLAT) == vectors
    assert exempt(net, dict(norm_decay_mult=0.0)) == {"blocks.norm.weight", "blocks.norm.bias"}
    assert layer_shapes(net, None)["conv.weight"] == (4, 2, 3, 3)
    key = jax.random.key(0)
    layers = [
        eqx.nn.ConvTranspose2d(2, 4, 3, key=key), eqx.nn.Embedding(3, 4, key=key), eqx.nn.GroupNorm(2, 4),
        eqx.nn.RMSNorm(4), eqx.nn.MultiheadAttention(2, 4, key=key), eqx.nn.GRUCell(2, 3, key=key),
        eqx.nn.Linear("scalar", 3, key=key), eqx.nn.BatchNorm(4, "batch", mode="ema"), eqx.nn.PReLU(),
    ]  # fmt: skip
    full = {p.path: p.shape for _, p in module_tree(*get_params(layers)).named_parameters()}
    assert layer_shapes(layers, None) == full
