"""Datasets with the names, arguments and results of MMEngine's."""

import json
import pickle
from typing import ClassVar

import numpy as np
import pytest

from jengine.config import DATASETS
from jengine.data import ArrayDataset, Compose, DataLoader, TransformedDataset, build_dataloader
from jengine.extras.augment import (
    BaseDataset,
    ClassBalancedDataset,
    ConcatDataset,
    MixedDataset,
    RepeatDataset,
)
from jengine.extras.augment.switch_recipe import set_pipeline
from jengine.extras.selfsup.pseudo_labels import PseudoLabelDataset

RECORDS = [dict(img_path=f"{i}.jpg", height=i, cat=i % 3) for i in range(6)]


class Pictures(BaseDataset):
    METAINFO: ClassVar = dict(classes=("cat", "dog"), task="none")

    def filter_data(self):
        least = (self.filter_cfg or {}).get("min_height", 0)
        return [record for record in self.data_list if record["height"] >= least]

    def get_cat_ids(self, idx):
        return [self.get_data_info(idx)["cat"]]


@pytest.fixture
def annotations(tmp_path):
    content = dict(metainfo=dict(task="detection", source="web"), data_list=RECORDS)
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(content))
    return dict(data_root=str(tmp_path), ann_file="a.json", data_prefix=dict(img_path="images"))


@pytest.mark.parametrize("serialize_data", [True, False])
@pytest.mark.parametrize("file", ["a.json", "a.pkl"])
def test_records_have_full_paths_and_an_index(annotations, tmp_path, serialize_data, file):
    dataset = Pictures(**{**annotations, "ann_file": file}, serialize_data=serialize_data)
    assert len(dataset) == 6
    first = dict(img_path=str(tmp_path / "images" / "4.jpg"), height=4, cat=1, sample_idx=4)
    assert dataset.get_data_info(4) == dataset.get_data_info(-2) == dataset[4] == first
    dataset.get_data_info(4)["height"] = 0
    assert dataset.get_data_info(4)["height"] == 4  # a copy
    assert len(dataset.data_list) == (0 if serialize_data else 6)
    with pytest.raises(IndexError, match="the dataset has 6 samples, got the index 6"):
        dataset.get_data_info(6)


def test_metainfo_of_the_argument_replaces_that_of_the_class_which_replaces_that_of_the_file(annotations, tmp_path):
    (tmp_path / "classes.txt").write_text("bird\nfish\n")
    dataset = Pictures(**annotations, metainfo=dict(source="own", classes=str(tmp_path / "classes.txt")))
    assert dataset.metainfo == dict(classes=["bird", "fish"], task="none", source="own")
    dataset.metainfo["task"] = "changed"
    assert dataset.metainfo["task"] == "none"
    assert Pictures.METAINFO["task"] == "none"


@pytest.mark.parametrize(
    ("settings", "heights"),
    [
        (dict(filter_cfg=dict(min_height=3)), [3, 4, 5]),
        (dict(indices=2), [0, 1]),
        (dict(indices=-2), [4, 5]),
        (dict(indices=[5, 0]), [5, 0]),
        (dict(indices=0), []),
        (dict(filter_cfg=dict(min_height=2), indices=1), [2]),
    ],
)
@pytest.mark.parametrize("serialize_data", [True, False])
def test_records_are_filtered_and_selected(annotations, settings, heights, serialize_data):
    dataset = Pictures(**annotations, **settings, serialize_data=serialize_data)
    assert [dataset.get_data_info(i)["height"] for i in range(len(dataset))] == heights


@pytest.mark.parametrize("serialize_data", [True, False])
def test_subsets(annotations, serialize_data):
    dataset = Pictures(**annotations, serialize_data=serialize_data)
    subset = dataset.get_subset([4, 2])
    assert [subset[i]["height"] for i in range(len(subset))] == [4, 2]
    assert [subset[i]["sample_idx"] for i in range(2)] == [0, 1]
    assert len(dataset) == 6
    dataset.get_subset_(-1)
    assert dataset[0]["height"] == 5
    with pytest.raises(TypeError, match="`indices` must be an integer or a list of integers, got 'all'"):
        dataset.get_subset("all")


def test_annotations_are_read_late_with_lazy_init(annotations):
    dataset = Pictures(**annotations, lazy_init=True)
    assert "source" not in dataset.metainfo
    assert len(dataset) == 6
    assert dataset.metainfo["source"] == "web"
    with pytest.raises(FileNotFoundError):
        Pictures(ann_file="missing.json")


def test_wrong_annotation_files_are_refused(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="must have the keys 'metainfo' and 'data_list', got a list in .*list.json"):
        BaseDataset(ann_file=str(tmp_path / "list.json"))
    assert BaseDataset(ann_file=None, data_root=None, lazy_init=True).ann_file == ""


