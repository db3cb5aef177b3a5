"""Test windows of tokens, and the generated text."""

import numpy as np
import pytest

from jengine.data import DataLoader
from jengine.extras.language import ByteTokenizer, Sentences, TokenWindows, encode_all
from jengine.runner import Runner
from tests.refusals import check_refusal


def test_a_sample_is_a_window_and_the_next_token_of_each_position():
    windows = TokenWindows(np.arange(10, dtype=np.uint16), length=3)
    assert len(windows) == 3
    assert {name: value.tolist() for name, value in windows[1].items()} == {"tokens": [3, 4, 5], "targets": [4, 5, 6]}
    assert windows[-1]["targets"].tolist() == [7, 8, 9]
    assert windows[0]["tokens"].dtype == np.int32
    with pytest.raises(IndexError, match="3 windows, got the index 3"):
        windows[3]


def test_tokens_in_a_file_are_read_in_batches(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(9, dtype=np.uint16))
    loader = DataLoader(TokenWindows(str(tmp_path / "tokens.npy"), length=2), batch_size=2)
    assert [batch["tokens"].tolist() for batch in loader] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_samples_have_the_bytes_of_their_targets_for_a_given_vocabulary(tmp_path):
    sizes = np.array([0, 1, 4, 2])
    np.save(tmp_path / "bytes.npy", sizes)
    for given in (sizes, str(tmp_path / "bytes.npy")):
        sample = TokenWindows([1, 2, 3, 0, 1], length=3, token_bytes=given)[0]
        assert sample["num_bytes"].tolist() == [4, 2, 0]  # the targets are 2, 3, 0
        assert sample["num_bytes"].dtype == np.int32


def test_windows_over_encoded_texts_have_bytes_and_all_metrics_of_language(tmp_path):
    tokens = encode_all(["naïve"] * 9, ByteTokenizer())
    parts = [TokenWindows(part, length=6) for part in (tokens[:30], tokens[30:])]
    assert parts[0][0]["num_bytes"].tolist() == [1, 1, 1, 1, 1, 0]  # the end of the text has none
    assert "num_bytes" not in TokenWindows(np.arange(7), length=6)[0]
    assert Sentences(sentences=2)[0]["num_bytes"].tolist() == [1] * 64
    metrics = [dict(type=name, label="targets") for name in ("Perplexity", "BitsPerByte", "Accuracy")]
    runner = Runner(
        dict(
            type="LinenModel", inputs="tokens", loss=dict(type="CrossEntropy", label="targets"),
            module=dict(type="TransformerLM", vocab_size=257, width=8, depth=1, heads=1, mlp_width=8),
        ),
        work_dir=str(tmp_path), log_level="ERROR", val_cfg={}, val_evaluator=metrics,
        val_dataloader=dict(batch_size=2, dataset=parts[0]),
        default_hooks=dict(checkpoint=None),
    )  # fmt: skip
    scores = runner.val()
    bits = np.log2(scores["perplexity"])
    # 24 targets, of which three ends have no bytes
    assert scores["bits_per_byte"] == pytest.approx(bits * 24 / 21, rel=1e-5)
    assert 0 <= scores["accuracy/top1"] <= 1


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (np.ones((2, 3), int), ["got int64(2, 3)"]),
        (np.ones(5), ["got float64(5,)"]),
        (np.arange(3), ["`length`", "got 3"]),
    ],
)
def test_illegal_tokens_are_refused(tokens, words):
    check_refusal(lambda: TokenWindows(tokens, length=3), ValueError, *words)


def test_sentences_are_the_same_in_each_run_and_different_in_the_test_split():
    train, test = Sentences(sentences=50), Sentences(sentences=50, split="test")
    assert train.text == Sentences(sentences=50).text
    assert not set(train.text.splitlines()) & set(test.text.splitlines())
    assert bytes(train[0]["tokens"].astype(np.uint8)).decode() == train.text[:64]
    assert pytest.approx(3 * np.log(4) + 5 * np.log(8)) == Sentences.ENTROPY
