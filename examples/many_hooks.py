"""Train on the digits with nearly every hook of jengine in one run.

    python examples/many_hooks.py

A small network learns from labels and from a mean teacher, the moving average of its own weights.
The loss, the augmentations and some hyperparameters change during training, a guard checks for
non-finite and exploding losses, two iterations are profiled, and training stops early when the
accuracy is high enough. The test averages the predictions for shifted digits and draws the results.
Nothing is compiled twice.
"""

import argparse
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jengine import Runner
from jengine.config import MODELS, TRANSFORMS, VISUALIZERS
from jengine.extras.augment import SwitchedLoss
from jengine.extras.networks import SmallCNN
from jengine.extras.serving import BaseTTAModel
from jengine.logging import Visualizer
from jengine.model import LinenModel

SHIFTS = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))


@TRANSFORMS.register_module(force=True)
class RandomShift:
    """Shift a digit by up to `pixels`, on the host."""

    def __init__(self, pixels=1):
        self.pixels = pixels

    def __call__(self, sample, rng):
        """Return a shifted sample."""
        shift = rng.randint(-self.pixels, self.pixels + 1, 2)
        return {**sample, "image": np.roll(sample["image"], shift, axis=(0, 1))}


def dim(batch, rng):
    """Dim each digit by a random factor, in the compiled step."""
    factor = jax.random.uniform(rng, (batch["image"].shape[0], 1, 1, 1), minval=0.4)
    return {**batch, "image": batch["image"] * factor}


def erase(batch, rng):
    """Erase a random row of pixels of each digit, in the compiled step."""
    row = jax.random.randint(rng, (batch["image"].shape[0], 1, 1, 1), 0, 8)
    return {**batch, "image": jnp.where(jnp.arange(8)[:, None, None] == row, 0.0, batch["image"])}


@MODELS.register_module(force=True)
class ShiftTTA(BaseTTAModel):
    """Average the logits of a digit over five shifts."""

    def augment(self, batch):
        """Return the shifted batches."""
        return [
            {**batch, "image": jnp.roll(batch["image"], shift, axis=(1, 2))} for shift in SHIFTS
        ]

    def merge_preds(self, predictions):
        """Return the mean of the logits."""
        return sum(predictions) / len(predictions)


@VISUALIZERS.register_module(force=True)
class DigitVisualizer(Visualizer):
    """Draw a digit with a green border if the prediction is correct, and a red one if it is
    wrong.
    """

    def add_datasample(
        self,
        name,
        image,
        data_sample=None,
        draw_gt=True,
        draw_pred=True,
        show=False,
        wait_time=0,
        step=0,
    ):
        """Draw a sample."""
        is_correct = data_sample["pred_label"] == data_sample["gt_label"]
        framed = np.empty((80, 80, 3), np.uint8)
        framed[:] = (60, 180, 75) if is_correct else (230, 25, 75)
        framed[8:72, 8:72] = np.kron(image, np.ones((8, 8, 1), np.uint8))
        self.add_image(name, framed, step)


NETWORK = LinenModel(SmallCNN(widths=(8, 16)), loss=dict(type="CrossEntropy"))


class Student(LinenModel):
    """Model with the number of classes, which ClassNumCheckHook compares with the data."""

    num_classes = 10


@dataclasses.dataclass
class WithTeacher:
    """Loss of the labels, given as a function, and of the teacher's predictions."""

    label_loss: Callable[..., jax.Array]

    def __call__(self, logits, batch, hyperparams):
        """Return the losses by name, and a metric."""
        teacher = hyperparams["teacher"]
        soft_targets = jax.nn.softmax(
            NETWORK.predict(teacher["params"], teacher["model_state"], batch)
        )
        return {
            "loss_label": self.label_loss(
                logits, jax.nn.one_hot(batch["label"], 10), hyperparams["smoothing"]
            ),
            "loss_teacher": hyperparams["teacher_weight"]
            * optax.softmax_cross_entropy(logits, soft_targets),
            "epoch_of_the_step": hyperparams["epoch"],
        }


def cross_entropy(logits, label, smoothing):
    """Return the cross entropy f[B] with smoothed labels."""
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(label, smoothing))


