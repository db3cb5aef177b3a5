"""ODC's memory, with the feature and label of each sample and the centroids: pure functions.

Source: Zhan et al., Online Deep Clustering for Unsupervised Representation Learning, 2020,
arXiv:2006.10645.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jengine.config.errors import ArgumentError
from jengine.parallel.replica_axis import gather_replicas


class MemoryBank(NamedTuple):
    """Features and labels for all samples. Belongs in the model's state, under any name."""

    features: jax.Array  # float32[N, D], L2-normalized
    labels: jax.Array  # int32[N], 0 to K - 1
    centroids: jax.Array  # float32[K, D], mean feature per label at the last update


def empty_bank(length: int, feat_dim: int, num_classes: int) -> MemoryBank:
    """Return a bank for the model's `init`, which a clustering fills before training.

    >>> empty_bank(length=1000, feat_dim=64, num_classes=10).centroids.shape
    (10, 64)
    """
    features = jnp.zeros((length, feat_dim), jnp.float32)
    labels = jnp.zeros((length,), jnp.int32)
    return MemoryBank(features, labels, centroids=jnp.zeros((num_classes, feat_dim), jnp.float32))


def fill_bank(bank: MemoryBank, features: ArrayLike, labels: ArrayLike) -> MemoryBank:
    """Return a bank with the features float[N, D] and labels int[N] from a clustering.

    `bank` defines the shapes.
    """
    features = np.asarray(features, np.float32)
    labels = np.asarray(labels)
    if features.shape != bank.features.shape:
        raise ArgumentError(
            f"`features` must have the shape of the memory bank, {bank.features.shape}, got "
            f"{features.shape}"
        )
    # The centroid of an empty cluster is 0/0, and NaN would spread through the bank.
    empty = np.flatnonzero(np.bincount(labels, minlength=len(bank.centroids)) == 0)
    if len(empty):
        raise ArgumentError(
            f"`labels` must have samples of every cluster, got none of {empty.tolist()}"
        )
    filled = bank._replace(
        features=jnp.asarray(_normalize(features)), labels=jnp.asarray(labels, jnp.int32)
    )
    return update_centroids(filled)


def count_labels(bank: MemoryBank) -> jax.Array:
    """Return the number of samples per label: int32[K]."""
    return jnp.bincount(bank.labels, length=len(bank.centroids)).astype(jnp.int32)


def update_samples(
    bank: MemoryBank, index: jax.Array, features: jax.Array, momentum: float = 0.5
) -> tuple[MemoryBank, jax.Array]:
    """Update the features for a batch, and assign the samples to the nearest centroids.

    Under `DataParallel` each replica gathers the other replicas' samples, so that all have the same
    bank.

    Args:
      bank: the bank.
      index: int32[B], sample indices in the dataset.
      features: float[B, D], the current features; no gradient flows through them.
      momentum: weight of the current features.

    Returns:
      The bank, and float32[], the fraction of the batch whose label changed.
    """
    index = gather_replicas(index)  # no-ops on one replica
    features = gather_replicas(jax.lax.stop_gradient(features))
    current = _normalize(features.astype(jnp.float32))
    averaged = _normalize((1 - momentum) * bank.features[index] + momentum * current)
    labels = jnp.argmax(averaged @ bank.centroids.T, axis=1).astype(jnp.int32)
    change_ratio = (labels != bank.labels[index]).mean(dtype=jnp.float32)
    bank = bank._replace(
        features=bank.features.at[index].set(averaged), labels=bank.labels.at[index].set(labels)
    )
    return bank, change_ratio


def update_centroids(bank: MemoryBank) -> MemoryBank:
    """Set each centroid to the mean feature of the label; centroids without samples stay."""
    counts = count_labels(bank)
    sums = jax.ops.segment_sum(bank.features, bank.labels, num_segments=len(bank.centroids))
    means = sums / jnp.maximum(counts, 1)[:, None]
    return bank._replace(centroids=jnp.where((counts > 0)[:, None], means, bank.centroids))


def deal_with_small_clusters(bank: MemoryBank, rng: jax.Array, min_cluster: int) -> MemoryBank:
    """Move samples in small clusters to the nearest others, then refill each with half the largest
    cluster.

    Args:
      bank: the bank, with at least `min_cluster` samples per label on average, so that some cluster
        is large enough.
      rng: key<fry>[], for the initial means in splits.
      min_cluster: smallest cluster size.
    """
    small = count_labels(bank) < min_cluster

    def refill(label: ArrayLike, bank: MemoryBank) -> MemoryBank:
        return jax.lax.cond(
            small[label],
            lambda b: _split_largest(b, label, jax.random.fold_in(rng, label)),
            lambda b: b,
            bank,
        )

    def redistribute(bank: MemoryBank) -> MemoryBank:
        # no sample joins a small cluster
        similarity = jnp.where(small, -jnp.inf, bank.features @ bank.centroids.T)
        nearest = jnp.argmax(similarity, axis=1).astype(jnp.int32)
        emptied = bank._replace(labels=jnp.where(small[bank.labels], nearest, bank.labels))
        return jax.lax.fori_loop(0, len(small), refill, emptied)

    return jax.lax.cond(small.any(), redistribute, lambda b: b, bank)


def _split_largest(bank: MemoryBank, label: ArrayLike, rng: jax.Array) -> MemoryBank:
    """Split the largest cluster by 2-means, give one half the label `label`, and update both
    centroids.
    """
    largest = jnp.argmax(count_labels(bank)).astype(jnp.int32)
    members = bank.labels == largest
    # If all features are equal, one side of 2-means is empty: split at random instead.
    order = jnp.where(members, jax.random.uniform(rng, members.shape), jnp.inf)
    # argsort twice: ranks
    random_half = members & (jnp.argsort(jnp.argsort(order)) < members.sum() // 2)
    second = _nearest_to_second_mean(bank.features, members, jnp.argmin(order))
    half = jnp.where(
        (members & second).any() & (members & ~second).any(), members & second, random_half
    )
    labels = jnp.where(half, jnp.asarray(label, jnp.int32), bank.labels)
    means = jnp.stack(
        [_masked_mean(bank.features, members & ~half), _masked_mean(bank.features, half)]
    )
    return bank._replace(
        labels=labels, centroids=bank.centroids.at[jnp.array([largest, label])].set(means)
    )


def _nearest_to_second_mean(
    features: jax.Array, members: jax.Array, first: jax.Array, iterations: int = 20
) -> jax.Array:
    """Run 2-means on the samples where `members` is True.

    Return which samples are nearest to the second mean: bool[N].

    The initial means are the sample `first` and the member farthest from it.
    """

    def distance(mean: jax.Array) -> jax.Array:
        return jnp.square(features - mean).sum(axis=1)

    def update_means(_: Any, means: jax.Array) -> jax.Array:
        second = distance(means[1]) < distance(means[0])
        return jnp.stack(
            [_masked_mean(features, members & ~second), _masked_mean(features, members & second)]
        )

    # Two points far apart as the first means; shapes are fixed, so that membership is a mask and
    # not a selection.
    farthest = jnp.argmax(jnp.where(members, distance(features[first]), -1.0))
    means = jax.lax.fori_loop(0, iterations, update_means, features[jnp.array([first, farthest])])
    return distance(means[1]) < distance(means[0])


def _masked_mean(features: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask[:, None], features, 0).sum(axis=0) / jnp.maximum(mask.sum(), 1)


def _normalize(features: Any) -> Any:
    return features / (jnp.linalg.norm(features, axis=-1, keepdims=True) + 1e-10)
