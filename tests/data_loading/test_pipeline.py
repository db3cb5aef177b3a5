import numpy as np

from jengine.config import TRANSFORMS
from jengine.data import ArrayDataset, DataLoader, Pipeline, TransformedDataset, build_dataloader


@TRANSFORMS.register_module(force=True)
class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, sample):
        return {**sample, "x": sample["x"] * self.factor}


def jitter(sample, rng):
    return {**sample, "x": sample["x"] + rng.randint(1000)}


def increment(sample):
    return {**sample, "x": sample["x"] + 1}


def make_dataset(count=4):
    return ArrayDataset({"x": np.arange(count)}, metainfo={"classes": ("a",)})


def load_epoch(loader, epoch, start=0):
    loader.set_epoch(epoch, start)
    return [batch["x"].tolist() for batch in loader]


def test_transforms_are_applied_in_order():
    loader = build_dataloader(
        dict(
            batch_size=2,
            dataset=dict(
                type="TransformedDataset", dataset=make_dataset(), pipeline=[increment, dict(type="Scale", factor=10)]
            ),
        ),
        train=False,
    )
    assert load_epoch(loader, 0) == [[10, 20], [30, 40]]
    assert loader.metainfo == {"classes": ("a",)}


def test_random_transforms_depend_on_seed_epoch_and_sample_alone():
    def loader(seed=0, **settings):
        return DataLoader(TransformedDataset(make_dataset(), [jitter], seed=seed), batch_size=2, **settings)

    first, second = load_epoch(loader(), 0), load_epoch(loader(), 1)
    assert len({*np.ravel(first), *np.ravel(second)}) == 8
    assert load_epoch(loader(), 1, start=1) == second[1:]
    assert load_epoch(loader(num_threads=2), 1) == second
    assert load_epoch(loader(seed=1), 0) != first


def test_random_transforms_within_another_dataset_depend_on_the_epoch_too():
    inner = TransformedDataset(make_dataset(), [jitter])
    alone, outer = (DataLoader(dataset, batch_size=2) for dataset in (inner, TransformedDataset(inner, [increment])))
    for epoch in (0, 1):
        assert load_epoch(outer, epoch) == [[x + 1 for x in batch] for batch in load_epoch(alone, epoch)]
    assert load_epoch(outer, 0) != load_epoch(outer, 1)


def test_a_replaced_pipeline_takes_effect_after_close_also_with_threads():
    dataset = TransformedDataset(make_dataset(), increment)
    loader = DataLoader(dataset, batch_size=2, num_threads=1)
    assert load_epoch(loader, 0) == [[1, 2], [3, 4]]
    dataset.pipeline = Pipeline()
    loader.close()
    assert load_epoch(loader, 1) == [[0, 1], [2, 3]]
    loader.close()


def test_a_pipeline_may_be_one_transform_or_none_or_a_pipeline():
    assert Pipeline(increment)({"x": 1}) == {"x": 2}
    assert Pipeline(dict(type="Scale", factor=3))({"x": 1}) == {"x": 3}
    assert Pipeline()({"x": 1}) == {"x": 1}
    assert Pipeline(Pipeline([increment, increment]))({"x": 1}) == {"x": 3}
