"""The memory of ODC: a feature and a label of every sample, and the centroids of the labels. Pure functions.

Source: Zhan et al., Online Deep Clustering for Unsupervised Representation Learning, 2020, arXiv:2006.10645.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class MemoryBank(NamedTuple):
    """What is remembered of each sample. Belongs into the model's state, under any name."""

    features: jax.Array  # float32[N, D], of length 1
    labels: jax.Array  # int32[N], 0 to K - 1
    centroids: jax.Array  # float32[K, D], means of the features with each label, as of their last update


def empty_bank(length: int, feat_dim: int, num_classes: int) -> MemoryBank:
    """A bank for `init`, to be filled by a clustering before training.

    Args:
      length: N, samples of the dataset.
      feat_dim: D, size of a feature.
      num_classes: K, clusters.
    """
    return MemoryBank(
        features=jnp.zeros((length, feat_dim), jnp.float32),
        labels=jnp.zeros((length,), jnp.int32),
        centroids=jnp.zeros((num_classes, feat_dim), jnp.float32),
    )


def fill_bank(bank: MemoryBank, features: Any, labels: Any) -> MemoryBank:
    """The bank with the features and labels of a clustering.

    Args:
      bank: for its shapes.
      features: float[N, D].
      labels: int[N].

    Raises:
      AssertionError: the shapes differ from the bank's, or a label has no sample.
    """
    features, labels = np.asarray(features, np.float32), np.asarray(labels)
    if features.shape != bank.features.shape:
        raise AssertionError(f"the memory bank is of shape {bank.features.shape}, the features {features.shape}")
    empty = np.flatnonzero(np.bincount(labels, minlength=len(bank.centroids)) == 0)
    if len(empty):
        raise AssertionError(f"a memory bank starts with samples of every label; {empty.tolist()} have none")
    filled = bank._replace(
        features=jnp.asarray(_unit(features)), labels=jnp.asarray(labels, jnp.int32), centroids=bank.centroids
    )
    return update_centroids(filled)


def count_labels(bank: MemoryBank) -> jax.Array:
    """How many samples have each label: int32[K]."""
    return jnp.bincount(bank.labels, length=len(bank.centroids)).astype(jnp.int32)


def update_samples(
    bank: MemoryBank, index: jax.Array, features: jax.Array, momentum: float = 0.5
) -> tuple[MemoryBank, jax.Array]:
    """Moves the features of a batch and gives its samples the label of the nearest centroid.

    Args:
      bank: the bank.
      index: int32[B], the places of the batch's samples.
      features: float[B, D], their features now; no gradient flows through them.
      momentum: weight of the new features.

    Returns:
      The bank, and float32[], the part of the batch whose label changed.
    """
    fresh = _unit(jax.lax.stop_gradient(features).astype(jnp.float32))
    moved = _unit((1 - momentum) * bank.features[index] + momentum * fresh)
    labels = jnp.argmax(moved @ bank.centroids.T, axis=1).astype(jnp.int32)
    changed = (labels != bank.labels[index]).mean(dtype=jnp.float32)
    bank = bank._replace(features=bank.features.at[index].set(moved), labels=bank.labels.at[index].set(labels))
    return bank, changed


def update_centroids(bank: MemoryBank) -> MemoryBank:
    """Moves every centroid to the mean of its features; that of a label without samples stays."""
    counts = count_labels(bank)
    sums = jax.ops.segment_sum(bank.features, bank.labels, num_segments=len(bank.centroids))
    means = sums / jnp.maximum(counts, 1)[:, None]
    return bank._replace(centroids=jnp.where((counts > 0)[:, None], means, bank.centroids))


def deal_with_small_clusters(bank: MemoryBank, rng: jax.Array, min_cluster: int) -> MemoryBank:
    """Empties clusters that are too small into the nearest others, then gives them half of the largest cluster each.

    Args:
      bank: the bank, of at least `min_cluster` samples for each label, so that one cluster at least is large enough.
      rng: key<fry>[], for where halves begin.
      min_cluster: the least size of a cluster.

    Returns:
      The bank; without a small cluster as it was.
    """
    small = count_labels(bank) < min_cluster

    def split(label: Any, bank: MemoryBank) -> MemoryBank:
        return jax.lax.cond(
            small[label], lambda b: _halve_largest(b, label, jax.random.fold_in(rng, label)), lambda b: b, bank
        )

    def deal(bank: MemoryBank) -> MemoryBank:
        likeness = jnp.where(small, -jnp.inf, bank.features @ bank.centroids.T)
        nearest = jnp.argmax(likeness, axis=1).astype(jnp.int32)
        emptied = bank._replace(labels=jnp.where(small[bank.labels], nearest, bank.labels))
        return jax.lax.fori_loop(0, len(small), split, emptied)

    return jax.lax.cond(small.any(), deal, lambda b: b, bank)


def _halve_largest(bank: MemoryBank, label: Any, rng: jax.Array) -> MemoryBank:
    """Gives half of the largest cluster, as 2-means divides it, the label `label`, and moves both centroids."""
    largest = jnp.argmax(count_labels(bank)).astype(jnp.int32)
    inside = bank.labels == largest
    # Features that are all alike leave one side of 2-means empty; then a random half has to do.
    chance = jnp.where(inside, jax.random.uniform(rng, inside.shape), jnp.inf)
    by_chance = inside & (jnp.argsort(jnp.argsort(chance)) < inside.sum() // 2)
    second = _second_mean(bank.features, inside, jnp.argmin(chance))
    half = jnp.where((inside & second).any() & (inside & ~second).any(), inside & second, by_chance)
    labels = jnp.where(half, jnp.asarray(label, jnp.int32), bank.labels)
    pair = jnp.stack([_mean(bank.features, inside & ~half), _mean(bank.features, half)])
    return bank._replace(labels=labels, centroids=bank.centroids.at[jnp.array([largest, label])].set(pair))


def _second_mean(features: jax.Array, inside: jax.Array, first: jax.Array, iterations: int = 20) -> jax.Array:
    """Which of the samples `inside` 2-means puts with the second mean: bool[N].

    The means begin at the sample `first` and at the one inside that is farthest from it.
    """

    def distance(mean: jax.Array) -> jax.Array:
        return jnp.square(features - mean).sum(axis=1)

    def improve(_: Any, means: jax.Array) -> jax.Array:
        second = distance(means[1]) < distance(means[0])
        return jnp.stack([_mean(features, inside & ~second), _mean(features, inside & second)])

    farthest = jnp.argmax(jnp.where(inside, distance(features[first]), -1.0))
    means = jax.lax.fori_loop(0, iterations, improve, features[jnp.array([first, farthest])])
    return distance(means[1]) < distance(means[0])


def _mean(features: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.where(chosen[:, None], features, 0).sum(axis=0) / jnp.maximum(chosen.sum(), 1)


def _unit(rows: Any) -> Any:
    return rows / (jnp.linalg.norm(rows, axis=-1, keepdims=True) + 1e-10)
