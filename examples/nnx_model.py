"""Train a Flax NNX module on the digits from Python, without a config file.

python examples/nnx_model.py
"""

import argparse

import jax
from flax import nnx

from jengine import Runner
from jengine.model import CrossEntropy, NnxModel


class DigitsNet(nnx.Module):
    """Classify images with two hidden layers, BatchNorm and dropout."""

    def __init__(self, width: int = 128, *, rngs: nnx.Rngs):
        self.hidden = nnx.List(
            [nnx.Linear(64, width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)]
        )
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for _ in self.hidden])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Return logits f[B, 10] of flat images f[B, 64]."""
        x = image
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = self.dropout(nnx.relu(norm(layer(x))))
        return self.head(x)


def main(max_epochs: int = 10, work_dir: str = "work_dirs/nnx_model") -> dict[str, float]:
    """Train and return the metrics of the last validation."""
    runner = Runner(
        model=NnxModel(DigitsNet, CrossEntropy()),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=64, dataset=dict(type="Digits", split="train", flat=True)),
        train_cfg=dict(max_epochs=max_epochs, val_interval=2),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=2e-3)),
        param_scheduler=dict(type="MultiStepLR", milestones=[6, 8], gamma=0.3),
        val_dataloader=dict(batch_size=128, dataset=dict(type="Digits", split="test", flat=True)),
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=5)),
    )
    runner.train()
    return runner.validations[-1][2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=10)
    parser.add_argument("--work-dir", default="work_dirs/nnx_model")
    args = parser.parse_args()
    print(main(args.max_epochs, args.work_dir))
