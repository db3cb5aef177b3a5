"""Transforms of samples on the host, and a dataset whose samples go through them."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from jengine.annotations import ConfigOf
from jengine.errors import config_path
from jengine.registry import DATASETS, TRANSFORMS

Transform = Callable[..., Any]  # sample -> sample, or (sample, rng) -> sample


class Pipeline:
    """Transforms, one after the other.

    Args:
      transforms: each a function of the sample, or of the sample and `rng`, an `np.random.RandomState`; a config of one
        that is registered in TRANSFORMS; or a list of such. None is no transform.

    Raises:
      TypeError: something else.
    """

    def __init__(self, transforms: Any = None) -> None:
        if isinstance(transforms, Pipeline):
            transforms = transforms.transforms
        if transforms is None or callable(transforms) or hasattr(transforms, "items"):
            transforms = [] if transforms is None else [transforms]
        if not isinstance(transforms, Sequence) or isinstance(transforms, str):
            raise TypeError(f"a pipeline is a list of transforms, found {type(transforms).__name__}: {transforms!r}")
        self.transforms: list[Transform] = []
        for i, entry in enumerate(transforms):
            with config_path(i):
                built = TRANSFORMS.build(entry) if hasattr(entry, "items") else entry
                if not callable(built):
                    raise TypeError(f"a transform is a function of a sample, or a config of one, found {built!r}")
                self.transforms.append(built)
        self._random = [_wants_rng(transform) for transform in self.transforms]

    @property
    def is_random(self) -> bool:
        """Whether a transform draws random numbers."""
        return any(self._random)

    def __call__(self, sample: Any, rng: np.random.RandomState | None = None) -> Any:
        """The sample transformed; `rng` is for the transforms that draw."""
        for transform, draws in zip(self.transforms, self._random, strict=True):
            sample = transform(sample, rng) if draws else transform(sample)
        return sample

    def __repr__(self) -> str:
        return f"Pipeline({self.transforms})"


@DATASETS.register_module()
class TransformedDataset:
    """Another dataset whose samples go through a pipeline when they are read.

    What a transform draws is a function of the seed, the epoch and the sample, so that a resumed run reads the same,
    however many processes and workers do it.

    Args:
      dataset: the dataset, or its config.
      pipeline: the transforms; see `Pipeline`.
      seed: of what transforms draw.

    Attributes:
      pipeline: the `Pipeline`; another one holds from the next batch that is read on, but not for workers and threads
        that read ahead already: `close` the loader to end those.
    """

    def __init__(self, dataset: Annotated[Any, ConfigOf(DATASETS)], pipeline: Any = None, seed: int = 0) -> None:
        with config_path("dataset"):
            self.dataset = DATASETS.build(dataset) if isinstance(dataset, str) or hasattr(dataset, "items") else dataset
        with config_path("pipeline"):
            self.pipeline = Pipeline(pipeline)
        self.metainfo = getattr(self.dataset, "metainfo", {})
        self.seed = seed
        self._epoch = 0

    def at_epoch(self, epoch: int) -> "TransformedDataset":
        """This dataset with what its transforms draw in `epoch`; a loader asks for it."""
        if not self.pipeline.is_random:
            return self
        other = copy.copy(self)
        other._epoch = epoch
        return other

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        rng = None
        if self.pipeline.is_random:
            seeds = np.random.SeedSequence((self.seed % 2**64, self._epoch, int(index)))
            rng = np.random.RandomState(np.random.MT19937(seeds))  # its stream is the same in every NumPy release
        return self.pipeline(self.dataset[index], rng)


def _wants_rng(transform: Transform) -> bool:
    try:
        return "rng" in inspect.signature(transform).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return False
