"""Load language models recorded from Hugging Face transformers (see tests/data/pretrained/record_lm.py)."""

import json
import os
import pathlib
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jengine.checkpoint import CheckpointMismatchError
from jengine.config import paths, registry
from jengine.config.errors import ConfigError
from jengine.extras.networks import TransformerLM
from jengine.extras.weights import export_hub, load_pretrained, open_weights, transformer_arguments
from jengine.extras.weights.huggingface import list_tensors, read_config
from tests.refusals import check_refusal

DATA = pathlib.Path(__file__).parents[2] / "data" / "pretrained"
MODELS = ("gpt2", "llama", "mistral")


def build(name, **changes):
    """Return the model, zeros as its parameters, and the recorded tokens and logits."""
    model = TransformerLM(**{**transformer_arguments(DATA / name), **changes})
    recorded = np.load(DATA / name / "logits.npz")
    structs = jax.eval_shape(model.init, jax.random.key(0), recorded["tokens"])["params"]
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), structs)
    return model, params, recorded["tokens"], recorded["logits"]


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "layers"])
@pytest.mark.parametrize("name", MODELS)
def test_a_directory_of_the_hub_computes_the_recorded_logits(name, scan):
    model, params, tokens, logits = build(name, scan=scan)
    params, _, report = load_pretrained(DATA / name, params)
    assert report.fits
    np.testing.assert_allclose(jax.jit(model.apply)({"params": params}, tokens), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_names_and_shapes_of_the_weights_follow_from_the_config(name):
    stored = {path: leaf.shape for path, leaf in open_weights(DATA / name).structs.items()}
    assert list_tensors(read_config(DATA / name)) == stored


def test_names_without_a_prefix_and_buffers_of_older_files_are_accepted():
    model, params, tokens, logits = build("gpt2")
    source = open_weights(DATA / "gpt2")
    weights = {name.removeprefix("transformer."): array for name, array in source.read(source.structs)}
    weights |= {f"h.{i}.attn.bias": np.ones((1, 1, 12, 12), bool) for i in range(2)}
    params, _, report = load_pretrained(weights, params, rename="gpt2")
    assert sorted(report.ignored) == ["h.0.attn.bias", "h.1.attn.bias"]
    np.testing.assert_allclose(jax.jit(model.apply)({"params": params}, tokens), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_whose_embedding_is_tied_or_not_loads_files_of_both_kinds(name):
    model, params, tokens, logits = build(name, tied=name == "llama")
    params, _, report = load_pretrained(DATA / name, params)
    result = model.apply({"params": params}, tokens)
    if name == "gpt2":
        np.testing.assert_allclose(result, logits, atol=1e-5, rtol=1e-5)
    else:
        assert report.ignored == ("lm_head.weight",)


def test_gpt2_is_not_loaded_without_its_map_into_a_model_with_square_matrices():
    _, params, *_ = build("gpt2", scan=False)
    rule = r"transformer\.h\.(\d+)\.attn\.c_proj", r"layers_\1.attn.out"
    words = "layers_0.attn.out.kernel", "(out, in) or (in, out)"
    check_refusal(lambda: load_pretrained(DATA / "gpt2", params, rename=[rule], strict=False), CheckpointMismatchError, *words)
    loaded, *_ = load_pretrained(DATA / "gpt2", params, rename=[(*rule, dict(transform="none"))], strict=False)
    source = open_weights(DATA / "gpt2")
    (stored,) = [array for name, array in source.read(source.structs) if name.endswith("h.0.attn.c_proj.weight")]
    np.testing.assert_array_equal(loaded["layers_0"]["attn"]["out"]["kernel"].ravel(), stored.ravel())


def test_weights_are_loaded_into_the_dtype_of_the_model_and_a_missing_layer_is_named(tmp_path):
    _, params, *_ = build("mistral")
    halves = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), params)
    loaded, _, _ = load_pretrained(DATA / "mistral", halves)
    source = open_weights(DATA / "mistral")
    array = dict(source.read(source.structs))["model.layers.1.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(loaded["layers"]["mlp"]["gate"]["kernel"][1], array.T)
    shutil.copytree(DATA / "llama", tmp_path / "llama")
    index = tmp_path / "llama" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"numbers 0 to 1 for 'layers\.mlp\.up\.weight', got none for 0, by the rule"):
        load_pretrained(tmp_path / "llama", build("llama")[1])


