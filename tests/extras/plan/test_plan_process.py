"""Test the process of the compilers with configs that end it, or fail, before a compiler is used."""

from jengine.extras.plan.plan_process import compile_candidates
from jengine.extras.plan.topologies import parse_topology

ABORT = """
import os
import sys


def get_config():
    print("F1 a.cc:1] Check failed: x", file=sys.stderr, flush=True)
    os.abort()
"""


def test_a_crash_ends_one_candidate_and_the_next_has_a_process_of_its_own(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(ABORT)
    candidates = [dict(mesh=None, overrides=[])] * 2
    results = list(compile_candidates(str(path), [], parse_topology("v5e:2x2"), candidates))
    assert [result["error"].splitlines() for result in results] == [
        ["the compiler ended with exit code -6", "F1 a.cc:1] Check failed: x"]
    ] * 2


def test_an_error_in_the_config_is_returned_with_its_type_and_traceback(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("def get_config():\n    raise KeyError('colour')\n")
    (result,) = compile_candidates(str(path), [], parse_topology("h100:2"), [dict(mesh=None, overrides=[])])
    assert result["error"].startswith("KeyError: 'colour'\n  while loading the config file")
    assert "in get_config" in result["traceback"]
