"""Train on data of other libraries, interrupt the run in the middle of an epoch, and resume it."""

import itertools
import logging

import numpy as np
import pytest

from jengine.errors import ConfigError

from .stream_cases import train, train_with_restart

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")
tfds = pytest.importorskip("tensorflow_datasets")
datasets = pytest.importorskip("datasets")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.foreign

ITERATIONS = dict(by_epoch=False, max_iters=12)
PASSES = dict(max_epochs=3)  # of five batches
EPOCHS = dict(max_epochs=3, epoch_length=4)  # which are not passes


class TorchIds(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"id": torch.tensor(index, dtype=torch.int32)}


class TorchStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ({"id": torch.tensor(k, dtype=torch.int32)} for k in range(10))


def torch_loader(dataset=TorchIds, **arguments):
    return torch.utils.data.DataLoader(dataset(), batch_size=2, **arguments)


def torch_shuffled():
    return torch_loader(shuffle=True, generator=torch.Generator().manual_seed(3))


def torch_workers():
    return torch_loader(shuffle=True, generator=torch.Generator().manual_seed(3), num_workers=1)


def stateful_loader():
    torch.manual_seed(7)  # the generator of the first pass; a resumed run has that of the checkpoint
    return stateful_dataloader.StatefulDataLoader(TorchIds(), batch_size=2, shuffle=True)


def stateful_stream():
    return stateful_dataloader.StatefulDataLoader(TorchStream(), batch_size=2)


def tf_ids(count=10):
    return tf.data.Dataset.range(count, output_type=tf.int32).map(lambda k: {"id": k})


def tf_shuffled():
    return tf_ids().shuffle(10, seed=1).batch(2)


def tf_endless():
    return tf_ids().shuffle(10, seed=1).repeat().batch(3)


def tf_filtered():
    return tf_ids(20).filter(lambda example: example["id"] % 2 == 0).shuffle(4, seed=1).batch(2)


def tfds_numpy():
    return tfds.as_numpy(tf_shuffled())


def hf_map(**columns):
    return datasets.Dataset.from_dict({"id": np.arange(10, dtype=np.int32), **columns})


def hf_config():
    return dict(dataset=hf_map(name=[f"{k}.png" for k in range(10)]), batch_size=2)


def hf_numpy():
    return dict(dataset=hf_map().with_format("numpy"), batch_size=2)


def hf_stream():
    return dict(dataset=hf_map().to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=4), batch_size=2)


def hf_batches():
    return hf_map().to_iterable_dataset().shuffle(seed=1, buffer_size=10).batch(2)


EXACT = [
    torch_loader,
    torch_shuffled,
    torch_workers,
    stateful_loader,
    stateful_stream,
    tf_shuffled,
    tf_filtered,
    hf_config,
    hf_numpy,
    hf_stream,
    hf_batches,
]


@pytest.mark.parametrize("train_cfg", [ITERATIONS, PASSES, EPOCHS], ids=["iterations", "passes", "epochs"])
@pytest.mark.parametrize("make_data", EXACT, ids=lambda make: make.__name__)
def test_a_resumed_run_continues_with_the_next_batch(tmp_path, make_data, train_cfg):
    policy = dict(data="exact")
    whole, parts, _ = train_with_restart(tmp_path, make_data, train_cfg=train_cfg, resume_policy=policy, stop=8)
    assert len(whole) == (15 if train_cfg is PASSES else 12)
    assert parts == whole


@pytest.mark.parametrize("train_cfg", [ITERATIONS, EPOCHS], ids=["iterations", "epochs"])
def test_an_endless_stream_of_tensorflow_continues_with_the_next_batch(tmp_path, train_cfg):
    policy = dict(data="exact")
    whole, parts, _ = train_with_restart(tmp_path, tf_endless, train_cfg=train_cfg, resume_policy=policy)
    assert parts == whole
    assert sorted(itertools.chain(*whole)[:10]) == list(range(10))
