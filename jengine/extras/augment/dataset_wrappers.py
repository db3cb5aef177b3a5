"""Datasets made from others: one after the other, repeated, balanced over classes, or mixed with
weights.
"""

import collections
import copy
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Self

import numpy as np

from jengine.config.annotations import ConfigOf, Count, Fraction, NonNegative, is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import DATASETS
from jengine.data.host_entries import Sample
from jengine.data.pipeline import at_epoch, fold_in

DatasetConfig = Annotated[Any, ConfigOf(DATASETS)]


class _Wrapper:
    """Dataset whose sample i is a sample of another one, maybe read in another epoch.

    The random transforms of each inner dataset draw numbers of their own.

    Attributes:
      datasets: the inner datasets.
    """

    datasets: list[Any]
    _epoch = 0
    _parts: tuple[int, ...] = ()

    @property
    def metainfo(self) -> dict[str, Any]:
        """The facts about the first inner dataset."""
        return _metainfo(self.datasets[0])

    @property
    def dataset(self) -> Any:
        """The inner dataset, if there is one: the way to its `pipeline`, which hooks change."""
        if len(self.datasets) != 1:
            raise AttributeError(
                f"{type(self).__name__} has {len(self.datasets)} datasets: see `datasets`"
            )
        return self.datasets[0]

    def _locate(self, idx: int) -> tuple[int, int, int]:
        """Return the dataset, the index in it, and the epoch, which varies the random numbers of
        a repeated sample.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, idx: int) -> Sample:
        number, index, epoch = self._locate(self._check(idx))
        return fold_in(at_epoch(self.datasets[number], epoch), *self._parts, number)[index]

    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Return a sample's record, from the inner dataset's `get_data_info`."""
        number, index, _ = self._locate(self._check(idx))
        return {**self.datasets[number].get_data_info(index), "sample_idx": idx % len(self)}

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return a sample's classes, from the inner dataset's `get_cat_ids`."""
        number, index, _ = self._locate(self._check(idx))
        return self.datasets[number].get_cat_ids(index)

    def at_epoch(self, epoch: int) -> Self:
        """Return this dataset with the random numbers for `epoch`; called by the loader."""
        dataset = copy.copy(self)  # this one may be read by other threads
        dataset._epoch = epoch
        return dataset

    def fold_in(self, *parts: int) -> Self:
        """Return this dataset with other random numbers; called by a dataset around it."""
        dataset = copy.copy(self)
        dataset._parts = (*self._parts, *parts)
        return dataset

    def full_init(self) -> None:
        """Read what the inner datasets have left for later (`lazy_init`)."""
        for dataset in self.datasets:
            if hasattr(dataset, "full_init"):
                dataset.full_init()

    def _check(self, idx: int) -> int:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"the dataset has {len(self)} samples, got the index {idx}")
        return idx % len(self)


@DATASETS.register_module()
class ConcatDataset(_Wrapper):
    """Datasets one after the other.

    >>> from jengine.data.datasets import ArrayDataset
    >>> both = ConcatDataset([ArrayDataset({"x": np.arange(2)}), ArrayDataset({"x": np.arange(3)})])
    >>> len(both), int(both[2]["x"])
    (5, 0)

    Args:
      datasets: the datasets, or configs for them.
      lazy_init: as in MMEngine: leave the inner annotations for later. The metainfo is then
        compared as far as it is known.
      ignore_keys: metainfo keys that may differ; the others must be equal.

    Raises:
      ConfigError: no dataset, or one with another metainfo than the first.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetConfig],
        lazy_init: bool = False,
        ignore_keys: str | Sequence[str] | None = None,
    ) -> None:
        self.datasets = _build_all(datasets)
        if not self.datasets:
            raise ConfigError("ConcatDataset: `datasets` must have at least one dataset, got none")
        if not lazy_init:
            self.full_init()
        ignored = {ignore_keys} if isinstance(ignore_keys, str) else set(ignore_keys or ())
        # Class names by index: with other classes, labels of the datasets would mean different
        # things.
        expected = {name: value for name, value in self.metainfo.items() if name not in ignored}
        for i, dataset in enumerate(self.datasets):
            found = {
                name: value for name, value in _metainfo(dataset).items() if name not in ignored
            }
            if not _equal(found, expected):
                names = sorted(
                    k for k in {**found, **expected} if not _equal(found.get(k), expected.get(k))
                )
                raise ConfigError(
                    "ConcatDataset: all datasets must have the metainfo of the first, got another "
                    f"{', '.join(names)} in datasets[{i}]; `ignore_keys` names what may differ"
                )

    @functools.cached_property
    def cumulative_sizes(self) -> list[int]:
        """Sample count up to and including each dataset."""
        return list(itertools.accumulate(map(len, self.datasets)))

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def _locate(self, idx: int) -> tuple[int, int, int]:
        number = int(np.searchsorted(self.cumulative_sizes, idx, side="right"))
        return number, idx - (self.cumulative_sizes[number - 1] if number else 0), self._epoch