@pytest.mark.parametrize("parsed", ["text", [dict(x=1), "text"]])
def test_records_must_be_dicts(annotations, parsed):
    class Wrong(BaseDataset):
        def parse_data_info(self, raw_data_info):
            return parsed

    with pytest.raises(TypeError, match="parse_data_info of Wrong must return a dict or dicts, got .*text"):
        Wrong(**annotations)
    with pytest.raises(ValueError, match="`ann_file` must end in .json, .pkl or .pickle, got ''"):
        BaseDataset()


def test_a_dropped_sample_is_replaced_by_one_that_seed_epoch_and_index_determine(annotations):
    def drop_odd(record, rng):
        return None if record["height"] % 2 else (record["height"], int(rng.randint(1000)))

    dataset = Pictures(**annotations, pipeline=[drop_odd])
    samples = [dataset.at_epoch(epoch)[1] for epoch in range(20)]
    assert {height for height, _ in samples} == {0, 2, 4}
    assert samples == [dataset.at_epoch(epoch)[1] for epoch in range(20)]
    with pytest.raises(ValueError, match="must return every sample with test_mode=True, got None for sample 1"):
        Pictures(**annotations, pipeline=[drop_odd], test_mode=True)[1]
    with pytest.raises(ValueError, match="the pipeline dropped 3 samples in a row"):
        Pictures(**annotations, pipeline=[lambda record: None], max_refetch=3)[0]
    assert Compose([lambda x: x + 1, lambda x: None, lambda x: x.missing])(1) is None


def test_concatenated_datasets_need_equal_metainfo():
    def part(count, **metainfo):
        return ArrayDataset({"x": np.arange(count)}, metainfo=dict(classes=("a",), **metainfo))

    both = ConcatDataset([part(2), part(3)])
    assert [int(both[i]["x"]) for i in range(-5, 5)] == [0, 1, 0, 1, 2] * 2
    assert (len(both), both.metainfo, both.cumulative_sizes) == (5, {"classes": ("a",)}, [2, 5])
    with pytest.raises(IndexError, match="the dataset has 5 samples, got the index 5"):
        both[5]
    with pytest.raises(ValueError, match=r"got another source in datasets\[1\]; `ignore_keys` names what may differ"):
        ConcatDataset([part(2), part(3, source="web")])
    assert len(ConcatDataset([part(2), part(3, source="web")], ignore_keys="source")) == 5
    with pytest.raises(ValueError, match="at least one dataset"):
        ConcatDataset([])


def test_wrappers_pass_on_records_and_the_epoch(annotations):
    DATASETS.register_module(name="TestPictures", module=Pictures, force=True)
    config = dict(type="TestPictures", **annotations)
    both = ConcatDataset([config, dict(config, indices=[3])], lazy_init=True)
    assert both.get_data_info(6)["height"] == 3
    assert both.get_data_info(6)["sample_idx"] == 6
    assert both.get_cat_ids(5) == [2]

    noise = TransformedDataset(ArrayDataset({"x": np.zeros(3)}), [lambda sample, rng: rng.randint(10**6)])
    for wrapped in (
        RepeatDataset(noise, times=2),
        ConcatDataset([noise, noise]),
        MixedDataset([noise], [1.0], length=6),
    ):
        epochs = [[wrapped.at_epoch(epoch)[i] for i in range(6)] for epoch in (0, 1, 0)]
        assert epochs[0] == epochs[2] != epochs[1]
        if isinstance(wrapped, RepeatDataset):  # other random numbers in each repetition
            assert len({*epochs[0], *epochs[1]}) == 12


def draw(sample, rng):
    return {**sample, "drawn": (*sample.get("drawn", ()), rng.randint(2**31))}


class Noise(BaseDataset):
    def load_data_list(self):
        return [dict(cat=i == 0) for i in range(4)]

    def get_cat_ids(self, idx):
        return [int(self.get_data_info(idx)["cat"])]


NOISE = Noise(pipeline=[draw])
DRAWN = TransformedDataset(NOISE, [draw])


