"""Train on data of other libraries, interrupt the run, and resume it: each must continue with the next batch."""

import itertools

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import build_dataloader
from jengine.hooks import Hook
from tests.runner.stream_cases import read_log, train

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")
tfds = pytest.importorskip("tensorflow_datasets")
datasets = pytest.importorskip("datasets")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

SAMPLES = [{"id": k} for k in range(10)]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


class OwnOrder(torch.utils.data.Sampler):
    """Yield batches in an order of its own, as a batch sampler of the user."""

    def __iter__(self):
        return iter([[1, 0], [3, 2]])

    def __len__(self):
        return 2


def torch_loader(data=SAMPLES, **arguments):
    return torch.utils.data.DataLoader(data, batch_size=2, **arguments)


def torch_shuffled(**arguments):
    return torch_loader(shuffle=True, generator=torch.Generator().manual_seed(3), **arguments)


def torch_workers():
    return torch_shuffled(num_workers=1, multiprocessing_context="spawn")


def torch_weighted():
    generator = torch.Generator().manual_seed(3)
    return torch_loader(sampler=torch.utils.data.WeightedRandomSampler([1.0] * 10, 10, generator=generator))


def torch_distributed():
    sampler = torch.utils.data.DistributedSampler(SAMPLES, num_replicas=1, rank=0, shuffle=True)
    return torch_loader(sampler=sampler)


def torch_stream():
    return torch_loader(Stream())


def stateful_loader():
    return stateful_dataloader.StatefulDataLoader(SAMPLES, batch_size=2, shuffle=True)


def stateful_stream():
    return stateful_dataloader.StatefulDataLoader(Stream(), batch_size=2)


def tf_ids(count=10):
    return tf.data.Dataset.range(count, output_type=tf.int32).map(lambda k: {"id": k})


def tf_shuffled(seed=1):
    return tf_ids().shuffle(10, seed=seed).batch(2)


def tf_unseeded():
    return tf_shuffled(seed=None)


def tf_endless():
    return tf_ids().shuffle(4, seed=1).repeat().batch(2)


def tf_filtered():
    return tf_ids(20).filter(lambda example: example["id"] % 2 == 0).shuffle(4, seed=1).batch(2)


def tf_examples():
    return dict(dataset=tf_ids().shuffle(4, seed=1), batch_size=2)


def tfds_numpy():
    return tfds.as_numpy(tf_shuffled())


def hf_dataset(**columns):
    return datasets.Dataset.from_dict({"id": np.arange(10, dtype=np.int32), **columns})


def hf_map():
    return dict(dataset=hf_dataset(name=[f"{k}.png" for k in range(10)]), batch_size=2)


def hf_numpy():
    return dict(dataset=hf_dataset().with_format("numpy"), batch_size=2)


def hf_shards():
    stream = hf_dataset().to_iterable_dataset(num_shards=5).shuffle(seed=1, buffer_size=1)
    return dict(dataset=stream, batch_size=2)


def hf_buffer():
    return dict(dataset=hf_dataset().to_iterable_dataset().shuffle(seed=1, buffer_size=4), batch_size=2)


def hf_batches():
    return hf_dataset().to_iterable_dataset().shuffle(seed=1, buffer_size=10).batch(2)


EXACT = [
    torch_loader,
    torch_shuffled,
    torch_weighted,
    torch_distributed,
    stateful_loader,
    stateful_stream,
    tf_shuffled,
    tf_unseeded,
    tf_filtered,
    tf_examples,
    tfds_numpy,
    hf_map,
    hf_numpy,
    hf_shards,
]
REPLAYED = [torch_stream, hf_buffer, hf_batches]
IN_ORDER = [torch_loader, torch_stream, stateful_stream]


def name(make_data):
    return make_data.__name__


def resumed(work_dir, make_data, save, **changes):
    """Return the ids of a run that stops at iteration 8, and those of its continuation from the last checkpoint."""
    first, _ = train(work_dir, make_data, stop=8, save=save, **changes)
    second, _ = train(work_dir, make_data, resume=True, save=save, **changes)
    return first, second


ITERATIONS = dict(by_epoch=False, max_iters=15)
PASSES = dict(max_epochs=3)
CASES = pytest.mark.parametrize(
    ("train_cfg", "save", "at"),
    [(ITERATIONS, 3, 6), (PASSES, 4, 8), (PASSES, 5, 5)],
    ids=["iterations", "within a pass", "at the end of a pass"],
)


@CASES
@pytest.mark.parametrize("make_data", [*EXACT, *REPLAYED], ids=name)
def test_a_resumed_run_continues_with_the_next_batch(tmp_path, make_data, train_cfg, save, at):
    first, second = resumed(tmp_path, make_data, save, train_cfg=train_cfg)
    assert (len(first), len(second)) == (9, 15 - at)
    assert second[: 9 - at] == first[at:]  # what the first run saw after its last checkpoint
    passes = [list(itertools.chain(*(first[:at] + second)[k : k + 5])) for k in (0, 5, 10)]
    if make_data is not torch_weighted:
        assert all(sorted(ids) == sorted(passes[0]) for ids in passes)
    assert (passes[0] == passes[1] == passes[2]) == (make_data in IN_ORDER)


@pytest.mark.parametrize("train_cfg", [ITERATIONS, dict(max_epochs=5, epoch_length=3)], ids=["iterations", "epochs"])
def test_an_endless_stream_of_tensorflow_continues_with_the_next_batch(tmp_path, train_cfg):
    first, second = resumed(tmp_path, tf_endless, 3, train_cfg=train_cfg)
    assert second[:3] == first[6:]
    assert sorted(itertools.chain(*(first[:6] + second))) == sorted(3 * list(range(10)))


