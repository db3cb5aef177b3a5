"""Test that `ckpt export` has the options of the extras that are installed."""

import pathlib
import shutil
import subprocess
import sys

import pytest

import jengine

ROOT = pathlib.Path(jengine.__file__).parent


@pytest.mark.parametrize(
    ("left_out", "usage", "run"),
    [
        (
            "weights",
            ["--jax-export FILE", "--ema", "CHECKPOINT"],
            "the following arguments are required: --jax-export",
        ),
        (
            "serving",
            ["--to {safetensors}", "--ema", "CHECKPOINT [FILE]"],
            "`jengine ckpt export` must have a FILE to write",
        ),
        (
            "networks",
            ["--jax-export FILE", "--ema"],
            "the following arguments are required: --jax-export",
        ),
    ],
)
def test_each_of_two_extras_exports_alone(tmp_path, left_out, usage, run):
    shutil.copytree(
        ROOT, tmp_path / "jengine", ignore=shutil.ignore_patterns("__pycache__", left_out)
    )
    command = [sys.executable, "-m", "jengine", "ckpt", "export"]
    settings = dict(cwd=tmp_path, capture_output=True, text=True, env={"COLUMNS": "300"})
    text = " ".join(subprocess.run([*command, "--help"], **settings).stdout.split())
    for option in usage:
        assert option in text, text
    assert ("--to" in text) == (left_out == "serving")
    assert run in subprocess.run([*command, "x"], **settings).stderr