@pytest.mark.parametrize(
    "dataset",
    [
        DRAWN,
        ConcatDataset([NOISE, NOISE, DRAWN]),
        MixedDataset([NOISE, DRAWN], [0.5, 0.5], length=40),  # each sample five times in an epoch
        RepeatDataset(ConcatDataset([NOISE, NOISE]), times=3),
        ConcatDataset([RepeatDataset(NOISE, times=2), ClassBalancedDataset(NOISE, oversample_thr=1.0)]),
        ConcatDataset([NOISE, ConcatDataset([NOISE, MixedDataset([NOISE, NOISE], [0.5, 0.5])]), DRAWN]),
        TransformedDataset(ConcatDataset([PseudoLabelDataset(NOISE), PseudoLabelDataset(DRAWN)]), [draw]),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_transforms_of_composed_datasets_never_draw_the_same_numbers(dataset):
    epochs = [[dataset.at_epoch(epoch)[i]["drawn"] for i in range(len(dataset))] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2]  # a resumed run reads the same samples
    assert epochs[0] == [dataset[i]["drawn"] for i in range(len(dataset))]
    numbers = [number for epoch in epochs[:2] for drawn in epoch for number in drawn]
    assert len(set(numbers)) == len(numbers)


def test_the_first_part_draws_what_it_draws_alone():
    assert ConcatDataset([NOISE, NOISE])[2] == NOISE[2]


def test_repeats_follow_the_frequency_of_the_rarest_class(annotations):
    class Labels:
        metainfo: ClassVar = dict(classes=("a", "b"))
        classes = ([0], [0, 1], [0], [0], [0], [0], [0], [0], [2], [2])

        def __len__(self):
            return 10

        def __getitem__(self, index):
            return index

        def get_cat_ids(self, index):
            return self.classes[index]

    # frequencies 0.8, 0.1 and 0.2: factors 1, sqrt(0.4 / 0.1) = 2 and sqrt(0.4 / 0.2) = 1.41, rounded up
    dataset = ClassBalancedDataset(Labels(), oversample_thr=0.4)
    assert dataset.repeat_indices == [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9]
    assert [dataset[i] for i in range(len(dataset))] == dataset.repeat_indices
    assert dataset.metainfo == dict(classes=("a", "b"))
    assert len(ClassBalancedDataset(Pictures(**annotations), 1e-3)) == 6
    with pytest.raises(ValueError, match="must have get_cat_ids"):
        ClassBalancedDataset(ArrayDataset({"x": np.zeros(2)}), 0.1)


def test_a_mixture_has_the_shares_of_its_weights_and_continues_in_the_next_epoch():
    few, many = (ArrayDataset({"x": np.arange(start, end)}) for start, end in ((0, 4), (100, 130)))
    mixed = MixedDataset([few, many], weights=[1, 3], length=8)
    epochs = [[int(mixed.at_epoch(epoch)[i]["x"]) for i in range(8)] for epoch in range(5)]
    for epoch in epochs:
        assert sum(x < 100 for x in epoch) == 2
    large = [x for epoch in epochs for x in epoch if x >= 100]
    assert sorted(large) == list(range(100, 130))  # each once in 5 epochs of 6
    assert large != sorted(large)
    small = [x for epoch in epochs for x in epoch if x < 100]
    assert sorted(small[:4]) == sorted(small[4:8]) == [0, 1, 2, 3]
    assert len(MixedDataset([few, many], weights=[1, 1])) == 8  # until the smaller one is read
    assert {mixed[i]["x"] >= 100 for i in range(8)} == {False, True}
    with pytest.raises(ValueError, match=r"`weights` must be 2 numbers, one for each dataset.*got \[1\]"):
        MixedDataset([few, many], weights=[1])


def test_a_loader_resumes_within_a_mixture_of_configs():
    arrays = [dict(type="ArrayDataset", arrays={"x": np.arange(n)}) for n in (5, 20)]
    dataset = dict(
        type="RepeatDataset", times=2, dataset=dict(type="MixedDataset", datasets=arrays, weights=[0.5, 0.5])
    )
    whole = build_dataloader(dict(batch_size=4, dataset=dataset), train=True, seed=1)
    assert isinstance(whole, DataLoader)
    assert len(whole.dataset) == 20
    whole.set_epoch(1)
    batches = [batch["x"].tolist() for batch in whole]
    again = build_dataloader(dict(batch_size=4, dataset=dataset), train=True, seed=1)
    again.set_epoch(1, start=3)
    assert [batch["x"].tolist() for batch in again] == batches[3:]
    copied = pickle.loads(pickle.dumps(whole.dataset.at_epoch(1)))  # for worker processes
    assert [copied[i]["x"] for i in range(20)] == [whole.dataset.at_epoch(1)[i]["x"] for i in range(20)]


def test_hooks_reach_the_pipeline_within_a_wrapper(annotations):
    inner = Pictures(**annotations, pipeline=[lambda record: record["height"]])
    loader = DataLoader(RepeatDataset(inner, times=2), batch_size=12, drop_last=True)
    assert next(iter(loader)).tolist() == [*range(6)] * 2
    set_pipeline(loader, Compose([lambda record: 10 * record["height"]]))
    assert next(iter(loader)).tolist() == [*range(0, 60, 10)] * 2
    with pytest.raises(AttributeError, match="ConcatDataset has 2 datasets: see `datasets`"):
        _ = ConcatDataset([inner, inner]).dataset