def test_loading_holds_one_tensor_beside_the_result(tmp_path):
    config = dict(model_type="llama", vocab_size=64, hidden_size=128, intermediate_size=1024, num_hidden_layers=8,
                  num_attention_heads=4)  # fmt: skip
    shapes = list_tensors(config)
    for i in range(8):  # a shard for each layer
        shard = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if f"layers.{i}." in name}
        save_file(shard, tmp_path / f"model-{i}.safetensors")
    rest = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if ".layers." not in name}
    save_file(rest, tmp_path / "model-rest.safetensors")
    weight_map = {name: f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors" for name in shapes}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=weight_map)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = TransformerLM(**transformer_arguments(config))
    structs = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), int))["params"]
    params = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), structs)  # no memory
    result = sum(4 * leaf.size for leaf in jax.tree.leaves(structs))
    tensor = 4 * 1024 * 128
    load_pretrained(tmp_path, params)  # imports
    tracemalloc.start()
    loaded, _, _ = load_pretrained(tmp_path, params)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result <= peak < result + 3 * tensor  # one read, one converted, and the headers
    assert float(loaded["layers"]["mlp"]["down"]["kernel"].min()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(model_type="bert"), ["`model_type`", "config.json", "got 'bert'"]),
        (
            dict(rope_parameters=dict(rope_type="dynamic")),
            ["`rope_type`", "'default'", "'linear'", "got 'dynamic'"],
        ),
        (dict(rope_parameters=dict(rope_type="yarn", factor=2.0, mscale=1.0)), ["got ['mscale']"]),
        (
            dict(residual_multiplier=0.22),
            ["`residual_multiplier`", "config.json", "1.0", "TransformerLM", "got 0.22"],
        ),
        (
            dict(final_logit_softcapping=30.0),
            ["`final_logit_softcapping`", "TransformerLM", "got 30.0"],
        ),
        (dict(attn_logit_softcapping=50.0), ["`attn_logit_softcapping`", "config.json"]),
        (
            dict(quantization_config=dict(quant_method="gptq")),
            ["`quantization_config`", "config.json"],
        ),
        (dict(a_new_setting=True), ["`a_new_setting`", "config.json", "TransformerLM", "got True"]),
        (dict(sliding_window=8), ["`sliding_window`", "config.json"]),  # only Mistral's
        (dict(partial_rotary_factor=0.5), ["`partial_rotary_factor`", "config.json", "1.0"]),
        (dict(rope_scaling=4.0), ["`config.json.rope_scaling`", "None", "got 4.0"]),
        (dict(hidden_act="quick_gelu"), ["config.json", "got 'quick_gelu'"]),
    ],
)
def test_a_config_with_what_the_transformer_does_not_have_is_refused(changes, words):
    check_refusal(lambda: transformer_arguments({**read_config(DATA / "llama"), **changes}), ConfigError, *words)


def test_settings_without_a_value_or_with_a_neutral_one_are_accepted():
    neutral = dict(
        residual_multiplier=1.0, final_logit_softcapping=None, quantization_config=None, pruned_heads={},
        partial_rotary_factor=1.0, unsloth_version="2025.1", task_specific_params=dict(translation=1),
    )  # fmt: skip
    expected = transformer_arguments(DATA / "llama")
    assert transformer_arguments({**read_config(DATA / "llama"), **neutral}) == expected


