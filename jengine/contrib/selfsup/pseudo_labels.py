"""Training on labels that clustering gives: a dataset that takes them, and a sampler that visits all of them alike."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jengine.data.samplers import DefaultSampler
from jengine.registry import DATA_SAMPLERS, DATASETS


@DATASETS.register_module()
class PseudoLabelDataset:
    """Another dataset whose samples, dicts, also have `pseudo_label`: int32[] and their place `index`: int32[].

    Args:
      dataset: the dataset, or its config.

    Attributes:
      pseudo_labels: int32[N], -1 until there are any.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = DATASETS.build(dataset) if hasattr(dataset, "items") else dataset
        self.metainfo = getattr(self.dataset, "metainfo", {})
        self.pseudo_labels = np.full(len(self.dataset), -1, np.int32)

    def assign_labels(self, labels: Sequence[int] | np.ndarray) -> None:
        """Takes the labels of all samples: int[N], in their order.

        Raises:
          AssertionError: there are more or fewer of them than samples.
        """
        if len(labels) != len(self):
            raise AssertionError(f"PseudoLabelDataset has {len(self)} samples, found {len(labels)} labels")
        self.pseudo_labels = np.asarray(labels).astype(np.int32)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._labelled(self.dataset[index], np.int32(index))

    def __getitems__(self, indices: np.ndarray) -> Any:
        if not hasattr(self.dataset, "__getitems__"):
            return [self[index] for index in indices]
        found = self.dataset.__getitems__(indices)
        if isinstance(found, list):
            return [self._labelled(sample, np.int32(i)) for sample, i in zip(found, indices, strict=True)]
        return self._labelled(found, np.asarray(indices, np.int32))

    def _labelled(self, sample: Any, index: Any) -> dict[str, Any]:
        return {**sample, "pseudo_label": self.pseudo_labels[index], "index": index}


@DATA_SAMPLERS.register_module()
class DeepClusterSampler(DefaultSampler):
    """Each sample once per epoch, except in epochs for which all labels are to be visited equally often.

    Arguments are those of `DefaultSampler`.
    """

    _uniform: tuple[int, np.ndarray, int] | None = None

    def set_uniform_indices(self, labels: np.ndarray, num_classes: int, epoch: int | None = None) -> None:
        """Has one epoch visit all labels alike.

        Args:
          labels: int[N], the labels of all samples.
          num_classes: how many labels there are.
          epoch: which epoch; None: the next that is iterated.
        """
        self._uniform = (self.epoch if epoch is None else epoch, np.asarray(labels), num_classes)

    @property
    def repeats(self) -> bool:
        """Whether all epochs are alike: never, one may be uniform."""
        return False

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of `epoch` before it is shared out: int64[size]."""
        if self._uniform is None or self._uniform[0] != epoch:
            return super().permutation(epoch)
        _, labels, num_classes = self._uniform
        bits = np.random.MT19937(np.random.SeedSequence((self.seed % 2**64, epoch)))
        return uniform_indices(labels, num_classes, np.random.RandomState(bits))


def uniform_indices(labels: np.ndarray, num_classes: int, rng: np.random.RandomState) -> np.ndarray:
    """As many indices as there are samples, equally many (but for a rest) of each label that occurs.

    Samples of a small class are drawn again and again, those of a large one at most once.

    Args:
      labels: int[N].
      num_classes: how many labels there are.
      rng: draws and shuffles.

    Returns:
      int64[N], in random order.
    """
    share = len(labels) // num_classes + 1
    drawn = []
    for label in range(num_classes):
        members = np.flatnonzero(labels == label)
        if len(members):
            drawn.append(rng.choice(members, share, replace=len(members) <= share))
    order = np.concatenate(drawn)
    rng.shuffle(order)
    return np.resize(order, len(labels))
