import json

import numpy as np

from jengine.logging import LocalVisBackend, TensorboardVisBackend, Visualizer
from jengine.logging.convert import histogram

VALUES = np.array([[0.0, 1.0, 1.0], [np.nan, np.inf, 4.0]], np.float32)  # four finite elements


def test_elements_are_binned_between_minimum_and_maximum():
    bins = histogram(VALUES, bins=4)
    assert bins.counts.tolist() == [1, 2, 0, 1]
    assert bins.edges.tolist() == [0, 1, 2, 3, 4]
    assert bins.mean == 1.5
    assert bins.std == 1.5  # the deviations are -1.5, -0.5, -0.5 and 2.5


def test_an_array_without_finite_elements_has_empty_bins():
    bins = histogram(np.array([np.nan]), bins=2)
    assert bins.counts.tolist() == [0, 0]
    assert np.isnan(bins.mean)


def test_every_backend_gets_the_same_bins_and_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = (LocalVisBackend, TensorboardVisBackend)
    visualizer = Visualizer([kind(tmp_path / kind.__name__) for kind in kinds])
    visualizer.add_histogram("w", VALUES, step=7, bins=2)
    visualizer.close()
    line = json.loads((tmp_path / "LocalVisBackend" / "histograms.json").read_text())
    assert line == {"name": "w", "step": 7, "counts": [3, 1], "edges": [0, 2, 4], "mean": 1.5, "std": 1.5}
    (event,) = EventAccumulator(str(tmp_path / "TensorboardVisBackend")).Reload().Histograms("w")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum) == (7, 0, 4, 4, 6)
    assert value.sum_squares == 18  # 0 + 1 + 1 + 16
    assert (value.bucket_limit, value.bucket) == ([2, 4], [3, 1])