def test_what_a_mistral_config_leaves_out_has_the_values_of_transformers():
    config = read_config(DATA / "mistral")
    del config["sliding_window"], config["num_key_value_heads"]
    found = transformer_arguments({**config, "num_attention_heads": 16})
    assert (found["window"], found["kv_heads"]) == (4096, 8)
    found = transformer_arguments({**config, "sliding_window": None, "num_key_value_heads": None})
    assert (found["window"], found["kv_heads"]) == (None, 4)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_biases_of_attentions_and_mlps_are_apart(part, scan, tmp_path):
    other = {"attention": "mlp", "mlp": "attention"}[part]
    config = {**read_config(DATA / "llama"), f"{part}_bias": True, f"{other}_bias": False}
    model = TransformerLM(**transformer_arguments(config), scan=scan)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 2), int))["params"]
    biases = {path.split(".")[-3] for path in paths.flatten(params) if path.endswith(".bias")}
    assert biases == {{"attention": "attn", "mlp": "mlp"}[part]}
    export_hub(params, tmp_path, config)
    names = {name.split(".")[-3] for name in read_all(tmp_path) if name.endswith(".bias")}
    assert names == {{"attention": "self_attn", "mlp": "mlp"}[part]}
    loaded, _, report = load_pretrained(tmp_path, jax.tree.map(jnp.zeros_like, params))
    assert report.fits
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_llama_without_its_output_layer_has_no_prefix_and_leaves_the_head_to_the_model(tmp_path):
    model, params, tokens, logits = build("llama")
    source = open_weights(DATA / "llama")
    weights = {name.removeprefix("model."): array for name, array in source.read(source.structs)}
    head = weights.pop("lm_head.weight")
    (tmp_path / "config.json").write_text((DATA / "llama" / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointMismatchError, match=r"missing     head\.kernel"
    ):  # the embedding is no head of this model
        load_pretrained(tmp_path, params)
    params["head"]["kernel"] = head.T
    loaded, _, _ = load_pretrained(tmp_path, params, exclude=["head"])
    np.testing.assert_allclose(jax.jit(model.apply)({"params": loaded}, tokens), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_attention_heads=0), ["`config.json.num_attention_heads`", "got 0"]),
        (dict(num_attention_heads="4"), ["`config.json.num_attention_heads`", "got '4'"]),
        (dict(num_attention_heads=None), ["config.json", "`TransformerLM.heads`"]),
        (dict(num_attention_heads=3), ["config.json", "TransformerLM", "`heads`"]),
        (dict(hidden_size=10**12), ["`config.json.hidden_size`", "2147483648", "None", "got 10000"]),
        (dict(hidden_size=10**400), ["`config.json.hidden_size`"]),
        (dict(hidden_size=True), ["`config.json.hidden_size`", "got True"]),
        (dict(head_dim=5), ["config.json", "TransformerLM", "`head_size`"]),
        (dict(num_hidden_layers=10**6), ["`config.json.num_hidden_layers`", "[1, 10000]"]),
        (dict(rms_norm_eps=float("nan")), ["`config.json.rms_norm_eps`", "above 0", "None", "got nan"]),
        (dict(attention_bias="no"), ["`config.json.attention_bias`", "True or False", "None", "got 'no'"]),
        (dict(rope_parameters="linear"), ["`config.json.rope_parameters`", "None", "got 'linear'"]),
        (dict(rope_parameters=dict(rope_theta=1)), ["`rope_theta`", "config.json", "above 1", "got 1"]),
        (dict(rope_parameters=dict(rope_theta=[])), ["`rope_theta`", "config.json", "above 1", "got []"]),
        (dict(rope_parameters=dict(rope_type=[1])), ["`rope_type`", "config.json", "got [1]"]),
        (dict(rope_parameters=dict(rope_type="linear")), ["config.json", "needs", "'factor'"]),
        (dict(rope_parameters=dict(rope_type="linear", factor="8")), ["`rotary_scaling.factor`"]),
        (
            dict(rope_parameters=dict(
                rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )),
            ["`high_freq_factor`", "low_freq_factor", "4.0", "got 4.0"],
        ),
        (dict(model_type=["llama"]), ["`model_type`", "config.json", "got", "llama"]),
        (dict(hidden_act=5), ["`config.json.hidden_act`", "None", "got 5"]),
    ],
)  # fmt: skip
def test_a_config_with_impossible_settings_is_refused_in_one_sentence(changes, words):
    check_refusal(lambda: transformer_arguments({**read_config(DATA / "llama"), **changes}), ConfigError, *words)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling", "head_dim", "num_key_value_heads"])
def test_null_in_a_config_stands_for_the_default(name):
    config = read_config(DATA / "llama")
    without = {key: value for key, value in config.items() if key != name}
    assert transformer_arguments({**config, name: None}) == transformer_arguments(without)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "config.json: it must be a regular file, not a pipe or a device"),
        (lambda path: path.symlink_to("/dev/zero"), "config.json: it must be a regular file, not a pipe or a device"),
        (lambda path: path.write_text("[" * 200_000), "JSON must be nested at most 100 levels deep"),
        (lambda path: path.write_text("[1]"), "it must be a JSON object, got a list"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "config.json must have settings in JSON: "),
    ],
    ids=["pipe", "device", "deep", "list", "binary"],
)
def test_a_config_that_cannot_be_read_is_one_clear_error(tmp_path, make, message):
    from safetensors.numpy import save_file

    save_file({"norm.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    make(tmp_path / "config.json")
    for function in (read_config, transformer_arguments, open_weights):
        with pytest.raises(ValueError, match=message):
            function(tmp_path)


def test_the_settings_of_rotations_have_the_same_meaning_in_older_configs():
    config = read_config(DATA / "llama")
    rope = dict(config.pop("rope_parameters"))
    older = {**config, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert transformer_arguments(older) == transformer_arguments(DATA / "llama")


LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0)


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        (dict(rope_scaling=dict(rope_type="default")), None),
        (dict(rope_scaling=dict(type="linear", factor=2.0)), dict(kind="linear", factor=2.0)),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=4.0, beta_fast=16.0, original_max_position_embeddings=8)),
            dict(kind="yarn", factor=4.0, beta_fast=16.0, original_length=8),
        ),
        # as in transformers: the length beside the scaling comes first, then that in it, then the longest context
        (
            dict(rope_scaling=dict(type="yarn", factor=4.0), original_max_position_embeddings=16),
            dict(kind="yarn", factor=4.0, original_length=16),
        ),
        (
            dict(
                rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32),
                original_max_position_embeddings=16,
            ),
            dict(kind="yarn", factor=4.0, original_length=16),
        ),
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), dict(kind="yarn", factor=4.0, original_length=64)),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=None, original_max_position_embeddings=16, truncate=False)),
            dict(kind="yarn", factor=4.0, original_length=16, truncate=False),
        ),
        (
            dict(rope_scaling=LLAMA3),
            dict(kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_length=64),
        ),
        (
            dict(rope_scaling=LLAMA3, original_max_position_embeddings=16),
            dict(kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_length=16),
        ),
        (dict(original_max_position_embeddings=16), None),
    ],
)
def test_the_scaling_of_rotations_is_read(settings, scaling):
    config = {**read_config(DATA / "llama"), "max_position_embeddings": 64}
    del config["rope_parameters"]
    arguments = transformer_arguments({**config, **settings})
    assert arguments["rotary_scaling"] == scaling
    model = registry.MODELS.build(dict(type="TransformerLM", **arguments))
    jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), int))


