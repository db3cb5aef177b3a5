"""Fine-tune a language model of Hugging Face from its directory, and export it in the same form."""

import pathlib

import jax
import numpy as np
import optax
import pytest

from jengine.cli import main
from jengine.config import load_config, resolve
from jengine.extras.networks import TransformerLM
from jengine.extras.weights import load_pretrained, open_weights, transformer_arguments
from jengine.extras.weights.huggingface import read_config
from jengine.hooks import Hook
from jengine.runner import Runner

DATA = pathlib.Path(__file__).parents[2] / "data" / "pretrained"
CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "lm.py"
TOKENS = np.arange(40, dtype=np.int32).reshape(4, 10) % 12


def make_config(work_dir, **changes):
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
    state = Runner.from_cfg(make_config(tmp_path / "run")).train()
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
    runner = Runner.from_cfg(make_config(tmp_path / "run", rotary_base=10_000.0, activation="gelu"))
    runner.train()
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert "rotary_base is 10000.0, that of the weights is 2000.0; " in log
    assert "activation is 'gelu', that of the weights is 'silu'." in log


class Losses(Hook):
    def __init__(self):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(float(outputs["loss"]))


def test_a_step_on_a_mesh_is_that_of_one_device(tmp_path):
    hook, rules = Losses(), resolve(load_config(CONFIG))["parallel"]["rules"]
    config = make_config(tmp_path / "mesh")
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
    config = make_config(tmp_path / "run")
    config["load_from"] = dict(path=config["load_from"], rename=rename)
    with pytest.raises((TypeError, ValueError), match=message):
        Runner.from_cfg(config)
    assert not (tmp_path / "run").exists()
