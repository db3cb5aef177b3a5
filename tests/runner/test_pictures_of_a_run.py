import warnings

import numpy as np

from jengine.data import ArrayDataset
from jengine.model import FunctionalModel


def test_it_is_a_default_hook_that_a_run_draws_with(make_runner, tmp_path):
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = make_runner(
            model=model,
            train_dataloader=data,
            train_cfg=dict(by_epoch=True, max_epochs=1),
            val_dataloader=data,
            val_evaluator=dict(type="IoUMetric"),
            visualizer=dict(type="LocalVisualizer"),
            default_hooks=dict(
                checkpoint=None, logger=None, visualization=dict(type="SegVisualizationHook", draw=True, interval=1)
            ),
        )
    runner.train()
    assert runner.validations[0][2] == {"aAcc": 1.0, "mIoU": 1.0, "mAcc": 1.0}
    pictures = sorted(path.name for path in tmp_path.glob("run/*/vis_data/vis_image/*.png"))
    assert pictures == [
        f"val_{i}_{runner.iter}.png" for i in range(6)
    ]  # the last two rows of the second batch are padding
