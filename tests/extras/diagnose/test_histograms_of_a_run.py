import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.diagnose.histogram import bin_elements
from jengine.hooks import Hook
from jengine.model import FunctionalModel


def model():
    return FunctionalModel(
        init=lambda: {"layer": {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.zeros(3)}},
        loss=lambda params, batch: jnp.square(batch["x"] @ params["layer"]["w"] + params["layer"]["b"]),
    )


class Record(Hook):
    """Keep gradients and weights of each step in arrays, for NumPy."""

    def init_traced_state(self, params, model_state):
        return jax.tree.map(jnp.zeros_like, params)

    def traced_grads(self, ctx):
        return ctx.replace(hook_state=ctx.grads)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen = getattr(self, "seen", [])
        self.seen.append(jax.device_get((runner.state.hook_state["Record"], runner.state.params)))


@pytest.mark.parametrize("values", [np.random.RandomState(0).randn(7, 5), [2.0, 2.0], [np.inf, np.nan, 1.0, -3.0], []])
def test_bins_are_those_of_numpy(values):
    values = np.asarray(values, np.float32)
    binned = bin_elements(jnp.asarray(values), bins=8)
    finite = values[np.isfinite(values)]
    counts, _edges = np.histogram(finite, 8)
    np.testing.assert_array_equal(binned.counts, counts)
    if finite.size:
        np.testing.assert_allclose([binned.low, binned.high], [finite.min(), finite.max()], rtol=1e-6)
        np.testing.assert_allclose([binned.mean, binned.std], [finite.mean(), finite.std()], rtol=1e-5)


@pytest.mark.parametrize("parallel", [None, dict(type="DataParallel", mesh=dict(data=2), devices=2)])
def test_histograms_of_the_due_steps_are_written_by_parameter(make_runner, tmp_path, parallel):
    x = np.random.RandomState(0).randn(16, 2).astype(np.float32)
    record = Record()
    runner = make_runner(
        model=model(),
        train_dataloader=dict(batch_size=4, dataset=ArrayDataset(dict(x=x))),
        train_cfg=dict(max_epochs=1, steps_per_call=2),
        custom_hooks=[
            dict(type="HistogramHook", interval=2, bins=4, patterns=["w$"]),
            *([record] if not parallel else []),
        ],
        visualizer=dict(vis_backends=[dict(type="LocalVisBackend", save_dir=str(tmp_path / "vis"))]),
        parallel=parallel,
    )
    runner.train()
    lines = [json.loads(line) for line in (tmp_path / "vis" / "histograms.json").read_text().splitlines()]
    names = [(line["name"], line["step"]) for line in lines]
    assert names == [(f"{kind}/layer.w", step) for step in (2, 4) for kind in ("gradients", "weights")]
    if parallel:  # each of two replicas has gradients of its own: both are counted
        assert [sum(line["counts"]) for line in lines] == [12, 6, 12, 6]
        return
    for line, (grads, params) in zip(lines, [record.seen[1]] * 2 + [record.seen[3]] * 2, strict=True):
        expected = (grads if line["name"].startswith("gradients") else params)["layer"]["w"]
        counts, edges = np.histogram(expected, 4)
        assert line["counts"] == counts.tolist()
        np.testing.assert_allclose(line["edges"], edges, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose([line["mean"], line["std"]], [expected.mean(), expected.std()], rtol=1e-4, atol=1e-7)
