"""Test tokenizers, packed rows with their positions on a resume, and the baseline for language models."""

import json

import grain
import numpy as np
import pytest

from benchmarks.kneser_ney import bits_per_byte
from jengine.config.errors import ConfigError
from jengine.extras.language import (
    ByteTokenizer,
    FileTokenizer,
    StandardLibrary,
    encode_all,
    pack,
    packed_text,
)

TEXTS = ["hello world, hello again", "naïve ☃ snow", "hello", "a world again"]


@pytest.fixture(scope="module")
def tokenizer():
    return FileTokenizer.train(TEXTS * 3, 280)


@pytest.mark.parametrize("kind", ["bytes", "trained", "file"])
def test_text_survives_its_tokens_and_their_bytes_add_up(kind, tokenizer, tmp_path):
    if kind == "file":
        tokenizer.save(tmp_path / "tokenizer.json")
    chosen = {
        "bytes": ByteTokenizer,
        "trained": lambda: tokenizer,
        "file": lambda: FileTokenizer(tmp_path / "tokenizer.json"),
    }
    used = chosen[kind]()
    for text in [*TEXTS, "never seen: Ω\n"]:
        tokens = used.encode(text)
        assert used.decode(tokens) == text
        assert used.token_bytes()[tokens].sum() == len(text.encode())
        assert tokens.max(initial=0) < used.vocab_size
    assert used.token_bytes()[used.end_token] == 0


def test_a_trained_tokenizer_merges_what_is_frequent(tokenizer):
    assert len(tokenizer.encode("hello world")) < len("hello world") / 2
    with pytest.raises(ValueError, match="`vocab_size` must be at least 257, got 100"):
        FileTokenizer.train(TEXTS, 100)


def test_pieces_of_characters_have_the_bytes_of_their_text(tmp_path):
    """As in Llama 2: a piece begins with U+2581 for a space, and `<0x..>` are bytes of other characters."""
    pieces = ["<s>", "</s>", "<0xE2>", "<0x98>", "<0x83>", "\u2581", "n", "\u00ef", "\u2581na"]
    model = dict(type="BPE", vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    model |= dict(byte_fallback=True, unk_token="<s>")
    model["vocab"]["\u2581na"] = 11  # numbers may be left out
    special = [
        dict(id=1, content="</s>", special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
    ]
    special.append(dict(special[0], id=9, content="<tool>", special=False))
    replace = dict(type="Replace", pattern=dict(String=" "), content="\u2581")
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(model=model, added_tokens=special, normalizer=replace)))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", end_token="</s>")
    text = "n \u00ef \u2603<tool>"
    assert tokenizer.vocab_size == 12
    assert tokenizer.token_bytes()[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.token_bytes()[[1, 11]].tolist() == [0, 3]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("empty.txt", b"", "a source must have at least one record with text, got 1 without"),
        ("empty.jsonl", b"\n", "a source must have at least one record with text, got 0 without"),
        ("number.jsonl", b"3\n", "must be an object or a string, got in line 1: 3"),
        ("broken.jsonl", b'"a"\n{oops\n', "must be JSON, got in line 2"),
        ("null.jsonl", b'{"text": null}\n', "`text` of a record must be a string, got in line 1"),
        ("latin.txt", b"caf\xe9", "must be UTF-8, got .*latin.txt"),
        ("table.csv", b"", "must end with .jsonl or .txt"),
    ],
)
def test_a_file_without_text_is_refused_at_its_place(file, text, message, tmp_path):
    (tmp_path / file).write_bytes(text)
    with pytest.raises(ValueError, match=message) as raised:
        packed_text(dict(good=["a text"], bad=str(tmp_path / file)), "bytes", 8)
    assert "in the config at `sources.bad`" in raised.value.__notes__


def test_empty_texts_are_left_out_and_what_is_cut_off_is_said_once(caplog):
    rows = list(
        pack(["", "abc", "", "de"], 4, packing="concat", tokenizer=ByteTokenizer(), shuffle=False, repeat=False)
    )
    assert [row["targets"].tolist() for row in rows] == [[*b"bc", 256, *b"e"], [256, -1, -1, -1]]
    rows = pack(["abcdef"] * 3, 5, packing="first_fit", tokenizer=ByteTokenizer(), shuffle=False)
    assert next(iter(rows))["targets"].tolist() == [*b"bcdef"]
    assert [m for m in caplog.messages if "more than 5 tokens are cut off there; packing='concat'" in m] != []
    with pytest.raises(ConfigError, match="`documents` must have at least one that is not empty, got none"):
        pack([], 4)
    with pytest.raises(ConfigError, match="`documents` must have at least one that is not empty, got none"):
        pack(["", ""], 4, tokenizer=ByteTokenizer())
    with pytest.raises(ValueError, match="`texts` must be one or more texts, got 'abc'"):
        encode_all("abc", ByteTokenizer())


