"""What predictions refuse: a call, its error, and the words that must be in the message."""

import base64

import numpy as np
import pytest

from jengine.config import ConfigError
from jengine.extras.augment.inputs import open_inputs
from jengine.extras.serving import BaseInferencer
from tests.refusals import check_row


def predict(path, content, dataset):
    """Open a file as the samples of a config, and read the first."""
    path.write_bytes(content)
    loader = dict(batch_size=2, dataset=dataset)
    return open_inputs(str(path), dict(val_dataloader=loader, train_dataloader=loader)).dataset[0]


PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")  # a PNG
IMAGES = dict(type="ImageFolder", root="nowhere", lazy_init=False, pipeline=[lambda sample: {"y": sample["label"]}])
NUMBERS = dict(type="ArrayDataset", arrays=dict(x=np.zeros(5, np.float32)))
REFUSED = {
    "an argument of two steps": (
        lambda: type("Both", (BaseInferencer,), dict(preprocess_kwargs=frozenset({"scale"}), forward_kwargs=frozenset({"scale", "other"}))), AssertionError, "Both", "scale",
    ),
    "a pipeline that needs the label": (lambda tmp_path: predict(tmp_path / "1.png", PIXEL, IMAGES), ConfigError, "`val_dataloader.dataset.pipeline`", "'label'"),
    "columns of other names": (lambda tmp_path: predict(tmp_path / "rows.csv", b"age\n1\n", NUMBERS), ConfigError, "columns", "x float32[]", "got age"),
    "columns of other values": (lambda tmp_path: predict(tmp_path / "rows.csv", b"x\nold\n", NUMBERS), ConfigError, "float32[]", "'x'", "got 'old'"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_predicted_is_refused(row, request):
    check_row(request, *row)
