"""What texts and their generation refuse: a call, its error, and the words that must be in the message."""

import pytest

from jengine.config.errors import ConfigError
from jengine.extras.language import FileTokenizer, Prompts, TextGenerator
from tests.refusals import check_row

MODULE = dict(type="TransformerLM", vocab_size=257, width=16, depth=1, heads=2, mlp_width=32)
PROMPTS = ["ab", "cabc", "a"]


def generator(max_new_tokens=3, module=None, **settings):
    inner = dict(type="LinenModel", module=module or MODULE, inputs="tokens", loss=dict(type="CrossEntropy", label="targets"))
    return TextGenerator(inner, "bytes", max_new_tokens=max_new_tokens, **settings)


def make_long_prompts():
    learned = dict(MODULE, positions="learned", max_length=16)
    generator(13, learned).make_prompts(PROMPTS)


def read_without_end(path):
    FileTokenizer.train(["hello world"] * 3, 260).save(path)
    FileTokenizer(path, end_token="</s>")


REFUSED = {
    "a file without its end token": (lambda tmp_path: read_without_end(tmp_path / "tokenizer.json"), ValueError, "`end_token`", "tokenizer.json", "'</s>'"),
    "a hook of a model that generates nothing": (
        lambda make_runner: make_runner(custom_hooks=[dict(type="GenerationHook", prompts=["a"])]).train(), ConfigError, "GenerationHook", "`model`", "TextGenerator",
    ),
    "more tokens than the model has": (lambda: generator(module=dict(MODULE, vocab_size=256)), ConfigError, "`tokenizer`", "256 tokens", "got 257"),
    "a model of images": (lambda: generator(module=dict(type="SmallViT")), ConfigError, "`model.module`", "TransformerLM", "got SmallViT"),
    "a choice among tokens without temperature": (lambda: generator(top_k=3), ValueError, "`top_k`", "`top_p`", "`temperature`"),
    "more tokens than positions": (make_long_prompts, ValueError, "16 positions", "got 17"),
    "prompts that are too long": (lambda: Prompts(PROMPTS, length=3), ConfigError, "`length`", "at least 4", "'cabc'", "got 3"),
    "a response of one of two": (lambda: Prompts([dict(prompt="a", response="b"), dict(prompt="c")]), ConfigError, "all records or none", "response", "got 1"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_is_refused(row, request):
    check_row(request, *row)
