"""Train SwAV on the digits: assign two views of an image to the same prototypes, and use all
prototypes equally.

    python examples/swav.py

The prototypes are frozen at first, while the embeddings adapt to them; later a queue of earlier
embeddings helps to use the prototypes equally. The hook makes both changes without recompilation.
At the end the example prints the accuracy of a nearest-neighbor vote among the features, and among
random projections of the pixels to the same dimension.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine import Runner
from jengine.data import Digits
from jengine.extras.selfsup import compare_features, random_view, swav_loss
from jengine.model import FunctionalModel

FEATURES = 16
PROTOTYPES = 60
BATCH = 128


class Encoder(nn.Module):
    """Encode images f[B, 8, 8, 1] as features f[B, 16]."""

    @nn.compact
    def __call__(self, image, train):
        """Return the features of images."""
        x = image
        for width, stride in ((32, 1), (64, 2)):
            x = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(FEATURES)(x.reshape(x.shape[0], -1))


class SwAV(nn.Module):
    """Combine encoder, projection and prototypes (Caron et al., 2020, arXiv:2006.09882)."""

    @nn.compact
    def __call__(self, image, train=False):
        """Return features f[B, 16] and L2-normalized embeddings f[B, 128]."""
        features = Encoder()(image, train)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(features))
        x = nn.Dense(128, use_bias=False)(x)
        x = nn.Dense(128)(nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)))
        embeddings = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)
        # creates the kernel, which the loss reads
        nn.Dense(PROTOTYPES, use_bias=False, name="prototypes")(embeddings)
        return features, embeddings


NETWORK = SwAV()


def init(rng, batch):
    """Return the parameters, and the running statistics of the norms as state."""
    variables = NETWORK.init(rng, batch["image"])
    return variables["params"], {"batch_stats": variables["batch_stats"]}


def loss(params, model_state, batch, rng):
    """Compute SwAV's loss; the hook adds its queue to the state, and the loss returns the
    updated queue.
    """
    variables = {"params": params, "batch_stats": model_state["batch_stats"]}
    embeddings = []
    for key in jax.random.split(rng):
        image = random_view(key, batch["image"])
        (_, embedding), updates = NETWORK.apply(
            variables, image, train=True, mutable=["batch_stats"]
        )
        variables = {"params": params, **updates}
        embeddings.append(embedding)
    value, queue = swav_loss(
        jnp.stack(embeddings), params["prototypes"]["kernel"], model_state.get("queue")
    )
    state = {"batch_stats": variables["batch_stats"]}
    return {"loss": value}, state if queue is None else {**state, "queue": queue}


def predict(params, model_state, batch):
    """Return the features."""
    return {"features": NETWORK.apply({"params": params, **model_state}, batch["image"])[0]}


def main(
    max_epochs: int = 40, work_dir: str = "work_dirs/swav", seed: int = 0
) -> tuple[Runner, float, float]:
    """Train; return the Runner and the kNN accuracies of its features and of random projections
    of the pixels.
    """
    runner = Runner(
        model=FunctionalModel(init, loss, predict),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=BATCH, dataset=dict(type="Digits", split="train")),
        train_cfg=dict(max_epochs=max_epochs),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3, weight_decay=1e-2)),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=max_epochs, by_epoch=True),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=10),
            checkpoint=dict(type="CheckpointHook", interval=max_epochs),
        ),
        custom_hooks=[
            dict(
                type="SwAVHook",
                priority="VERY_HIGH",
                batch_size=BATCH,
                queue_length=3 * BATCH,
                epoch_queue_starts=max_epochs // 2,
                frozen_layers_cfg=dict(prototypes=50),
            )
        ],
        randomness=dict(seed=seed),
    )
    runner.train()
    return runner, *compare_features(runner, Digits("train"), Digits("test"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=40)
    parser.add_argument("--work-dir", default="work_dirs/swav")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    _, learned, random = main(args.max_epochs, args.work_dir, args.seed)
    print(
        f"kNN accuracy of {FEATURES} features: {learned:.4f}; of {FEATURES} random projections: "
        f"{random:.4f}"
    )