# --- Export. ---


def read_all(directory):
    source = open_weights(directory)
    return dict(source.read(source.structs))


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "layers"])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_has_the_tensors_of_the_directory_that_was_loaded(name, scan, tmp_path):
    _, params, *_ = build(name, scan=scan)
    dtype = read_all(DATA / name)["model.norm.weight" if name != "gpt2" else "transformer.ln_f.weight"].dtype
    params, _, _ = load_pretrained(DATA / name, jax.tree.map(lambda x: x.astype(dtype), params))
    export_hub(params, tmp_path / "out", DATA / name, shard_bytes=9000)
    expected, actual = read_all(DATA / name), read_all(tmp_path / "out")
    assert actual.keys() == expected.keys()
    for tensor, array in expected.items():
        assert actual[tensor].dtype == array.dtype
        np.testing.assert_array_equal(actual[tensor], array, err_msg=tensor)
    assert read_config(tmp_path / "out") == read_config(DATA / name)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    with pytest.raises(FileExistsError, match=r"must have no other weights, .*got model-00001-of"):
        export_hub(params, tmp_path / "out", DATA / name)


def test_parameters_in_float32_are_exported_in_the_dtype_of_their_origin(tmp_path):
    params, _, _ = load_pretrained(DATA / "mistral", build("mistral")[1])
    structs = export_hub(params, tmp_path, DATA / "mistral", dtype="bfloat16")
    assert {struct.dtype.name for struct in structs.values()} == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, read_all(tmp_path), read_all(DATA / "mistral"))
    export_hub(params, tmp_path, DATA / "mistral")  # in float32
    assert read_config(tmp_path)["dtype"] == "float32"


def test_an_export_says_whether_the_embedding_is_tied_and_refuses_another_model(tmp_path):
    params, _, _ = load_pretrained(DATA / "gpt2", build("gpt2", tied=False)[1])
    params["head"]["kernel"] += 1
    structs = export_hub(params, tmp_path / "untied", DATA / "gpt2")
    assert "lm_head.weight" in structs
    assert not read_config(tmp_path / "untied")["tie_word_embeddings"]
    np.testing.assert_array_equal(read_all(tmp_path / "untied")["lm_head.weight"], params["head"]["kernel"].T)
    with pytest.raises(CheckpointMismatchError, match=r"missing     layers\.attn\.key\.bias"):
        export_hub(params, tmp_path / "other", DATA / "llama")
    assert not (tmp_path / "other").exists()


def test_an_export_carries_the_tokenizer_and_the_settings_for_generation_along(tmp_path):
    origin, out = tmp_path / "origin", tmp_path / "out"
    shutil.copytree(DATA / "llama", origin)
    companions = {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json",
        "merges.txt", "chat_template.jinja", "additional_chat_templates/rag.jinja", "generation_config.json",
    }  # fmt: skip
    (origin / "additional_chat_templates").mkdir()
    for name in [*companions, "modeling_llama.py", "pytorch_model.bin", "README.md"]:
        (origin / name).write_text(f"of {name}")
    params, _, _ = load_pretrained(origin, build("llama")[1])
    export_hub(params, out, origin)
    found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert found == {*companions, "config.json", "model.safetensors"}
    assert all((out / name).read_text() == f"of {name}" for name in companions)
    export_hub(params, tmp_path / "alone", read_config(origin))  # a config alone has nothing beside it
    assert {file.name for file in (tmp_path / "alone").iterdir()} == {"config.json", "model.safetensors"}
    for file in origin.glob("*.safetensors*"):
        file.unlink()
    export_hub(params, origin, origin)  # in place
    assert (origin / "tokenizer.json").read_text() == "of tokenizer.json"
