"""Load models by the name of their family, recorded from Hugging Face transformers (see tests/data/pretrained/record_hub.py)."""

import pathlib
import shutil
import textwrap

import jax
import numpy as np
import pytest

from jengine.config.errors import CheckpointMismatchError, ConfigError
from jengine.config.plugins import list_extras
from jengine.config.registry import MODELS
from jengine.extras import weights
from jengine.extras.networks import (
    NnxTransformerLM,
    TransformerLM,
    contrastive_loss,
    split_transformer,
)
from jengine.extras.weights import (
    export_hub,
    hub_module,
    load_pretrained,
    open_weights,
    transformer_arguments,
)
from jengine.extras.weights.huggingface import (
    find_differences,
    find_family,
    list_tensors,
    read_config,
)
from jengine.extras.weights.language_models import make_config
from jengine.model import LinenModel, parameter_roles
from tests.docs_pages import blocks_of

DATA = pathlib.Path(__file__).parents[2] / "data" / "pretrained"
LANGUAGE = ("gemma", "gemma2", "gemma3", "qwen2", "qwen3")
IMAGES = ("clip", "convnext", "resnet", "resnet_basic", "vit")


def build(name, **changes):
    """Return the network, zeros for its variables, and the recorded inputs and logits."""
    module = MODELS.build(dict(hub_module(DATA / name), **changes))
    recorded = np.load(DATA / name / "outputs.npz")
    inputs = [recorded[key] for key in ("image", "tokens") if key in recorded]
    structs = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return module, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), structs), inputs, recorded["logits"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {}) for name in (*LANGUAGE, *IMAGES)), ("gemma3", dict(scan=False))],
)
def test_a_directory_of_the_hub_computes_the_recorded_logits(name, changes):
    module, variables, inputs, logits = build(name, **changes)
    params = variables.pop("params")
    params, state, report = load_pretrained(DATA / name, params, variables)
    assert report.fits
    np.testing.assert_allclose(
        jax.jit(module.apply)({"params": params, **state}, *inputs), logits, atol=1e-5, rtol=1e-5
    )


def test_the_nnx_transformer_computes_the_recorded_logits():
    from flax import nnx

    settings = transformer_arguments(DATA / "gemma3")
    recorded = np.load(DATA / "gemma3" / "outputs.npz")
    linen, structs = split_transformer(nnx.eval_shape(lambda: NnxTransformerLM(nnx.Rngs(0), **settings)))
    assert linen == TransformerLM(**settings)
    params, _, _ = load_pretrained(DATA / "gemma3", jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), structs))

    @jax.jit
    def compute(params):
        module = NnxTransformerLM(nnx.Rngs(0), **settings)
        state = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        nnx.update(module, state)
        return module(recorded["tokens"])

    logits = compute(params)
    np.testing.assert_allclose(logits, recorded["logits"], atol=1e-5, rtol=1e-5)


def test_tokens_that_are_generated_with_a_cache_have_the_recorded_logits():
    module, variables, (tokens,), logits = build("gemma2", cache_length=10)
    params, _, _ = load_pretrained(DATA / "gemma2", variables["params"])
    apply = jax.jit(lambda cache, tokens, positions: module.apply(
        {"params": params, "cache": cache}, tokens, positions=positions, mutable=["cache"]
    ))  # fmt: skip
    first, state = apply(variables["cache"], tokens[:, :6], np.broadcast_to(np.arange(6), (2, 6)))
    steps = [first]
    for i in range(6, 10):
        step, state = apply(state["cache"], tokens[:, i : i + 1], np.full((2, 1), i))
        steps.append(step)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), logits, atol=1e-5, rtol=1e-5)


