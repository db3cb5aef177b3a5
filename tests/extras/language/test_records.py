"""Test that a text is encoded at once, which of its tokens are learned, and how it ends."""

import json

import numpy as np
import pytest

from jengine.extras.language import (
    ByteTokenizer,
    ChatTemplate,
    FileTokenizer,
    Prompts,
    TextFormat,
    pack,
)
from jengine.extras.language.records import encode_record, make_format
from jengine.extras.language.tokenizers import decode_text
from tests.refusals import check_refusal

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
TEXTS = ["the cat said: hello to the dog, yes or no [INST] hi [/INST]", "naïve ☃ snow"] * 9
KINDS = ("metaspace", "prepend", "byte_level", "byte_level_prefix", "words")


def make_tokenizer(kind):
    """Return a tokenizer as those of Llama 2 and Mistral, of GPT-2, and of words."""
    pre, model = tokenizers.pre_tokenizers, tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    if kind == "metaspace":
        model.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    elif kind == "prepend":
        normalizers = tokenizers.normalizers
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind.startswith("byte_level"):
        model.pre_tokenizer = pre.ByteLevel(add_prefix_space=kind.endswith("prefix"))
        model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer.initial_alphabet = pre.ByteLevel.alphabet()
    else:
        words = sorted({word for text in TEXTS for word in text.split()})
        vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
        model.pre_tokenizer = pre.WhitespaceSplit()
        model.add_special_tokens(SPECIAL)
        return model
    model.train_from_iterator(TEXTS, trainer)
    return model


def load(kind, directory, end="</s>"):
    make_tokenizer(kind).save(str(directory / f"{kind}.json"))
    return FileTokenizer(directory / f"{kind}.json", end_token=end)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "response"),
    [("[INST] hi [/INST]", "yes"), ("the cat said:", " hello to"), ("the cat said: ", "hello"), ("☃ naïve", " ☃ dog")],
)
def test_a_prompt_and_its_response_have_the_tokens_of_their_text(kind, prompt, response, tmp_path):
    tokenizer = load(kind, tmp_path)
    tokens, is_learned = encode_record(dict(prompt=prompt, response=response), tokenizer, TextFormat())
    assert tokens[:-1].tolist() == tokenizer.encode(prompt + response).tolist()
    assert tokens[-1] == tokenizer.end_token
    assert is_learned[-1]
    first = int(np.argmax(is_learned))
    assert is_learned[first:].all()
    # What is not learned are tokens of the prompt alone, all of those that a prompt without a response has too.
    alone = tokenizer.encode(prompt).tolist()
    common = next((i for i, (a, b) in enumerate(zip(tokens, alone, strict=False)) if a != b), len(alone))
    assert first == common


def test_a_token_of_characters_on_both_sides_is_learned():
    class Pairs(ByteTokenizer):
        """Two characters each."""

        def encode_with_spans(self, text):
            starts = np.arange(0, len(text), 2)
            return starts.astype(np.int32), np.stack([starts, np.minimum(starts + 2, len(text))], 1)

    _, is_learned = encode_record(dict(prompt="abc", response="defg"), Pairs(), TextFormat())
    assert is_learned.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("kind", ["byte_level", "words"])
def test_the_tokens_of_a_conversation_are_those_of_its_text(kind, tmp_path):
    tokenizer = load(kind, tmp_path)
    text = "{% for m in messages %}{{ m.content + ' ' }}{{ eos_token + ' ' if m.role == 'assistant' }}{% endfor %}"
    style = make_format(tokenizer, "{prompt}", "response", text)
    assert style.chat_template == ChatTemplate(text, eos_token="</s>")
    messages = [dict(role=role, content=x) for role, x in (("user", "hi"), ("assistant", "yes"))] * 2
    tokens, is_learned = encode_record(dict(messages=messages), tokenizer, style)
    assert tokens.tolist() == tokenizer.encode("hi yes </s> hi yes </s> ").tolist()  # no further end
    words = [tokenizer.decode([token]).strip() or "</s>" * (token == 2) for token in tokens[is_learned].tolist()]
    assert [word for word in words if word] == ["yes", "</s>", "yes", "</s>"]