def test_the_order_of_a_stateful_loader_is_that_of_the_checkpoint(tmp_path):
    torch.manual_seed(1)
    whole, _ = train(tmp_path / "whole", stateful_loader, save=5)
    torch.manual_seed(1)
    train(tmp_path / "parts", stateful_loader, save=5, stop=5)
    torch.manual_seed(2)
    second, _ = train(tmp_path / "parts", stateful_loader, save=5, resume=True)
    assert second == whole[5:]


def test_workers_of_pytorch_continue_with_the_next_batch(tmp_path):
    train_cfg = dict(by_epoch=False, max_iters=9)  # each pass starts them again
    first, second = resumed(tmp_path, torch_workers, 3, train_cfg=train_cfg)
    assert second[:3] == first[6:]


def test_another_batch_size_continues_at_the_same_example_of_a_shuffled_pass(tmp_path):
    def make_data(batch_size):
        generator = torch.Generator().manual_seed(3)
        return lambda: torch.utils.data.DataLoader(SAMPLES, batch_size, shuffle=True, generator=generator)

    whole, _ = train(tmp_path / "whole", make_data(2), train_cfg=PASSES)
    first, _ = train(tmp_path / "parts", make_data(2), stop=8, save=4, train_cfg=PASSES)
    second, runner = train(tmp_path / "parts", make_data(1), resume=True, save=100, train_cfg=PASSES)
    flat = itertools.chain.from_iterable
    assert list(flat(first[:8] + second)) == list(flat(whole))
    assert "an epoch has 10 iterations instead of 5, and 14 iterations remain" in read_log(runner)


def test_chunks_and_batches_ahead_do_not_move_the_position(tmp_path):
    train_cfg = dict(by_epoch=False, max_iters=15, steps_per_call=3)
    for make_data in (torch_shuffled, tf_shuffled, hf_shards):
        first, second = resumed(tmp_path / name(make_data), make_data, 3, train_cfg=train_cfg)
        assert second[:3] == first[6:]


@pytest.mark.parametrize(
    ("make_data", "message"),
    [
        (lambda: torch_loader(shuffle=True), "pass generator=torch.Generator() to the DataLoader"),
        (lambda: torch.utils.data.DataLoader(SAMPLES, batch_sampler=OwnOrder()), "pass generator=torch.Generator()"),
        (torch_stream, "use torchdata's StatefulDataLoader, which has a position"),
        (hf_buffer, "shuffle the shards alone, .shuffle(seed=..., buffer_size=1)"),
    ],
    ids=["global generator", "batch sampler", "iterable dataset", "shuffle buffer"],
)
def test_what_has_no_position_is_logged_with_the_way_to_one_and_refused_if_it_must_be_exact(
    tmp_path, make_data, message
):
    with pytest.raises(ConfigError, match="must be data whose position can be saved") as error:
        train(tmp_path / "exact", make_data, resume="exact")
    assert message in str(error.value)
    _, first = train(tmp_path / "run", make_data, stop=4)
    assert "cannot be saved: a resumed run reads and drops the batches before its position" in read_log(first)
    assert message in read_log(first)
    _, second = train(tmp_path / "run", make_data, resume=True)
    assert "examples of this pass are read and dropped" in read_log(second)


def test_columns_of_strings_stay_on_the_host(tmp_path):
    seen = []

    class Names(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append([f"{k}.png" for k in np.asarray(data_batch["id"])] == list(data_batch["name"]))

    train(tmp_path, hf_map, custom_hooks=[Names()])
    assert seen == [True] * 12


def test_lists_of_numbers_of_a_stream_are_arrays(tmp_path):
    tokens = hf_dataset(tokens=np.arange(40).reshape(10, 4).tolist())
    for data in (
        dict(dataset=tokens, batch_size=2),
        dict(dataset=tokens.to_iterable_dataset(), batch_size=2),
        tokens.to_iterable_dataset().batch(2),
    ):
        batch = build_dataloader(data, train=False).example()
        assert batch["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("make_data", [tf_shuffled, tf_examples, hf_shards, torch_shuffled], ids=name)
def test_processes_share_examples_but_not_batches(make_data):
    shards = []
    for index in range(2):
        loader = build_dataloader(make_data(), train=True, process_index=index, process_count=2)
        shards.append([k for batch in loader for k in batch["id"].tolist()])
    if isinstance(make_data(), dict):
        assert not set(shards[0]) & set(shards[1])
        assert len(shards[0] + shards[1]) == 8  # two batches of two on each process; the rest is dropped
    else:
        assert shards[0] == shards[1]  # a loader yields the share of its process


def test_a_second_pass_does_not_change_the_first():
    expected, loader = (build_dataloader(tf_shuffled(), train=True) for _ in range(2))
    batches = iter(loader)
    seen = [next(batches)["id"].tolist()]
    assert sorted(k for batch in loader.copy_at_epoch(0) for k in batch["id"].tolist()) == list(range(10))
    seen += [batch["id"].tolist() for batch in batches]
    assert seen == [batch["id"].tolist() for batch in expected]


def test_data_with_a_state_of_their_own_allow_one_pass_at_a_time():
    loader = build_dataloader(stateful_loader(), train=True)
    with pytest.raises(ValueError, match="StatefulDataLoader must allow a second pass during the current one"):
        loader.copy_at_epoch(0)
    assert sorted(k for batch in loader for k in batch["id"].tolist()) == list(range(10))
