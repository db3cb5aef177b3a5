"""What histories, hubs and backends of logs refuse: a call, its error, and the words that must be in the message."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.logging import (
    HistoryBuffer,
    LocalVisBackend,
    MessageHub,
    TensorboardVisBackend,
    Visualizer,
    format_table,
)
from jengine.logging.convert import histogram
from tests.refusals import check_row


def fill(*values, **arguments):
    """Return a hub in which the scalar train/loss has been updated."""
    hub = MessageHub("test")
    for value in values:
        hub.update_scalar("train/loss", value, **arguments)
    return hub


def draw(image, path):
    LocalVisBackend(path).add_image("x", image)


def update_twice(value):
    hub = fill()
    with pytest.raises(ValueError, match="size 1"):
        hub.update_scalar("x", value)
    hub.update_scalar("x", value)  # the type of the array is cached


def trace_a_scalar():
    hub = fill()
    jax.jit(lambda x: hub.update_scalar("x", x))(1.0)


def change_a_resumed_info():
    hub = fill()
    hub.update_info("y", 1)
    hub.update_info("y", 1, resumed=False)


def read_a_snapshot(name):
    snapshot = fill(1.0).snapshot()
    snapshot.flush()
    snapshot.get_scalar(name)


def record_a_text():
    hub = MessageHub("test")
    hub.record({"loss": 1.0, "name": "resnet"}, {}, 0.0, 0.0)
    hub.flush()


def write_without_tensorboard(write, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    write(TensorboardVisBackend(path))


def draw_without_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    draw(np.zeros((2, 2, 3), np.uint8), tmp_path)


LOCAL = {"type": "LocalVisBackend"}
TENSORBOARD = (ImportError, "pip install 'jengine[tensorboard]'")
REFUSED = {
    # histories
    "a misspelt statistic": (lambda: HistoryBuffer().statistics("maen"), KeyError, "'maen'", "did you mean 'mean'"),
    **{
        f"the {name} of nothing": (lambda name=name: HistoryBuffer().statistics(name), ValueError, "history is empty")
        for name in ("mean", "max", "min", "current")
    },
    "an array in a history": (lambda: HistoryBuffer().update(np.ones(2)), ValueError, "size 1"),
    "a history of nothing": (lambda: HistoryBuffer(0), ValueError, "`capacity`", "at least 1", "got 0"),
    # scalars
    "a misspelt scalar": (lambda: fill(1).get_scalar("train/los"), KeyError, "'train/los'", "did you mean 'train/loss'"),
    "a misspelt scalar of a snapshot": (lambda: read_a_snapshot("train/los"), KeyError, "'train/los'", "did you mean 'train/loss'"),
    **{
        f"{type(value).__module__.partition('.')[0]} {value.shape}": (lambda value=value: update_twice(value), ValueError, "size 1", "'x'")
        for value in (np.ones(2), np.ones(0), jnp.ones(2), jnp.ones((1, 3)))
    },
    **{f"the scalar {value!r}": (lambda value=value: fill(value), TypeError, "'train/loss'") for value in ("1", None, [1.0])},
    "a traced scalar": (trace_a_scalar, TypeError, "traced", "shape"),
    "a count alone": (lambda: fill().update_scalars({"x": {"count": 2}}), TypeError, "'value'"),
    "a misspelt count": (lambda: fill().update_scalars({"x": {"value": 1, "counts": 2}}), TypeError, "'counts'"),
    "a scalar without entries": (lambda: fill().update_scalars({"x": {}}), TypeError, "'value'"),
    "a scalar that is resumed at last": (lambda: fill(1, 2, resumed=False).update_scalar("train/loss", 3), AssertionError, "`resumed` of 'train/loss'", "False", "got True"),
    "an info that is not resumed at last": (change_a_resumed_info, AssertionError, "`resumed` of 'y'", "True", "got False"),
    "a state without its infos": (lambda: fill().load_state_dict({"log_scalars": {}}), KeyError, "runtime_info"),
    "a metric that is a text": (record_a_text, ValueError, "resnet", "'train/name'"),
    # backends
    "a histogram of texts": (lambda: histogram(np.array(["a"])), TypeError, "`values`", "real numbers", "got <U1"),
    "a URL": (lambda: LocalVisBackend("gs://bucket/run"), ValueError, "`save_dir`", "'gs://bucket/run'", "work_dir"),
    "an image of floats": (lambda tmp_path: draw(np.zeros((2, 2, 3), np.float32), tmp_path), TypeError, "`image`", "uint8", "got float32"),
    "an image with channels first": (lambda tmp_path: draw(np.zeros((3, 8, 8), np.uint8), tmp_path), TypeError, "data type"),
    "an image without Pillow": (draw_without_pillow, ImportError, "pip install 'jengine[draw]'"),
    "a scalar without TensorBoard": (lambda tmp_path, monkeypatch: write_without_tensorboard(lambda b: b.add_scalar("a", 1.0), tmp_path, monkeypatch), *TENSORBOARD),
    "a config without TensorBoard": (lambda tmp_path, monkeypatch: write_without_tensorboard(lambda b: b.add_config("a = 1"), tmp_path, monkeypatch), *TENSORBOARD),
    "two backends of one name": (lambda tmp_path: Visualizer([LOCAL, LOCAL], save_dir=tmp_path), RuntimeError, "unique", "'LocalVisBackend'", "`vis_backends[1]`"),
    "a misspelt backend": (lambda tmp_path: Visualizer([{"type": "TensorBoardVisBackend"}], save_dir=tmp_path), KeyError, "did you mean 'TensorboardVisBackend'"),
    "a backend of another name": (lambda tmp_path: Visualizer(save_dir=tmp_path).get_backend("LocalBackend"), KeyError, "did you mean 'LocalVisBackend'"),
    # tables
    "a row that is too short": (lambda: format_table(["a", "b"], [[1, 2], [3]]), ValueError, "argument 3"),
    "an alignment that is too short": (lambda: format_table(["a", "b"], [[1, 2]], align=["left"]), ValueError, "argument 2"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_logged_is_refused(row, request):
    check_row(request, *row)
