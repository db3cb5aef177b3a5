"""Direct preference optimization of a small language model, with a frozen copy as the reference.

    python examples/dpo.py

Rafailov et al. 2023, "Direct preference optimization", https://arxiv.org/abs/2305.18290. The model
first learns to count from a number on a circle of 16, upwards as often as downwards. Then it is
shown pairs of answers, of which counting up is preferred.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jengine import Runner
from jengine.config import DATASETS, MODELS
from jengine.data import ArrayDataset
from jengine.model import LinenModel, autocast

NUMBERS = 16
NETWORK = dict(type="TransformerLM", vocab_size=NUMBERS, width=32, depth=1, heads=2, mlp_width=64)


def count_from(start: np.ndarray, step: int) -> np.ndarray:
    """Return int32[N, 6]: a number, which is the prompt, and the five after it."""
    return ((start[:, None] + step * np.arange(6)) % NUMBERS).astype(np.int32)


@DATASETS.register_module()
class Answers(ArrayDataset):
    """Answers in pairs, the chosen and the rejected one; or all of them, without a preference."""

    def __init__(self, in_pairs: bool):
        start = np.arange(256) % NUMBERS
        up, down = count_from(start, 1), count_from(start, -1)
        tokens = np.concatenate([up, down])
        alone = dict(tokens=tokens[:, :-1], label=tokens[:, 1:])
        super().__init__(dict(chosen=up, rejected=down) if in_pairs else alone)


@MODELS.register_module()
class PreferenceModel(LinenModel):
    """Language model that is trained with pairs of answers, int[B, T] each.

    The variables of the reference are in `hyperparams["reference"]`. The first `prompt` tokens of
    both answers are the question, which does not count.
    """

    def __init__(self, module, beta=0.1, prompt=1):
        super().__init__(module, dict(type="CrossEntropy"), inputs="chosen")
        self.beta = beta
        self.prompt = prompt

    def log_probs(self, params, batch):
        """Return the logarithms of the probabilities of both answers, f32[B] each."""
        tokens = jnp.concatenate([batch["chosen"], batch["rejected"]])
        logits = autocast(self.module.apply)({"params": params}, tokens[:, :-1])
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return jnp.split(found[:, self.prompt - 1 :, 0].sum(axis=1), 2)

    def train_step(self, state, batch, ctx):
        """Update the model once; the reference is evaluated in the same program."""
        chosen, rejected = self.log_probs(ctx.hyperparams["reference"]["params"], batch)

        def loss(params):
            ours = self.log_probs(params, batch)
            margin = self.beta * ((ours[0] - chosen) - (ours[1] - rejected))
            return {"loss": -jax.nn.log_sigmoid(margin), "margin": margin, "accuracy": margin > 0}

        return ctx.update(state, loss)


def main(max_iters: int = 100, work_dir: str = "work_dirs/dpo", pretrain_iters: int = 300):
    """Train both models, and return the Runner of the second."""
    alone = dict(type="LinenModel", module=NETWORK, loss=dict(type="CrossEntropy"), inputs="tokens")
    pairs = dict(type="PreferenceModel", module=NETWORK)
    pretrained = f"{work_dir}/pretrained"
    make_runner(alone, pretrained, pretrain_iters, 3e-3).train()
    reference = dict(model=pairs, checkpoint=pretrained)
    runner = make_runner(
        pairs,
        work_dir,
        max_iters,
        1e-3,
        load_from=pretrained,
        custom_hooks=[dict(type="FrozenModelHook", model=reference, name="reference")],
    )
    print(f"probability of counting up: {measure(runner):.3f}")
    runner.train()
    print(f"after the preferences:      {measure(runner):.3f}")
    return runner


def make_runner(model, work_dir, max_iters, lr, **changes):
    """Return a Runner for one of the models."""
    data = dict(type="Answers", in_pairs=model["type"] == "PreferenceModel")
    return Runner(
        model,
        work_dir,
        train_dataloader=dict(batch_size=64, dataset=data),
        train_cfg=dict(by_epoch=False, max_iters=max_iters),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=lr)),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=20),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=max_iters),
        ),
        randomness=dict(seed=0),
        **changes,
    )


def measure(runner: Runner) -> float:
    """Return the mean probability of the next larger number after each."""
    tokens = count_from(np.arange(NUMBERS), 1)
    probs = jax.nn.softmax(runner.predict(dict(chosen=tokens[:, :1])))[:, 0]
    return float(np.take_along_axis(np.asarray(probs), tokens[:, 1:2], axis=1).mean())


if __name__ == "__main__":
    main()
