"""Segment handwritten digits in clutter, and write images of the ground truth next to the
prediction.

    python examples/segment_digits.py

Each image has two complete digits among fragments of others. Their strokes are the same, so that
the model must use the context of a pixel to decide whether it belongs to a digit. Images are
composed from scikit-learn's digits, the same in every run; test images are composed from digits
that are not used in training.
"""

import argparse

import jax
import numpy as np
from flax import linen as nn

from jengine import Runner
from jengine.data import ArrayDataset, Digits
from jengine.model import CrossEntropy, LinenModel

CLASSES = ("background", "clutter", "digit")
PALETTE = ((40, 40, 40), (230, 120, 20), (60, 180, 75))
SIZE = 32  # height and width of an image in pixels
INK = 0.3  # pixels above this value belong to a stroke


class SegmentationNet(nn.Module):
    """Apply dilated convolutions, which enlarge the receptive field at full resolution."""

    width: int = 24

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Return logits f[B, H, W, 3] of images f[B, H, W, 1]."""
        x = image
        for i, dilation in enumerate((1, 1, 2, 4, 1)):
            y = nn.Conv(
                self.width, (3, 3), kernel_dilation=dilation, use_bias=False, name=f"conv{i}"
            )(x)
            y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"bn{i}")(y))
            x = y if i == 0 else x + y
        return nn.Conv(len(CLASSES), (1, 1), name="head")(x)


def compose(split: str, count: int, seed: int) -> ArrayDataset:
    """Return a dataset of `count` images: `image` float32[32, 32, 1] and `label` int32[32, 32]."""
    digits = Digits(split).arrays["image"][..., 0]
    rng = np.random.RandomState(seed)
    images = np.zeros((count, SIZE, SIZE), np.float32)
    labels = np.zeros((count, SIZE, SIZE), np.int32)

    def paste(image, label, patch, class_index, top, left):
        region = np.s_[top : top + patch.shape[0], left : left + patch.shape[1]]
        is_stroke = patch > INK
        image[region] = np.where(is_stroke, patch, image[region])
        label[region] = np.where(is_stroke, class_index, label[region])

    for image, label in zip(images, labels, strict=True):
        for _ in range(10):
            digit = digits[rng.randint(len(digits))]
            y, x = rng.randint(0, 5, 2)
            paste(image, label, digit[y : y + 4, x : x + 4], 1, *rng.randint(0, SIZE - 4, 2))
        for left in (0, SIZE // 2):
            position = rng.randint(0, SIZE - 8), left + rng.randint(0, SIZE // 2 - 8)
            paste(image, label, digits[rng.randint(len(digits))], 2, *position)
    images += 0.05 * rng.randn(*images.shape).astype(np.float32)
    meta = {"classes": CLASSES, "palette": PALETTE}
    return ArrayDataset({"image": np.clip(images, 0, 1)[..., None], "label": labels}, metainfo=meta)


def main(
    max_epochs: int = 12,
    train_images: int = 1024,
    test_images: int = 128,
    work_dir: str = "work_dirs/segment_digits",
) -> dict[str, float]:
    """Train and return the metrics of the last validation; the images are written below
    `work_dir`.
    """
    test_data = dict(
        batch_size=32, dataset=dict(type=compose, split="test", count=test_images, seed=1)
    )
    runner = Runner(
        model=LinenModel(SegmentationNet(), CrossEntropy()),
        work_dir=work_dir,
        train_dataloader=dict(
            batch_size=32, dataset=dict(type=compose, split="train", count=train_images, seed=0)
        ),
        train_cfg=dict(max_epochs=max_epochs, val_interval=max_epochs),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=3e-3, weight_decay=1e-2)),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=True, convert_to_iter_based=True),
        val_dataloader=test_data,
        val_cfg=dict(),
        val_evaluator=dict(type="IoUMetric"),
        visualizer=dict(type="LocalVisualizer", zoom=8, alpha=0.6),
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=max_epochs),
            visualization=dict(type="SegVisualizationHook", draw=True, interval=4),
        ),
    )
    runner.train()
    return runner.validations[-1][2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=12)
    parser.add_argument("--work-dir", default="work_dirs/segment_digits")
    args = parser.parse_args()
    print(main(args.max_epochs, work_dir=args.work_dir))
