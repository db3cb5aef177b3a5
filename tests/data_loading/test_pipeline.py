import numpy as np
import pytest

from jengine.data import ArrayDataset, DataLoader, Pipeline, TransformedDataset, build_dataloader
from jengine.registry import TRANSFORMS


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


def numbers(count=4):
    return ArrayDataset({"x": np.arange(count)}, metainfo={"classes": ("a",)})


def epoch_of(loader, epoch, start=0):
    loader.set_epoch(epoch, start)
    return [batch["x"].tolist() for batch in loader]


def test_samples_go_through_the_transforms_in_order():
    loader = build_dataloader(
        dict(
            batch_size=2,
            dataset=dict(
                type="TransformedDataset", dataset=numbers(), pipeline=[increment, dict(type="Scale", factor=10)]
            ),
        ),
        train=False,
    )
    assert epoch_of(loader, 0) == [[10, 20], [30, 40]]
    assert loader.metainfo == {"classes": ("a",)}


def test_what_is_drawn_depends_on_seed_epoch_and_sample_alone():
    def loader(seed=0, **settings):
        return DataLoader(TransformedDataset(numbers(), [jitter], seed=seed), batch_size=2, **settings)

    first, second = epoch_of(loader(), 0), epoch_of(loader(), 1)
    assert len({*np.ravel(first), *np.ravel(second)}) == 8
    assert epoch_of(loader(), 1, start=1) == second[1:]
    assert epoch_of(loader(num_threads=2), 1) == second
    assert epoch_of(loader(seed=1), 0) != first


def test_another_pipeline_holds_from_the_next_batch_on_also_where_threads_had_read_ahead():
    dataset = TransformedDataset(numbers(), increment)
    loader = DataLoader(dataset, batch_size=2, num_threads=1)
    assert epoch_of(loader, 0) == [[1, 2], [3, 4]]
    dataset.pipeline = Pipeline()
    loader.close()
    assert epoch_of(loader, 1) == [[0, 1], [2, 3]]
    loader.close()


def test_a_pipeline_may_be_one_transform_or_none_or_a_pipeline():
    assert Pipeline(increment)({"x": 1}) == {"x": 2}
    assert Pipeline(dict(type="Scale", factor=3))({"x": 1}) == {"x": 3}
    assert Pipeline()({"x": 1}) == {"x": 1}
    assert Pipeline(Pipeline([increment, increment]))({"x": 1}) == {"x": 3}


def test_what_is_no_transform_is_refused():
    with pytest.raises(TypeError, match="a pipeline is a list of transforms, found str"):
        Pipeline("Scale")
    with pytest.raises(TypeError, match="a transform is a function of a sample, or a config of one, found 3"):
        Pipeline([increment, 3])
    with pytest.raises(KeyError, match="transform must be a registered name or an import path, got 'Scales'; did you mean 'Scale'") as caught:
        TransformedDataset(numbers(), [dict(type="Scales", factor=1)])
    assert any("pipeline[0]" in note for note in caught.value.__notes__)
