"""Test how `make bench` compares ratios, and that the Runner and the hand-written loop train the same."""

import json

import jax
import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import by_hand, by_runner, cases, png_files
from benchmarks.accelerator import trace
from benchmarks.results import compare_ratios, lower_of, replace_section


def test_ratios_more_than_ten_percent_worse_are_reported():
    changes = compare_ratios({"a": 1.0, "b": 2.0, "c": 1.0, "removed": 1.0}, {"a": 1.11, "b": 2.19, "c": 0.8, "d": 3.0})
    assert [(change.name, change.worse, change.verdict) for change in changes] == [
        ("a", True, "WORSE"),
        ("b", False, ""),
        ("c", False, "better"),
        ("d", False, "new"),
    ]


def test_lower_of_two_measurements_is_used():
    assert lower_of({"a": 1.5, "b": 1.0}, {"a": 1.2, "b": 1.1}) == {"a": 1.2, "b": 1.0}


def test_section_is_replaced_in_place_and_others_are_unchanged():
    document = replace_section(replace_section("# Results\n", "Speed", "old"), "Peers", "other")
    assert replace_section(document, "Speed", "new") == "# Results\n\n## Speed\n\nnew\n\n## Peers\n\nother\n"


@pytest.fixture
def results_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(bench, "MEASURED", tmp_path / ".bench" / "RESULTS.md")
    monkeypatch.setattr(bench, "RATIOS", tmp_path / "ratios.json")
    monkeypatch.setattr(bench, "HERE", tmp_path / "benchmarks")
    return tmp_path


def run_bench(monkeypatch, values, *arguments):
    """Run `make bench` with the host benchmark replaced, so that it measures these values one after the other."""
    text, values = f"table of {values}", iter(values)
    monkeypatch.setattr(bench, "measure", lambda name, options: (text, {"host, Runner": next(values)}))
    return bench.main(["host", *arguments])


def test_run_fails_only_if_a_second_measurement_is_worse_too(results_dir, monkeypatch, capsys):
    assert run_bench(monkeypatch, [1.0], "--accept") == 0
    assert json.loads((results_dir / "ratios.json").read_text()) == {"host, Runner": 1.0}
    assert run_bench(monkeypatch, [1.3, 1.05]) == 0
    capsys.readouterr()
    assert run_bench(monkeypatch, [1.3, 1.2]) == 1
    text = capsys.readouterr().out
    assert "host, Runner     1.000     1.200  WORSE" in text
    assert "--accept" in text
    assert json.loads((results_dir / "ratios.json").read_text()) == {"host, Runner": 1.0}  # only --accept changes them
    assert "table of [1.0]" in (results_dir / "RESULTS.md").read_text()
    assert "table of [1.3, 1.2]" in (results_dir / ".bench" / "RESULTS.md").read_text()


def test_idle_time_is_the_time_between_the_later_computations():
    def make_event(begin, duration, **args):
        return dict(ph="X", ts=begin, dur=duration, args=args)

    events = [
        make_event(30.0, 5.0, hlo_module="jit_step"),
        make_event(0.0, 10.0, hlo_module="jit_step"),
        make_event(8.0, 4.0, hlo_module="jit_step"),  # on another stream, ends at 12
        make_event(12.0, 18.0, long_name="host event"),
        make_event(40.0, 1.0, hlo_module="jit_step"),
        dict(ph="M", name="process_name", args=dict(name="/device:GPU:0")),
    ]
    assert trace.busy_intervals(events) == [(0.0, 12.0), (30.0, 35.0), (40.0, 41.0)]
    assert trace.idle_share(events) == 5.0 / 11.0  # those before are of programs that compile


def test_hand_written_loop_trains_like_the_runner(tmp_path, monkeypatch):
    monkeypatch.setattr(by_runner, "discard_terminal_output", lambda: None)  # it affects the whole process
    case = cases.CASES[0]
    runner = by_runner.RunnerLoop(case, tmp_path / "runner", ema=True)  # trains some iterations
    hand = by_hand.HandWrittenLoop(case, tmp_path / "hand", ema=True)
    key = jax.random.fold_in(jax.random.key(runner.runner.seed), 0)
    params, _ = runner.runner.model.init(key, case.batches()[0])
    hand.state["params"] = jax.tree.map(np.array, params)
    hand.run(1)
    hand.state["ema"] = jax.tree.map(
        np.array, hand.state["params"]
    )  # the average of the Runner starts as a copy of these
    hand.run(runner.runner.iter - 1)
    hand.close()
    for actual, expected in (
        (runner.state.params, hand.state["params"]),
        (runner.state.hook_state["EMAHook"].params, hand.state["ema"]),
    ):
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), actual, expected)


@pytest.mark.parametrize("settings", [{}, {"threads": 1}])
def test_grain_and_jengine_decode_the_same_files_in_the_image_benchmark(tmp_path, settings):
    pytest.importorskip("PIL")
    paths = png_files.write_files(tmp_path, png_files.BATCH_SIZE)
    settings_of_jengine = {f"num_{name}": count for name, count in settings.items()}
    epochs = [
        next(batches)
        for batches in (
            png_files.grain_batches(paths, **settings),
            png_files.jengine_batches(paths, **settings_of_jengine),
        )
    ]
    for epoch in epochs:
        order = np.argsort(epoch["image"].reshape(len(paths), -1).astype(np.int64) @ np.arange(96 * 96 * 3))
        epoch["image"], epoch["label"] = epoch["image"][order], epoch["label"][order]
    assert epochs[0]["image"].shape == (64, 96, 96, 3)
    assert np.array_equal(epochs[0]["image"], epochs[1]["image"])
    assert np.array_equal(epochs[0]["label"], epochs[1]["label"])
