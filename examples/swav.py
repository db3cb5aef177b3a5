"""SwAV on the digits: two views of an image are to choose the same prototypes, all of which are used equally.

    python examples/swav.py

The prototypes stand still at first, until the embeddings have found their places among them; later a queue of earlier
embeddings helps to use them equally. Both are changes of the hook's that compile nothing anew. At the end the accuracy
of a nearest-neighbour vote among the features is printed, beside that among random projections of the pixels to as
many numbers.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine import Runner
from jengine.contrib.selfsup import compare_features, random_view, swav_loss
from jengine.data import Digits
from jengine.model import FunctionalModel

FEATURES = 16
PROTOTYPES = 60
BATCH = 128


class Encoder(nn.Module):
    """Images f[B, 8, 8, 1] to features f[B, 16]."""

    @nn.compact
    def __call__(self, image, train):
        """Features of images."""
        x = image
        for width, stride in ((32, 1), (64, 2)):
            x = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(FEATURES)(x.reshape(x.shape[0], -1))


class SwAV(nn.Module):
    """Encoder, projection and prototypes (Caron et al., 2020, arXiv:2006.09882)."""

    @nn.compact
    def __call__(self, image, train=False):
        """Features f[B, 16] and embeddings f[B, 128] of length 1."""
        features = Encoder()(image, train)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(features))
        x = nn.Dense(128, use_bias=False)(x)
        x = nn.Dense(128)(nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)))
        embeddings = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)
        nn.Dense(PROTOTYPES, use_bias=False, name="prototypes")(embeddings)  # for its kernel, which the loss reads
        return features, embeddings


NETWORK = SwAV()


def init(rng, batch):
    """Parameters, and the running statistics of the norms."""
    variables = NETWORK.init(rng, batch["image"])
    return variables["params"], {"batch_stats": variables["batch_stats"]}


def loss(params, model_state, batch, rng):
    """Each view predicts the prototypes of the other; the queue is the hook's, lent and given back."""
    variables = {"params": params, "batch_stats": model_state["batch_stats"]}
    embeddings = []
    for key in jax.random.split(rng):
        image = random_view(key, batch["image"])
        (_, found), changed = NETWORK.apply(variables, image, train=True, mutable=["batch_stats"])
        variables = {"params": params, **changed}
        embeddings.append(found)
    value, queue = swav_loss(jnp.stack(embeddings), params["prototypes"]["kernel"], model_state.get("queue"))
    state = {"batch_stats": variables["batch_stats"]}
    return {"loss": value}, state if queue is None else {**state, "queue": queue}


def predict(params, model_state, batch):
    """The features."""
    return {"features": NETWORK.apply({"params": params, **model_state}, batch["image"])[0]}


def main(max_epochs: int = 40, work_dir: str = "work_dirs/swav", seed: int = 0) -> tuple[Runner, float, float]:
    """Trains, and returns the Runner, the accuracy among its features and that among projections of the pixels."""
    runner = Runner(
        model=FunctionalModel(init, loss, predict),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=BATCH, dataset=dict(type="Digits", split="train")),
        train_cfg=dict(max_epochs=max_epochs),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3, weight_decay=1e-2)),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=max_epochs, by_epoch=True),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=10), checkpoint=dict(type="CheckpointHook", interval=max_epochs)
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
    print(f"kNN accuracy of {FEATURES} features: {learned:.4f}; of {FEATURES} random projections: {random:.4f}")
