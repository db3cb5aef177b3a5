"""Fine-tune a language model of Hugging Face from its directory, and export it in the same form."""

import pathlib

import jax
import numpy as np
import optax
import pytest

from jengine.cli import main
from jengine.config import load_config, resolve
from jengine.config.errors import ConfigError
from jengine.extras.networks import TransformerLM
from jengine.extras.weights import export_hub, load_pretrained, open_weights, transformer_arguments
from jengine.extras.weights.huggingface import read_config
from jengine.extras.weights.language_models import make_config
from jengine.hooks import Hook
from jengine.runner import Runner
from tests.refusals import check_refusal

DATA = pathlib.Path(__file__).parents[2] / "data" / "pretrained"
CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "lm.py"
TOKENS = np.arange(40, dtype=np.int32).reshape(4, 10) % 12


def make_config_of_run(work_dir, **changes):
    module = dict(type="TransformerLM", **transformer_arguments(DATA / "llama"))
    data = dict(batch_size=4, dataset=dict(type="ArrayDataset", arrays=dict(tokens=TOKENS, targets=TOKENS + 1)))
    return dict(
        model=dict(
            type="LinenModel",
            module={**module, **changes},
            inputs="tokens",
            loss=dict(type="CrossEntropy", label="targets"),
        ),
        work_dir=str(work_dir),
        load_from=str(DATA / "llama"),
        train_dataloader=data,
        train_cfg=dict(by_epoch=False, max_iters=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None),
    )


def test_a_fine_tuned_model_is_exported_as_the_directory_that_it_started_from(tmp_path, capsys):
    state = Runner.from_cfg(make_config_of_run(tmp_path / "run")).train()
    assert float(np.abs(state.params["layers"]["mlp"]["up"]["kernel"]).max()) > 0.5  # the recorded ones are large
    for options in ([], ["--like", str(DATA / "llama")]):
        out = tmp_path / f"hub{len(options)}"
        assert main(["ckpt", "export", str(tmp_path / "run"), str(out), "--to", "safetensors", *options]) == 0
        assert "21 tensors, 20.3 KiB, written to" in capsys.readouterr().out
        original, exported = (open_weights(path) for path in (DATA / "llama", out))
        expected = dict(original.read(original.structs))
        for name, array in exported.read(exported.structs):  # at a learning rate of 0
            np.testing.assert_array_equal(array, expected.pop(name))
        assert not expected
        assert read_config(out) == read_config(DATA / "llama")
    assert main(["ckpt", "export", str(tmp_path / "run"), str(out), "--like", str(DATA)]) == 2
    assert "`--like` must be given with --to safetensors" in capsys.readouterr().err


def test_a_model_that_computes_something_else_with_weights_of_the_same_shapes_is_a_warning(tmp_path):
    runner = Runner.from_cfg(make_config_of_run(tmp_path / "run", rotary_base=10_000.0, activation="gelu"))
    runner.train()
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert "rotary_base is 10000.0, that of the weights is 2000.0; " in log
    assert "activation is 'gelu', that of the weights is 'silu'." in log


LLAMA = dict(vocab_size=12, width=8, depth=1, heads=2, mlp_width=6)
GPT2 = dict(**LLAMA, norm="layer", mlp="plain", activation="gelu_tanh", positions="learned", bias=True, tied=True)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (dict(**LLAMA, kv_heads=1, bias="mlp", norm_epsilon=1e-5, rotary_base=500.0), "llama"),
        (dict(**LLAMA, rotary_scaling=dict(kind="linear", factor=2.0)), "llama"),
        (dict(**LLAMA, rotary_scaling=dict(kind="yarn", factor=2.0, original_length=16), head_size=6), "llama"),
        (
            dict(
                **LLAMA, tied=True, activation="relu",
                rotary_scaling=dict(kind="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=9),
            ),
            "llama",
        ),
        (dict(**LLAMA, window=4, activation="gelu"), "mistral"),
        (dict(**GPT2, max_length=10), "gpt2"),
    ],
)  # fmt: skip
def test_a_model_that_was_trained_here_is_exported_with_a_config_of_its_own(tmp_path, settings, kind):
    module = TransformerLM(**settings)
    params = jax.jit(module.init)(jax.random.key(0), TOKENS)["params"]
    config = make_config(module)
    assert config["model_type"] == kind
    export_hub(params, tmp_path, config)
    read = transformer_arguments(tmp_path)
    zeros = jax.tree.map(np.zeros_like, params)
    loaded, _, _ = load_pretrained(tmp_path, zeros)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    np.testing.assert_array_equal(
        TransformerLM(**read).apply({"params": loaded}, TOKENS), module.apply({"params": params}, TOKENS)
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(**LLAMA, experts=2), ["None"]),
        (dict(**LLAMA, window=3, bias=True), ["attention_bias"]),
        (dict(**GPT2 | dict(mlp="gated"), max_length=10), ["'gated'", "'plain'"]),
    ],
)
def test_settings_that_no_model_type_has_are_no_config(settings, words):
    check_refusal(lambda: make_config(TransformerLM(**settings)), ConfigError, *words)


@pytest.mark.parametrize("as_object", [False, True])
def test_the_command_exports_a_model_that_has_started_from_nothing(tmp_path, capsys, as_object):
    config = make_config_of_run(tmp_path / "run") | dict(load_from=None)
    if as_object:
        config["model"]["module"] = TransformerLM(**transformer_arguments(DATA / "llama"))
    state = Runner.from_cfg(config).train()
    assert main(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "hub"), "--to", "safetensors"]) == 0
    assert transformer_arguments(tmp_path / "hub") == transformer_arguments(DATA / "llama")
    weights = open_weights(tmp_path / "hub")
    np.testing.assert_array_equal(
        dict(weights.read(weights.structs))["model.norm.weight"], state.params["norm"]["scale"]
    )


class Losses(Hook):
    def __init__(self):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(float(outputs["loss"]))


def test_a_step_on_a_mesh_is_that_of_one_device(tmp_path):
    hook, rules = Losses(), resolve(load_config(CONFIG))["parallel"]["rules"]
    config = make_config_of_run(tmp_path / "mesh")
    config.update(
        parallel=dict(type="Pjit", devices=4, mesh=dict(data=1, fsdp=2, tensor=2), rules=rules, strict=True),
        custom_hooks=[hook],
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.5)),
        default_hooks=dict(checkpoint=None, logger=None),
    )
    params = Runner.from_cfg(config).train().params
    assert tuple(params["layers"]["mlp"]["up"]["kernel"].sharding.spec) == (None, "fsdp", "tensor")

    model = TransformerLM(**transformer_arguments(DATA / "llama"), remat=False)
    structs = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), structs)
    before, _, _ = load_pretrained(DATA / "llama", zeros)

    def loss(params):
        logits = model.apply({"params": params}, TOKENS)
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS + 1).mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(before)
    np.testing.assert_allclose(hook.losses, [value], rtol=1e-6)
    after = jax.tree.map(lambda x, gradient: x - 0.5 * gradient, before, gradients)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), params, after)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ([("a", "b", dict(stacked=0))], "has no argument 'stacked'; did you mean 'stack'?"),
        ("gpt3", "must be .*'gpt2'.*got 'gpt3'; did you mean 'gpt2'?"),
    ],
)
def test_a_wrong_rule_is_an_error_before_anything_is_built(tmp_path, rename, message):
    config = make_config_of_run(tmp_path / "run")
    config["load_from"] = dict(path=config["load_from"], rename=rename)
    with pytest.raises((TypeError, ValueError), match=message):
        Runner.from_cfg(config)
    assert not (tmp_path / "run").exists()
