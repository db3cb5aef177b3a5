"""Train DeepCluster on the digits: learn features by predicting the clusters of earlier features.

    python examples/deepcluster.py

The features of all images are clustered five times, and each time a new head learns to predict the
cluster of an image from a random view of it. There are more clusters than classes of digits. At the
end the example prints the accuracy of a nearest-neighbor vote among the features, and among random
projections of the pixels to the same dimension.
"""

import argparse

import jax.numpy as jnp
import optax
from flax import linen as nn

from jengine import Runner
from jengine.data import Digits
from jengine.extras.selfsup import compare_features, random_view
from jengine.model import FunctionalModel

FEATURES = 16
CLUSTERS = 40


class DeepCluster(nn.Module):
    """Encode images, and predict their clusters with a head (Caron et al., 2018,
    arXiv:1807.05520).
    """

    @nn.compact
    def __call__(self, image, train=False):
        """Return features f[B, 16] and logits f[B, 40] of images f[B, 8, 8, 1]."""
        x = image
        for width, stride in ((32, 1), (64, 2)):
            x = nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        features = nn.Dense(FEATURES)(x.reshape(x.shape[0], -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(features))
        return features, nn.Dense(CLUSTERS, name="head")(x)


NETWORK = DeepCluster()


def init(rng, batch):
    """Return the parameters, and the running statistics of the norms as state."""
    variables = NETWORK.init(rng, batch["image"])
    return variables["params"], {"batch_stats": variables["batch_stats"]}


def loss(params, model_state, batch, rng):
    """Compute the cross entropy of predicting the cluster of an image from a random view of it."""
    image = random_view(rng, batch["image"])
    (_, logits), model_state = NETWORK.apply(
        {"params": params, **model_state}, image, train=True, mutable=["batch_stats"]
    )
    is_correct = logits.argmax(axis=-1) == batch["pseudo_label"]
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["pseudo_label"])
    return {"loss": value, "accuracy": is_correct.mean(dtype=jnp.float32)}, dict(model_state)


def predict(params, model_state, batch):
    """Return the features."""
    return {"features": NETWORK.apply({"params": params, **model_state}, batch["image"])[0]}


def main(
    max_epochs: int = 50, work_dir: str = "work_dirs/deepcluster", seed: int = 0
) -> tuple[Runner, float, float]:
    """Train; return the Runner and the kNN accuracies of its features and of random projections
    of the pixels.
    """
    digits = dict(type="Digits", split="train")
    runner = Runner(
        model=FunctionalModel(init, loss, predict),
        work_dir=work_dir,
        train_dataloader=dict(
            batch_size=128,
            dataset=dict(type="PseudoLabelDataset", dataset=digits),
            sampler=dict(type="DeepClusterSampler"),
        ),
        train_cfg=dict(max_epochs=max_epochs),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=5e-3, weight_decay=1e-2)),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=max_epochs, by_epoch=True),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=10),
            checkpoint=dict(type="CheckpointHook", interval=max_epochs),
        ),
        custom_hooks=[
            dict(
                type="DeepClusterHook",
                extract_dataloader=dict(batch_size=256, dataset=digits),
                clustering=dict(type="Kmeans", k=CLUSTERS, pca_dim=FEATURES),
                unif_sampling=True,
                reweight=False,
                reweight_pow=0.5,
                interval=max(1, max_epochs // 5),
            )
        ],
        randomness=dict(seed=seed),
    )
    runner.train()
    return runner, *compare_features(runner, Digits("train"), Digits("test"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=50)
    parser.add_argument("--work-dir", default="work_dirs/deepcluster")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    _, learned, random = main(args.max_epochs, args.work_dir, args.seed)
    print(
        f"kNN accuracy of {FEATURES} features: {learned:.4f}; of {FEATURES} random projections: "
        f"{random:.4f}"
    )
