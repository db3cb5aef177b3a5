import warnings

import numpy as np
import pytest

from jengine.data import IterableLoader
from jengine.data.masking import get_mask


class Tensor:
    """The part of a torch tensor that an adapter may use."""

    def __init__(self, values):
        self.values = values

    def detach(self):
        return self

    def cpu(self):
        return self

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


class EpochRecorder:
    """Record the epochs that are set."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return 5


class TorchLike:
    """The part of a torch DataLoader that an adapter may use."""

    drop_last = False

    def __init__(self, batch_size, size=5):
        self.batch_size = batch_size
        self.sampler = EpochRecorder()
        self.dataset = np.arange(size, dtype=np.float32)

    def __len__(self):
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self):
        for k in range(len(self)):
            yield {"x": Tensor(self.dataset[k * self.batch_size : (k + 1) * self.batch_size])}


class SizedBatches:
    """Has a length, but no information about the size of its last batch."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        return iter([{"x": np.full(size, k)} for k, size in enumerate(self.sizes)])


def sizes(loader):
    return [len(batch["x"]) for batch in loader]


def test_tensors_become_numpy_arrays():
    batch = next(iter(IterableLoader(TorchLike(5), train=True)))
    assert isinstance(batch["x"], np.ndarray)
    assert batch["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", [lambda: TorchLike(2), lambda: [{"x": np.zeros(n)} for n in (2, 2, 1)]])
def test_a_smaller_last_batch_is_dropped_in_training_and_not_counted_from_the_start(make):
    with pytest.warns(UserWarning, match="the last of 3 batches is smaller"):
        loader = IterableLoader(make(), train=True)
    assert len(loader) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        assert sizes(loader) == sizes(loader) == [2, 2]


def test_a_smaller_last_batch_that_is_detected_at_the_end_is_dropped_with_one_warning():
    loader = IterableLoader(SizedBatches(2, 2, 1), train=True)
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="the last of 3 batches is smaller"):
        assert sizes(loader) == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sizes(loader) == [2, 2]
    assert len(loader) == 2


@pytest.mark.parametrize("make", [lambda: TorchLike(2), lambda: SizedBatches(2, 2, 1)])
def test_in_evaluation_the_last_batch_is_padded_and_all_batches_have_a_mask(make):
    loader = IterableLoader(make(), train=False)
    batches = list(loader)
    assert len(loader) == 3
    assert [len(b["x"]) for b in batches] == [2, 2, 2]
    assert [b["mask"].tolist() for b in batches] == [[True, True], [True, True], [True, False]]
    assert batches[2]["x"][1] == batches[2]["x"][0]


def test_evaluation_batches_need_no_entries_if_all_are_full():
    batches = [np.zeros(2)] * 2
    assert len(list(IterableLoader(batches, train=False))) == 2
    with pytest.raises(TypeError, match="a batch that may be padded must be a dict"):
        list(IterableLoader([*batches, np.zeros(1)], train=False))


def test_the_last_tuple_of_arrays_is_padded_in_evaluation():
    batches = [(np.zeros(2), np.ones(2)), (np.zeros(1), np.ones(1))]
    full, padded = IterableLoader(batches, train=False)
    assert [get_mask(full).tolist(), get_mask(padded).tolist()] == [[True, True], [True, False]]
    x, y = padded
    assert [x.tolist(), y.tolist()] == [[0, 0], [1, 1]]


def test_a_start_in_the_middle_skips_batches_and_keeps_the_size_of_the_first():
    loader = IterableLoader(SizedBatches(2, 2, 1), train=False)
    loader.set_epoch(0, start=2)
    (batch,) = loader
    assert batch["x"].tolist() == [2, 2]
    assert batch["mask"].tolist() == [True, False]
    assert loader.state_dict() == {"epoch": 1, "position": 0, "examples": 0}
    assert len(list(loader)) == 3


def test_iteration_continues_at_the_saved_position():
    loader = IterableLoader(SizedBatches(1, 1, 1), train=True)
    loader.set_epoch(4)
    next(iter(loader))
    state = loader.state_dict()
    assert state == {"epoch": 4, "position": 1, "examples": 1}
    loader.load_state_dict(state)
    assert [batch["x"].tolist() for batch in loader] == [[1], [2]]


def test_the_epoch_is_passed_to_the_sampler():
    sampled = TorchLike(5)
    IterableLoader(sampled, train=True).set_epoch(3)
    assert sampled.sampler.epochs == [3]

    nested = SizedBatches(1)
    nested.batch_sampler = EpochRecorder()
    nested.batch_sampler.sampler = EpochRecorder()
    IterableLoader(nested, train=True).set_epoch(4)
    assert nested.batch_sampler.sampler.epochs == [4]

    own = SizedBatches(1)
    own.epochs = []
    own.set_epoch = own.epochs.append
    IterableLoader(own, train=True).set_epoch(5)
    assert own.epochs == [5]

    IterableLoader(SizedBatches(1), train=True).set_epoch(6)  # no set_epoch: no error


def test_the_number_of_batches_per_epoch_can_be_limited():
    loader = IterableLoader(SizedBatches(2, 2, 2), train=True, num_batch_per_epoch=2)
    assert len(loader) == 2
    assert sizes(loader) == [2, 2]


def test_the_dataset_and_the_batch_size_of_the_loader_are_available():
    source = TorchLike(5)
    assert IterableLoader(source, train=True).dataset is source.dataset
    assert IterableLoader(source, train=True).batch_size == 5
    batches = [{"x": np.zeros(2)}]
    assert IterableLoader(batches, train=True).dataset is batches
    loader = IterableLoader(batches, train=True)
    assert loader.batch_size is None
    next(iter(loader))
    assert loader.batch_size == 2


def test_a_copy_is_an_independent_pass_if_the_source_allows_it():
    source = TorchLike(batch_size=1)
    loader = IterableLoader(source, train=True)
    batches = iter(loader)
    first = next(batches)["x"].tolist()
    assert [batch["x"].tolist() for batch in loader.copy_at_epoch(3)] == [[0], [1], [2], [3], [4]]
    assert source.sampler.epochs == [3]
    assert [first, next(batches)["x"].tolist()] == [[0], [1]]
    source.persistent_workers = True
    with pytest.raises(ValueError, match="only one pass at a time; .*, and no persistent_workers"):
        loader.copy_at_epoch(0)
