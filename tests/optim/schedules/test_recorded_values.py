"""Test that the value at every iteration equals recordings of MMEngine 0.10.7 (float64 on the host)."""

import json
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from jengine.optim.schedules import build_param_schedulers

RECORDINGS = sorted((pathlib.Path(__file__).parents[2] / "data" / "parity").glob("sched_*.json"))


def test_all_recordings_exist():
    assert len(RECORDINGS) == 11


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_values_equal_the_recording(path):
    record = json.loads(path.read_text())
    optimizer = record["optim_wrapper"]["optimizer"]
    base = {key: value for key, value in optimizer.items() if key != "type"}
    wrapper = SimpleNamespace(
        param_groups=[dict(base), {**base, "lr": base["lr"] * 0.1}],  # head: lr_mult 0.1
        base_param_settings=dict(base),
    )
    length = record["epoch_length"]
    schedulers = build_param_schedulers(
        record["param_scheduler"],
        wrapper,
        max_epochs=record["iters"] // length,
        max_iters=record["iters"],
        epoch_length=length,
    )
    seen = {"lr": [], "momentum": []}
    for iteration in range(record["iters"]):
        for name, values in seen.items():
            values.append([group[name] for group in wrapper.param_groups])
        for scheduler in schedulers:
            if not scheduler.by_epoch or (iteration + 1) % length == 0:
                scheduler.step()
    for name, values in seen.items():
        backbone, head = np.array(values).T
        np.testing.assert_allclose(backbone, record[name]["backbone.layer0.kernel"], rtol=1e-9)
        np.testing.assert_allclose(head, record[name]["head.linear.kernel"], rtol=1e-9)
