import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from safetensors.numpy import load_file, save_file

from jengine.checkpoint import CorruptCheckpointError, orbax
from jengine.extras.weights import export_params, import_batch_stats, import_params
from tests.checkpoint.conftest import make_meta


class Net(nn.Module):
    """Use each kind of module whose weights have another layout in PyTorch."""

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(4, (3, 2), feature_group_count=2, name="layers_0")(image)
        x = nn.BatchNorm(use_running_average=True, name="bn")(x)
        x = nn.Conv(5, (3,), name="line")(x.reshape(x.shape[0], -1, 4))
        x = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6, name="attn")(x, x)
        return nn.Dense(3, name="head")(nn.LayerNorm(name="norm")(x)) + nn.Embed(1, 3, name="token")(jnp.array([0]))


IMAGE = np.random.default_rng(0).standard_normal((2, 6, 6, 2), np.float32)


def fill_with_noise(tree):
    """Return the tree with different positive values in each array."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: rng.uniform(0.1, 1, leaf.shape).astype(leaf.dtype), tree)


@pytest.fixture(scope="module")
def variables():
    return fill_with_noise(jax.eval_shape(Net().init, jax.random.key(0), IMAGE))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net.safetensors"


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_names_and_shapes_match_pytorch(variables, path):
    # The shapes of torch.nn.Conv2d(2, 4, (3, 2), groups=2), BatchNorm2d(4), Conv1d(4, 5, 3), Linear and LayerNorm.
    written = export_params(variables["params"], path, batch_stats=variables)
    shapes = {name: tensor.shape for name, tensor in load_file(path).items()}
    assert shapes == {name: tensor.shape for name, tensor in written.items()}
    assert shapes == {
        "layers.0.weight": (4, 1, 3, 2), "layers.0.bias": (4,),
        "bn.weight": (4,), "bn.bias": (4,), "bn.running_mean": (4,), "bn.running_var": (4,),
        "line.weight": (5, 4, 3), "line.bias": (5,),
        "attn.query.weight": (6, 5), "attn.query.bias": (6,), "attn.key.weight": (6, 5), "attn.key.bias": (6,),
        "attn.value.weight": (6, 5), "attn.value.bias": (6,), "attn.out.weight": (5, 6), "attn.out.bias": (5,),
        "norm.weight": (5,), "norm.bias": (5,), "head.weight": (3, 5), "head.bias": (3,), "token.weight": (1, 3),
    }  # fmt: skip


def test_a_net_with_pytorchs_layouts_computes_the_same_outputs(variables, path):
    """Compute the forward pass as PyTorch defines it: NCHW convolutions with OIHW weights, Linear as x Wᵀ + b."""
    export_params(variables["params"], path, batch_stats=variables)
    w = load_file(path)

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = jnp.transpose(IMAGE, (0, 3, 1, 2))
    x = jax.lax.conv_general_dilated(
        x, w["layers.0.weight"], (1, 1), "SAME", feature_group_count=2, dimension_numbers=("NCHW", "OIHW", "NCHW")
    ) + w["layers.0.bias"].reshape(1, 4, 1, 1)
    scale = w["bn.weight"] / jnp.sqrt(w["bn.running_var"] + 1e-5)
    x = (x - w["bn.running_mean"].reshape(1, 4, 1, 1)) * scale.reshape(1, 4, 1, 1) + w["bn.bias"].reshape(1, 4, 1, 1)
    x = jnp.transpose(x, (0, 2, 3, 1)).reshape(2, 36, 4).transpose(0, 2, 1)
    x = jax.lax.conv_general_dilated(x, w["line.weight"], (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH"))
    x = (x + w["line.bias"].reshape(1, 5, 1)).transpose(0, 2, 1)
    q, k, v = (
        linear(f"attn.{name}", x).reshape(2, 36, 2, 3).transpose(0, 2, 1, 3) for name in ("query", "key", "value")
    )
    attended = jax.nn.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(3)) @ v
    x = linear("attn.out", attended.transpose(0, 2, 1, 3).reshape(2, 36, 6))
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * w["norm.weight"] + w["norm.bias"]
    x = linear("head", x) + w["token.weight"]
    expected = Net().apply(variables, IMAGE)
    np.testing.assert_allclose(x, expected, rtol=2e-5, atol=2e-5)


def test_a_round_trip_is_bit_exact(variables, path):
    export_params(variables["params"], path, batch_stats=variables)
    assert_equal(import_params(path, variables["params"]), variables["params"])
    zeroed = {**variables, "batch_stats": jax.tree.map(np.zeros_like, variables["batch_stats"])}
    assert_equal(import_batch_stats(path, zeroed), variables)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (2, 2, 2, 3), (1, 2, 1, 2, 3)])
def test_a_round_trip_is_bit_exact_for_every_rank_and_dtype(path, shape, dtype):
    values = np.random.default_rng(2).integers(0, 2, shape) * 5
    params = {
        "a": [{"kernel": jnp.asarray(values, dtype)}, jnp.asarray(values, dtype)],
        "scale": jnp.asarray(values, dtype),
    }
    export_params(params, path)
    assert_equal(import_params(path, params), params)


def test_parameters_are_put_on_the_devices_of_the_model(path):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    export_params({"head": {"kernel": np.arange(12, dtype=np.float32).reshape(4, 3)}}, path)
    target = {"head": {"kernel": jax.ShapeDtypeStruct((4, 3), jnp.bfloat16, sharding=sharding)}}
    kernel = import_params(path, target)["head"]["kernel"]
    assert (kernel.sharding, kernel.dtype) == (sharding, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(kernel, np.float32), np.arange(12).reshape(4, 3))


def test_a_checkpoint_is_exported_without_its_model(variables, checkpointer, tmp_path, path):
    average = jax.tree.map(lambda leaf: leaf + 1, variables["params"])
    state = {"params": variables["params"], "model_state": {"batch_stats": variables["batch_stats"]}, "ema": average}
    checkpointer.save(tmp_path / "epoch_1", state, make_meta())
    checkpointer.wait()
    export_params(tmp_path, path, batch_stats=True)
    assert_equal(import_params(path, variables["params"]), variables["params"])
    assert_equal(import_batch_stats(path, variables["batch_stats"]), variables["batch_stats"])
    assert set(os.listdir(tmp_path)) == {"epoch_1", "last_checkpoint", path.name}
    assert path.stat().st_mode & 0o777 == (tmp_path / "last_checkpoint").stat().st_mode & 0o777
    export_params(tmp_path, path, item="ema", batch_stats="model_state")
    assert_equal(import_params(path, variables["params"]), average)
    with pytest.raises(KeyError, match="has no 'emma'; did you mean 'ema'"):
        export_params(tmp_path, path, item="emma")
    os.remove(tmp_path / "epoch_1" / "manifest.json")
    with pytest.raises(CorruptCheckpointError):
        export_params(tmp_path / "epoch_1", path)


def test_parameters_and_statistics_are_of_one_checkpoint_while_a_run_saves(checkpointer, tmp_path, path, monkeypatch):
    def save(number):
        value = np.full(2, number, np.float32)
        state = {"params": {"bn": {"scale": value}}, "model_state": {"bn": {"mean": value}}}
        checkpointer.save(tmp_path / f"iter_{number}", state, make_meta(number))
        checkpointer.wait()

    def read_while_a_run_saves(directory, structs, read=orbax.read):
        save(2)
        return read(directory, structs)

    save(1)
    monkeypatch.setattr(orbax, "read", read_while_a_run_saves)
    tensors = export_params(tmp_path, path, batch_stats=True)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "bn.weight": [1.0, 1.0],
        "bn.running_mean": [1.0, 1.0],
    }


def test_a_file_of_a_pytorch_model_can_be_imported(path):
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {"module.head.weight": weight, "module.bn.running_mean": np.ones(2, np.float32),
               "module.bn.num_batches_tracked": np.array(3)}  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    target = {"head": {"kernel": np.zeros((3, 2), np.float32)}}
    params = import_params(path, target, rename=[("module", "")])
    np.testing.assert_array_equal(params["head"]["kernel"], weight.T)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": {"kernel": np.ones((2, 2)), "scale": np.ones(2)}}, "'a.kernel' and 'a.scale' are both named 'a.weight'"),
        (
            {"a_0": {"bias": np.ones(1)}, "a": [{"bias": np.ones(1)}]},
            "'a.0.bias' and 'a_0.bias' are both named 'a.0.bias'",
        ),
    ],
)
def test_two_parameters_with_one_name_are_refused(params, message, path):
    with pytest.raises(ValueError, match=message):
        export_params(params, path)
    with pytest.raises(ValueError, match=message):
        import_params(path, params)
    assert not path.exists()


def test_a_parameter_and_a_statistic_with_the_same_path_are_both_exported(path):
    tensors = export_params({"bn": {"mean": np.zeros(2)}}, path, batch_stats={"bn": {"mean": np.ones(2)}})
    assert {name: tensor[0] for name, tensor in tensors.items()} == {"bn.mean": 0, "bn.running_mean": 1}


def test_attention_is_distinguished_from_other_modules_with_the_same_names(path):
    conv = {"query": {"kernel": np.zeros((3, 4, 5), np.float32)}}  # a one-dimensional convolution called query
    assert export_params(conv, path)["query.weight"].shape == (5, 4, 3)
    projections = {name: {"kernel": np.zeros((6, 2, 4), np.float32)} for name in ("query", "key", "value")}
    root = {**projections, "out": {"kernel": np.zeros((2, 4, 6), np.float32)}}
    assert {tensor.shape for tensor in export_params(root, path).values()} == {(8, 6), (6, 8)}
    assert_equal(import_params(path, root), root)
    grouped = {**root, "key": {"kernel": np.zeros((6, 1, 4), np.float32)}}  # fewer heads for keys
    assert export_params(grouped, path)["key.weight"].shape == (4, 6)
