"""What samplers, datasets and loaders refuse: a call, its error, and the words that must be in the message."""

import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from jengine.config import DATASETS
from jengine.config.errors import ConfigError
from jengine.data import (
    ArrayDataset,
    BatchCheck,
    DataLoader,
    DefaultSampler,
    IterableLoader,
    Pipeline,
    TransformedDataset,
    build_dataloader,
    prefetch_to_device,
)
from jengine.parallel import Pjit
from tests.refusals import check_row

X = ArrayDataset({"x": np.arange(8)})
CFG = {"dataset": X, "batch_size": 2}


class Samples:
    def __init__(self, read):
        self.read = read

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.read(index)


class Batches:
    """A dataset of batches alone."""

    def __len__(self):
        return 4

    def __getitems__(self, indices):
        return {"x": np.asarray(indices)}


def section(**changes):
    return lambda: build_dataloader({**CFG, **changes}, train=True)


def loader(data=X, *args, **arguments):
    return lambda: DataLoader(data, *args, **arguments)


def first(*args, **arguments):
    return lambda: next(iter(DataLoader(*args, **arguments)))


def stream(**settings):
    return lambda: build_dataloader({"dataset": lambda: iter([]), "batch_size": 2, **settings}, train=True)


def iterated(data, train=True, **settings):
    return lambda: list(IterableLoader(data, train, **settings))


def batch_of(*arrays, loader="train_dataloader", **entries):
    return lambda: BatchCheck(loader)(arrays or entries)