def test_the_statistics_of_batch_norms_arrive_in_the_model_state():
    _, variables, *_ = build("resnet")
    params, state, _ = load_pretrained(DATA / "resnet", variables["params"], {"batch_stats": variables["batch_stats"]})
    source = open_weights(DATA / "resnet")
    stored = dict(source.read(source.structs))
    block = "resnet.encoder.stages.1.layers.0.shortcut."
    shortcut = state["batch_stats"]["stage1_0"]["shortcut"]["bn"]
    np.testing.assert_array_equal(shortcut["var"], stored[f"{block}normalization.running_var"])
    np.testing.assert_array_equal(shortcut["mean"], stored[f"{block}normalization.running_mean"])
    kernel = params["stage1_0"]["shortcut"]["conv"]["kernel"]
    np.testing.assert_array_equal(kernel[0, 0].T, stored[f"{block}convolution.weight"][:, :, 0, 0])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma", dict(use_bidirectional_attention=True), "`use_bidirectional_attention` .* False for TransformerLM, got True"),
        ("gemma", dict(final_logit_softcapping=30.0), "`final_logit_softcapping` of a config.json must be a setting of Tr"),
        ("gemma2", dict(layer_types=["chunked_attention"] * 2), "`layer_types` of a config.json must have 2 entries, each"),
        ("gemma2", dict(layer_types=["full_attention"]), "`layer_types` of a config.json must have 2 entries"),
        (
            "gemma3", dict(rope_parameters=dict(sliding_attention=dict(rope_type="linear", factor=2.0))),
            "`rope_parameters` of a config.json must have 'full_attention', and 'sliding_attention' with",
        ),
        ("gemma3", dict(rope_parameters=dict(rope_theta=3.0)), "`rope_parameters` of a config.json must have 'full_att"),
        ("qwen2", dict(partial_rotary_factor=0.5), "`partial_rotary_factor` of a config.json must be 1.0"),
        ("qwen2", dict(attention_bias=True), "`attention_bias` of a config.json must be False for TransformerLM, got True"),
        ("qwen3", dict(use_sliding_window=1), "`config.json.use_sliding_window` must be True or False or None, got 1"),
        ("qwen3", dict(num_experts=8), "`num_experts` of a config.json must be a setting of TransformerLM, got 8"),
        ("vit", dict(qkv_bias=False), "`config.json.qkv_bias` must be True or None, got False"),
        ("vit", dict(hidden_act="mish"), "activation of a config.json must be one of .*'quick_gelu'.* got 'mish'"),
        ("vit", dict(layerscale_value=1.0), "`layerscale_value` of a config.json must be a setting of ViT, got 1.0"),
        ("convnext", dict(depths=[1, "2", 1]), r"`config.json.depths\[1\]` must be an integer"),
        ("convnext", dict(use_grn=True), "`use_grn` of a config.json must be a setting of ConvNeXt, got True"),
        ("resnet", dict(layer_type="wide"), "`config.json.layer_type` must be 'basic' or 'bottleneck' or None, got 'wide'"),
        ("resnet", dict(embedding_size=0), r"`config.json.embedding_size` must be an integer in \[1, .*, got 0"),
        ("clip", dict(text_config=dict(rope_theta=1e4)), "`rope_theta` of a config.json must be a setting of CLIP, got 10000"),
        ("clip", dict(vision_config=dict(patch_size=-1)), "`config.json.patch_size` must be an integer"),
    ],
)  # fmt: skip
def test_a_setting_that_the_network_does_not_have_is_named(name, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        hub_module({**read_config(DATA / name), **changes})
    assert "\n" not in str(caught.value)


def test_an_unknown_model_type_lists_those_that_are_known_and_the_way_to_add_one(tmp_path):
    with pytest.raises(ConfigError) as caught:
        hub_module(dict(model_type="bert"))
    assert str(caught.value) == (
        "`model_type` of a config.json must be one of clip, convnext, gemma, gemma2, gemma3_text, gpt2, llama, mistral, "
        "qwen2, qwen3, resnet, vit, got 'bert'; a package adds another in its section 'hub_models': docs/pretrained.md"
    )
    assert find_family("gemma3-text") is find_family("gemma3_text")
    with pytest.raises(ConfigError, match="must be that of a language model, got one of a ViT: see `hub_module`"):
        transformer_arguments(DATA / "vit")
    with pytest.raises(ConfigError, match="must be one of gemma, .*, qwen3 to be exported as .*, got 'vit'"):
        export_hub({"head": {"kernel": np.zeros((2, 2))}}, tmp_path / "out", DATA / "vit")


def test_a_family_is_a_file_of_at_most_80_lines():
    files = {module.rpartition(".")[2] for module in list_extras()["weights"]["hub_models"].values()}
    folder = pathlib.Path(weights.__file__).parent
    assert {name: n for name in files if (n := len((folder / f"{name}.py").read_text().splitlines())) > 80} == {}


def test_older_files_mean_the_same():
    config = read_config(DATA / "gemma3")
    rope = config.pop("rope_parameters")
    del config["layer_types"], config["_sliding_window_pattern"]
    older = dict(
        config, rope_theta=3000.0, rope_local_base_freq=500.0, sliding_window_pattern=3, cache_implementation="hybrid",
        rope_scaling={key: value for key, value in rope["full_attention"].items() if key != "rope_theta"},
    )  # fmt: skip
    assert hub_module(older) == hub_module(DATA / "gemma3")
    assert hub_module({**older, "sliding_window_pattern": 2})["full_blocks"] == (1,)
    clip = read_config(DATA / "clip")
    older = {**clip, "text_config_dict": clip["text_config"], "text_config": {}, "vision_config_dict": None}
    assert hub_module(older) == hub_module(DATA / "clip")
    old = dict(tie_word_embeddings=True, add_cross_attention=False, cross_attention_hidden_size=None, pruned_heads={})
    first = {**clip["text_config"], **old, "eos_token_id": 2}
    assert hub_module({**clip, "text_config": first})["text"]["end_token"] is None
    qwen = dict(read_config(DATA / "qwen2"), use_mrope=False, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    del qwen["layer_types"]
    assert (hub_module(qwen)["window"], hub_module(qwen)["full_blocks"]) == (4, (0,))


def test_what_a_config_leaves_out_has_the_values_of_transformers():
    assert hub_module(dict(model_type="vit")) == dict(
        type="ViT", num_classes=2, patch=16, width=768, depth=12, heads=12, mlp_ratio=4.0, activation="gelu",
        norm_epsilon=1e-12,
    )  # fmt: skip
    sizes = dict(vocab_size=9, hidden_size=8, num_hidden_layers=6, num_attention_heads=4, intermediate_size=6)
    found = hub_module(dict(sizes, model_type="gemma2", num_key_value_heads=2))
    assert (found["head_size"], found["attention_scale"], found["logits_cap"]) == (256, 1 / 16, 30.0)
    assert (found["window"], found["full_blocks"], found["tied"]) == (4096, (1, 3, 5), True)


@pytest.mark.parametrize("name", LANGUAGE)
def test_an_export_has_the_tensors_of_the_directory_that_was_loaded(name, tmp_path):
    params = build(name)[1]["params"]
    source = open_weights(DATA / name)
    expected = dict(source.read(source.structs))
    assert list_tensors(read_config(DATA / name)) == {path: array.shape for path, array in expected.items()}
    params, _, _ = load_pretrained(DATA / name, params)
    export_hub(params, tmp_path, DATA / name, dtype="bfloat16")
    exported = open_weights(tmp_path)
    for path, array in exported.read(exported.structs):
        np.testing.assert_array_equal(array, expected.pop(path), err_msg=path)
    assert not expected
    assert read_config(tmp_path) == read_config(DATA / name)


SIZES = dict(vocab_size=12, width=8, depth=3, heads=2, kv_heads=1, mlp_width=6)
GEMMA = dict(SIZES, norm="rms_plus_one", activation="gelu_tanh", embed_scale=8**0.5, tied=True)
SANDWICH = dict(GEMMA, post_norm=True, window=3, attention_scale=1 / 3)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen2", dict(SIZES, bias="qkv", rotary_base=500.0)),
        ("qwen2", dict(SIZES, bias="qkv", window=3, full_blocks=(0,))),
        ("qwen3", dict(SIZES, bias="attention", query_key_norm=True, head_size=6)),
        ("gemma", GEMMA),
        ("gemma2", dict(SANDWICH, full_blocks=(1,), attention_cap=2.0, logits_cap=3.0)),
        (
            "gemma3_text",
            dict(SANDWICH, full_blocks=(2,), query_key_norm=True, rotary_base=3000.0, local_rotary_base=500.0,
                 rotary_scaling=dict(kind="linear", factor=2.0)),
        ),
    ],
)  # fmt: skip
def test_a_model_that_was_trained_here_has_the_config_of_its_family(model_type, settings):
    module = TransformerLM(**settings)
    config = make_config(module)
    assert config["model_type"] == model_type
    read = TransformerLM(**transformer_arguments(config))
    assert find_differences(config, module) == []
    assert (read.make_settings(), read.tied, read.vocab_size) == (module.make_settings(), module.tied, 12)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("vit", dict(num_classes=3, activation="gelu_tanh"), ["activation is 'gelu_tanh', that of the weights is 'gelu'"]),
        ("vit", dict(heads=2), ["heads is 2, that of the weights is 3"]),
        ("resnet", dict(widths=[8, 16], stride_first=True), ["stride_first is True, that of the weights is False"]),
        ("gemma2", dict(logits_cap=None), ["logits_cap is None, that of the weights is 3.0"]),
        ("gemma3", dict(local_rotary_base=None), ["local_rotary_base is None, that of the weights is 500.0"]),
    ],
)
def test_settings_that_the_shapes_do_not_show_are_compared(name, changes, expected):
    module = MODELS.build(dict(hub_module(DATA / name), **changes))
    assert find_differences(read_config(DATA / name), module) == expected