def test_characters_of_several_bytes_are_learned_whole():
    tokens, is_learned = encode_record(dict(prompt="é", response="☃"), ByteTokenizer(), TextFormat())
    assert tokens.tolist() == [*"é☃".encode(), 256]
    assert is_learned.tolist() == [False, False, True, True, True, True]


def test_each_of_several_end_tokens_ends_an_answer(tmp_path):
    tokenizer = load("words", tmp_path, end=["</s>", "<|end|>"])
    assert (tokenizer.end_token, list(tokenizer.end_tokens)) == (2, [2, 3])
    assert encode_record("hi yes <|end|>", tokenizer, TextFormat())[0].tolist()[-2:] != [3, 2]
    assert encode_record("hi yes", tokenizer, TextFormat())[0][-1] == 2
    hi = int(tokenizer.encode("hi")[0])
    assert decode_text(tokenizer, [hi, 3, hi, 2]) == "hi"
    with pytest.raises(ValueError, match=r"`end_token` must be a token of .*words.json, got '<eos>'"):
        load("words", tmp_path, end=["</s>", "<eos>"])


def test_a_directory_names_its_special_and_end_tokens(tmp_path):
    make_tokenizer("words").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            dict(eos_token=dict(content="</s>"), bos_token=None, add_bos_token=True, chat_template="{{ unk_token }}")
        )
    )
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(dict(unk_token="<unk>", eos_token="<s>")))
    (tmp_path / "config.json").write_text(json.dumps(dict(eos_token_id=1)))
    tokenizer = FileTokenizer(tmp_path)
    assert tokenizer.special_tokens == dict(eos_token="</s>", unk_token="<unk>")
    assert tokenizer.chat_template.render([dict(role="user")], False) == "<unk>"
    assert tokenizer.end_tokens == (2, 1)
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[3, 2])))
    assert FileTokenizer(tmp_path).end_tokens == (2, 3)
    assert FileTokenizer(tmp_path, end_token="<s>").end_tokens == (1, 3, 2)


@pytest.mark.parametrize("text", [b"[1]", b"null", b"", b"\xff\xfe", b"[" * 200_000])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_settings_that_are_no_json_object_are_named(tmp_path, name, text):
    make_tokenizer("words").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=rf"{name} must have settings in JSON: "):
        FileTokenizer(tmp_path, end_token="</s>")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("tokenizer_config.json", dict(eos_token=5), ["`eos_token`", "got 5"]),
        ("tokenizer_config.json", dict(unk_token=dict(content=[1])), ["`unk_token`", "got [1]"]),
        ("tokenizer_config.json", dict(chat_template=5), ["`chat_template`", "got 5"]),
        ("tokenizer_config.json", dict(chat_template=[dict(name="default", template=5)]), ["got 5"]),
        ("generation_config.json", dict(eos_token_id="2"), ["`eos_token_id`", "got '2'"]),
        ("generation_config.json", dict(eos_token_id=[2, -1]), ["got [2, -1]"]),
    ],
)
def test_settings_of_another_type_are_refused(tmp_path, name, settings, words):
    make_tokenizer("words").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps(settings))
    check_refusal(lambda: FileTokenizer(tmp_path, end_token="</s>"), ValueError, *words)


def test_truncation_and_padding_in_a_file_are_left_out(tmp_path):
    model = make_tokenizer("byte_level")
    model.enable_truncation(16)
    model.enable_padding(length=24, pad_id=0, pad_token="<unk>")
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", end_token="</s>")
    text = " ".join(["hello"] * 200)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1
    row = next(iter(pack([text], 64, packing="first_fit", tokenizer=tokenizer)))
    assert 0 not in row["targets"]
    assert Prompts(["a"], tokenizer).arrays["prompt_length"].tolist() == [1]
