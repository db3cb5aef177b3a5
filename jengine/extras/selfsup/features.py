"""Features for a whole dataset, and measures for how well they separate the classes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.annotations import checked
from jengine.config.errors import ArgumentError, ConfigError, config_path, require_extra
from jengine.data.build import build_dataloader
from jengine.data.datasets import ArrayDataset
from jengine.data.loader import DataLoader
from jengine.data.masking import get_mask
from jengine.extras.selfsup.model_entries import drop_replica_axis
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import Model, ModelState, PyTree, predict_with_key, prediction_key

_AVERAGE = {"type": "AvgPool2d", "output_size": 1}


def _build_extract(
    model: Model, is_pooled: bool = False
) -> Callable[[PyTree, ModelState, Iterable[PyTree]], np.ndarray]:
    """Build `extract(params, model_state, loader)`, which collects the features f32[N, D] on the
    host.

    The features are the entry `features` f32[B, ...] in the model's predictions, in loader order,
    flattened and without padding; with `is_pooled`, means of [B, H, W, C] over H and W. Every
    process reads all the data and computes the same features, which needs no communication.
    """

    @jax.jit
    def predict(params: PyTree, model_state: ModelState, batch: PyTree) -> jax.Array:
        predictions = predict_with_key(model, params, model_state, batch, prediction_key(0, 0))
        if not isinstance(predictions, dict) or "features" not in predictions:
            actual = (
                sorted(predictions) if isinstance(predictions, dict) else type(predictions).__name__
            )
            raise ArgumentError(
                f"{type(model).__name__}.predict must return a dict with 'features', got {actual}"
            )
        features = predictions["features"]
        # On the device: a feature map is 49 times as large as its mean, and each batch is
        # transferred.
        features = features.mean(axis=(1, 2)) if is_pooled and features.ndim == 4 else features
        return features.reshape(features.shape[0], -1).astype(jnp.float32)

    def extract(params: PyTree, model_state: ModelState, loader: Iterable[PyTree]) -> np.ndarray:
        features = []
        for batch in loader:
            predicted = np.asarray(predict(params, model_state, batch))
            mask = get_mask(batch)
            # Padded examples would be clustered as if they were data.
            features.append(predicted if mask is None else predicted[np.asarray(mask)])
        return np.concatenate(features)

    return extract


@checked
class Extractor:
    """Feature extraction for a dataset with a run's model.

    >>> from jengine.data.datasets import ArrayDataset
    >>> from jengine.data.loader import DataLoader
    >>> extract = Extractor(DataLoader(ArrayDataset({"image": np.zeros((4, 8, 8, 1))}), 2))

    Args:
      extract_dataloader: loader over the samples in order, or a config for one.
      seed, dist_mode: MMSelfSup's arguments, which need no value: the loader does not shuffle, and
        every process computes all features.
      pool_cfg: None, or `dict(type='AvgPool2d', output_size=1)` for features [B, H, W, C], whose
        mean over H and W is taken; others are flattened.
    """

    def __init__(
        self,
        extract_dataloader: Iterable[PyTree],
        seed: int | None = None,
        dist_mode: bool = False,
        pool_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        if pool_cfg is not None and {"output_size": 1, **pool_cfg} != _AVERAGE:
            raise ConfigError(
                f"`Extractor.pool_cfg` must be None or {_AVERAGE}, got {dict(pool_cfg)}"
            )
        with config_path("extract_dataloader"):
            self._loader = build_dataloader(extract_dataloader, train=False)
        self._is_pooled = pool_cfg is not None
        self._model: Model | None = None

    def __call__(self, runner: RunnerProtocol) -> np.ndarray:
        """Return the features f32[N, D] of all samples, with the current weights, in inference
        mode.
        """
        state = runner.state
        strategy = runner.strategy
        if state is None:
            raise ValueError(
                "Extractor: `runner` must have a state, got one without; call runner.train() first"
            )
        # Compiled once for a model, and again for another runner that uses the same extractor.
        if self._model is not runner.model:
            self._model = runner.model
            self._extract = _build_extract(runner.model, self._is_pooled)
        model_state = drop_replica_axis(strategy.mean_over_replicas(state.model_state), strategy)
        return self._extract(state.params, model_state, self._loader)


def extract_features(
    model: Model, params: PyTree, model_state: ModelState, loader: Iterable[PyTree]
) -> np.ndarray:
    """Return the features f32[N, D] for a loader's samples, in order and without padding.

    The model's `predict` must return a dict with `features` f32[B, ...], which are flattened.
    """
    return _build_extract(model)(params, model_state, loader)


def knn_accuracy(
    features: np.ndarray,
    labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    k: int = 5,
) -> float:
    """Return the test accuracy of a majority vote among the k nearest neighbors.

    Args:
      features, test_features: float[N, D] and float[M, D].
      labels, test_labels: int[N] and int[M].
      k: number of neighbors.
    """
    with require_extra("examples", "knn_accuracy requires scikit-learn"):
        from sklearn.neighbors import KNeighborsClassifier
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
    """Return `knn_accuracy` for random projections, the baseline for learned features of the same
    size.

    Args:
      samples, test_samples: float[N, ...] and float[M, ...], flattened here.
      labels, test_labels: int[N] and int[M].
      size: dimension that samples are projected to, by a matrix of normal numbers.
      k: number of neighbors.
      repeats: number of matrices to average over.
    """
    flat = samples.reshape(len(samples), -1)
    test_flat = test_samples.reshape(len(test_samples), -1)
    accuracies = []
    for seed in range(repeats):
        # Random projections as the lower bound: an encoder must beat them to have learned anything.
        matrix = np.random.RandomState(seed).randn(flat.shape[1], size) / size**0.5
        accuracies.append(knn_accuracy(flat @ matrix, labels, test_flat @ matrix, test_labels, k))
    return float(np.mean(accuracies))


def compare_features(
    runner: RunnerProtocol, train: ArrayDataset, test: ArrayDataset
) -> tuple[float, float]:
    """Compare a trained model's features with random projections, by nearest neighbor accuracy.

    Args:
      runner: a runner after training, whose model predicts `features`.
      train, test: `ArrayDataset`s with `image` and `label`; the labels of the second one are
        predicted.

    Returns:
      `knn_accuracy` for the features, and `projection_accuracy` for the pixels with the same
      dimension.
    """
    features, test_features = (
        Extractor(DataLoader(dataset, 256))(runner) for dataset in (train, test)
    )
    labels = train.arrays["label"]
    test_labels = test.arrays["label"]
    learned = knn_accuracy(features, labels, test_features, test_labels)
    images = train.arrays["image"]
    test_images = test.arrays["image"]
    return learned, projection_accuracy(images, labels, test_images, test_labels, features.shape[1])
