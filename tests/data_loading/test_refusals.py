"""What samplers, datasets and loaders refuse: each call, its error, and the words that must be in it."""

import numpy as np
import pytest

from jengine.config import DATASETS
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset, DataLoader, DefaultSampler, IterableLoader, build_dataloader

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


REFUSED = {
    # settings
    "a batch size of 0": (loader(batch_size=0), ValueError, "batch_size` must be an integer of at least 1 or None, got 0"),
    "half a sample": (loader(batch_size=2.5), TypeError, "batch_size` must be an integer of at least 1 or None, got 2.5"),
    "negative workers": (loader(batch_size=2, num_workers=-1), ValueError, "num_workers` must be an integer of at least 0, got -1"),
    "no whole batch": (loader(batch_size=9, drop_last=True), ValueError, "at least one batch: got 8 samples .* batch_size 9"),
    "no batches": (loader(batch_size=2, num_batch_per_epoch=0), ValueError, "num_batch_per_epoch` must be an integer of at least 1"),
    "a collate_fn that is none": (loader(batch_size=2, collate_fn={"type": "x"}), TypeError, "collate_fn` must be a function"),
    "a sampler that is none": (loader(batch_size=2, sampler=3), TypeError, "`sampler` must be an iterable of indices with a length, got int"),
    "a start after the end": (lambda: DataLoader(X, 4).set_epoch(0, start=3), ValueError, "start must be a position in the epoch, 0 to 2, got 3"),
    "a misspelt setting": (section(batchsize=4), TypeError, "DataLoader has no argument 'batchsize'; did you mean 'batch_size'"),
    "no dataset": (lambda: build_dataloader({"batch_size": 2}, train=True), TypeError, "DataLoader needs the argument 'dataset'"),
    "persistent_workers": (section(persistent_workers=True), TypeError, "DataLoader has no argument 'persistent_workers\'"),
    "pin_memory": (section(pin_memory=True), TypeError, "DataLoader has no argument 'pin_memory\'"),
    "batch_sampler": (section(batch_sampler=True), TypeError, "DataLoader has no argument 'batch_sampler\'"),
    "a sampler of a stream": (stream(sampler=[1]), ConfigError, "`sampler` must not be given for function, which has no access by index"),
    "workers of a stream": (stream(num_workers=1), ConfigError, "`num_workers` must not be given for function"),
    "threads of a stream": (stream(num_threads=1), ConfigError, "`num_threads` must not be given for function"),
    "prefetch of a stream": (stream(prefetch_factor=1), ConfigError, "`prefetch_factor` must not be given for function"),
    "a collate_fn of batches": (iterated([{"x": np.zeros(2)}], collate_fn=len), ConfigError, "`collate_fn` must be given with `batch_size`"),
    "a collate_fn of a dataset of batches": (first(Batches(), 2, collate_fn=len), ConfigError, "`collate_fn` must be None for Batches"),
    # datasets and samplers
    "a generator as dataset": (loader((i for i in range(3)), 2), TypeError, "`dataset` must have __len__ and __getitem__ for 0 to N - 1, got generator"),
    "a dict of arrays": (section(dataset={"x": np.zeros(4), "y": np.zeros(4)}), TypeError, r"a dataset must have a 'type', got only the keys \['x', 'y'\]"),
    "arrays of other lengths": (lambda: ArrayDataset({"a": np.zeros(2), "b": np.zeros(3)}), ValueError, r"share their leading axis, got {'a': \(2,\), 'b': \(3,\)}"),
    "an unknown split": (lambda: DATASETS.build({"type": "Digits", "split": "val"}), ValueError, "split` must be 'train' or 'test', got 'val'"),
    "no sample": (lambda: DefaultSampler([]), ValueError, "the dataset must have at least one sample"),
    "a process out of range": (lambda: DefaultSampler(4, process_index=2, process_count=2), ValueError, "process_index must be 0 to 1, got 2"),
    "a number as data": (iterated(3), ConfigError, "must be a config dict, an iterable of batches, or a function .* got 3"),
    "no batch": (iterated([]), ValueError, "the data must have at least one whole batch"),
    # batches
    "an array to pad": (first(ArrayDataset(np.zeros(4)), 2), TypeError, "or a tuple or list, got ndarray; return one of these, or use drop_last=True"),
    "an own mask": (first(ArrayDataset({"mask": np.zeros(4)}), 2), ValueError, "must not have an entry 'mask'"),
    "samples of other shapes": (
        first(Samples(lambda i: {"image": np.zeros(i + 1)}), 2), ValueError, "all input arrays must have the same shape",
    ),
    "samples of other structure": (first(Samples(lambda i: {"a": 1} if i else {"b": 1}), 2), ValueError, "pytree structure error"),
    "a smaller batch in the middle": (
        iterated([{"x": np.zeros(n)} for n in (2, 1, 2)]), ValueError, "batches must have the same size, got 2 examples in batch 0 and 1 in batch 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_the_reason(case):
    call, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        call()