def test_the_settings_of_both_encoders_are_compared():
    config = hub_module(DATA / "clip")
    assert find_differences(read_config(DATA / "clip"), MODELS.build(config)) == []
    config["image"] = {key: value for key, value in config["image"].items() if key != "activation"}
    found = find_differences(read_config(DATA / "clip"), MODELS.build(config))
    assert found == ["image.activation is 'gelu', that of the weights is 'quick_gelu'"]


@pytest.fixture
def without_head(tmp_path):
    """Return a directory of a ViTModel: without a prefix and a classifier, but with a pooler."""
    from safetensors.numpy import save_file

    shutil.copytree(DATA / "vit", tmp_path / "vit")
    source = open_weights(DATA / "vit")
    arrays = dict(source.read(source.structs))
    arrays = {name.removeprefix("vit."): x for name, x in arrays.items() if not name.startswith("classifier")}
    arrays["pooler.dense.weight"] = np.zeros((12, 12), np.float32)
    save_file({name: np.asarray(x, np.float32) for name, x in arrays.items()}, tmp_path / "vit" / "model.safetensors")
    return tmp_path / "vit"


def test_a_model_without_its_head_needs_one_of_the_network(without_head):
    _, variables, inputs, logits = build("vit")
    with pytest.raises(CheckpointMismatchError, match=r"missing     head\.bias"):
        load_pretrained(without_head, variables["params"])
    _, _, report = load_pretrained(without_head, variables["params"], exclude=["head"])
    assert report.ignored == ("pooler.dense.weight",)
    features = MODELS.build(dict(hub_module(without_head), num_classes=None))
    whole, _, _ = load_pretrained(DATA / "vit", variables["params"])
    bare = {name: x for name, x in whole.items() if name != "head"}
    loaded, _, _ = load_pretrained(without_head, bare)
    jax.tree.map(np.testing.assert_array_equal, loaded, bare)
    y = jax.jit(features.apply)({"params": loaded}, *inputs) @ whole["head"]["kernel"] + whole["head"]["bias"]
    np.testing.assert_allclose(y, logits, atol=1e-5)


