import numpy as np
import pytest

from jengine.data import ArrayDataset, DataLoader, TransformedDataset, build_dataloader
from jengine.extras.selfsup import DeepClusterSampler, PseudoLabelDataset


class SingleSampleDataset:
    """Return one sample at a time: the dataset has no `__getitems__`."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": np.float32(index)}


@pytest.mark.parametrize("inner", [ArrayDataset(dict(x=np.arange(3, dtype=np.float32))), SingleSampleDataset()])
def test_samples_have_their_label_and_their_index(inner):
    dataset = PseudoLabelDataset(inner)
    assert dataset[1] == {"x": 1.0, "pseudo_label": -1, "index": 1}
    dataset.assign_labels(np.array([7, 8, 9]))
    (batch,) = DataLoader(dataset, 3, drop_last=True)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "x": [0.0, 1.0, 2.0],
        "pseudo_label": [7, 8, 9],
        "index": [0, 1, 2],
    }
    assert batch["pseudo_label"].dtype == batch["index"].dtype == np.int32


def test_its_samples_have_the_random_transforms_of_the_epoch():
    dataset = TransformedDataset(SingleSampleDataset(), [lambda sample, rng: {"x": rng.rand()}])
    plain, labelled = DataLoader(dataset, 3), DataLoader(PseudoLabelDataset(dataset), 3)
    batches = []
    for epoch in (0, 1):
        plain.set_epoch(epoch)
        labelled.set_epoch(epoch)
        (expected,), (batch,) = plain, labelled
        np.testing.assert_array_equal(batch["x"], expected["x"])
        batches.append(batch["x"].tolist())
    assert batches[0] != batches[1]


def test_it_builds_its_dataset_from_a_config():
    inner = dict(type="ArrayDataset", arrays=dict(x=np.array([1, 2])), metainfo=dict(classes=("a",)))
    loader = build_dataloader(dict(batch_size=2, dataset=dict(type="PseudoLabelDataset", dataset=inner)), train=False)
    assert loader.dataset.metainfo == {"classes": ("a",)}
    assert len(loader.dataset) == 2


def test_one_epoch_is_uniform_and_the_others_are_permutations():
    labels = np.array([0] * 9 + [1])
    sampler = DeepClusterSampler(10, seed=3)
    sampler.set_uniform_indices(labels, 2, epoch=4)
    counts = [np.bincount(labels[sampler.indices(epoch, 10)], minlength=2).tolist() for epoch in (3, 4, 5)]
    assert counts[0] == counts[2] == [9, 1]
    assert counts[1][1] >= 4  # six of each are drawn, and ten of these are used
    np.testing.assert_array_equal(sampler.indices(4, 10), sampler.indices(4, 10))
    assert not sampler.repeats


def test_the_next_epoch_is_uniform_by_default():
    sampler = DeepClusterSampler(10)
    sampler.set_epoch(2)
    sampler.set_uniform_indices(np.array([0] * 9 + [1]), 2)
    assert (sampler.indices(2, 10) == 9).sum() >= 4
    assert (sampler.indices(3, 10) == 9).sum() == 1


def test_processes_divide_a_uniform_epoch():
    shares = [DeepClusterSampler(10, process_index=i, process_count=2) for i in range(2)]
    for sampler in shares:
        sampler.set_uniform_indices(np.array([0] * 9 + [1]), 2, epoch=0)
    both = np.concatenate([sampler.indices(0, 5) for sampler in shares])
    assert (both == 9).sum() >= 4
    assert len(both) == 10
