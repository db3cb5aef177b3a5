"""Load weights recorded from PyTorch (see tests/data/pretrained/record.py), and those of other formats."""

import functools
import http.server
import json
import pathlib
import threading

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from safetensors.numpy import load_file, save_file

from jengine.checkpoint import CheckpointMismatchError
from jengine.extras.weights import load_pretrained, locate_weights, open_weights
from jengine.extras.weights.optimizer_state import load_optimizer
from tests.checkpoint.conftest import make_meta
from tests.refusals import check_refusal

from .pretrained_models import NnxBlock, NnxViT, ResNet, ViT

DATA = pathlib.Path(__file__).parents[2] / "data" / "pretrained"
TIMM_NAMES = [("patch_embed.proj", "embed"), (r"blocks\.(\d+)\.(?:mlp\.)?(\w+)", r"layers_\1_\2")]


def read_values(name):
    """Return the recorded input (as NHWC), the output, and all recorded values."""
    values = load_file(DATA / f"{name}_values.safetensors")
    return values["image"].transpose(0, 2, 3, 1), values["output"], values


def zeros_like(structs):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), structs)


@pytest.fixture(scope="module")
def vit_params():
    return zeros_like(jax.eval_shape(ViT().init, jax.random.key(0), read_values("vit")[0])["params"])


def small_params(value=0.0):
    return {"dense": {"kernel": np.full((3, 2), value, np.float32), "bias": np.full(2, value, np.float32)}}


# --- PyTorch. ---


def test_resnet_of_torchvision_computes_the_recorded_outputs_in_linen():
    image, output, _ = read_values("resnet18")
    variables = zeros_like(jax.eval_shape(ResNet().init, jax.random.key(0), image))
    params, state, report = load_pretrained(
        DATA / "resnet18.safetensors",
        variables.pop("params"),
        variables,
        rename=[(r"(.*)\.downsample\.(\d)", r"\1.downsample_\2")],
    )
    np.testing.assert_allclose(jax.jit(ResNet().apply)({"params": params, **state}, image), output, atol=1e-4)
    assert len(report.matched) == 102
    assert report.fits
    assert "bn1.num_batches_tracked" in report.ignored
    assert report.reshaped["conv1.kernel"] == ("(4, 3, 7, 7)", "(7, 7, 3, 4)")


def test_vit_of_timm_computes_the_recorded_outputs_in_linen(vit_params):
    image, output, _ = read_values("vit")
    params, state, report = load_pretrained(DATA / "vit.safetensors", vit_params, rename=TIMM_NAMES)
    np.testing.assert_allclose(ViT().apply({"params": params}, image), output, atol=1e-4)
    assert state is None
    assert report.matched["layers_1_attn.value.kernel"] == "blocks.1.attn.qkv.weight"
    assert report.matched["layers_1_attn.out.kernel"] == "blocks.1.attn.proj.weight"
    assert str(report) == "40 match, 0 missing, 0 unexpected, 0 mismatched, 36 renamed, 20 reshaped"


def test_vit_of_timm_computes_the_recorded_outputs_in_nnx():
    image, output, _ = read_values("vit")
    module = NnxViT(nnx.Rngs(0))
    params, _, _ = load_pretrained(DATA / "vit.safetensors", nnx.state(module, nnx.Param))
    nnx.update(module, params)
    np.testing.assert_allclose(module(image), output, atol=1e-4)


class FlaxAttention(nnx.MultiHeadAttention):
    def __init__(self, width, heads, rngs):
        super().__init__(num_heads=heads, in_features=width, decode=False, rngs=rngs)


def test_fused_projections_are_split_for_the_attention_of_nnx():
    fused, split = (NnxBlock(24, nnx.Rngs(0), **kind) for kind in ({}, {"attention": FlaxAttention}))
    tokens = jax.random.normal(jax.random.key(1), (2, 5, 24))
    for module in (fused, split):
        params, _, _ = load_pretrained(
            DATA / "vit.safetensors", nnx.state(module, nnx.Param), rename=[("blocks.1", "")], strict=False
        )
        nnx.update(module, params)
    np.testing.assert_allclose(fused(tokens), split(tokens), atol=1e-5)