def test_a_classifier_starts_with_another_head_and_image_size():
    module = MODELS.build(dict(hub_module(DATA / "vit"), num_classes=3))
    structs = jax.eval_shape(module.init, jax.random.key(0), np.zeros((1, 16, 16, 3)))["params"]
    start = jax.tree.map(lambda x: np.full(x.shape, 7.0, x.dtype), structs)
    params, _, _ = load_pretrained(DATA / "vit", start, exclude=["head"], interpolate=["pos_embed"])
    whole, _, _ = load_pretrained(DATA / "vit", build("vit")[1]["params"])
    np.testing.assert_array_equal(params["layers_1"]["fc1"]["kernel"], whole["layers_1"]["fc1"]["kernel"])
    np.testing.assert_array_equal(params["pos_embed"][:, 0], whole["pos_embed"][:, 0])
    assert params["pos_embed"].shape == (1, 17, 12)
    assert set(np.unique(params["head"]["kernel"])) == {7}


def test_rules_have_the_name_of_the_family_where_there_is_no_config(tmp_path):
    from safetensors.numpy import save_file

    source = open_weights(DATA / "convnext")
    save_file({k: np.asarray(x, np.float32) for k, x in source.read(source.structs)}, tmp_path / "w.safetensors")
    _, variables, *_ = build("convnext")
    params, _, _ = load_pretrained(tmp_path / "w.safetensors", variables["params"], rename="convnext")
    expected, _, _ = load_pretrained(DATA / "convnext", variables["params"])
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_the_package_of_the_documentation_adds_a_family(run_python, tmp_path):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(next(x for x in blocks_of("pretrained.md", "text") if "hub_models" in x))
    (package / "hub_starcoder2.py").write_text(next(x for x in blocks_of("pretrained.md", "python") if "starcoder2 =" in x))
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jengine.extras]\nmy_family = my_package.plugin\n")
    code = f"""
    sys.path.insert(0, {str(tmp_path)!r})
    import jax, numpy as np
    from jengine.config import MODELS
    from jengine.extras.weights import hub_module, load_pretrained
    hub = {str(DATA / "starcoder2")!r}
    recorded = np.load(hub + "/outputs.npz")
    module = MODELS.build(hub_module(hub))
    structs = jax.eval_shape(module.init, jax.random.key(0), recorded["tokens"])["params"]
    params, _, report = load_pretrained(hub, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), structs))
    logits = jax.jit(module.apply)({{"params": params}}, recorded["tokens"])
    np.testing.assert_allclose(logits, recorded["logits"], atol=1e-5, rtol=1e-5)
    print(report)
    """
    done = run_python(textwrap.dedent(code))
    assert "19 match, 0 missing" in done.stdout, done.stderr


