"""Test fine-tuning on prompts with responses: masks, mixtures, LoRA from a directory of the Hub, resume and export."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine import Runner, load_config
from jengine.cli import main
from jengine.config import paths, resolve
from jengine.config.errors import ConfigError
from jengine.extras.language import ChatTemplate, FileTokenizer, TextFormat, packed_text
from jengine.extras.networks import TransformerLM
from jengine.extras.weights import load_pretrained, transformer_arguments
from jengine.hooks import Hook
from tests.refusals import check_refusal

ROOT = pathlib.Path(__file__).parents[3]
LLAMA = ROOT / "tests" / "data" / "pretrained" / "llama"  # 40 words
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {% if m.role == 'assistant' %}{{ eos_token }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
TALK = [
    dict(role="user", content="w1 w2"),
    dict(role="assistant", content="w3"),
    dict(role="user", content="w4"),
    dict(role="assistant", content="w5 w6"),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Return a directory with a Llama of 40 words and its tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    directory = tmp_path_factory.mktemp("hub") / "llama"
    shutil.copytree(LLAMA, directory)
    special = ["</s>", "<|user|>", "<|assistant|>"]
    words = [*special, *(f"w{i}" for i in range(37))]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(special)
    model.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(dict(eos_token=dict(content="</s>"), chat_template=CHAT))
    )
    return directory


def test_the_end_and_the_chat_template_of_a_directory_of_the_hub_are_read(hub):
    tokenizer = FileTokenizer(hub)
    assert tokenizer.end_token == 0
    assert tokenizer.chat_template == ChatTemplate(CHAT, "", "</s>")
    with pytest.raises(FileNotFoundError, match="`path` must be a tokenizer.json or a directory with one"):
        FileTokenizer(hub / "missing")


def test_of_a_conversation_only_what_the_assistant_says_is_learned(hub):
    row = next(iter(packed_text([dict(messages=TALK)], str(hub), 16, shuffle=False, repeat=False)))
    # <|user|> w1 w2 <|assistant|> w3 </s> <|user|> w4 <|assistant|> w5 w6 </s>
    assert row["tokens"][:11].tolist() == [1, 4, 5, 2, 6, 0, 1, 7, 2, 8, 9]
    assert row["targets"][:11].tolist() == [-1, -1, -1, 6, 0, -1, -1, -1, 8, 9, 0]
    assert row["segment_ids"].tolist() == [1] * 11 + [0] * 5
    style = TextFormat(chat_template=ChatTemplate(CHAT, eos_token="</s>"))
    assert style.make_prompt(dict(messages=TALK)).endswith("<|user|> w4 <|assistant|> ")
    assert style.make_prompt(dict(messages=TALK[:1])) == "<|user|> w1 w2 <|assistant|> "
    assert style.find_response(dict(messages=TALK)) == "w5 w6"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            dict(question="a", response="b"),
            ["'{prompt}'", "got question, response without 'prompt'"],
        ),
        (dict(prompt="a"), ["`response`"]),
        (dict(messages=TALK), ["`chat_template`", "`messages`", "got None"]),
    ],
)
def test_a_record_without_what_is_needed_is_refused(record, words):
    check_refusal(lambda: next(iter(packed_text([record], "bytes", 16))), ValueError, *words)


def test_sources_are_mixed_by_the_weights_of_their_names():
    sources = {letter: [dict(prompt="?", response=letter)] * 7 for letter in "ab"}
    rows = iter(packed_text(sources, "bytes", 40, weights=dict(b=3, a=1)))
    targets = np.concatenate([next(rows)["targets"] for _ in range(20)])
    few, many = ((targets == ord(letter)).sum() for letter in "ab")
    assert few + many == 20 * 20  # a prompt and a response have two tokens
    assert many / few == pytest.approx(3, abs=0.2)
    for weights, message in (
        (dict(a=1, c=2), "`weights` must have a, b, got a, c"),
        (dict(a=1), "`weights` must have a, b, got a"),
    ):
        with pytest.raises(ConfigError, match=message):
            packed_text(sources, "bytes", 8, weights=weights)
    with pytest.raises(ConfigError, match="`weights` must be None with repeat=False"):
        packed_text(sources, "bytes", 8, weights=dict(a=1, b=1), repeat=False)


def test_a_pass_has_each_record_once():
    records = [dict(prompt="?", response=chr(ord("a") + i)) for i in range(10)]
    rows = list(packed_text(dict(first=records[:4], second=records[4:]), "bytes", 8, repeat=False))
    learned = np.concatenate([row["targets"] for row in rows])
    assert sorted(learned[(learned != -1) & (learned != 256)]) == [ord(record["response"]) for record in records]


class Steps(Hook):
    """Record the losses, and the first batch."""

    def __init__(self):
        self.losses, self.batch = [], None

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(float(outputs["loss"]))
        self.batch = jax.device_get(data_batch) if self.batch is None else self.batch


def make_config(hub, work_dir, max_iters=20, **changes):
    cfg = resolve(load_config(f"{ROOT / 'configs' / 'instruct.py'}:{hub}"))
    pairs = [dict(prompt=f"w{i} w{i + 1}", response=f" w{i + 1} w{i}") for i in range(1, 20)]
    pathlib.Path(hub, "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    sources = dict(pairs=str(hub / "pairs.jsonl"), talks=[dict(messages=TALK), dict(messages=TALK[:2])])
    cfg["train_dataloader"]["batch_size"] = 2
    cfg["train_dataloader"]["dataset"].update(sources=sources, weights=dict(pairs=3, talks=1), length=24, open_rows=3)
    for name in (
        "val_dataloader",
        "val_evaluator",
        "val_cfg",
        "test_dataloader",
        "test_evaluator",
        "test_cfg",
        "precision",
    ):
        del cfg[name]
    cfg.update(
        work_dir=str(work_dir),
        train_cfg=dict(by_epoch=False, max_iters=max_iters),
        param_scheduler=None,
        parallel=None,
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=10)),
    )
    cfg["optim_wrapper"]["optimizer"]["lr"] = 0.01
    return {**cfg, **changes}


@pytest.fixture(scope="module")
def tuned(hub, tmp_path_factory):
    hook = Steps()
    runner = Runner.from_cfg(make_config(hub, tmp_path_factory.mktemp("tuned"), custom_hooks=[hook]))
    runner.train()
    return runner, hook


@pytest.fixture(scope="module")
def base():
    """Return the network and the weights of the directory."""
    module = TransformerLM(**transformer_arguments(LLAMA), remat=False)
    structs = jax.eval_shape(module.init, jax.random.key(0), np.zeros((1, 4), int))["params"]
    params, _, _ = load_pretrained(LLAMA, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), structs))
    return module, params


def test_the_loss_is_that_of_the_responses_and_falls(tuned, base):
    _, hook = tuned
    module, params = base
    logits = jax.jit(module.apply)({"params": params}, *(hook.batch[name] for name in ("tokens", "segment_ids", "positions")))
    targets = hook.batch["targets"]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    assert 0.2 < (targets != -1).mean() < 0.7
    np.testing.assert_allclose(hook.losses[0], losses[targets != -1].mean(), rtol=1e-5)
    assert np.mean(hook.losses[-3:]) < hook.losses[0] / 2


def test_only_the_updates_are_trained(tuned, base):
    state, (_, params) = tuned[0].state, base
    assert {path.rpartition(".")[2] for path in paths.flatten(state.params)} == {"lora_a", "lora_b"}
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(state.params))
    jax.tree.map(np.testing.assert_array_equal, state.model_state["frozen"], params)


def test_a_resumed_run_reads_the_packed_rows_that_follow_its_checkpoint_and_ends_with_equal_bits(
    tuned, hub, tmp_path
):
    again, saved = Steps(), f"{tuned[0].work_dir}/iter_10"
    runner = Runner.from_cfg(make_config(hub, tmp_path, resume=saved, custom_hooks=[again]))
    runner.train()
    assert again.losses == tuned[1].losses[10:]
    whole = tuned[0].state
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(runner.state, name), getattr(whole, name))


def test_the_merged_weights_are_exported_as_a_directory_of_the_hub(tuned, base, tmp_path):
    runner, (module, before) = tuned[0], base
    assert main(["ckpt", "export", runner.work_dir, str(tmp_path / "out"), "--to", "safetensors"]) == 0
    params, _, report = load_pretrained(tmp_path / "out", before)
    assert report.fits
    batch = tuned[1].batch
    rows = [batch[name] for name in ("tokens", "segment_ids", "positions")]
    np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, *rows), runner.predict([batch]), atol=1e-5, rtol=1e-5)
    equal = paths.flatten(jax.tree.map(lambda x, y: bool((x == y).all()), params, before))
    assert {path for path, is_equal in equal.items() if not is_equal} == {
        f"layers.{name}.kernel" for name in ("attn.query", "attn.key", "attn.value", "attn.out", "mlp.gate", "mlp.up", "mlp.down")
    }  # fmt: skip
