"""Train DenseCL on the digits: contrast whole images at first, and positions too from `start_iters`
on.

    python examples/densecl.py

The momentum encoder and the queues of keys are the model's state; the views are created inside the
compiled step. The weight of the dense loss is an input of the step, so that turning it on does not
recompile. At the end the example prints the accuracy of a nearest-neighbor vote among the features,
and among random projections of the pixels to the same dimension.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine import Runner
from jengine.data import Digits
from jengine.extras.selfsup import (
    compare_features,
    dense_match,
    densecl_losses,
    info_nce,
    push,
    random_view,
)
from jengine.model import FunctionalModel

FEATURES = 16
QUEUE = 512
MOMENTUM = 0.98


class DenseEncoder(nn.Module):
    """Encode images f[B, 8, 8, 1] as features f[B, 16] and as maps of 4x4 positions."""

    @nn.compact
    def __call__(self, image):
        """Return features, their projection f[B, 64], the map f[B, 16, 64] and its projection
        f[B, 16, 64].
        """
        x = image
        for width, stride in ((32, 1), (64, 2)):
            x = nn.relu(
                nn.GroupNorm(8)(nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x))
            )
        positions = x.reshape(x.shape[0], 16, -1)
        features = nn.Dense(FEATURES, name="features")(x.reshape(x.shape[0], -1))
        single = nn.Dense(64)(nn.relu(nn.Dense(128)(features)))
        dense = nn.Dense(64)(nn.relu(nn.Dense(128)(positions)))
        return features, normalize(single), positions, normalize(dense)


def normalize(x):
    """L2-normalize along the last axis."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


NETWORK = DenseEncoder()


def init(rng, batch):
    """Return the parameters; as state the parameters of the momentum encoder and two queues of
    random keys.
    """
    params = NETWORK.init(rng, batch["image"])["params"]
    single, dense = (
        normalize(jax.random.normal(key, (QUEUE, 64))) for key in jax.random.split(rng)
    )
    return params, {"keys": jax.tree.map(jnp.copy, params), "queue": single, "dense_queue": dense}


def loss(params, model_state, batch, rng, hyperparams):
    """Compute the contrastive losses of images and positions against the keys in the queues."""
    key_params = jax.tree.map(
        lambda k, p: MOMENTUM * k + (1 - MOMENTUM) * p, model_state["keys"], params
    )
    key_params = jax.lax.stop_gradient(key_params)
    first, second = (random_view(key, batch["image"]) for key in jax.random.split(rng))
    _, query, positions, dense_query = NETWORK.apply({"params": params}, first)
    _, key, key_positions, dense_key = jax.lax.stop_gradient(
        NETWORK.apply({"params": key_params}, second)
    )
    single = info_nce(query, key, model_state["queue"]).mean()
    matched_keys = dense_match(positions, key_positions, dense_key)
    dense = info_nce(dense_query, matched_keys, model_state["dense_queue"]).mean()
    return densecl_losses(single, dense, hyperparams["loss_lambda"]), {
        "keys": key_params,
        "queue": push(model_state["queue"], key),
        "dense_queue": push(model_state["dense_queue"], normalize(dense_key.mean(axis=1))),
    }


def predict(params, batch):
    """Return the features."""
    return {"features": NETWORK.apply({"params": params}, batch["image"])[0]}


class DenseModel(FunctionalModel):
    """Model with the weight of the dense loss, which DenseCLHook turns on."""

    loss_lambda = 0.5


def main(max_iters: int = 1500, work_dir: str = "work_dirs/densecl") -> tuple[Runner, float, float]:
    """Train; return the Runner and the kNN accuracies of its features and of random projections
    of the pixels.
    """
    runner = Runner(
        model=DenseModel(init, loss, predict),
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
    print(
        f"kNN accuracy of {FEATURES} features: {learned:.4f}; of {FEATURES} random projections: "
        f"{random:.4f}"
    )
