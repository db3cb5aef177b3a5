"""What drawings refuse: a call, its error, and the words that must be in the message."""

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.extras.drawing import LocalVisualizer
from jengine.extras.drawing.samples import to_entry
from tests.refusals import check_row

pytest.importorskip("PIL.Image")


def draw(path, **sample):
    LocalVisualizer(save_dir=path).draw(np.zeros((1, 1), np.uint8), sample)


REFUSED = {
    "a misspelt entry": (lambda tmp_path: draw(tmp_path, gt_semseg=np.zeros((1, 1), int)), KeyError, "did you mean 'gt_sem_seg'"),
    "an unknown entry of instances": (lambda tmp_path: draw(tmp_path, gt_instances={"bbox": np.zeros((1, 4))}), KeyError, "'bbox'"),
    "labels of another size": (lambda tmp_path: draw(tmp_path, gt_sem_seg=np.zeros((2, 1), int)), ValueError, "`labels`", "size of the image"),
    "an opacity of 2": (lambda: LocalVisualizer(alpha=2), ValueError, "alpha`", "number"),
    "a zoom of 0": (lambda: LocalVisualizer(zoom=0), ValueError, "zoom`", "at least 1"),
    "predictions of four axes": (lambda: to_entry(np.zeros((2, 2, 2, 2)), "Hook.prediction"), ConfigError, "`Hook.prediction`", "got f64[2,2,2,2]"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(row, request):
    check_row(request, *row)
