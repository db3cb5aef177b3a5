"""Test the suite for accelerators on a CPU, with tiny sizes: each of its lines has run before a device is at hand."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.accelerator import __main__ as suite
from benchmarks.accelerator import files, rows, trace


@pytest.fixture
def clean_environment(monkeypatch):
    """Environment of a user: without the flags of these tests, which compile for quick tests on eight devices."""
    own = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JENGINE_ON_RECOMPILE", "PYTEST_XDIST_WORKER", rows.FILE)
    for name in own:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def run_suite(tmp_path, *arguments):
    """Run the suite in this process, with its parts in others, and return its exit code and rows."""
    path = tmp_path / "rows.json"
    code = suite.main(["--tiny", "--minutes", "20", "--json", str(path), *arguments])
    return code, rows.read(path)


@pytest.mark.many_processes
@pytest.mark.parametrize(
    "part",
    ["saves", "language", "card", "configs", "engine", "images", "files"],
)
def test_each_part_ends_with_passed_checks_on_a_cpu(part, tmp_path, clean_environment):
    code, found = run_suite(tmp_path, "--parts", part)
    assert [row for row in found if row["passed"] is False] == []
    assert code == 0
    assert len([row for row in found if row["part"] == part]) > 2


def test_a_part_that_takes_too_long_is_cut_and_its_rows_are_kept(
    tmp_path, clean_environment, monkeypatch
):
    monkeypatch.setitem(suite.PARTS, "card", suite.Part("is cut", 0.01, False))
    code, found = run_suite(tmp_path, "--parts", "card", "--minutes", "5")
    assert code == 1
    assert [row["check"] for row in found if row["part"] == "device"] == [
        "backend",
        "device",
        "versions",
    ]
    (end,) = [row for row in found if row["check"] == "the part's end"]
    assert end["value"] == "cut at its time limit after 3 s"


def test_rows_are_read_up_to_an_incomplete_line(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    monkeypatch.setenv(rows.FILE, str(path))
    monkeypatch.setenv("JENGINE_ACCELERATOR_PART", "card")
    rows.record_close("difference", 0.5, 1.0)
    rows.record_close("not a number", float("nan"), 1.0)
    with open(path, "a") as file:
        file.write('{"part": "cut')
    found = [(row["part"], row["check"], row["passed"]) for row in rows.read(path)]
    assert found == [("card", "difference", True), ("card", "not a number", False)]


def test_stored_rows_are_a_section_of_their_device(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    facts = [
        ("device", "device", "1 x Chip"),
        ("device", "versions", "jax 1"),
        ("card", "SGD", 0.25),
    ]
    rows_of_file = [
        dict(part=p, check=c, value=v, wanted="", passed=None, time=1e9) for p, c, v in facts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))
    monkeypatch.setattr(suite, "RESULTS", tmp_path / "RESULTS.md")
    suite.RESULTS.write_text("# Results\n")
    assert suite.main(["--store", str(path)]) == 0
    text = suite.RESULTS.read_text()
    assert "## Accelerator: 1 x Chip" in text
    assert "jax 1" in text
    assert "card  SGD     0.25" in text


def test_the_table_has_the_rows_part_by_part_and_the_names_of_long_tests():
    test = "tests/optim/test_groups.py::test_" + "a_long_name_" * 9
    found = [("files", test, 1), ("card", "SGD", 2), ("files", "passed", 3), ("card", "AdamW", 4)]
    lines = suite.summarize(
        [dict(part=p, check=c, value=v, wanted="", passed=None) for p, c, v in found]
    ).splitlines()[2:]
    assert [line.split()[-1] for line in lines] == ["2", "4", "1", "3"]
    assert f"{test[:87]}... " in lines[2]


def test_the_files_of_tests_exist():
    assert [
        path for path in (*files.FOLDERS, *files.TINY) if not (suite.ROOT / path).exists()
    ] == []


def test_a_trace_has_no_calls_of_python_functions():
    import jax

    events = trace.record_trace(lambda iters: [jax.numpy.ones(iters).sum().item()], 4)
    assert trace.busy_intervals(events)
    assert [event["name"] for event in events if event.get("name", "").startswith("$")] == []


def test_without_an_accelerator_it_says_what_is_missing(clean_environment):
    command = [sys.executable, "-m", "benchmarks.accelerator", "--need-accelerator"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2
    assert "pip install 'jengine[cuda13]'" in done.stderr or "NVIDIA driver" in done.stderr
