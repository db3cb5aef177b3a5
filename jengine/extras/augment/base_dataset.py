"""Datasets as MMEngine's users write them: an annotation file, records, and a transform
pipeline.
"""

import copy
import functools
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from jengine.config.annotations import Count, is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import DATASETS
from jengine.config.storage import (
    LARGE,
    allowed_directory,
    file_name,
    is_url,
    local_copy,
    read_bytes,
    read_text,
)
from jengine.data.host_entries import Sample
from jengine.data.pipeline import Pipeline
from jengine.data.samplers import random_state

Record = dict[str, Any]
Indices = int | Sequence[int] | np.ndarray | None
F = TypeVar("F", bound=Callable[..., Any])


def force_full_init(method: F) -> F:
    """Decorate a method so that it reads the annotations first if the dataset has `lazy_init`."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.full_init()
        return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


@DATASETS.register_module()
class BaseDataset:
    """Dataset with records from an annotation file, which a pipeline turns into samples.

    The file is JSON or a pickle of `dict(metainfo=dict(...), data_list=[record, ...])`; a subclass
    overrides `load_data_list` for any other source, and `parse_data_info` for paths and labels.
    Indexing returns `pipeline(record)`, where the record has its index as `sample_idx`. A pipeline
    that returns None drops the sample: in training another one takes its place, which the seed, the
    epoch and the index determine.

    >>> class Squares(BaseDataset):
    ...     METAINFO = dict(classes=("even", "odd"))
    ...
    ...     def load_data_list(self):
    ...         return [dict(x=i * i, label=i % 2) for i in range(10)]
    >>> dataset = Squares(indices=4, pipeline=[lambda record: record["x"]])
    >>> [dataset[i] for i in range(4)], dataset.get_data_info(3)
    ([0, 1, 4, 9], {'x': 9, 'label': 1, 'sample_idx': 3})

    Args:
      ann_file: annotation file, below `data_root` unless it is an absolute path; '' for none.
      metainfo: facts about the dataset, such as the class names; they replace those in `METAINFO`,
        which replace those in the file. A file name stands for the list with its lines.
      data_root: directory or URL with the files. For URLs the annotations are copied, see
        `local_copy`, which a transform that reads other files should call too.
      data_prefix: directories by name, each below `data_root`: `dict(img_path='train')`. A record's
        entry of this name is completed with it.
      filter_cfg: passed on to `filter_data`, which a subclass overrides.
      indices: the records to keep: the first n, the last n for -n, or a list with indices.
      serialize_data: keep the records pickled in one array, which worker processes share instead of
        copying it.
      pipeline: the transforms; see `Pipeline`.
      test_mode: whether a dropped sample is an error instead of replaced.
      lazy_init: read the annotations at the first use; `metainfo` in the file is known only then.
      max_refetch: how many other samples are tried instead of a dropped one.
      seed: seed for random transforms.

    Attributes:
      METAINFO: class default for the metainfo.
      pipeline: the `Pipeline`.

    Raises:
      FileNotFoundError: no annotation file. ConfigError: a file without `metainfo` and `data_list`.
    """

    METAINFO: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        ann_file: str | None = "",
        metainfo: Mapping[str, Any] | None = None,
        data_root: str | None = "",
        data_prefix: Mapping[str, str] | None = None,
        filter_cfg: Mapping[str, Any] | None = None,
        indices: Indices = None,
        serialize_data: bool = True,
        pipeline: Any = None,
        test_mode: bool = False,
        lazy_init: bool = False,
        max_refetch: Count = 1000,
        seed: int = 0,
    ) -> None:
        self.data_root = data_root = data_root or ""
        self.ann_file = os.path.join(data_root, ann_file) if ann_file else ""
        prefixes = {"img_path": ""} if data_prefix is None else dict(data_prefix)
        self.data_prefix = {name: os.path.join(data_root, part) for name, part in prefixes.items()}
        # A subclass may change it while it filters; the config is saved later and must stay what
        # was written.
        self.filter_cfg = copy.deepcopy(filter_cfg)
        self.serialize_data = serialize_data
        self.test_mode = test_mode
        self.max_refetch = max_refetch
        self.seed = seed
        with config_path("pipeline"):
            self.pipeline = Pipeline(pipeline)
        self._metainfo = {
            name: _read_lines(x) for name, x in {**self.METAINFO, **(metainfo or {})}.items()
        }
        self._indices = indices
        self._epoch = 0
        self._parts: tuple[int, ...] = ()
        self._fully_initialized = False
        self.data_list: list[Record] = []
        # Two arrays instead of a list of dicts: worker processes that are forked share their pages,
        # while reading a list changes its reference counts and copies it.
        self.data_bytes = np.zeros(0, np.uint8)
        self.data_address = np.zeros(0, np.int64)
        if not lazy_init:
            self.full_init()

    # --- Reading the annotations ---

    def full_init(self) -> None:
        """Read, filter and select the records, unless that is done."""
        if self._fully_initialized:
            return
        self.data_list = self.load_data_list()
        # Filtered before indices are taken: `indices=100` are the first that remain, as in
        # MMEngine.
        self.data_list = self.filter_data()
        if self._indices is not None:
            self.data_list = [
                self.data_list[i] for i in _select(self._indices, len(self.data_list))
            ]
        if self.serialize_data:
            self._serialize(self.data_list)
        self._fully_initialized = True

    def load_data_list(self) -> list[Record]:
        """Return the records in `ann_file`, in order."""
        annotations = _load_file(self.ann_file)
        if not is_mapping(annotations) or not {"metainfo", "data_list"} <= set(annotations):
            raise ConfigError(
                "`ann_file` must have the keys 'metainfo' and 'data_list', got "
                f"{_describe(annotations)} in "
                f"{self.ann_file}; another format needs a subclass with `load_data_list`"
            )
        # What the class and the config give replaces what the file says.
        self._metainfo = {**annotations["metainfo"], **self._metainfo}
        records: list[Record] = []
        for raw in annotations["data_list"]:
            parsed = self.parse_data_info(raw)
            new = parsed if isinstance(parsed, list) else [parsed]
            if not all(map(is_mapping, new)):
                raise TypeError(
                    f"parse_data_info of {type(self).__name__} must return a dict or dicts, got "
                    f"{parsed!r}"
                )
            records += new
        return records

    def parse_data_info(self, raw_data_info: Record) -> Record | list[Record]:
        """Return a record, or several, for an entry in the file.

        Here with `data_prefix` before its paths.
        """
        for name, prefix in self.data_prefix.items():
            if name in raw_data_info:
                raw_data_info[name] = os.path.join(prefix, raw_data_info[name])
        return raw_data_info

    def filter_data(self) -> list[Record]:
        """Return the records to keep from `self.data_list`.

        A subclass may use `self.filter_cfg`.
        """
        return self.data_list

    # --- Access ---

    @property
    def metainfo(self) -> dict[str, Any]:
        """A copy of the facts about the dataset."""
        return copy.deepcopy(self._metainfo)

    @force_full_init
    def get_data_info(self, idx: int) -> Record:
        """Copy a record, with its index as `sample_idx`."""
        count = len(self)
        if not -count <= idx < count:
            raise IndexError(f"the dataset has {count} samples, got the index {idx}")
        if self.serialize_data:
            start = 0 if idx % count == 0 else int(self.data_address[idx % count - 1])
            # Only bytes that `_serialize` has written in this process.
            info = pickle.loads(
                self.data_bytes[start : int(self.data_address[idx % count])].tobytes()
            )
        else:
            # Transforms may change a sample in place, which must not reach the next epoch.
            info = copy.deepcopy(self.data_list[idx])
        return {**info, "sample_idx": int(idx % count)}

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return a sample's classes, for `ClassBalancedDataset`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `get_cat_ids(idx)`, the classes of a sample"
        )

    def prepare_data(self, idx: int) -> Sample:
        """Return the transformed sample; None if the pipeline drops it."""
        rng = self._random_state(idx) if self.pipeline.is_random else None
        return self.pipeline(self.get_data_info(idx), rng)

    @force_full_init
    def __len__(self) -> int:
        return len(self.data_address) if self.serialize_data else len(self.data_list)

    @force_full_init
    def __getitem__(self, idx: int) -> Sample:
        sample = self.prepare_data(idx)
        if sample is not None:
            return sample
        if self.test_mode:
            raise ValueError(
                "the pipeline must return every sample with test_mode=True, got None for sample "
                f"{idx}"
            )
        rng = self._random_state(idx)  # a resumed run must read the same sample
        for _ in range(self.max_refetch):
            sample = self.prepare_data(int(rng.randint(len(self))))
            if sample is not None:
                return sample
        raise ValueError(
            f"the pipeline dropped {self.max_refetch} samples in a row (max_refetch); check its "
            "transforms"
        )

    def at_epoch(self, epoch: int) -> Self:
        """Return this dataset with the random numbers for `epoch`; called by the loader."""
        self.full_init()
        dataset = copy.copy(self)  # this one may be read by other threads
        dataset._epoch = epoch
        return dataset

    def fold_in(self, *parts: int) -> Self:
        """Return this dataset with other random numbers; called by a dataset around it."""
        dataset = copy.copy(self)
        dataset._parts = (*self._parts, *parts)
        return dataset

    def _random_state(self, idx: int) -> np.random.RandomState:
        return random_state(self.seed, self._epoch, idx, *self._parts)

    # --- Parts ---

    @force_full_init
    def get_subset_(self, indices: Indices) -> None:
        """Keep some records in this dataset: the first n, the last n for -n, or those in a list."""
        selected = _select(indices, len(self))
        # Read before anything is replaced: `selected` refers to the present positions.
        records = [self.get_data_info(i) for i in selected]
        for record in records:
            del record["sample_idx"]  # its place in this dataset
        if self.serialize_data:
            self._serialize(records)
        else:
            self.data_list = records

    @force_full_init
    def get_subset(self, indices: Indices) -> Self:
        """Return a dataset with some records; see `get_subset_`."""
        subset = copy.copy(self)
        subset._metainfo = self.metainfo
        subset.get_subset_(indices)
        return subset

    def _serialize(self, records: Sequence[Record]) -> None:
        pickles = [np.frombuffer(pickle.dumps(record, protocol=4), np.uint8) for record in records]
        self.data_address = np.cumsum([len(each) for each in pickles], dtype=np.int64)
        self.data_bytes = np.concatenate(pickles) if pickles else np.zeros(0, np.uint8)
        self.data_list = []


def _select(indices: Indices, count: int) -> list[int]:
    """Return the indices to keep out of `count`."""
    if isinstance(indices, int | np.integer):
        return list(range(count))[:indices] if indices >= 0 else list(range(count))[indices:]
    if not isinstance(indices, Sequence | np.ndarray) or isinstance(indices, str):
        raise TypeError(f"`indices` must be an integer or a list of integers, got {indices!r}")
    return [int(i) for i in indices]


def _read_lines(value: Any) -> Any:
    """Return the lines of a file for its name, and a copy of anything else."""
    if isinstance(value, str) and (is_url(value) or os.path.isfile(value)):
        return read_text(local_copy(value)).splitlines()
    return copy.deepcopy(value)


def _load_file(path: str) -> Any:
    name = file_name(path)
    if name.endswith((".pkl", ".pickle")):
        if allowed_directory() is not None:
            raise ConfigError(
                f"a config from elsewhere must name no pickle, which may run any code, got {path!r}"
            )
        return pickle.loads(read_bytes(local_copy(path), limit=LARGE))
    if name.endswith(".json"):
        try:
            return json.loads(read_bytes(local_copy(path), limit=LARGE))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"`ann_file` must be JSON, got {path}: {error}") from None
    raise ConfigError(
        f"`ann_file` must end in .json, .pkl or .pickle, got {path!r}; another format needs a "
        "subclass with `load_data_list`"
    )


def _describe(annotations: Any) -> str:
    return (
        f"the keys {sorted(map(str, annotations))}"
        if is_mapping(annotations)
        else f"a {type(annotations).__name__}"
    )