def check_row(row, documents):
    """Each segment is a part of a document with its next tokens, and positions that count up."""
    for segment in set(row["segment_ids"]) - {0}:
        chosen = row["segment_ids"] == segment
        text = bytes(row["tokens"][chosen].tolist()).decode()
        following = bytes(row["targets"][chosen].tolist()).decode()
        assert any(text in document and following in document for document in documents)
        assert text[1:] == following[:-1]
        np.testing.assert_array_equal(np.diff(row["positions"][chosen]), 1)


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_rows_share_documents_and_resume_at_the_same_row(packing):
    documents = ["abcdefgh", "ijk", "lmnop", "qrstuv", "wxyz", "ABCDEFGHIJ"]
    tokens = [np.frombuffer(document.encode(), np.uint8) for document in documents]
    rows = iter(pack(tokens, length=8, packing=packing, seed=3, open_rows=2))
    first = [next(rows) for _ in range(4)]
    state = rows.get_state()
    expected = [next(rows) for _ in range(4)]
    rows = iter(pack(tokens, length=8, packing=packing, seed=3, open_rows=2))
    rows.set_state(state)
    for got, want in zip([next(rows) for _ in range(4)], expected, strict=True):
        assert {name: x.tolist() for name, x in got.items()} == {name: x.tolist() for name, x in want.items()}
    for row in first + expected:
        check_row(row, documents)
        padding = row["segment_ids"] == 0
        assert (row["targets"][padding] == -1).all()
        assert (row["num_bytes"] == np.where(padding, 0, 1)).all()
        assert packing == "first_fit" or not padding.any()


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_in_one_pass_each_token_is_a_target_once_and_padding_none(packing):
    texts = ["abcdefg", "hi", "jklmnop", "q"]
    rows = list(pack(texts, 6, packing=packing, tokenizer=ByteTokenizer(), shuffle=False, repeat=False, open_rows=9))
    targets = np.concatenate([row["targets"] for row in rows])
    segments = np.concatenate([row["segment_ids"] for row in rows])
    learned = "".join(chr(target) for target in sorted(targets[(targets != -1) & (targets != 256)]))
    expected = [text[1:] if packing == "concat" else text[1:7] for text in texts]  # first_fit cuts documents off
    assert learned == "".join(sorted("".join(expected)))
    assert ((targets == -1) == (segments == 0)).all()
    assert (segments == 0).any()
    np.testing.assert_array_equal(
        np.concatenate([row["num_bytes"] for row in rows]), (targets != -1) & (targets != 256)
    )


def test_texts_are_mixed_by_weights_and_end_with_the_end_token():
    sources = [grain.MapDataset.source([letter * 3] * 50).repeat() for letter in "ab"]
    rows = iter(
        pack(grain.MapDataset.mix(sources, weights=[3, 1]), length=40, tokenizer=ByteTokenizer(), shuffle=False)
    )
    tokens = np.concatenate([next(rows)["tokens"] for _ in range(10)])
    assert np.isin(tokens, [ord("a"), ord("b")]).all()  # the end is a target only
    assert (tokens == ord("a")).mean() == pytest.approx(0.75, abs=0.02)
    assert encode_all(["ab", "c"], ByteTokenizer()).tolist() == [97, 98, 256, 99, 256]


def test_the_splits_of_the_standard_library_have_no_file_in_common():
    from jengine.extras.language.datasets import read_standard_library

    train, test = (set(read_standard_library(split)) for split in ("train", "test"))
    assert len(train) > 10 * len(test) > 100
    assert not train & test
    windows = StandardLibrary(length=16, split="test")
    np.testing.assert_array_equal(windows[3]["targets"][:-1], windows[3]["tokens"][1:])
    assert {int(n) for i in range(len(windows)) for n in set(windows[i]["num_bytes"])} == {0, 1}  # 0 ends files


def test_kneser_ney_equals_a_calculation_by_hand():
    # Bigrams of 0 1 0 1 0 2: (0,1) twice, (1,0) twice, (0,2) once; continuations: 0 after {1}, 1 after {0}, 2 after {0}.
    train, test = np.array([0, 1, 0, 1, 0, 2]), np.array([0, 1])
    discount_1, discount_2 = 1.0, 1 / (1 + 2 * 2)  # all three continuations are 1; of the bigrams one is 1, two are 2
    unigram = (1 - discount_1 + 3 * discount_1 / 3) / 3  # of each token
    bigram = (2 - discount_2) / 3 + discount_2 * 2 / 3 * unigram
    unigrams = -np.log2(unigram)  # the first test token has no history
    value = bits_per_byte(train, test, np.ones(2), order=2, vocab_size=3)
    assert value == pytest.approx((unigrams - np.log2(bigram)) / 2)
