"""SimSiam on the digits: features without labels, judged by their nearest neighbours.

    python examples/simsiam.py

Two random views of each image are made inside the compiled step. The predictor keeps its learning rate while the
encoder's follows a cosine. At the end the accuracy of a nearest-neighbour vote among the features is printed, beside
that among random projections of the pixels to as many numbers.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine import Runner
from jengine.contrib.selfsup import compare_features, random_view
from jengine.data import Digits
from jengine.model import FunctionalModel

FEATURES = 16


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


class Projector(nn.Module):
    """Features to f[B, 128], whose likeness is maximised."""

    @nn.compact
    def __call__(self, features, train):
        """Projections of features."""
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(features)
        x = nn.Dense(128, use_bias=False)(nn.relu(x))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dense(128, use_bias=False)(x)
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, use_scale=False, use_bias=False)(x)


class Predictor(nn.Module):
    """A projection of one view to that of the other, through a bottleneck."""

    @nn.compact
    def __call__(self, projection, train):
        """Predictions of projections."""
        x = nn.Dense(32, use_bias=False)(projection)
        return nn.Dense(128)(nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)))


class SimSiam(nn.Module):
    """Encoder, projector and predictor (Chen and He, 2021, arXiv:2011.10566)."""

    def setup(self):
        """Names the parts: `predictor` is what the optimizer's rule looks for."""
        self.encoder, self.projector, self.predictor = Encoder(), Projector(), Predictor()

    def __call__(self, image, train=False):
        """Features f[B, 16], projections and predictions f[B, 128]."""
        features = self.encoder(image, train)
        projection = self.projector(features, train)
        return features, projection, self.predictor(projection, train)


NETWORK = SimSiam()


def init(rng, batch):
    """Parameters, and the running statistics of the norms."""
    variables = NETWORK.init(rng, batch["image"])
    return variables["params"], {"batch_stats": variables["batch_stats"]}


def loss(params, model_state, batch, rng):
    """Each view predicts the projection of the other, through which no gradient flows."""
    guesses, projections = [], []
    for key in jax.random.split(rng):
        image = random_view(key, batch["image"])
        (_, projection, guess), model_state = NETWORK.apply(
            {"params": params, **model_state}, image, train=True, mutable=["batch_stats"]
        )
        guesses.append(guess)
        projections.append(jax.lax.stop_gradient(projection))
    spread = (projections[0] / jnp.linalg.norm(projections[0], axis=-1, keepdims=True)).std(axis=0).mean()
    likeness = 0.5 * (cosine(guesses[0], projections[1]) + cosine(guesses[1], projections[0]))
    return {"loss": -likeness, "spread": spread * 128**0.5}, dict(model_state)


def cosine(a, b):
    """The cosine of the angles f[B] between rows f[B, D]."""
    return (a * b).sum(-1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1) + 1e-8)


def predict(params, model_state, batch):
    """The features."""
    return {"features": NETWORK.apply({"params": params, **model_state}, batch["image"])[0]}


def main(max_epochs: int = 150, work_dir: str = "work_dirs/simsiam") -> tuple[Runner, float, float]:
    """Trains, and returns the Runner, the accuracy among its features and that among projections of the pixels."""
    lr = 0.1
    runner = Runner(
        model=FunctionalModel(init, loss, predict),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=256, dataset=dict(type="Digits", split="train")),
        train_cfg=dict(max_epochs=max_epochs),
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=lr, momentum=0.9, weight_decay=1e-4),
            paramwise_cfg=dict(custom_keys={"predictor": dict(fix_lr=True)}),
        ),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=max_epochs, by_epoch=True),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=5), checkpoint=dict(type="CheckpointHook", interval=max_epochs)
        ),
        custom_hooks=[dict(type="SimSiamHook", fix_pred_lr=True, lr=lr)],
    )
    runner.train()
    return runner, *compare_features(runner, Digits("train"), Digits("test"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=150)
    parser.add_argument("--work-dir", default="work_dirs/simsiam")
    args = parser.parse_args()
    _, learned, random = main(args.max_epochs, args.work_dir)
    print(f"kNN accuracy of {FEATURES} features: {learned:.4f}; of {FEATURES} random projections: {random:.4f}")
