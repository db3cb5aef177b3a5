"""What `make bench` makes of its numbers, and that the loops it compares do the same."""

import json

import jax
import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import accelerator, by_hand, by_runner, cases
from benchmarks.results import best_of, judge, replace_section


def test_a_ratio_that_is_worse_by_more_than_a_tenth_is_found():
    changes = judge({"a": 1.0, "b": 2.0, "c": 1.0, "gone": 1.0}, {"a": 1.11, "b": 2.19, "c": 0.8, "d": 3.0})
    assert [(change.name, change.worse, change.verdict) for change in changes] == [
        ("a", True, "WORSE"),
        ("b", False, ""),
        ("c", False, "better"),
        ("d", False, "new"),
    ]


def test_of_two_measurements_the_lower_counts():
    assert best_of({"a": 1.5, "b": 1.0}, {"a": 1.2, "b": 1.1}) == {"a": 1.2, "b": 1.0}


def test_a_section_is_replaced_in_its_place_and_the_others_stay():
    document = replace_section(replace_section("# Results\n", "Speed", "old"), "Peers", "far behind")
    assert replace_section(document, "Speed", "new") == "# Results\n\n## Speed\n\nnew\n\n## Peers\n\nfar behind\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(bench, "RATIOS", tmp_path / "ratios.json")
    monkeypatch.setattr(bench, "HERE", tmp_path / "benchmarks")
    return tmp_path


def run(monkeypatch, values, *arguments):
    """`make bench` where the benchmark of the host measures these values, one after the other."""
    values = iter(values)
    monkeypatch.setattr(bench, "measure", lambda name, options: ("a table", {"host, Runner": next(values)}))
    return bench.main(["host", *arguments])


def test_a_run_fails_only_if_a_second_measurement_is_worse_too(folder, monkeypatch, capsys):
    assert run(monkeypatch, [1.0], "--accept") == 0
    assert json.loads((folder / "ratios.json").read_text()) == {"host, Runner": 1.0}
    assert run(monkeypatch, [1.3, 1.05]) == 0
    capsys.readouterr()
    assert run(monkeypatch, [1.3, 1.2]) == 1
    text = capsys.readouterr().out
    assert "host, Runner     1.000  1.200  WORSE" in text
    assert "--accept" in text
    assert "a table" in (folder / "RESULTS.md").read_text()
    assert json.loads((folder / "ratios.json").read_text()) == {"host, Runner": 1.0}  # only --accept changes them


def test_the_device_is_idle_between_its_computations():
    def event(begin, duration, **args):
        return dict(ph="X", ts=begin, dur=duration, args=args)

    events = [
        event(30.0, 5.0, hlo_module="jit_step"),
        event(0.0, 10.0, hlo_module="jit_step"),
        event(8.0, 4.0, hlo_module="jit_step"),  # on another stream, to 12
        event(12.0, 18.0, long_name="written by the host"),
        event(40.0, 1.0, hlo_module="jit_step"),
        dict(ph="M", name="process_name", args=dict(name="/device:GPU:0")),
    ]
    assert accelerator.busy_intervals(events) == [(0.0, 12.0), (30.0, 35.0), (40.0, 41.0)]
    assert accelerator.idle_time(events) == 18.0 + 5.0


def test_the_loop_by_hand_trains_as_the_runner_does(tmp_path, monkeypatch):
    monkeypatch.setattr(by_runner, "_terminal", lambda: None)  # it is for a whole process
    case = cases.CASES[0]
    runner = by_runner.ByRunner(case, tmp_path / "runner", ema=True)  # some iterations are done then
    hand = by_hand.ByHand(case, tmp_path / "hand", ema=True)
    key = jax.random.fold_in(jax.random.key(runner.runner.seed), 0)
    start, _ = runner.runner.model.init(key, case.batches()[0])
    hand.state["params"] = jax.tree.map(np.array, start)
    hand.run(1)
    hand.state["ema"] = jax.tree.map(np.array, hand.state["params"])  # the Runner's average begins as a copy of these
    hand.run(runner.runner.iter - 1)
    hand.close()
    for ours, theirs in (
        (runner.state.params, hand.state["params"]),
        (runner.state.hook_state["EMAHook"].params, hand.state["ema"]),
    ):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), ours, theirs)
