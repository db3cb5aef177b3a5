"""Features of a whole dataset, and how well its classes lie apart in them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.hooks.runner_protocol import Runner

PyTree = Any


class FeatureExtractor:
    """Runs a model over a loader in inference mode and collects its features on the host.

    The features are the entry `features` f32[B, ...] of the model's predictions, flattened. Every process reads all
    the data and gets the same features, so that nothing has to be sent around.

    Args:
      model: a model whose `predict` returns a dict with `features`.
    """

    def __init__(self, model: Any) -> None:
        self._predict = jax.jit(lambda params, model_state, batch: _features(model, params, model_state, batch))

    def __call__(self, params: PyTree, model_state: PyTree, loader: Any) -> np.ndarray:
        """The features f32[N, D] of the loader's samples, in their order, without padding.

        Args:
          params: the parameters.
          model_state: the model's state.
          loader: gives the batches in order; in a batch with `mask`, only the real rows count.

        Raises:
          AssertionError: the predictions have no features.
        """
        rows = []
        for batch in loader:
            found = np.asarray(self._predict(params, model_state, batch))
            mask = batch.get("mask") if hasattr(batch, "get") else None
            rows.append(found if mask is None else found[np.asarray(mask)])
        return np.concatenate(rows)


def extract_features(model: Any, params: PyTree, model_state: PyTree, loader: Any) -> np.ndarray:
    """The features f32[N, D] of a loader's samples, once; see `FeatureExtractor`."""
    return FeatureExtractor(model)(params, model_state, loader)


def knn_accuracy(
    features: np.ndarray, labels: np.ndarray, test_features: np.ndarray, test_labels: np.ndarray, k: int = 5
) -> float:
    """How often the majority of the k nearest neighbours has the right label.

    Args:
      features: float[N, D], of the samples with known labels.
      labels: int[N].
      test_features: float[M, D].
      test_labels: int[M].
      k: neighbours that vote.

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
    """What learned features are to be compared with: `knn_accuracy` of random projections to as many numbers.

    Args:
      samples: float[N, ...], flattened here.
      labels: int[N].
      test_samples: float[M, ...].
      test_labels: int[M].
      size: numbers that each sample is projected to, by a matrix of normal numbers.
      k: neighbours that vote.
      repeats: matrices over which the accuracy is averaged.
    """
    known, asked = samples.reshape(len(samples), -1), test_samples.reshape(len(test_samples), -1)
    found = []
    for seed in range(repeats):
        matrix = np.random.RandomState(seed).randn(known.shape[1], size) / size**0.5
        found.append(knn_accuracy(known @ matrix, labels, asked @ matrix, test_labels, k))
    return float(np.mean(found))


def _features(model: Any, params: PyTree, model_state: PyTree, batch: PyTree) -> jax.Array:
    predictions = model.predict(params, model_state, batch)
    if not isinstance(predictions, dict) or "features" not in predictions:
        found = sorted(predictions) if isinstance(predictions, dict) else type(predictions).__name__
        raise AssertionError(
            f"features are the entry 'features' of the model's predictions; {type(model).__name__}.predict gave {found}"
        )
    features = predictions["features"]
    return features.reshape(features.shape[0], -1).astype(jnp.float32)


def compare_features(runner: Runner, train: Any, test: Any) -> tuple[float, float]:
    """What a trained model's features are worth: the accuracy of their neighbours, and that of random projections.

    Args:
      runner: after training; its model predicts `features`.
      train: an `ArrayDataset` of `image` and `label`, whose labels are known.
      test: another, whose labels are asked for.

    Returns:
      `knn_accuracy` of the features, and `projection_accuracy` of the pixels in as many dimensions.

    Raises:
      ValueError: the runner has no state.
    """
    from jengine.data import DataLoader

    state = runner.state
    if state is None:
        raise ValueError("compare_features: the runner must be trained, found no state; call runner.train() first")
    known, asked = (
        extract_features(runner.model, state.params, state.model_state, DataLoader(data, 256)) for data in (train, test)
    )
    labels = train.arrays["label"], test.arrays["label"]
    learned = knn_accuracy(known, labels[0], asked, labels[1])
    images = train.arrays["image"], test.arrays["image"]
    return learned, projection_accuracy(images[0], labels[0], images[1], labels[1], known.shape[1])