@DATASETS.register_module()
class RepeatDataset(_Wrapper):
    """Dataset that is read several times in an epoch, with other random transforms each time.

    >>> from jengine.data.datasets import ArrayDataset
    >>> [int(sample["x"]) for sample in RepeatDataset(ArrayDataset({"x": np.arange(2)}), times=2)]
    [0, 1, 0, 1]

    Args:
      dataset: the dataset, or a config for it.
      times: how often it is read.
      lazy_init: as in MMEngine: leave the annotations of the dataset for later.
    """

    def __init__(self, dataset: DatasetConfig, times: Count, lazy_init: bool = False) -> None:
        self.datasets = _build_all([dataset], "dataset")
        self.times = times
        if not lazy_init:
            self.full_init()

    def __len__(self) -> int:
        return self.times * len(self.datasets[0])

    def _locate(self, idx: int) -> tuple[int, int, int]:
        repetition, index = divmod(idx, len(self.datasets[0]))
        return 0, index, self._epoch * self.times + repetition


@DATASETS.register_module()
class ClassBalancedDataset(_Wrapper):
    """Dataset in which samples with rare classes are repeated.

    A class in a fraction f of the samples has the factor max(1, sqrt(oversample_thr / f)); a sample
    is repeated by the greatest factor among its classes, rounded up. The dataset must have
    `get_cat_ids(index)`, a sample's classes.

    >>> class Pets:
    ...     def __len__(self):
    ...         return 4
    ...
    ...     def __getitem__(self, i):
    ...         return i
    ...
    ...     def get_cat_ids(self, i):
    ...         return [int(i == 3)]
    >>> list(ClassBalancedDataset(Pets(), oversample_thr=0.5))  # class 1 is in a quarter
    [0, 1, 2, 3, 3]

    Args:
      dataset: the dataset, or a config for it.
      oversample_thr: sample fraction below which a class is repeated.
      lazy_init: as in MMEngine: leave the annotations of the dataset for later.

    Raises:
      ConfigError: a dataset without `get_cat_ids`.

    Source: Gupta et al., LVIS, arXiv:1908.03195, appendix B.
    """

    def __init__(
        self, dataset: DatasetConfig, oversample_thr: Fraction, lazy_init: bool = False
    ) -> None:
        self.datasets = _build_all([dataset], "dataset")
        self.oversample_thr = oversample_thr
        if not hasattr(self.datasets[0], "get_cat_ids"):
            raise ConfigError(
                "ClassBalancedDataset: `dataset` must have get_cat_ids(index), the classes of a "
                f"sample, got a {type(self.datasets[0]).__name__}"
            )
        if not lazy_init:
            self.full_init()
            _ = self.repeat_indices

    @functools.cached_property
    def repeat_indices(self) -> list[int]:
        """The index in the inner dataset for each sample."""
        self.full_init()
        dataset = self.datasets[0]
        classes = [set(dataset.get_cat_ids(i)) for i in range(len(dataset))]
        counts = collections.Counter(itertools.chain.from_iterable(classes))
        total = len(dataset)
        # Gupta et al., LVIS (2019): the square root of threshold over frequency, and no class less
        # often than it is.
        factors = {
            c: max(1.0, math.sqrt(self.oversample_thr * total / count))
            for c, count in counts.items()
        }
        # A sample with several classes follows its rarest one.
        repeats = [math.ceil(max((factors[c] for c in each), default=1.0)) for each in classes]
        return [index for index, times in enumerate(repeats) for _ in range(times)]

    @functools.cached_property
    def _copies(self) -> np.ndarray:
        """The number of each sample among its repetitions, from 0."""
        indices = np.asarray(self.repeat_indices)
        # less the place of the first of them
        return np.arange(len(indices)) - np.searchsorted(indices, indices)

    def __len__(self) -> int:
        return len(self.repeat_indices)

    def _locate(self, idx: int) -> tuple[int, int, int]:
        epoch = self._epoch * (int(self._copies.max()) + 1) + int(self._copies[idx])
        return 0, self.repeat_indices[idx], epoch


