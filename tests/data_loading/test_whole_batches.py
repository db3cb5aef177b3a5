"""Test that loaders pass on batches of any form with `batch_axis=None`, and refuse them otherwise."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset, BatchCheck, build_dataloader
from tests.refusals import check_refusal


class Graphs(NamedTuple):
    nodes: Any
    edges: Any
    weight: Any = 0.5
    globals: Any = None


def graphs(i, size=3):
    return Graphs(np.full((size, 2), i, np.float32), {"length": np.full(2 * size, i)})


class Stream:
    batch_axis = None

    def __iter__(self):
        return (graphs(i, 3 + i) for i in range(4))


class Batches(list):
    batch_axis, batch_rules = None, [("nodes", ("data",))]


def sizes(batches):
    return [len(batch.nodes) for batch in batches]


IN_ORDER = dict(type="DefaultSampler", shuffle=False)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "data",
    [
        Stream(),
        dict(dataset=Stream()),
        dict(dataset=lambda: iter(Stream()), batch_axis=None),
        dict(dataset=list(Stream()), batch_axis=None, sampler=IN_ORDER),
        dict(dataset=list(Stream()), batch_axis=None, sampler=IN_ORDER, num_threads=1),
        dict(dataset=Batches(Stream()), sampler=IN_ORDER),
    ],
    ids=["iterable", "stream", "function", "dataset", "threads", "dataset with the attribute"],
)
def test_a_batch_passes_through_whole_and_its_position_is_saved(data, train):
    loader = build_dataloader(data, train=train, process_index=1, process_count=2)  # each process has it whole
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    assert sizes(batches) == [3, 4, 5, 6]
    assert type(batches[1]) is Graphs
    assert batches[1].globals is None
    assert batches[1].weight == 0.5
    np.testing.assert_array_equal(batches[1].edges["length"], [1] * 8)
    again = build_dataloader(data, train=train)
    again.load_state_dict(states[1])
    assert sizes(again) == [5, 6]
    assert again.batch_size is None
    assert again.batch_rules == (tuple(Batches.batch_rules) if isinstance(loader.dataset, Batches) else ())
    loader.close()
    again.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_samples_are_collated_to_batches_of_any_form(is_stream):
    samples = [graphs(i, size=1 + i) for i in range(5)]
    join = lambda some: Graphs(np.concatenate([g.nodes for g in some]), len(some))  # noqa: E731
    dataset = (lambda: iter(samples)) if is_stream else samples
    order = {} if is_stream else dict(sampler=IN_ORDER)
    cfg = dict(dataset=dataset, batch_size=2, collate_fn=join, batch_axis=None, **order)
    assert sizes(build_dataloader(cfg, train=True)) == [3, 7]  # a smaller last batch is dropped in training
    last = list(build_dataloader(cfg, train=False))[-1]
    assert (last.nodes.shape, int(last.edges)) == ((5, 2), 1)  # and not padded in evaluation


def test_a_sampler_shuffles_batches():
    batches = [graphs(i) for i in range(8)]
    loader = build_dataloader(dict(dataset=batches, batch_axis=None), train=True)
    first = [int(batch.nodes[0, 0]) for batch in loader]
    assert first != sorted(first) == list(range(8))


def test_arrays_without_a_shared_axis_are_an_error_that_names_them_and_the_setting():
    collate = lambda samples: {"x": np.zeros((2, 3)), "kl": np.float32(0.1)}  # noqa: E731
    with pytest.raises(
        ValueError, match=r"must share their leading axis, got \{'kl': \(\), 'x': \(2, 3\)\}; .*batch_axis=None"
    ):
        BatchCheck("val_dataloader")(collate([]))
    assert BatchCheck("val_dataloader", batch_axis=None)(collate([]))
    with pytest.raises(ValueError, match=r"must share their leading axis, got \{'nodes': \(3, 2\), .*batch_axis=None"):
        next(iter(build_dataloader(lambda: iter([graphs(0)]), train=True)))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(), TypeError, ["'batch_size'"]),
        (dict(batch_axis=1), ConfigError, ["batch_axis`", "None", "got 1"]),
        (dict(batch_size=1, batch_rules=[("x", ("data",))]), ConfigError, ["batch_axis=None"]),
        (dict(batch_axis=None, batch_rules=["x"]), (ConfigError, TypeError), ["batch_rules"]),
        (dict(batch_axis=None, collate_fn=list), ConfigError, ["`collate_fn`", "`batch_size`"]),
    ],
)
def test_settings_that_do_not_fit_are_errors(settings, error, words):
    check_refusal(lambda: build_dataloader(dict(dataset=ArrayDataset({"x": np.zeros(4)}), **settings), train=True), error, *words)


def test_batches_of_other_structures_have_other_forms():
    check = BatchCheck("train_dataloader", batch_axis=None)
    assert check(graphs(0)) != check(graphs(0)._replace(edges={}))
    assert jax.tree.structure(graphs(0)) != jax.tree.structure(graphs(0)._replace(globals=np.zeros(1)))
