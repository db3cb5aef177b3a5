import pickle

import numpy as np
import pytest

from jengine.data import DefaultSampler, InfiniteSampler


def order(epoch, **kwargs):
    sampler = DefaultSampler(10, **kwargs)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_each_epoch_has_its_own_order_and_a_rerun_has_the_same():
    assert order(0, seed=3) != order(1, seed=3)
    assert order(0, seed=3) != order(0, seed=4)
    assert order(1, seed=3) == order(1, seed=3)
    assert sorted(order(1, seed=3)) == list(range(10))


def test_the_order_never_changes():
    # RandomState(MT19937(SeedSequence((3, 1)))).permutation(10) of numpy.random, whose stream is frozen: a run that is
    # resumed with another NumPy release must continue in the same order.
    assert order(1, seed=3) == [3, 0, 4, 8, 2, 7, 9, 6, 1, 5]


def test_without_shuffling_the_order_is_that_of_the_dataset():
    assert order(5, shuffle=False) == list(range(10))


@pytest.mark.parametrize("epoch", [0, 1])
def test_shards_are_disjoint_and_complete(epoch):
    shards = [order(epoch, process_index=p, process_count=2) for p in range(2)]
    assert not set(shards[0]) & set(shards[1])
    assert sorted(shards[0] + shards[1]) == list(range(10))


def test_rounding_up_repeats_the_first_samples_and_counts_them_as_padding():
    samplers = [DefaultSampler(10, shuffle=False, process_index=p, process_count=4) for p in range(4)]
    assert [list(s) for s in samplers] == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert [s.num_real(3) for s in samplers] == [3, 3, 2, 2]
    assert [len(s) for s in samplers] == [3, 3, 3, 3]


def test_without_rounding_up_no_sample_is_repeated():
    samplers = [DefaultSampler(10, shuffle=False, round_up=False, process_index=p, process_count=4) for p in range(4)]
    assert [list(s) for s in samplers] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert [len(s) for s in samplers] == [3, 3, 2, 2]
    assert {s.samples_per_epoch(drop_last=True) for s in samplers} == {2}
    assert {s.samples_per_epoch(drop_last=False) for s in samplers} == {3}


def test_there_may_be_more_processes_than_samples():
    sampler = DefaultSampler(2, shuffle=False, process_index=4, process_count=5)
    assert list(sampler) == [0]
    assert sampler.num_real(1) == 0


def test_the_infinite_sampler_yields_one_permutation_after_another():
    sampler = InfiniteSampler(5, seed=1)
    stream = sampler.indices(0, 15).tolist()
    assert [sorted(stream[k : k + 5]) for k in (0, 5, 10)] == [list(range(5))] * 3
    assert stream[:5] != stream[5:10]
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(15)] == stream


def test_a_section_of_the_infinite_stream_is_computed_without_the_ones_before():
    sampler = InfiniteSampler(5, seed=1)
    np.testing.assert_array_equal(sampler.indices(3, 4), sampler.indices(0, 16)[12:])


def test_processes_share_the_infinite_stream():
    stream = InfiniteSampler(5, seed=1).indices(0, 20)
    shards = [InfiniteSampler(5, seed=1, process_index=p, process_count=2).indices(0, 10) for p in range(2)]
    np.testing.assert_array_equal(np.stack(shards, axis=1).reshape(-1), stream)


def test_a_permutation_may_be_changed_and_is_not_sent_to_workers():
    sampler = DefaultSampler(1000, seed=1)
    order = sampler.permutation(0)
    expected = order.tolist()
    order[:] = 0
    assert sampler.permutation(0).tolist() == expected
    assert sampler.permutation(1).tolist() != expected
    assert len(pickle.dumps(sampler)) < 1000
    assert pickle.loads(pickle.dumps(sampler)).permutation(0).tolist() == expected