@DATASETS.register_module()
class MixedDataset(_Wrapper):
    """Weighted dataset mixture: each epoch has them in fixed proportions, by grain's
    `MapDataset.mix`.

    Each dataset is shuffled and repeated on its own, and an epoch continues where the last one
    ended, so that a large dataset is read whole over several epochs. A sample that is repeated
    within an epoch has other random transforms each time.

    >>> from jengine.data.datasets import ArrayDataset
    >>> few, many = ArrayDataset({"x": np.zeros(10)}), ArrayDataset({"x": np.ones(90)})
    >>> mixed = MixedDataset([few, many], weights=[0.5, 0.5], length=20)
    >>> sum(mixed[i]["x"].item() for i in range(20))
    10.0

    Args:
      datasets: the datasets, or configs for them.
      weights: the share per dataset, up to a common factor.
      length: samples in an epoch; None until the first dataset has been read.
      seed: seed for the order within each dataset.

    Raises:
      ConfigError: another number of weights than datasets, or weights without a positive sum.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetConfig],
        weights: Sequence[NonNegative],
        length: Count | None = None,
        seed: int = 0,
    ) -> None:
        import grain

        self.datasets = _build_all(datasets)
        if len(weights) != len(self.datasets) or sum(weights) <= 0:
            raise ConfigError(
                f"MixedDataset: `weights` must be {len(self.datasets)} numbers, one for each "
                f"dataset, with a sum above 0, got {list(weights)}"
            )
        self.full_init()
        shares = [weight / sum(weights) for weight in weights]
        used = [i for i, share in enumerate(shares) if share > 0]
        # grain mixes indices, not samples: a transform then sees its own index and epoch
        ranges = [
            grain.MapDataset.range(len(self.datasets[i])).shuffle(seed=seed + i) for i in used
        ]
        endless = [
            each.repeat().map_with_index(functools.partial(_place, i, len(each)))
            for i, each in zip(used, ranges, strict=True)
        ]
        self._mix: Any = grain.MapDataset.mix(endless, weights=[shares[i] for i in used])
        self._length = length or max(
            1, math.floor(min(len(self.datasets[i]) / shares[i] for i in used))
        )

    def __len__(self) -> int:
        return self._length

    def _locate(self, idx: int) -> tuple[int, int, int]:
        place: tuple[int, int, int] = self._mix[self._epoch * self._length + idx]
        return place


def _place(number: int, size: int, position: int, index: int) -> tuple[int, int, int]:
    """Return the dataset, the index in it, and the pass over it; an epoch may have several."""
    return number, int(index), position // size


def _build_all(datasets: Sequence[Any], name: str = "datasets") -> list[Any]:
    built = []
    for i, dataset in enumerate(datasets):
        with config_path(*([name, i] if name == "datasets" else [name])):
            built.append(
                DATASETS.build(dataset)
                if isinstance(dataset, str) or is_mapping(dataset)
                else dataset
            )
            if not hasattr(built[-1], "__getitem__"):
                raise TypeError(f"`{name}` must have datasets or their configs, got {built[-1]!r}")
    return built


def _metainfo(dataset: Any) -> dict[str, Any]:
    # optional in datasets of users
    return copy.deepcopy(dict(getattr(dataset, "metainfo", None) or {}))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if is_mapping(one) and is_mapping(other):
        return one.keys() == other.keys() and all(
            _equal(value, other[name]) for name, value in one.items()
        )
    return bool(one == other)
