import copy

import numpy as np
import pytest

from jengine.config import DATA_SAMPLERS, DATASETS
from jengine.config.errors import ConfigError
from jengine.data import (
    ArrayDataset,
    DataLoader,
    DefaultSampler,
    InfiniteSampler,
    IterableLoader,
    build_dataloader,
)


@pytest.fixture
def cfg():
    return {"dataset": {"type": "ArrayDataset", "arrays": {"x": np.arange(10)}}, "batch_size": 4}


def notes(info):
    return getattr(info.value, "__notes__", [])


def test_training_data_are_shuffled_and_evaluation_data_in_order_and_padded(cfg):
    before = copy.deepcopy(cfg)
    train = build_dataloader(cfg, train=True, seed=7)
    val = build_dataloader(cfg, train=False, seed=7)
    assert (len(train), len(val)) == (2, 3)
    assert train.sampler.shuffle
    assert train.sampler.seed == 7
    assert [set(batch) for batch in train] == [{"x"}] * 2
    assert [batch["x"].tolist() for batch in val] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert str(cfg) == str(before)


def test_the_sampler_of_the_config_gets_the_shared_seed_and_the_shard(cfg):
    cfg["sampler"] = {"type": "InfiniteSampler", "shuffle": False}
    loader = build_dataloader(cfg, train=True, seed=7, process_index=1, process_count=2)
    assert isinstance(loader.sampler, InfiniteSampler)
    assert (loader.sampler.seed, loader.sampler.process_index, loader.sampler.process_count) == (7, 1, 2)
    assert next(iter(loader))["x"].tolist() == [1, 3, 5, 7]


def test_a_seed_in_the_config_takes_precedence_unless_none(cfg):
    cfg["sampler"] = {"type": "DefaultSampler", "seed": 3}
    assert build_dataloader(cfg, train=True, seed=7).sampler.seed == 3
    cfg["sampler"]["seed"] = None
    assert build_dataloader(cfg, train=True, seed=7).sampler.seed == 7


def test_a_custom_sampler_gets_only_the_arguments_that_it_takes(cfg):
    @DATA_SAMPLERS.register_module("EvenTest", force=True)
    class Even:
        def __init__(self, dataset):
            self.size = len(dataset)

        def __iter__(self):
            return iter(range(0, self.size, 2))

        def __len__(self):
            return self.size // 2

    cfg["sampler"] = {"type": "EvenTest"}
    assert next(iter(build_dataloader(cfg, train=True)))["x"].tolist() == [0, 2, 4, 6]


def test_a_sampler_that_forwards_its_arguments_gets_the_shard_and_the_seed(cfg):
    @DATA_SAMPLERS.register_module("ForwardTest", force=True)
    class Forward(DefaultSampler):
        def __init__(self, dataset, **kwargs):
            super().__init__(dataset, **kwargs)

    cfg["sampler"] = {"type": "ForwardTest", "shuffle": False}
    loader = build_dataloader(cfg, train=True, seed=7, process_index=1, process_count=2)
    assert (loader.sampler.seed, len(loader)) == (7, 1)
    assert next(iter(loader))["x"].tolist() == [1, 3, 5, 7]


def test_a_sampler_of_another_number_of_processes_is_refused(cfg):
    @DATA_SAMPLERS.register_module("DropTest", force=True)
    class Drop(DefaultSampler):
        def __init__(self, dataset, **kwargs):
            super().__init__(dataset)

    shard = {"process_index": 1, "process_count": 2}
    dataset = ArrayDataset({"x": np.arange(10)})
    message = "must be 1 and 2, those of this process, got 0 and 1"
    for sampler in ({"type": "DropTest"}, Drop(dataset)):
        with pytest.raises(ConfigError, match=f"`process_index` and `process_count` of Drop {message}") as info:
            build_dataloader({**cfg, "sampler": sampler}, train=True, **shard)
        assert notes(info) == ["in the config at `sampler`"]
    loaders = [
        DataLoader(dataset, 2),
        build_dataloader({"dataset": lambda: iter(dataset), "batch_size": 2}, train=True),
    ]
    for loader in loaders:
        with pytest.raises(ConfigError, match=message):
            build_dataloader(loader, train=True, **shard)
    batches = build_dataloader([{"x": np.zeros(2)}], train=True)  # the share of this process: nothing is divided
    assert build_dataloader(batches, train=True, **shard) is batches


def test_existing_objects_are_used_unchanged(cfg):
    dataset = ArrayDataset({"x": np.arange(4)})
    sampler = DefaultSampler(dataset, shuffle=False)
    loader = build_dataloader({"dataset": dataset, "batch_size": 2, "sampler": sampler}, train=True)
    assert loader.dataset is dataset
    assert loader.sampler is sampler
    assert build_dataloader(loader, train=False) is loader
    foreign = build_dataloader([{"x": np.zeros(2)}], train=False)
    assert isinstance(foreign, IterableLoader)
    assert build_dataloader(foreign, train=False) is foreign


def test_the_split_of_the_digits_is_fixed():
    train, test = DATASETS.build({"type": "Digits"}), DATASETS.build({"type": "Digits", "split": "test", "flat": True})
    assert (len(train), len(test)) == (1438, 359)  # 1,797 images, a fifth held out
    assert train[0]["image"].shape == (8, 8, 1)
    assert train[0]["image"].dtype == np.float32
    assert test[0]["image"].shape == (64,)
    assert test[0]["label"].dtype == np.int32
    assert (train.arrays["image"].min(), train.arrays["image"].max()) == (0, 1)
    assert train.metainfo["classes"] == tuple("0123456789")
    # scikit-learn's whole set has 178 zeros; none is in both splits or in neither.
    assert (train.arrays["label"] == 0).sum() + (test.arrays["label"] == 0).sum() == 178
    seen = {image.tobytes() for image in train.arrays["image"]}
    assert not any(image.tobytes() in seen for image in test.arrays["image"])


def test_the_digits_are_those_of_scikit_learn():
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    chosen = np.random.RandomState(0).permutation(1797)[:359]
    test = DATASETS.build({"type": "Digits", "split": "test", "flat": True})
    np.testing.assert_array_equal(test.arrays["image"], (images[chosen] / 16).astype(np.float32))
    np.testing.assert_array_equal(test.arrays["label"], labels[chosen])


def test_the_config_form_builds_the_same_loader_as_the_class(cfg):
    built = build_dataloader({**cfg, "num_batch_per_epoch": 1}, train=True)
    assert isinstance(built, DataLoader)
    assert len(built) == 1
