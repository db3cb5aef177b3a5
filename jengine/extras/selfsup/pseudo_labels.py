"""Cluster labels for training: a dataset that they are assigned to, and a sampler that balances
them.
"""

import copy
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from jengine.config.annotations import ConfigOf, is_mapping
from jengine.config.errors import ArgumentError
from jengine.config.registry import DATA_SAMPLERS, DATASETS
from jengine.data.pipeline import at_epoch, fold_in
from jengine.data.samplers import DefaultSampler, random_state


@DATASETS.register_module()
class PseudoLabelDataset:
    """Dataset of dicts that adds `pseudo_label`: int32[] and the sample index `index`: int32[] to
    another one.

    >>> from jengine.data.datasets import ArrayDataset
    >>> dataset = PseudoLabelDataset(ArrayDataset({"image": np.zeros((2, 8, 8))}))
    >>> dataset.assign_labels([3, 5])
    >>> int(dataset[1]["pseudo_label"])
    5

    Args:
      dataset: the other dataset, or a config for it.

    Attributes:
      pseudo_labels: int32[N], -1 before the first assignment.
    """

    def __init__(self, dataset: Annotated[Any, ConfigOf(DATASETS)]) -> None:
        self.dataset = DATASETS.build(dataset) if is_mapping(dataset) else dataset
        self.metainfo = getattr(self.dataset, "metainfo", {})  # optional in datasets of users
        self.pseudo_labels = np.full(len(self.dataset), -1, np.int32)

    def assign_labels(self, labels: Sequence[int] | np.ndarray) -> None:
        """Set the labels of all samples: int[N], in dataset order."""
        if len(labels) != len(self):
            raise ArgumentError(
                f"PseudoLabelDataset: `labels` must have {len(self)} entries, got {len(labels)}"
            )
        self.pseudo_labels = np.asarray(labels).astype(np.int32)

    def at_epoch(self, epoch: int) -> "PseudoLabelDataset":
        """Return this dataset with the random numbers for `epoch`; called by the loader."""
        dataset = copy.copy(self)  # this one may be read by other threads
        dataset.dataset = at_epoch(self.dataset, epoch)
        return dataset

    def fold_in(self, *parts: int) -> "PseudoLabelDataset":
        """Return this dataset with other random numbers; called by a dataset around it."""
        dataset = copy.copy(self)
        dataset.dataset = fold_in(self.dataset, *parts)
        return dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._add_label(self.dataset[index], np.int32(index))

    def __getitems__(self, indices: np.ndarray) -> Any:
        if not hasattr(self.dataset, "__getitems__"):
            return [self[index] for index in indices]
        samples = self.dataset.__getitems__(indices)
        if isinstance(samples, list):
            return [
                self._add_label(sample, np.int32(i))
                for sample, i in zip(samples, indices, strict=True)
            ]
        return self._add_label(samples, np.asarray(indices, np.int32))

    def _add_label(self, sample: Any, index: Any) -> dict[str, Any]:
        return {**sample, "pseudo_label": self.pseudo_labels[index], "index": index}


@DATA_SAMPLERS.register_module()
class DeepClusterSampler(DefaultSampler):
    """`DefaultSampler`, with the same arguments, that visits all labels equally often in epochs
    where it should.

    >>> sampler = DeepClusterSampler(np.zeros(6), shuffle=True, seed=0)
    >>> sampler.set_uniform_indices(np.array([0, 0, 0, 0, 0, 1]), num_classes=2)
    >>> bool((sampler.permutation(sampler.epoch) == 5).sum() > 1)
    True
    """

    _uniform: tuple[int, np.ndarray, int] | None = None

    def set_uniform_indices(
        self, labels: np.ndarray, num_classes: int, epoch: int | None = None
    ) -> None:
        """Visit all `num_classes` labels int[N] equally often in one epoch.

        None for the next one.
        """
        self._uniform = (self.epoch if epoch is None else epoch, np.asarray(labels), num_classes)

    @property
    def repeats(self) -> bool:
        """False: epochs differ, because any of them may be uniform."""
        return False

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the order in `epoch` before it is divided among processes: int64[size]."""
        if self._uniform is None or self._uniform[0] != epoch:
            return super().permutation(epoch)
        _, labels, num_classes = self._uniform
        return uniform_indices(labels, num_classes, random_state(self.seed, epoch))


def uniform_indices(labels: np.ndarray, num_classes: int, rng: np.random.RandomState) -> np.ndarray:
    """Return as many indices as there are samples, with equal shares (up to rounding) for all
    labels that occur.

    Samples in a small class are drawn repeatedly, those in a large class at most once. The order
    int64[N] is random.
    """
    share = len(labels) // num_classes + 1
    indices = []
    for label in range(num_classes):
        members = np.flatnonzero(labels == label)
        if len(members):
            # With repetition only in clusters that are smaller than their share.
            indices.append(rng.choice(members, share, replace=len(members) <= share))
    order = np.concatenate(indices)
    rng.shuffle(order)
    # As many as there are samples, so that the epoch keeps its length and the schedules theirs.
    return np.resize(order, len(labels))
