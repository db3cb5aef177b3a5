"""Transforms for samples on the host."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from jengine.config.annotations import ConfigOf
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import DATASETS, TRANSFORMS
from jengine.data.host_entries import Sample
from jengine.data.samplers import random_state

Transform = Callable[..., Any]  # sample -> sample; it may also take `rng` and `ctx`


class SampleContext(NamedTuple):
    """What a transform may read besides the sample.

    Attributes:
      length: the length that examples should have now (tokens, the side of an image), from the
        dataloader's `example_length`; None without one.
    """

    length: int | None = None


class Pipeline:
    """Pipeline of transforms, applied one after the other.

    >>> Pipeline([lambda sample: sample + 1, lambda sample: 2 * sample])(3)
    8

    Args:
      transforms: each a function of the sample; if it has the arguments, also of `rng`, an
        `np.random.RandomState`, and of `ctx`, a `SampleContext`; a config for one that is
        registered in TRANSFORMS; or a list of those. None for no transforms.

    Raises:
      TypeError: a transform that is not a function.
    """

    def __init__(self, transforms: Any = None) -> None:
        # Built twice when a wrapper passes on what it was given; the transforms are the same.
        if isinstance(transforms, Pipeline):
            transforms = transforms.transforms
        if transforms is None or callable(transforms) or hasattr(transforms, "items"):
            transforms = [] if transforms is None else [transforms]
        if not isinstance(transforms, Sequence) or isinstance(transforms, str):
            raise TypeError(
                f"a pipeline must be a list of transforms, got {type(transforms).__name__}: "
                f"{transforms!r}"
            )
        self.transforms: list[Transform] = []
        for i, entry in enumerate(transforms):
            with config_path(i):
                self.transforms.append(
                    build_function(entry, "a transform must be a function of a sample")
                )
        # Once: signatures are slow to inspect, and this would be for each sample.
        self._takes = [_takes(transform) for transform in self.transforms]

    @property
    def is_random(self) -> bool:
        """True if a transform draws random numbers."""
        return any("rng" in names for names in self._takes)

    @property
    def takes_context(self) -> bool:
        """True if a transform reads the `SampleContext`."""
        return any("ctx" in names for names in self._takes)

    def __call__(
        self,
        sample: Sample,
        rng: np.random.RandomState | None = None,
        ctx: "SampleContext | None" = None,
    ) -> Sample:
        """Return the transformed sample, None once a transform drops it.

        `rng` is for random transforms.
        """
        given = {"rng": rng, "ctx": ctx or SampleContext()}
        for transform, names in zip(self.transforms, self._takes, strict=True):
            sample = (
                transform(sample, **{name: given[name] for name in names})
                if names
                else transform(sample)
            )
            if sample is None:
                return None
        return sample

    def __repr__(self) -> str:
        return f"Pipeline({self.transforms})"


Compose = Pipeline  # MMEngine's name


@DATASETS.register_module()
class TransformedDataset:
    """Dataset whose samples are transformed when they are read.

    Random numbers are a function of the seed, the epoch, the sample index and the place among
    composed datasets (see `fold_in`), so a resumed run reads the same samples, with any number of
    processes and workers.

    Args:
      dataset: the dataset, or its config.
      pipeline: the transforms; see `Pipeline`.
      seed: seed for random transforms.

    Attributes:
      pipeline: the `Pipeline`. A replacement takes effect at the next batch that is read, but not
        in workers and threads that are already running: `close` the loader to end those.
    """

    def __init__(
        self, dataset: Annotated[Any, ConfigOf(DATASETS)], pipeline: Any = None, seed: int = 0
    ) -> None:
        with config_path("dataset"):
            self.dataset = (
                DATASETS.build(dataset)
                if isinstance(dataset, str) or hasattr(dataset, "items")
                else dataset
            )
        with config_path("pipeline"):
            self.pipeline = Pipeline(pipeline)
        self.metainfo = getattr(self.dataset, "metainfo", {})
        self.seed = seed
        self.context = SampleContext()
        self._epoch = 0
        self._parts: tuple[int, ...] = ()

    def at_epoch(self, epoch: int) -> "TransformedDataset":
        """Return this dataset with the random numbers for `epoch`; called by the loader."""
        inner = at_epoch(self.dataset, epoch)
        if inner is self.dataset and not self.pipeline.is_random:
            return self
        dataset = copy.copy(self)  # this one may be read by other threads
        dataset.dataset = inner
        dataset._epoch = epoch
        return dataset

    def fold_in(self, *parts: int) -> "TransformedDataset":
        """Return this dataset with other random numbers; called by a dataset around it."""
        dataset = copy.copy(self)
        dataset._parts = (*self._parts, *parts)
        return dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if not self.pipeline.is_random:
            return self.pipeline(fold_in(self.dataset, *self._parts)[index], None, self.context)
        # Part 1, because the inner transforms must not draw the same numbers as those here.
        inner = fold_in(self.dataset, *self._parts, 1)
        rng = random_state(self.seed, self._epoch, index, *self._parts)
        return self.pipeline(inner[index], rng, self.context)


def at_epoch(dataset: Any, epoch: int) -> Any:
    """Return a dataset with the random numbers for `epoch`; the dataset itself if it draws none."""
    return dataset.at_epoch(epoch) if hasattr(dataset, "at_epoch") else dataset


def fold_in(dataset: Any, *parts: int) -> Any:
    """Return a dataset with the random numbers for its place in others.

    The dataset itself if it draws none.

    As `jax.random.fold_in` does for keys: samples with the same index in two parts have the same
    seed and epoch, and must still be augmented differently.

    Args:
      dataset: the dataset, which may have a method `fold_in(*parts)`.
      parts: its number among the parts of the dataset around it, after that of the dataset around
        that one, and so on.
    """
    return dataset.fold_in(*parts) if hasattr(dataset, "fold_in") else dataset


def set_length(dataset: Any, length: int) -> None:
    """Set the length that examples should have, in a dataset and in those that it wraps.

    Raises:
      ConfigError: nothing reads it.
    """
    if not _set_length(dataset, length):
        raise ConfigError(
            "`example_length` must have a transform with the argument `ctx`, which reads "
            "`ctx.length`, or a dataset "
            f"with the method `set_length`, got {type(dataset).__name__} without one"
        )


def _set_length(dataset: Any, length: int) -> bool:
    inner = getattr(dataset, "datasets", None) or [
        part for part in [getattr(dataset, "dataset", None)] if part is not None
    ]
    found = [_set_length(part, length) for part in inner]
    if hasattr(dataset, "set_length"):
        dataset.set_length(length)
        return True
    if isinstance(dataset, TransformedDataset):
        dataset.context = SampleContext(length)
        return dataset.pipeline.takes_context or any(found)
    return any(found)


def _takes(transform: Transform) -> tuple[str, ...]:
    try:
        return tuple(
            name for name in ("rng", "ctx") if name in inspect.signature(transform).parameters
        )
    except (TypeError, ValueError):  # some built-ins have no signature
        return ()


def build_function(entry: Any, rule: str) -> Transform:
    """Return a function, built if it is a config; `rule` says what it must be, for an error."""
    function = TRANSFORMS.build_function(entry)
    if not callable(function):
        raise TypeError(f"{rule}, or its config, got {function!r}")
    return function
