"""Feature clustering on the host, with class weights and log lines from the clusters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jengine.config.annotations import Count, Fraction, Positive
from jengine.config.errors import ConfigError, require_extra
from jengine.config.registry import Registry

CLUSTERINGS: Registry = Registry("clustering", section="CLUSTERINGS")


@CLUSTERINGS.register_module()
@dataclasses.dataclass(frozen=True)
class Kmeans:
    """scikit-learn's k-means on whitened, L2-normalized features.

    Source: Caron et al., Deep Clustering for Unsupervised Learning of Visual Features, 2018,
    arXiv:1807.05520.

    Args:
      k: cluster count.
      pca_dim: how many whitened principal components features are first reduced to; -1 skips the
        reduction.
      max_iter: maximum iteration count.
    """

    extra = "examples"

    k: int
    pca_dim: int = 256
    max_iter: int = 20

    def __call__(self, features: np.ndarray, seed: int) -> np.ndarray:
        """Return the cluster per sample, int64[N] from 0 to k - 1, for features float[N, D]."""
        with require_extra("examples", "Kmeans requires scikit-learn"):
            from sklearn.cluster import KMeans
        if len(features) < self.k:
            raise ConfigError(
                f"Kmeans: `k` must be at most the number of samples, {len(features)}, got {self.k}"
            )
        features = _whiten(features, self.pca_dim, seed, "Kmeans")
        # As Faiss does in the original code: random centroids, one run; k-means++ is slow with
        # thousands of clusters.
        kmeans = KMeans(self.k, init="random", n_init=1, max_iter=self.max_iter, random_state=seed)
        return kmeans.fit_predict(features).astype(np.int64)


@CLUSTERINGS.register_module()
@dataclasses.dataclass(frozen=True)
class PIC:
    """Power iteration clustering on the nearest neighbor graph over whitened, L2-normalized
    features.

    Power iterations on the affinities give each sample a centrality. Each sample points to the
    neighbor to which the centrality, weighted by the affinity, increases most; samples whose
    pointers end at the same sample are a cluster. The cluster count is a result. Clusters are
    numbered by size, the largest is 0; samples in clusters beyond `k` join the closest of the `k`,
    by the means.

    Source: Lin and Cohen, Power Iteration Clustering, 2010; with a neighbor graph, in Caron et al.,
    Deep Clustering for Unsupervised Learning of Visual Features, 2018, arXiv:1807.05520.

    Args:
      k: largest cluster count, the head's class count.
      pca_dim: as in Kmeans.
      sigma: affinity bandwidth, `exp(-squared_distance / sigma**2)`.
      nnn: nearest neighbors per sample.
      alpha: affinity share in a power iteration; the rest is uniform.
      distribute_singletons: a singleton joins its closest neighbor that is in a larger cluster.
    """

    extra = "examples"

    k: Count
    pca_dim: int = 256
    sigma: Positive = 0.2
    nnn: Count = 5
    alpha: Fraction = 0.001
    distribute_singletons: bool = True

    def __call__(self, features: np.ndarray, seed: int) -> np.ndarray:
        """Return the cluster per sample, int64[N] from 0 to at most k - 1, for features float[N,
        D].
        """
        with require_extra("examples", "PIC requires scikit-learn"):
            from sklearn.neighbors import NearestNeighbors
        if len(features) <= self.nnn:
            raise ConfigError(
                f"PIC: `nnn` must be below the number of samples, {len(features)}, got {self.nnn}"
            )
        features = _whiten(features, self.pca_dim, seed, "PIC")
        index = NearestNeighbors(n_neighbors=self.nnn).fit(features)
        distances, neighbors = index.kneighbors()  # of each sample, without the sample itself
        roots = self._find_roots(neighbors, np.exp(-(distances**2) / self.sigma**2))
        if self.distribute_singletons:
            roots = _distribute_singletons(roots, neighbors)
        return _number_by_size(roots, features, self.k)

    def _find_roots(self, neighbors: np.ndarray, affinities: np.ndarray) -> np.ndarray:
        """Return for each sample the most central sample in the same cluster, int64[N]."""
        from scipy.sparse import csr_array

        num_samples = len(neighbors)
        starts = np.arange(num_samples + 1) * self.nnn
        directed = csr_array(
            (affinities.ravel(), neighbors.ravel(), starts), shape=(num_samples, num_samples)
        )
        graph = (directed + directed.T).tocsr()
        centrality = np.full(num_samples, 1 / num_samples)
        for _ in range(_POWER_ITERATIONS):
            centrality = self.alpha * (graph @ centrality) + (1 - self.alpha) / num_samples
            centrality /= centrality.sum()
        edges = graph.tocoo()
        gains = edges.data * (centrality[edges.col] - centrality[edges.row])
        order = np.lexsort((-gains, edges.row))  # the largest gain of each row first
        rows, first = np.unique(edges.row[order], return_index=True)
        best = order[first]
        pointers = np.arange(num_samples)
        pointers[rows] = np.where(gains[best] > 0, edges.col[best], rows)
        # centrality increases along pointers, so that there is no cycle
        while (pointers[pointers] != pointers).any():
            pointers = pointers[pointers]
        return pointers


_POWER_ITERATIONS = 200


def build_clustering(cfg: Mapping[str, Any]) -> Kmeans | PIC:
    """Build a clustering from a config, `dict(type='Kmeans', k=...)` or `dict(type='PIC', k=...)`.

    >>> build_clustering(dict(type="Kmeans", k=10, pca_dim=-1))
    Kmeans(k=10, pca_dim=-1, max_iter=20)
    """
    return CLUSTERINGS.build({"type": "Kmeans", **cfg})


def class_weights(counts: ArrayLike, power: float) -> jax.Array:
    """Return class weights that decrease with the class size: `(1 / count) ** power`, normalized.

    Works under `jit`.

    >>> class_weights([1, 3], power=1).tolist()
    [0.75, 0.25]

    Args:
      counts: int[K], samples per class. An empty class gets nearly all the weight.
      power: 0 gives equal weights; 1 gives each class the same total weight.

    Returns:
      float32[K], summing to 1.
    """
    weights = (1.0 / (jnp.asarray(counts, jnp.float32) + 1e-10)) ** power
    return weights / weights.sum()


def describe_clusters(counts: np.ndarray) -> str:
    """Return MMSelfSup's log line about the cluster sizes int[K].

    >>> describe_clusters(np.array([0, 2, 5]))
    'empty_num: 1\\tmin_cluster: 0\\tmax_cluster:5'
    """
    return (
        f"empty_num: {(counts == 0).sum()}\tmin_cluster: {counts.min()}\tmax_cluster:{counts.max()}"
    )


def _whiten(features: np.ndarray, pca_dim: int, seed: int, owner: str) -> np.ndarray:
    """Return whitened principal components, or with `pca_dim=-1` the features, with an L2 norm
    of 1.
    """
    from sklearn.decomposition import PCA

    num_samples, num_features = features.shape
    if pca_dim > min(features.shape):
        raise ConfigError(
            f"{owner}: `pca_dim` must be at most {min(features.shape)} for {num_samples} samples "
            f"of {num_features} features, got {pca_dim}; -1 skips the reduction"
        )
    if pca_dim != -1:
        features = PCA(pca_dim, whiten=True, random_state=seed).fit_transform(features)
    # Unit vectors: Euclidean k-means then compares by cosine, as the losses do.
    return features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-10)


def _distribute_singletons(clusters: np.ndarray, neighbors: np.ndarray) -> np.ndarray:
    """Move each sample that is alone to the cluster with the closest neighbor that is not, if
    there is one.
    """
    sizes = np.bincount(clusters, minlength=len(clusters))
    is_alone = sizes[clusters] == 1
    can_join = ~is_alone[neighbors]
    closest_neighbor = neighbors[np.arange(len(clusters)), can_join.argmax(axis=1)]
    return np.where(is_alone & can_join.any(axis=1), clusters[closest_neighbor], clusters)


def _number_by_size(clusters: np.ndarray, features: np.ndarray, k: int) -> np.ndarray:
    """Return clusters by decreasing size, 0 to k - 1.

    Samples of others join the one with the closest mean.
    """
    _, indices, counts = np.unique(clusters, return_inverse=True, return_counts=True)
    ranks = np.empty(len(counts), np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    labels = ranks[indices]
    if (rest := labels >= k).any():
        means = np.stack([features[labels == label].mean(axis=0) for label in range(k)])
        products = features[rest] @ means.T
        # the squared distance less |x|^2
        labels[rest] = np.argmin((means**2).sum(axis=1) - 2 * products, axis=1)
    return labels
