import warnings

import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.drawing import LocalVisualizer, display
from jengine.model import FunctionalModel

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def make_segmentation_runner(make_runner):
    """Return a function that makes a Runner for segmenting light and dark pixels, with six images in two batches."""

    def make(visualizer=None, **hook):
        return _make_segmentation_runner(make_runner, visualizer, hook)

    return make


def _make_segmentation_runner(make_runner, visualizer, hook):
    def predict(params, batch):
        return (batch["x"] * params["w"] > 0).astype(np.int32)

    rng = np.random.RandomState(0)
    x = rng.randn(6, 4, 4).astype(np.float32)
    arrays = dict(x=x, image=np.clip(x, 0, 1)[..., None], label=(x > 0).astype(np.int32), y=x)
    model = FunctionalModel(
        init=lambda: {"w": np.ones((), np.float32)},
        loss=lambda params, batch: (batch["x"] * params["w"] - batch["y"]) ** 2,
        predict=predict,
    )
    data = dict(batch_size=4, dataset=ArrayDataset(arrays, metainfo={"classes": ("low", "high")}))
    return make_runner(
        model=model,
        visualizer=visualizer,
        train_dataloader=data,
        train_cfg=dict(by_epoch=True, max_epochs=1),
        val_dataloader=data,
        val_evaluator=dict(type="IoUMetric"),
        default_hooks=dict(
            checkpoint=None,
            logger=None,
            visualization=dict(type="SegVisualizationHook", draw=True, interval=1, **hook),
        ), validates=True,
    )


def test_a_run_draws_with_the_hook_among_the_default_hooks(make_segmentation_runner, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = make_segmentation_runner()
    runner.train()
    assert runner.validations[0][2] == {"aAcc": 1.0, "mIoU": 1.0, "mAcc": 1.0}
    pictures = sorted(path.name for path in tmp_path.glob("run/*/vis_data/vis_image/*.png"))
    assert pictures == [
        f"val_{i}_{runner.iter}.png" for i in range(6)
    ]  # the last two examples of the second batch are padding


def test_without_a_display_a_run_writes_files_and_logs_it(make_segmentation_runner, tmp_path, monkeypatch):
    monkeypatch.setattr(display, "has_display", lambda: False)
    with pytest.warns(UserWarning, match="images are shown, and the visualizer does not write anything"):
        runner = make_segmentation_runner(show=True)
    runner.train()
    written = sorted(tmp_path.glob("run/*/vis_data/vis_image/*.png"))
    assert [path.name for path in written] == [f"val_{i}_{runner.iter}.png" for i in range(6)]
    log = next(tmp_path.glob("run/*/*.log")).read_text()
    assert f"There is no display: pictures are written to {written[0].parent}" in log
    assert not list(tmp_path.glob("run/*/vis_data/*.json"))


def test_the_first_picture_fails_with_a_visualizer_that_does_not_draw(make_segmentation_runner):
    runner = make_segmentation_runner(visualizer=dict(type="Visualizer"))
    with pytest.raises(NotImplementedError, match="use LocalVisualizer"):
        runner.train()
    assert (runner.iter, runner.validations) == (1, [])


def test_a_test_draws_its_images_with_label_and_prediction_by_default(make_runner, tmp_path):
    images = np.random.RandomState(0).rand(3, 8, 8, 1).astype(np.float32)
    arrays = dict(image=images, label=np.array([0, 1, 1], np.int32))
    data = dict(batch_size=2, dataset=ArrayDataset(arrays, metainfo={"classes": ("cat", "dog")}))
    model = FunctionalModel(
        init=lambda: {"w": np.ones(2, np.float32)},
        loss=lambda params, batch: params["w"].sum() * batch["image"].mean(axis=(1, 2, 3)),
        predict=lambda params, batch: batch["image"].mean(axis=(1, 2, 3))[:, None] * params["w"],
    )
    runner = make_runner(
        model=model,
        train_dataloader=data,
        test_dataloader=data,
        test_cfg=dict(),
        test_evaluator=dict(type="Accuracy"),
        custom_hooks=[dict(type="NaiveVisualizationHook")], validates=True,
    )
    runner.test()
    pictures = sorted(tmp_path.glob("run/*/vis_data/vis_image/*.png"))
    assert [path.name for path in pictures] == [f"sample_{i}_0.png" for i in range(3)]
    expected = LocalVisualizer(classes=("cat", "dog")).draw(images[1], dict(gt_label=1, pred_label=0))
    np.testing.assert_array_equal(np.asarray(Image.open(pictures[1])), expected)
