"""Clusters of features, on the host, and what training needs to know of them."""

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
    """k-means on whitened, normalised features, by scikit-learn.

    Source: Caron et al., Deep Clustering for Unsupervised Learning of Visual Features, 2018, arXiv:1807.05520.

    Args:
      k: number of clusters.
      pca_dim: features are first reduced to that many whitened principal components; -1: they are taken as they are.
      max_iter: iterations at most.
    """

    k: int
    pca_dim: int = 256
    max_iter: int = 20

    def __call__(self, features: np.ndarray, seed: int) -> np.ndarray:
        """Clusters of samples.

        Args:
          features: float[N, D].
          seed: of the centroids to begin with.

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
        if len(features) < self.k:
            raise ConfigError(f"Kmeans: {len(features)} samples are fewer than the k={self.k} clusters wanted")
        if self.pca_dim > min(features.shape):
            raise ConfigError(
                f"Kmeans: pca_dim={self.pca_dim} is more than {features.shape[0]} samples of {features.shape[1]} "
                "features have; -1 takes the features as they are"
            )
        if self.pca_dim != -1:
            features = PCA(self.pca_dim, whiten=True, random_state=seed).fit_transform(features)
        features = features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-10)
        kmeans = KMeans(self.k, init="random", n_init=1, max_iter=self.max_iter, random_state=seed)
        return kmeans.fit_predict(features).astype(np.int64)


_KINDS = {"Kmeans": Kmeans}


def build_clustering(cfg: Mapping[str, Any]) -> Kmeans:
    """The clustering that a config describes: `dict(type='Kmeans', k=...)`.

    Raises:
      ConfigError: an unknown type. TypeError: arguments that it does not take, or that it lacks.
    """
    arguments = {**cfg}
    kind = arguments.pop("type", "Kmeans")
    if kind not in _KINDS:
        raise ConfigError(f"no clustering is called {kind!r}{closest(kind, _KINDS)}")
    check_arguments(_KINDS[kind], arguments)
    return _KINDS[kind](**arguments)


def class_weights(counts: Any, power: float) -> jax.Array:
    """Weights of classes that fall with their size: `(1 / count) ** power`, summing to 1. Works under `jit`.

    Args:
      counts: int[K], samples of each class. An empty class gets nearly all the weight.
      power: 0: all alike; 1: every class weighs the same in all.

    Returns:
      float32[K].
    """
    weights = (1.0 / (jnp.asarray(counts, jnp.float32) + 1e-10)) ** power
    return weights / weights.sum()


def describe_clusters(counts: np.ndarray) -> str:
    """One line for the log, in MMSelfSup's form: how many clusters are empty, and the least and largest size.

    Args:
      counts: int[K], samples of each cluster.
    """
    return f"empty_num: {(counts == 0).sum()}\tmin_cluster: {counts.min()}\tmax_cluster:{counts.max()}"
