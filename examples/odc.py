"""Train ODC on the digits: keep the cluster of each image in memory, and update it as the features
change.

    python examples/odc.py

The features are clustered once, before training. After that the memory of features and clusters,
which is part of the model's state, is updated with each batch, and the hook maintains it: it
updates the centroids, merges small clusters into others and refills them with half of a large one.
At the end the example prints the accuracy of a nearest-neighbor vote among the features, and among
random projections of the pixels to the same dimension.
"""

import argparse

import jax.numpy as jnp
import optax
from flax import linen as nn

from jengine import Runner
from jengine.data import Digits
from jengine.extras.selfsup import compare_features, empty_bank, random_view, update_samples
from jengine.model import FunctionalModel

FEATURES = 16
CLUSTERS = 40
SAMPLES = 1438  # training images
BATCH = 128
MOMENTUM = 0.2


class ODC(nn.Module):
    """Encode images, and predict their clusters with a head (Zhan et al., 2020,
    arXiv:2006.10645).
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


NETWORK = ODC()


def init(rng, batch):
    """Return the parameters; as state the running statistics of the norms, the memory and the
    class weights.
    """
    variables = NETWORK.init(rng, batch["image"])
    return variables["params"], {
        "batch_stats": variables["batch_stats"],
        "bank": empty_bank(SAMPLES, FEATURES, CLUSTERS),
        "loss_weight": jnp.full(CLUSTERS, 1 / CLUSTERS),
    }


def loss(params, model_state, batch, rng):
    """Compute the cross entropy of the cluster in memory for a random view, and update the
    memory with its features.
    """
    image = random_view(rng, batch["image"])
    variables = {"params": params, "batch_stats": model_state["batch_stats"]}
    (features, logits), updates = NETWORK.apply(
        variables, image, train=True, mutable=["batch_stats"]
    )
    labels = model_state["bank"].labels[batch["index"]]
    value = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    weight = model_state["loss_weight"][labels]
    bank, change_ratio = update_samples(model_state["bank"], batch["index"], features, MOMENTUM)
    losses = {"loss": (value * weight).sum() / weight.sum(), "change_ratio": change_ratio}
    return losses, {**model_state, **updates, "bank": bank}


def predict(params, model_state, batch):
    """Return the features."""
    variables = {"params": params, "batch_stats": model_state["batch_stats"]}
    return {"features": NETWORK.apply(variables, batch["image"])[0]}


def main(
    max_epochs: int = 40, work_dir: str = "work_dirs/odc", seed: int = 0
) -> tuple[Runner, float, float]:
    """Train; return the Runner and the kNN accuracies of its features and of random projections
    of the pixels.
    """
    digits = dict(type="Digits", split="train")
    runner = Runner(
        model=FunctionalModel(init, loss, predict),
        work_dir=work_dir,
        train_dataloader=dict(
            batch_size=BATCH, dataset=dict(type="PseudoLabelDataset", dataset=digits)
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
                clustering=dict(type="Kmeans", k=CLUSTERS, pca_dim=-1),
                unif_sampling=False,
                reweight=False,
                reweight_pow=0.5,
                init_memory=True,
                interval=max_epochs + 1,  # only before training
            ),
            dict(
                type="ODCHook",
                centroids_update_interval=10,
                deal_with_small_clusters_interval=10,
                evaluate_interval=100,
                reweight=True,
                reweight_pow=0.5,
                min_cluster=10,
            ),
        ],
        randomness=dict(seed=seed),
    )
    runner.train()
    return runner, *compare_features(runner, Digits("train"), Digits("test"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=40)
    parser.add_argument("--work-dir", default="work_dirs/odc")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    _, learned, random = main(args.max_epochs, args.work_dir, args.seed)
    print(
        f"kNN accuracy of {FEATURES} features: {learned:.4f}; of {FEATURES} random projections: "
        f"{random:.4f}"
    )