@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj", "out_proj"), ("query", "key", "value", "out")])
def test_separate_projections_are_the_same_as_fused_ones(vit_params, tmp_path, names):
    tensors = {}
    for name, tensor in load_file(DATA / "vit.safetensors").items():
        module, _, kind = name.rpartition(".")
        if module.endswith("qkv"):
            parts = np.split(tensor, 3)
            tensors |= {module.replace("qkv", part) + f".{kind}": x for part, x in zip(names, parts, strict=False)}
        else:
            tensors[name.replace("attn.proj", f"attn.{names[3]}")] = tensor
    save_file(tensors, tmp_path / "split.safetensors")
    separate, _, _ = load_pretrained(tmp_path / "split.safetensors", vit_params, rename=TIMM_NAMES)
    fused, _, _ = load_pretrained(DATA / "vit.safetensors", vit_params, rename=TIMM_NAMES)
    jax.tree.map(np.testing.assert_array_equal, separate, fused)


def test_square_matrices_have_the_order_of_the_others_in_the_file_or_that_of_a_rule(tmp_path):
    square, wide = np.arange(4, dtype=np.float32).reshape(2, 2), np.arange(6, dtype=np.float32).reshape(3, 2)
    target = {"head": {"kernel": np.zeros((2, 2), np.float32)}, "neck": {"kernel": np.zeros((2, 3), np.float32)}}
    save_file({"fc.weight": square, "neck.weight": wide}, tmp_path / "net.safetensors")
    for rule in [("fc", "head"), ("fc.weight", "head.kernel")]:
        params, _, _ = load_pretrained(tmp_path / "net.safetensors", target, rename=[rule])
        np.testing.assert_array_equal(params["head"]["kernel"], square.T)
    alone = {"head": target["head"]}
    params, _, _ = load_pretrained({"fc": {"kernel": square}}, alone, rename=[("fc", "head")])  # Flax's layout
    np.testing.assert_array_equal(params["head"]["kernel"], square)
    for transform, expected in [("none", square), ("transpose", square.T), (np.square, square**2)]:
        rule = ("fc", "head", dict(transform=transform))
        params, _, _ = load_pretrained({"fc.weight": square}, alone, rename=[rule])
        np.testing.assert_array_equal(params["head"]["kernel"], expected)


def test_a_sharded_file_equals_a_single_one(vit_params, tmp_path):
    tensors = load_file(DATA / "vit.safetensors")
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: x for name, x in tensors.items() if weight_map[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    single, _, _ = load_pretrained(DATA / "vit.safetensors", vit_params, rename=TIMM_NAMES)
    for path in (index, tmp_path):  # the index, or its directory
        sharded, _, _ = load_pretrained(path, vit_params, rename=TIMM_NAMES)
        jax.tree.map(np.testing.assert_array_equal, single, sharded)


# --- Position embeddings. ---


def test_position_embeddings_are_resized_only_on_request_and_as_in_timm(vit_params):
    larger = {**vit_params, "pos_embed": np.zeros((1, 37, 24), np.float32)}
    message = r"pos_embed  stored float32\[1,17,24\], expected float32\[1,37,24\]; interpolate=\['pos_embed'\] resizes"
    with pytest.raises(CheckpointMismatchError, match=message):
        load_pretrained(DATA / "vit.safetensors", larger, rename=TIMM_NAMES)
    params, _, report = load_pretrained(
        DATA / "vit.safetensors", larger, rename=TIMM_NAMES, interpolate=["pos_embed"], interpolation="bicubic"
    )
    np.testing.assert_allclose(params["pos_embed"], read_values("vit")[2]["pos_embed_6x6"], atol=1e-5)
    assert report.reshaped["pos_embed"] == ("(1, 17, 24)", "(1, 37, 24)")


@pytest.mark.parametrize(
    ("stored", "expected"), [((1, 16, 3), (1, 36, 3)), ((17, 3), (1, 37, 3)), ((1, 4, 4, 3), (1, 2, 6, 3))]
)
def test_a_linear_ramp_stays_linear_when_it_is_resized(stored, expected):
    extra = stored[-2] % 2
    side = np.linspace(0, 3, 4, dtype=np.float32)
    ramp = np.broadcast_to(side[:, None, None], (4, 4, 3)).reshape(-1, 3)
    values = np.concatenate([np.full((extra, 3), 9, np.float32), ramp]).reshape(stored)
    target = {"pos": np.zeros(expected, np.float32)}
    params, _, _ = load_pretrained({"pos": values}, target, interpolate=["pos"], interpolation="bilinear")
    tokens = params["pos"].reshape(-1, 3)
    np.testing.assert_array_equal(tokens[:extra], np.full((extra, 3), 9))
    height = 2 if len(expected) == 4 else 6
    rows = tokens[extra:].reshape(height, 6, 3)[:, 0, 0]
    np.testing.assert_allclose(rows.mean(), 1.5, atol=1e-5)
    assert (np.diff(rows) > 0).all()


# --- Other formats. ---


@pytest.mark.parametrize("prefix", ["", "params/"])
def test_npz_files_of_the_original_vit_and_of_big_vision_are_read(tmp_path, prefix):
    arrays = {
        f"{prefix}Transformer/encoderblock_0/LayerNorm_0/scale": np.full(4, 2.0, np.float32),
        f"{prefix}head/kernel": np.arange(8, dtype=np.float32).reshape(4, 2),
    }
    if prefix:
        arrays["opt/count"] = np.zeros(())
        arrays[f"{prefix}head/kernel"] = arrays[f"{prefix}head/kernel"].astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "vit.npz", **arrays)
    target = {
        "Transformer": {"encoderblock_0": {"LayerNorm_0": {"scale": np.ones(4, np.float32)}}},
        "head": {"kernel": np.zeros((4, 2), np.float32)},
    }
    params, _, report = load_pretrained(tmp_path / "vit.npz", target)
    np.testing.assert_array_equal(params["Transformer"]["encoderblock_0"]["LayerNorm_0"]["scale"], np.full(4, 2.0))
    np.testing.assert_array_equal(params["head"]["kernel"], np.arange(8).reshape(4, 2))
    assert report.ignored == (("opt.count",) if prefix else ())
    assert not report.renamed


