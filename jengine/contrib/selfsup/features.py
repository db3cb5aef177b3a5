"""Extract the features of a whole dataset, and measure how well they separate its classes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.contrib.selfsup.model_entries import drop_replica_axis
from jengine.data import DataLoader
from jengine.data.masking import get_mask
from jengine.errors import ArgumentError
from jengine.hooks.runner_protocol import Runner

PyTree = Any


class FeatureExtractor:
    """Run a model over a loader in inference mode and collect its features on the host.

    The features are the entry `features` f32[B, ...] of the model's predictions, flattened. Every process reads all
    the data and computes the same features, which needs no communication.

    Args:
      model: a model whose `predict` returns a dict with `features`.
    """

    def __init__(self, model: Any) -> None:
        self._predict = jax.jit(lambda params, model_state, batch: _predict_features(model, params, model_state, batch))

    def __call__(self, params: PyTree, model_state: PyTree, loader: Any) -> np.ndarray:
        """Return the features f32[N, D] of the loader's samples, in order and without padding.

        Args:
          params: the parameters.
          model_state: the model's state.
          loader: yields the batches in order; padded examples are those that are False in a batch's mask.

        Raises:
          ArgumentError: the predictions have no features.
        """
        features = []
        for batch in loader:
            predicted = np.asarray(self._predict(params, model_state, batch))
            mask = get_mask(batch)
            features.append(predicted if mask is None else predicted[np.asarray(mask)])
        return np.concatenate(features)


def extract_features(model: Any, params: PyTree, model_state: PyTree, loader: Any) -> np.ndarray:
    """Return the features f32[N, D] of a loader's samples; see `FeatureExtractor`."""
    return FeatureExtractor(model)(params, model_state, loader)


def knn_accuracy(
    features: np.ndarray, labels: np.ndarray, test_features: np.ndarray, test_labels: np.ndarray, k: int = 5
) -> float:
    """Return the accuracy of a majority vote of the k nearest neighbors.

    Args:
      features: float[N, D], features of the labeled samples.
      labels: int[N].
      test_features: float[M, D].
      test_labels: int[M].
      k: number of neighbors.

    Raises:
      ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.neighbors import KNeighborsClassifier
    except ImportError as error:
        raise ImportError("knn_accuracy uses scikit-learn: pip install 'jengine[examples]'") from error
    return float(KNeighborsClassifier(k).fit(features, labels).score(test_features, test_labels))


def projection_accuracy(
    samples: np.ndarray,
    labels: np.ndarray,
    test_samples: np.ndarray,
    test_labels: np.ndarray,
    size: int,
    k: int = 5,
    repeats: int = 10,
) -> float:
    """Return `knn_accuracy` of random projections, the baseline for learned features of the same size.

    Args:
      samples: float[N, ...], flattened here.
      labels: int[N].
      test_samples: float[M, ...].
      test_labels: int[M].
      size: dimension that samples are projected to, by a matrix of normal numbers.
      k: number of neighbors.
      repeats: number of matrices to average over.
    """
    flat, test_flat = samples.reshape(len(samples), -1), test_samples.reshape(len(test_samples), -1)
    accuracies = []
    for seed in range(repeats):
        matrix = np.random.RandomState(seed).randn(flat.shape[1], size) / size**0.5
        accuracies.append(knn_accuracy(flat @ matrix, labels, test_flat @ matrix, test_labels, k))
    return float(np.mean(accuracies))


def compare_features(runner: Runner, train: Any, test: Any) -> tuple[float, float]:
    """Compare a trained model's features with random projections, by the accuracy of their nearest neighbors.

    Args:
      runner: a runner after training, whose model predicts `features`.
      train: an `ArrayDataset` of `image` and `label`, the labeled samples.
      test: another one, whose labels are predicted.

    Returns:
      `knn_accuracy` of the features, and `projection_accuracy` of the pixels with the same dimension.

    Raises:
      ValueError: the runner has no state.
    """
    state = runner.state
    if state is None:
        raise ValueError("compare_features: `runner` must be trained, got one without a state; call runner.train()")
    extract, strategy = FeatureExtractor(runner.model), runner.strategy
    model_state = drop_replica_axis(strategy.mean_over_replicas(state.model_state), strategy)
    features, test_features = (
        extract(state.params, model_state, DataLoader(dataset, 256)) for dataset in (train, test)
    )
    labels, test_labels = train.arrays["label"], test.arrays["label"]
    learned = knn_accuracy(features, labels, test_features, test_labels)
    images, test_images = train.arrays["image"], test.arrays["image"]
    return learned, projection_accuracy(images, labels, test_images, test_labels, features.shape[1])


def _predict_features(model: Any, params: PyTree, model_state: PyTree, batch: PyTree) -> jax.Array:
    predictions = model.predict(params, model_state, batch)
    if not isinstance(predictions, dict) or "features" not in predictions:
        actual = sorted(predictions) if isinstance(predictions, dict) else type(predictions).__name__
        raise ArgumentError(f"{type(model).__name__}.predict must return a dict with 'features', got {actual}")
    features = predictions["features"]
    return features.reshape(features.shape[0], -1).astype(jnp.float32)
