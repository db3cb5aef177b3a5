"""DenseCL on the digits: contrast of whole images at first, of places too from `start_iters` on.

    python examples/densecl.py

The momentum encoder and the queues of keys are the model's state; the views are made inside the compiled step. The
switch to the dense loss is a number of the host's, so that nothing is compiled anew. At the end the accuracy of a
nearest-neighbour vote among the features is printed, beside that among random projections of the pixels to as many
numbers.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine import Runner
from jengine.contrib.selfsup import (
    compare_features,
    dense_match,
    densecl_losses,
    info_nce,
    push,
    random_view,
)
from jengine.data import Digits
from jengine.model import FunctionalModel

FEATURES = 16
QUEUE = 512
MOMENTUM = 0.98


class DenseEncoder(nn.Module):
    """Images f[B, 8, 8, 1] to features f[B, 16], and to maps of 4x4 places."""

    @nn.compact
    def __call__(self, image):
        """Features, their projection f[B, 64], the map f[B, 16, 64] and its projection f[B, 16, 64]."""
        x = image
        for width, stride in ((32, 1), (64, 2)):
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)))
        places = x.reshape(x.shape[0], 16, -1)
        features = nn.Dense(FEATURES, name="features")(x.reshape(x.shape[0], -1))
        whole = nn.Dense(64)(nn.relu(nn.Dense(128)(features)))
        dense = nn.Dense(64)(nn.relu(nn.Dense(128)(places)))
        return features, unit(whole), places, unit(dense)


def unit(x):
    """Rows of length 1."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


NETWORK = DenseEncoder()


def init(rng, batch):
    """Parameters; as state the momentum encoder's and two queues of random keys."""
    params = NETWORK.init(rng, batch["image"])["params"]
    single, dense = (unit(jax.random.normal(key, (QUEUE, 64))) for key in jax.random.split(rng))
    return params, {"keys": jax.tree.map(jnp.copy, params), "queue": single, "dense_queue": dense}


def loss(params, model_state, batch, rng, hyperparams):
    """Each image, and each of its places, is to find its key among those in the queue."""
    keys = jax.tree.map(lambda k, p: MOMENTUM * k + (1 - MOMENTUM) * p, model_state["keys"], params)
    keys = jax.lax.stop_gradient(keys)
    first, second = (random_view(key, batch["image"]) for key in jax.random.split(rng))
    _, query, places, dense_query = NETWORK.apply({"params": params}, first)
    _, key, key_places, dense_key = jax.lax.stop_gradient(NETWORK.apply({"params": keys}, second))
    single = info_nce(query, key, model_state["queue"]).mean()
    matched = dense_match(places, key_places, dense_key)
    dense = info_nce(dense_query, matched, model_state["dense_queue"]).mean()
    return densecl_losses(single, dense, hyperparams["loss_lambda"]), {
        "keys": keys,
        "queue": push(model_state["queue"], key),
        "dense_queue": push(model_state["dense_queue"], unit(dense_key.mean(axis=1))),
    }


def predict(params, batch):
    """The features."""
    return {"features": NETWORK.apply({"params": params}, batch["image"])[0]}


def main(max_iters: int = 1500, work_dir: str = "work_dirs/densecl") -> tuple[Runner, float, float]:
    """Trains, and returns the Runner, the accuracy among its features and that among projections of the pixels."""
    model = FunctionalModel(init, loss, predict)
    model.loss_lambda = 0.5
    runner = Runner(
        model=model,
        work_dir=work_dir,
        train_dataloader=dict(batch_size=128, dataset=dict(type="Digits", split="train")),
        train_cfg=dict(by_epoch=False, max_iters=max_iters),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3, weight_decay=1e-2)),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=max_iters, by_epoch=False),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=100),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=max_iters),
        ),
        custom_hooks=[dict(type="DenseCLHook", start_iters=max_iters // 5)],
    )
    runner.train()
    return runner, *compare_features(runner, Digits("train"), Digits("test"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-iters", type=int, default=1500)
    parser.add_argument("--work-dir", default="work_dirs/densecl")
    args = parser.parse_args()
    _, learned, random = main(args.max_iters, args.work_dir)
    print(f"kNN accuracy of {FEATURES} features: {learned:.4f}; of {FEATURES} random projections: {random:.4f}")
