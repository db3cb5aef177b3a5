"""Train plain functions instead of a module, with custom hooks on the host and inside the compiled
step.

    python examples/plain_functions.py

The model is softmax regression with an L2 penalty. One hook increases the weight of the penalty
during training, on the host and without recompiling. Another averages the parameters inside the
step.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from jengine import Runner
from jengine.hooks import Hook
from jengine.model import FunctionalModel


def init(rng):
    """Return the parameters of a linear map from 64 pixels to 10 classes."""
    return {"kernel": 0.01 * jax.random.normal(rng, (64, 10)), "bias": jnp.zeros((10,))}


def predict(params, batch):
    """Return logits f[B, 10]."""
    return batch["image"] @ params["kernel"] + params["bias"]


def loss(params, batch, hyperparams):
    """Return two losses. Both are minimized because both have 'loss' in their name."""
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(
        predict(params, batch), batch["label"]
    )
    return {
        "loss_ce": cross_entropy,
        "loss_l2": hyperparams["l2"] * jnp.square(params["kernel"]).sum(),
    }


class PenaltySchedule(Hook):
    """Increase the weight of the penalty from 0 to `max_weight` over the run. It is an input of
    the compiled step.
    """

    def __init__(self, max_weight: float):
        self.max_weight = max_weight

    def before_train(self, runner):
        """Define the hyperparameter before the step is traced."""
        runner.hyperparams["l2"] = 0.0

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        """Set the weight of this iteration."""
        runner.hyperparams["l2"] = self.max_weight * runner.iter / runner.max_iters


class Average(Hook):
    """Average the parameters exponentially. A traced hook is compiled into the step."""

    def init_traced_state(self, params, model_state):
        """Return a copy of the parameters, because the parameters themselves are donated to the
        step.
        """
        return jax.tree.map(jnp.copy, params)

    def traced_update(self, ctx):
        """Move the average towards the new parameters by a hundredth of the difference."""
        return ctx.replace(hook_state=optax.incremental_update(ctx.params, ctx.hook_state, 0.01))


def main(max_iters: int = 1000, work_dir: str = "work_dirs/plain_functions") -> Runner:
    """Train and return the Runner, whose `state` contains the parameters and the average."""
    runner = Runner(
        model=FunctionalModel(init, loss, predict),
        work_dir=work_dir,
        train_dataloader=dict(
            batch_size=128, dataset=dict(type="Digits", split="train", flat=True)
        ),
        train_cfg=dict(by_epoch=False, max_iters=max_iters, val_interval=250),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.5, momentum=0.9)),
        val_dataloader=dict(batch_size=128, dataset=dict(type="Digits", split="test", flat=True)),
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=100),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=500),
        ),
        custom_hooks=[dict(type=PenaltySchedule, max_weight=1e-3), Average()],
    )
    runner.train()
    return runner


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-iters", type=int, default=1000)
    parser.add_argument("--work-dir", default="work_dirs/plain_functions")
    args = parser.parse_args()
    runner = main(args.max_iters, args.work_dir)
    print(runner.validations[-1][2])