@pytest.mark.parametrize("name", IMAGES)
def test_the_parameters_have_the_roles_of_what_they_do(name):
    module, _, inputs, _ = build(name)
    batch = dict(zip(["image", "tokens"], inputs, strict=False), label=np.zeros(2, np.int32))
    loss = contrastive_loss if name == "clip" else dict(type="CrossEntropy")
    if name == "clip":
        batch["tokens"] = batch["tokens"][:2]
    model = LinenModel(module, loss, inputs=["image", "tokens"][: len(inputs)])
    params, state = jax.eval_shape(model.init, jax.random.key(0), batch)
    roles = parameter_roles(model, params, batch=batch, model_state=state)
    kinds = {path: role.kind for path, role in roles.items() if role.kind not in ("bias", "norm")}
    block = {f"{part}.kernel": "hidden" for part in ("attn.query", "attn.key", "attn.value", "attn.out", "fc1", "fc2")}
    blocks = {f"layers_{i}.{path}": kind for i in range(2) for path, kind in block.items()}
    expected = {
        "vit": {
            "patch_embed.kernel": "input", "cls_token": "position", "pos_embed": "position", "head.kernel": "head", **blocks,
        },
        "clip": {
            "image_encoder.patch_embed.kernel": "input", "image_encoder.cls_token": "position",
            "image_encoder.pos_embed": "position", "text_encoder.embed.embedding": "embedding",
            "text_encoder.pos_embed": "position", "image_projection.kernel": "head", "text_projection.kernel": "head",
            "log_factor": "scale",
            **{f"{side}_encoder.{path}": kind for side in ("image", "text") for path, kind in blocks.items()},
        },
        "convnext": {
            "stem.kernel": "input", "downsample1.kernel": "convolution", "downsample2.kernel": "convolution",
            "head.kernel": "head",
            **{
                f"stage{place}.{part}": kind
                for place in ("0_0", "1_0", "1_1", "2_0")
                for part, kind in {
                    "depthwise.kernel": "depthwise", "fc1.kernel": "hidden", "fc2.kernel": "hidden", "layer_scale": "scale",
                }.items()
            },
        },
    }  # fmt: skip
    if name.startswith("resnet"):
        expected = {path: "convolution" for path in kinds if path.startswith("stage")}
        assert kinds == {"stem.conv.kernel": "input", "head.kernel": "head", **expected}
        assert len(expected) == {"resnet": 10, "resnet_basic": 8}[name]
    else:
        assert kinds == expected[name]
