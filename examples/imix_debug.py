"""Debug a training on the digits with iMIX's hooks.

    python examples/imix_debug.py

The hooks check for NaNs, trace one iteration, log a text at each stage, write images and histograms
to TensorBoard, and save averages of the weights after each epoch.
"""

import argparse
import os

from jengine import Runner
from jengine.config import HOOKS
from jengine.extras.imix import HookBase, from_imix


@HOOKS.register_module(force=True)
class PicturesHook(HookBase):
    """Write an image of a digit and a histogram of the weights of the head every few iterations."""

    def __init__(self, period: int = 5):
        self.period = period

    def after_train_iter(self):
        """Add the image and the histogram to those of the next log line, without waiting for the
        device.
        """
        if self.trainer.iter % self.period == 0:
            digits = self.trainer.train_dataloader.dataset.arrays
            self.put_image("digit", digits["image"][self.trainer.iter])
            self.put_histogram("head", self.trainer.state.params["head"]["kernel"])


def is_third(trainer):
    """Return whether this is the third iteration of the run, after everything has been compiled."""
    return trainer.iter == 2


def main(total_epochs: int = 8, work_dir: str = "work_dirs/imix_debug") -> Runner:
    """Train and return the Runner."""
    arguments = from_imix(
        dict(
            model=dict(
                type="LinenModel",
                module=dict(type="SmallCNN", widths=(8, 16)),
                loss=dict(type="CrossEntropy"),
            ),
            work_dir=work_dir,
            train_data=dict(samples_per_gpu=128, data=dict(type="Digits", split="train")),
            test_data=dict(
                samples_per_gpu=128,
                data=dict(type="Digits", split="test"),
                post_processor=dict(metrics=[dict(type="Accuracy")]),
            ),
            optimizer=dict(type="Adam", lr=1e-2),
            total_epochs=total_epochs,
            log_config=dict(
                period=5,
                hooks=[dict(type="CommonMetricLoggerHook"), dict(type="TensorboardLoggerHook")],
            ),
            checkpoint_config=dict(prefix="digits", max_num_checkpoints=1),
            custom_hooks=[
                dict(type="AutogradAnomalyDetectHook", mode=True),
                dict(
                    type="AutogradProfilerHook",
                    enable_predicate=is_third,
                    output_dir=os.path.join(work_dir, "traces"),
                ),
                dict(type="TextLoggerHook", text=" all other hooks have run", level="LOWEST"),
                dict(type="PicturesHook"),
                dict(type="EMAIterHook", decay=0.9, level=20),
                dict(type="EMAEpochHook", level=40),
            ],
        )
    )
    runner = Runner(**arguments)
    runner.train()
    return runner


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-epochs", type=int, default=8)
    parser.add_argument("--work-dir", default="work_dirs/imix_debug")
    args = parser.parse_args()
    main(args.total_epochs, args.work_dir)
