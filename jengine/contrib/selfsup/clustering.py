"""Cluster features on the host, and derive class weights and log lines from the clusters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.errors import ConfigError, closest
from jengine.registry import check_arguments


@dataclasses.dataclass(frozen=True)
class Kmeans:
    """Run scikit-learn's k-means on whitened, L2-normalized features.

    Source: Caron et al., Deep Clustering for Unsupervised Learning of Visual Features, 2018, arXiv:1807.05520.

    Args:
      k: number of clusters.
      pca_dim: number of whitened principal components that features are first reduced to; -1 skips the reduction.
      max_iter: maximum number of iterations.
    """

    k: int
    pca_dim: int = 256
    max_iter: int = 20

    def __call__(self, features: np.ndarray, seed: int) -> np.ndarray:
        """Return the cluster of each sample.

        Args:
          features: float[N, D].
          seed: seed of the initial centroids.

        Returns:
          int64[N], 0 to k - 1.

        Raises:
          ValueError: fewer samples than clusters, or fewer features than principal components.
          ImportError: scikit-learn is not installed.
        """
        try:
            from sklearn.cluster import KMeans
            from sklearn.decomposition import PCA
        except ImportError as error:
            raise ImportError("Kmeans clusters with scikit-learn: pip install 'jengine[examples]'") from error
        num_samples, num_features = features.shape
        if num_samples < self.k:
            raise ConfigError(f"Kmeans: `k` must be at most the number of samples, {num_samples}, got {self.k}")
        if self.pca_dim > min(features.shape):
            raise ConfigError(
                f"Kmeans: `pca_dim` must be at most {min(features.shape)} for {num_samples} samples of {num_features} "
                f"features, got {self.pca_dim}; -1 skips the reduction"
            )
        if self.pca_dim != -1:
            features = PCA(self.pca_dim, whiten=True, random_state=seed).fit_transform(features)
        features = features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-10)
        kmeans = KMeans(self.k, init="random", n_init=1, max_iter=self.max_iter, random_state=seed)
        return kmeans.fit_predict(features).astype(np.int64)


_CLUSTERINGS = {"Kmeans": Kmeans}


def build_clustering(cfg: Mapping[str, Any]) -> Kmeans:
    """Build a clustering from its config, `dict(type='Kmeans', k=...)`.

    Raises:
      ConfigError: an unknown type. TypeError: unknown or missing arguments.
    """
    arguments = {**cfg}
    name = arguments.pop("type", "Kmeans")
    if name not in _CLUSTERINGS:
        raise ConfigError(f"`type` must be a clustering, got {name!r}{closest(name, _CLUSTERINGS)}")
    check_arguments(_CLUSTERINGS[name], arguments)
    return _CLUSTERINGS[name](**arguments)


def class_weights(counts: Any, power: float) -> jax.Array:
    """Return class weights that decrease with the class size: `(1 / count) ** power`, normalized. Works under `jit`.

    Args:
      counts: int[K], number of samples of each class. An empty class gets nearly all the weight.
      power: 0 gives equal weights; 1 gives each class the same total weight.

    Returns:
      float32[K], summing to 1.
    """
    weights = (1.0 / (jnp.asarray(counts, jnp.float32) + 1e-10)) ** power
    return weights / weights.sum()


def describe_clusters(counts: np.ndarray) -> str:
    """Return MMSelfSup's log line: the number of empty clusters, and the smallest and largest size.

    Args:
      counts: int[K], number of samples of each cluster.
    """
    return f"empty_num: {(counts == 0).sum()}\tmin_cluster: {counts.min()}\tmax_cluster:{counts.max()}"
