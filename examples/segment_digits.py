"""Segments handwritten digits from clutter, and writes pictures of the ground truth beside the prediction.

    python examples/segment_digits.py

Each image holds two whole digits among fragments of others: the strokes are the same, so that only what surrounds a
pixel tells whether it belongs to a digit. Images are composed from scikit-learn's digits, the same at every run; those
that the model is tested on are made of digits that it has not seen.
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
SIZE = 32  # side of an image in pixels
INK = 0.3  # what is darker than this belongs to a stroke


class SegmentationNet(nn.Module):
    """Convolutions whose reach grows without losing resolution: each looks twice as far as the one before."""

    width: int = 24

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Logits f[B, H, W, 3] of images f[B, H, W, 1]."""
        x = image
        for i, dilation in enumerate((1, 1, 2, 4, 1)):
            y = nn.Conv(self.width, (3, 3), kernel_dilation=dilation, use_bias=False, name=f"conv{i}")(x)
            y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"bn{i}")(y))
            x = y if i == 0 else x + y
        return nn.Conv(len(CLASSES), (1, 1), name="head")(x)


def compose(split: str, count: int, seed: int) -> ArrayDataset:
    """A dataset of `count` images: `image` float32[32, 32, 1] and `label` int32[32, 32]."""
    digits = Digits(split).arrays["image"][..., 0]
    rng = np.random.RandomState(seed)
    images = np.zeros((count, SIZE, SIZE), np.float32)
    labels = np.zeros((count, SIZE, SIZE), np.int32)

    def paste(image, label, part, value, top, left):
        window = np.s_[top : top + part.shape[0], left : left + part.shape[1]]
        ink = part > INK
        image[window] = np.where(ink, part, image[window])
        label[window] = np.where(ink, value, label[window])

    for image, label in zip(images, labels, strict=True):
        for _ in range(10):
            whole = digits[rng.randint(len(digits))]
            y, x = rng.randint(0, 5, 2)
            paste(image, label, whole[y : y + 4, x : x + 4], 1, *rng.randint(0, SIZE - 4, 2))
        for left in (0, SIZE // 2):
            place = rng.randint(0, SIZE - 8), left + rng.randint(0, SIZE // 2 - 8)
            paste(image, label, digits[rng.randint(len(digits))], 2, *place)
    images += 0.05 * rng.randn(*images.shape).astype(np.float32)
    meta = {"classes": CLASSES, "palette": PALETTE}
    return ArrayDataset({"image": np.clip(images, 0, 1)[..., None], "label": labels}, metainfo=meta)


def main(
    max_epochs: int = 12, train_images: int = 1024, test_images: int = 128, work_dir: str = "work_dirs/segment_digits"
) -> dict[str, float]:
    """Trains and returns the metrics of the last validation; the pictures lie below `work_dir`."""
    test_data = dict(batch_size=32, dataset=compose("test", test_images, seed=1))
    runner = Runner(
        model=LinenModel(SegmentationNet(), CrossEntropy()),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=32, dataset=compose("train", train_images, seed=0)),
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