def brier(logits, label, smoothing):
    """Return the squared errors f[B] of the probabilities with smoothed labels."""
    return jnp.square(jax.nn.softmax(logits) - optax.smooth_labels(label, smoothing)).sum(-1)


def build_model():
    """Return the network with two losses to switch between, both with a loss for the teacher's
    predictions.
    """
    return Student(
        NETWORK.module, loss=SwitchedLoss([WithTeacher(cross_entropy), WithTeacher(brier)])
    )


def build_hooks(target_accuracy):
    """Return the configs of the hooks, in addition to the six default hooks."""
    augments = dict(augments=[dim, erase], probs=[0.4, 0.4])
    schedule = [
        dict(action_epoch=1, hyperparams=dict(smoothing=0.1), batch_augments=augments),
        dict(action_epoch=3, hyperparams=dict(smoothing=0.0), loss=1, batch_augments=None),
    ]
    return [
        # inside the compiled step
        dict(type="NumericsGuardHook", max_in_row=3, spike_factor=100.0),
        dict(type="HistogramHook", interval=20, patterns=["kernel$"]),
        dict(type="EMAHook", momentum=0.05, update_buffers=True),
        dict(type="MeanTeacherHook", momentum=0.05, evaluate_on_teacher=False),
        # inputs of the step: hyperparameters and data
        dict(type="SetEpochInfoHook"),
        dict(type="WarmupParamHook", param_name="teacher_weight", value=0.2, warmup_epochs=2),
        dict(type="SwitchRecipeHook", schedule=schedule),
        dict(type="PipelineSwitchHook", switch_epoch=2, switch_pipeline=[]),
        # between steps
        dict(type="CheckInvalidLossHook", interval=10),
        dict(type="PreciseBNHook", num_samples=512),
        dict(type="SyncBuffersHook"),
        dict(type="ClassNumCheckHook"),
        dict(
            type="EarlyStoppingHook",
            monitor="accuracy/top1",
            min_delta=0.001,
            stopping_threshold=target_accuracy,
        ),
        # time, memory, images
        dict(type="EmptyCacheHook"),
        dict(type="MemoryProfilerHook", interval=11),
        dict(type="ProfilerHook", by_epoch=False, schedule=dict(skip_first=2, active=2)),
        dict(type="ProgressHook"),
        dict(type="NaiveVisualizationHook", interval=3, img_norm_cfg=dict(mean=[0.0], std=[255.0])),
        # the test
        dict(type="PrepareTTAHook", tta_cfg=dict(type="ShiftTTA")),
    ]


def main(
    max_epochs: int = 20, target_accuracy: float = 0.97, work_dir: str = "work_dirs/many_hooks"
) -> tuple[Runner, float]:
    """Train and test; return the Runner and the test accuracy."""
    digits = dict(type="Digits", split="train")
    test_data = dict(batch_size=128, dataset=dict(type="Digits", split="test"))
    runner = Runner(
        model=build_model(),
        work_dir=work_dir,
        train_dataloader=dict(
            batch_size=128,
            dataset=dict(
                type="TransformedDataset",
                dataset=digits,
                pipeline=[dict(type="RandomShift", pixels=1)],
            ),
        ),
        train_cfg=dict(max_epochs=max_epochs),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-2, weight_decay=1e-2)),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=max_epochs, by_epoch=True),
        val_dataloader=test_data,
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
        test_dataloader=test_data,
        test_cfg=dict(),
        test_evaluator=dict(type="Accuracy"),
        visualizer=dict(type="DigitVisualizer"),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=5),
            checkpoint=dict(
                type="CheckpointHook", interval=5, max_keep_ckpts=1, save_best="accuracy/top1"
            ),
        ),
        custom_hooks=build_hooks(target_accuracy),
    )
    runner.train()
    return runner, runner.test()["accuracy/top1"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--work-dir", default="work_dirs/many_hooks")
    args = parser.parse_args()
    _, accuracy = main(args.max_epochs, work_dir=args.work_dir)
    print(f"test accuracy with five shifts of each digit: {accuracy:.4f}")