class ByName:
    """A dataset whose samples have names."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"a": 1}[index]


class Graphs(NamedTuple):
    nodes: Any
    edges: Any


def put_by_rules(*rules):
    graphs = Graphs(np.zeros((3, 2), np.float32), {"length": np.zeros(6)})
    Pjit(devices=1).put_batch(graphs, rules=list(rules))


def build_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    DATASETS.build({"type": "Digits"})


def check_two(first, second):
    check = BatchCheck("val_dataloader")
    check({"id": np.array(first)})
    check({"id": np.array(second)})


OF_STREAM = (ConfigError, "function")
IN_INT32 = "int32"
REFUSED = {
    # settings
    "a batch size of 0": (loader(batch_size=0), ValueError, "batch_size`", "at least 1 or None", "got 0"),
    "half a sample": (loader(batch_size=2.5), TypeError, "batch_size`", "integer", "got 2.5"),
    "negative workers": (loader(batch_size=2, num_workers=-1), ValueError, "num_workers`", "at least 0", "got -1"),
    "no whole batch": (loader(batch_size=9, drop_last=True), ValueError, "8 samples", "batch_size 9"),
    "no batches": (loader(batch_size=2, num_batch_per_epoch=0), ValueError, "num_batch_per_epoch`", "at least 1"),
    "a collate_fn that is none": (loader(batch_size=2, collate_fn={"type": "x"}), TypeError, "collate_fn`", "function"),
    "a sampler that is none": (loader(batch_size=2, sampler=3), TypeError, "`sampler`", "indices", "got int"),
    "a start after the end": (lambda: DataLoader(X, 4).set_epoch(0, start=3), ValueError, "start", "0 to 2", "got 3"),
    "a depth below 0": (lambda: prefetch_to_device([], depth=-1), ValueError, "depth", "0 or more", "got -1"),
    "a misspelt setting": (section(batchsize=4), TypeError, "DataLoader", "'batchsize'", "did you mean 'batch_size'"),
    "no dataset": (lambda: build_dataloader({"batch_size": 2}, train=True), TypeError, "DataLoader", "'dataset'"),
    **{f"{name} of PyTorch": (section(**{name: True}), TypeError, "DataLoader", f"'{name}'") for name in ("persistent_workers", "pin_memory", "batch_sampler")},
    "a misspelt dataset": (section(dataset={"type": "ArrayDatset"}), KeyError, "did you mean 'ArrayDataset'", "`dataset.type`"),
    "a misspelt sampler": (section(sampler={"type": "DefaultSampelr"}), KeyError, "did you mean 'DefaultSampler'", "`sampler.type`"),
    "a sampler of a stream": (stream(sampler=[1]), *OF_STREAM, "`sampler`", "access by index"),
    "workers of a stream": (stream(num_workers=1), *OF_STREAM, "`num_workers`"),
    "threads of a stream": (stream(num_threads=1), *OF_STREAM, "`num_threads`"),
    "prefetch of a stream": (stream(prefetch_factor=1), *OF_STREAM, "`prefetch_factor`"),
    "a collate_fn of batches": (iterated([{"x": np.zeros(2)}], collate_fn=len), ConfigError, "`collate_fn`", "`batch_size`"),
    "a collate_fn of a dataset of batches": (first(Batches(), 2, collate_fn=len), ConfigError, "`collate_fn`", "None", "Batches"),
    # datasets, samplers and transforms
    "a generator as dataset": (loader((i for i in range(3)), 2), TypeError, "`dataset`", "__len__", "__getitem__", "got generator"),
    "a dict of arrays": (section(dataset={"x": np.zeros(4), "y": np.zeros(4)}), TypeError, "'type'", "['x', 'y']"),
    "arrays of other lengths": (lambda: ArrayDataset({"a": np.zeros(2), "b": np.zeros(3)}), ValueError, "leading axis", "{'a': (2,), 'b': (3,)}"),
    "an unknown split": (lambda: DATASETS.build({"type": "Digits", "split": "val"}), ValueError, "split`", "'train' or 'test'", "got 'val'"),
    "digits without scikit-learn": (build_without_scikit_learn, ImportError, "pip install 'jengine[examples]'"),
    "no sample": (lambda: DefaultSampler([]), ValueError, "at least one sample"),
    "a process out of range": (lambda: DefaultSampler(4, process_index=2, process_count=2), ValueError, "process_index", "0 to 1", "got 2"),
    "a number as data": (iterated(3), ConfigError, "config dict", "iterable of batches", "function", "got 3"),
    "no batch": (iterated([]), ValueError, "at least one whole batch"),
    "a name as a pipeline": (lambda: Pipeline("Scale"), TypeError, "list of transforms", "got str"),
    "a number as a transform": (lambda: Pipeline([len, 3]), TypeError, "function of a sample", "got 3"),
    "a misspelt transform": (lambda: TransformedDataset(X, [dict(type="Normalise")]), KeyError, "'Normalise'", "did you mean 'Normalize'", "pipeline[0]"),
    "rules for no entry": (lambda: put_by_rules(("node_s", ("data",))), ConfigError, "'node_s'", "closest: nodes", "`batch_rules`"),
    # batches
    "an array to pad": (first(ArrayDataset(np.zeros(4)), 2), TypeError, "tuple or list", "got ndarray", "drop_last=True"),
    "an own mask": (first(ArrayDataset({"mask": np.zeros(4)}), 2), ValueError, "'mask'"),
    "samples of other shapes": (first(Samples(lambda i: {"image": np.zeros(i + 1)}), 2), ValueError, "same shape", "'image' of (1,) in sample 0", "(2,) in sample 1"),
    "samples of other structure": (first(Samples(lambda i: {"a": 1} if i else {"b": 1}), 2), ValueError, "structure"),
    "lists of other lengths": (lambda: next(iter(build_dataloader([{"text": {"tokens": [[1, 2], [3]]}}], train=True))), ValueError, "inhomogeneous shape"),
    "a sample that fails": (first(ByName(), 2), KeyError, "sample 0 of ByName", "0 to N - 1"),
    "a smaller batch in the middle": (
        iterated([{"x": np.zeros(n)} for n in (2, 1, 2)]), ValueError, "same size", "2 examples in batch 0", "1 in batch 1",
    ),
    "a batch without arrays": (
        batch_of(image=np.array([None, 1], object), name=np.array(["a", "b"])), ValueError, "leading axis", "no array", "`train_dataloader`",
    ),
    "integers beyond int32 in a later batch": (
        lambda: check_two([0, 2**31 - 1], [5, 2**31]), ValueError, "`val_dataloader`", IN_INT32, "5 to 2147483648", "'id' of batch 1", "leave the entry out",
    ),
    "integers beyond int64": (batch_of(np.zeros(1), np.array([2**64 - 1], np.uint64)), ValueError, IN_INT32, "18446744073709551615", "'1'"),
    "integers beyond int32 in a dict": (batch_of(x=np.zeros(1), meta={"id": np.array([2**40])}), ValueError, IN_INT32, "'meta.id' of batch 0"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_data_that_cannot_be_loaded_are_refused(row, request):
    check_row(request, *row)