def write_pytree(path, params):
    ocp.PyTreeCheckpointer().save(path, {"params": params, "step": 3, "note": "mine"})
    return path


def write_standard(path, params):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": params, "opt_state": [{"mu": np.ones(2)}, None]})
    return path


def write_manager(path, params):
    with ocp.CheckpointManager(path) as manager:
        for step, value in ((3, small_params(3.0)), (10, params)):
            manager.save(step, args=ocp.args.StandardSave(value))
    return path


def write_items(path, params):
    with ocp.CheckpointManager(path) as manager:
        other = ocp.args.StandardSave({"count": np.ones(2)})
        manager.save(3, args=ocp.args.Composite(params=ocp.args.StandardSave(params), opt=other))
    return path / "3"


def write_nnx(path, params):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.State({"dense": {name: nnx.Param(x) for name, x in params["dense"].items()}}))
    return path


@pytest.mark.parametrize("write", [write_pytree, write_standard, write_manager, write_items, write_nnx])
def test_orbax_checkpoints_of_other_loops_are_read(tmp_path, write):
    path = write(tmp_path / "own", small_params(7.0))
    params, _, report = load_pretrained(path, small_params())
    jax.tree.map(np.testing.assert_array_equal, params, small_params(7.0))
    assert report.fits


def test_weights_below_another_path_are_selected_by_item(tmp_path):
    ocp.PyTreeCheckpointer().save(tmp_path / "own", {"train": {"model": small_params(7.0)}, "step": 3})
    params, _, _ = load_pretrained(tmp_path / "own", small_params(), item="train.model")
    jax.tree.map(np.testing.assert_array_equal, params, small_params(7.0))


def test_a_checkpoint_of_the_engine_loads_onto_the_devices_of_the_model(checkpointer, tmp_path):
    state = {
        "params": small_params(7.0),
        "model_state": {"batch_stats": {"mean": np.ones(2, np.float32)}},
        "step": np.int32(1),
    }
    path = checkpointer.save(tmp_path / "epoch_1", state, make_meta())
    checkpointer.wait()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    target = {
        "dense": {"kernel": jax.device_put(jnp.zeros((3, 2), jnp.bfloat16), sharding), "bias": np.zeros(2, np.float32)}
    }
    for weights in (path, state):  # on disk and in memory
        params, state_loaded, report = load_pretrained(
            weights, target, {"batch_stats": {"mean": np.zeros(2, np.float32)}}
        )
        assert (params["dense"]["kernel"].sharding, params["dense"]["kernel"].dtype) == (sharding, jnp.bfloat16)
        np.testing.assert_array_equal(params["dense"]["kernel"].astype(np.float32), np.full((3, 2), 7.0))
        np.testing.assert_array_equal(state_loaded["batch_stats"]["mean"], np.ones(2))
        assert report.cast == {"dense.kernel": ("float32[3,2]", "bfloat16[3,2]")}


class NormedNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.bn = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.bn(self.dense(x))


def test_modules_and_states_of_nnx_are_loaded_from_memory():
    module = NormedNet(nnx.Rngs(0))
    module.bn.mean[...] = jnp.full(2, 3.0)
    zeros = jax.tree.map(jnp.zeros_like, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    stats = {"bn": {"mean": jnp.zeros(2), "var": jnp.zeros(2)}}
    for weights in (module, nnx.state(module)):
        params, state, report = load_pretrained(weights, zeros, stats)
        np.testing.assert_array_equal(params["dense"]["kernel"], module.dense.kernel[...])
        np.testing.assert_array_equal(state["bn"]["mean"], [3.0, 3.0])
        assert report.fits
        assert params["dense"]["kernel"] is not module.dense.kernel[...]


def test_variables_of_linen_are_loaded_from_memory():
    net = nn.Sequential([nn.Dense(2), nn.BatchNorm(use_running_average=True)])
    variables = jax.tree.map(lambda x: x + 1, net.init(jax.random.key(0), np.ones((1, 3))))
    other = net.init(jax.random.key(1), np.ones((1, 3)))
    for weights in (variables, freeze(variables)):
        params, state, _ = load_pretrained(weights, other["params"], {"batch_stats": other["batch_stats"]})
        jax.tree.map(np.testing.assert_array_equal, {"params": params, **state}, variables)
    params, _, _ = load_pretrained(variables["params"], other["params"])  # the parameters alone
    jax.tree.map(np.testing.assert_array_equal, params, variables["params"])


def test_optimizers_of_nnx_are_loaded_with_their_counts(tmp_path):
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adamw(0.1), wrt=nnx.Param)
    optimizer.update(module, nnx.grad(lambda module: jnp.square(module(jnp.ones((4, 3)))).sum())(module))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "nnx", {"model": nnx.state(module), "optimizer": nnx.state(optimizer)})
    fresh = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(1)), nnx.Param)
    source = open_weights(tmp_path / "nnx")
    _, _, report = load_pretrained(source, fresh, item="model")
    state, found = load_optimizer(source, optax.adam(0.1).init(fresh), list(report.matched), item="model")
    kernel = optimizer.opt_state[0].mu["kernel"][...]
    np.testing.assert_array_equal(state[0].mu["kernel"][...], kernel)
    assert int(state[0].count) == found.step == 1
    assert found.step_from == "optimizer.step"
    assert not found.missing


# --- Rules and errors. ---


def test_excluded_parameters_keep_their_values():
    target = {**small_params(), "head": {"kernel": np.full((2, 5), 4.0, np.float32)}}
    weights = {**small_params(7.0), "head": {"kernel": np.zeros((2, 9), np.float32)}, "rngs": {"key": np.zeros(2)}}
    params, _, report = load_pretrained(weights, target, exclude=["head", "rngs"])
    np.testing.assert_array_equal(params["head"]["kernel"], np.full((2, 5), 4.0))
    np.testing.assert_array_equal(params["dense"]["bias"], [7.0, 7.0])
    assert report.excluded == ("head.kernel",)
    assert report.fits
    params, _, report = load_pretrained(small_params(7.0), small_params(1.0), exclude=[r".*\.bias"])
    np.testing.assert_array_equal(params["dense"]["bias"], [1.0, 1.0])
    with pytest.raises(
        ValueError, match="`exclude` must match parameters of the model, got 'heads'.* did you mean 'head'"
    ):
        load_pretrained(weights, target, exclude=["heads"])
    with pytest.raises(ValueError, match="`interpolate` must match .*got 'pos_embed'"):
        load_pretrained(weights, target, interpolate=["pos_embed"])


