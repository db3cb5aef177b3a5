"""Test the formula of docs/scale.md for the memory of a chip against compiled programs."""

import pathlib
import re

import pytest

from jengine.config import load_config, resolve
from jengine.extras.plan.plan import set_devices
from jengine.extras.plan.program_costs import compile_plan

ROOT = pathlib.Path(__file__).parents[3]
SIZE = dict(width=32, depth=2, mlp_width=64, vocab_size=256)


@pytest.fixture(scope="module")
def memory_per_chip():
    (code,) = re.findall(r"```python\n(def .*?)```", (ROOT / "docs" / "scale.md").read_text(), flags=re.DOTALL)
    names = {}
    exec(compile(code, "scale.md", "exec"), names)
    return names["memory_per_chip"]


def test_the_formula_has_the_state_of_a_compiled_update(memory_per_chip):
    mesh = dict(data=2, fsdp=2, tensor=2)
    cfg = resolve(load_config(f"{ROOT / 'configs' / 'lm.py'}:toy"))
    cfg["model"]["module"].update(SIZE, heads=2)
    cfg["optim_wrapper"]["accumulative_counts"] = 2
    memory = compile_plan(set_devices(cfg, 8, mesh), training_only=True)["programs"]["update"]["memory"]
    parts = memory_per_chip(16, 64, **SIZE, **mesh, accumulates=True)
    assert memory["parameters"] == parts["parameters"]
    # and some counters
    assert memory["optimizer state"] == pytest.approx(parts["Adam"] + parts["accumulated gradients"], abs=64)


def test_the_large_size_is_described_by_the_formula(memory_per_chip):
    module = resolve(load_config(f"{ROOT / 'configs' / 'lm.py'}:1b"))["model"]["module"]
    size = {name: module[name] for name in SIZE}
    parts = memory_per_chip(512, 2048, **size, fsdp=256)
    norms = 33 * 2048
    assert parts["parameters"] == 4 * ((1_006_700_544 - norms) / 256 + norms)
    assert parts["inputs of the blocks"] == 16 * 2 * 2048 * 2048 * 2  # bytes of two examples in bfloat16
