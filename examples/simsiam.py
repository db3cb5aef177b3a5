"""Train SimSiam on the digits: learn features without labels, and evaluate them by their nearest
neighbors.

    python examples/simsiam.py

Two random views of each image are created inside the compiled step. The predictor keeps its
learning rate while the encoder's follows a cosine. At the end the example prints the accuracy of a
nearest-neighbor vote among the features, and among random projections of the pixels to the same
dimension.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine import Runner
from jengine.data import Digits
from jengine.extras.selfsup import compare_features, random_view
from jengine.model import FunctionalModel

FEATURES = 16


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


class Projector(nn.Module):
    """Project features to f[B, 128], whose similarity is maximized."""

    @nn.compact
    def __call__(self, features, train):
        """Return the projections of features."""
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(features)
        x = nn.Dense(128, use_bias=False)(nn.relu(x))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dense(128, use_bias=False)(x)
        return nn.BatchNorm(
            use_running_average=not train, momentum=0.9, use_scale=False, use_bias=False
        )(x)


class Predictor(nn.Module):
    """Predict the projection of one view from that of the other, through a bottleneck."""

    @nn.compact
    def __call__(self, projection, train):
        """Return the predictions of projections."""
        x = nn.Dense(32, use_bias=False)(projection)
        return nn.Dense(128)(nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)))


class SimSiam(nn.Module):
    """Combine encoder, projector and predictor (Chen and He, 2021, arXiv:2011.10566)."""

    def setup(self):
        """Create the modules; the optimizer's rule matches the name `predictor`."""
        self.encoder, self.projector, self.predictor = Encoder(), Projector(), Predictor()

    def __call__(self, image, train=False):
        """Return features f[B, 16], projections and predictions f[B, 128]."""
        features = self.encoder(image, train)
        projection = self.projector(features, train)
        return features, projection, self.predictor(projection, train)


NETWORK = SimSiam()


def init(rng, batch):
    """Return the parameters, and the running statistics of the norms as state."""
    variables = NETWORK.init(rng, batch["image"])
    return variables["params"], {"batch_stats": variables["batch_stats"]}


def loss(params, model_state, batch, rng):
    """Compute the negative similarity of the predictions of one view and the projections of the
    other.
    """
    predictions = []
    projections = []
    for key in jax.random.split(rng):
        image = random_view(key, batch["image"])
        (_, projection, prediction), model_state = NETWORK.apply(
            {"params": params, **model_state}, image, train=True, mutable=["batch_stats"]
        )
        predictions.append(prediction)
        projections.append(jax.lax.stop_gradient(projection))
    spread = (
        (projections[0] / jnp.linalg.norm(projections[0], axis=-1, keepdims=True))
        .std(axis=0)
        .mean()
    )
    similarity = 0.5 * (
        cosine(predictions[0], projections[1]) + cosine(predictions[1], projections[0])
    )
    return {"loss": -similarity, "spread": spread * 128**0.5}, dict(model_state)


def cosine(a, b):
    """Return the cosine similarities f[B] of vectors f[B, D]."""
    return (a * b).sum(-1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1) + 1e-8)


def predict(params, model_state, batch):
    """Return the features."""
    return {"features": NETWORK.apply({"params": params, **model_state}, batch["image"])[0]}


def main(max_epochs: int = 150, work_dir: str = "work_dirs/simsiam") -> tuple[Runner, float, float]:
    """Train; return the Runner and the kNN accuracies of its features and of random projections
    of the pixels.
    """
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
            logger=dict(type="LoggerHook", interval=5),
            checkpoint=dict(type="CheckpointHook", interval=max_epochs),
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
    print(
        f"kNN accuracy of {FEATURES} features: {learned:.4f}; of {FEATURES} random projections: "
        f"{random:.4f}"
    )