def test_weights_that_do_not_fit_are_an_error_or_with_strict_false_a_report():
    target = {**small_params(1.0), "neck": {"scale": np.ones(2, np.float32)}}
    weights = {
        "dense": {"kernel": np.zeros((3, 4), np.float32), "bias": np.zeros(2, np.float32)},
        "nec": {"scale": np.ones(2)},
    }
    with pytest.raises(CheckpointMismatchError, match="1 match, 1 missing, 1 unexpected, 1 mismatched"):
        load_pretrained(weights, target)
    params, _, report = load_pretrained(weights, target, strict=False)
    np.testing.assert_array_equal(params["dense"]["kernel"], np.ones((3, 2)))
    np.testing.assert_array_equal(params["dense"]["bias"], np.zeros(2))
    assert (report.missing, report.unexpected, list(report.mismatched)) == (
        ("neck.scale",),
        ("nec.scale",),
        ["dense.kernel"],
    )


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (("dens", "x"), ["did you mean 'dense'"]),
        ((r"dense(", "x"), ["regular expression"]),
        ((r"(dense)", r"\2"), ["old ones"]),
        ((r"dense\.\w+", "x"), ["got 'x' for both"]),
    ],
)
def test_rules_that_cannot_be_applied_are_errors(rule, words):
    check_refusal(lambda: load_pretrained(small_params(), small_params(), rename=[rule]), ValueError, *words)


def write_arrays(path, *values):
    """Write what `equinox.tree_serialise_leaves` writes: one array after another."""
    with path.open("wb") as file:
        for value in values:
            np.save(file, value)
    return path


def test_arrays_without_names_take_those_of_the_parameters_in_their_order(tmp_path):
    target = {"dense": {"bias": np.zeros(2, np.float32), "kernel": np.zeros((3, 2), np.float32)}}
    bias, kernel = np.arange(2, dtype=np.float32), np.ones((3, 2), ml_dtypes.bfloat16)
    path = write_arrays(tmp_path / "net.eqx", np.float64(0.5), bias, kernel, True)  # with the settings of a module
    params, _, _ = load_pretrained(path, target)
    np.testing.assert_array_equal(params["dense"]["bias"], bias)
    np.testing.assert_array_equal(params["dense"]["kernel"], np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"array 1 should be `dense\.bias` with the shape \(2,\), got one of \(3, 2\)"):
        load_pretrained(write_arrays(tmp_path / "other.eqx", kernel, bias), target)
    with pytest.raises(
        ValueError, match=r"array 2 should be `dense\.kernel` .* got the end of the file; pass the pytree"
    ):
        load_pretrained(write_arrays(tmp_path / "short.eqx", bias), target)
    moments = [np.int32(3), bias + 1, kernel, bias, kernel]
    path = write_arrays(tmp_path / "state.eqx", bias, kernel, *moments)
    with pytest.raises(ValueError, match=r"got 4 more arrays, the first with the shape \(2,\); pass the pytree"):
        load_pretrained(path, target)
    structure = (target, {"count": 0, "mu": target, "nu": target})
    params, _, _ = load_pretrained(path, target, item="0", structure=structure)
    np.testing.assert_array_equal(params["dense"]["bias"], bias)
    params, _, _ = load_pretrained(path, target, item="1.mu", structure=structure)
    np.testing.assert_array_equal(params["dense"]["bias"], bias + 1)
    (tmp_path / "torn.eqx").write_bytes(path.read_bytes()[:-3])
    (tmp_path / "pickle.eqx").write_bytes(b"\x80\x04pickle")
    (tmp_path / "torn.msgpack").write_bytes(b"\xc1no")
    for name in ("torn.eqx", "pickle.eqx", "torn.msgpack"):
        with pytest.raises(ValueError, match=f"{name} is not a complete"):
            load_pretrained(tmp_path / name, target)


@pytest.mark.parametrize("name", ["net.msgpack", "checkpoint_20"])
def test_msgpack_files_of_flax_are_read(tmp_path, name):
    variables = {"params": small_params(3.0), "batch_stats": {"bn": {"mean": np.full(2, 5.0, np.float32)}}}
    (tmp_path / name).write_bytes(flax.serialization.to_bytes(variables))
    params, state, _ = load_pretrained(
        tmp_path / name, small_params(), {"batch_stats": {"bn": {"mean": np.zeros(2, np.float32)}}}
    )
    jax.tree.map(np.testing.assert_array_equal, {"params": params, **state}, variables)


def test_weights_at_a_web_address_are_fetched_once(tmp_path, monkeypatch):
    monkeypatch.setenv("JENGINE_LOCAL_DIR", str(tmp_path / "cache"))
    save_file({"dense.kernel": np.ones((3, 2), np.float32)}, tmp_path / "model.safetensors")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path = locate_weights(f"http://127.0.0.1:{server.server_port}/model.safetensors")
        server.shutdown()
    assert path.startswith(str(tmp_path / "cache"))
    np.testing.assert_array_equal(load_file(path)["dense.kernel"], np.ones((3, 2)))
