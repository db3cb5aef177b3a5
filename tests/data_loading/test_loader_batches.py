import multiprocessing
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset, DataLoader, DefaultSampler, InfiniteSampler
from jengine.data.batch_prefetcher import kill_workers
from jengine.logging.watchdog import all_stacks


def make_dataset(size):
    return ArrayDataset({"x": np.arange(size, dtype=np.int32)})


class Samples:
    """A dataset that returns one sample at a time, and records the indices."""

    def __init__(self, size):
        self.size = size
        self.indices = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.indices.append(index)
        return {"x": np.float32(index), "pair": (index, [np.full(2, index)])}


def load_epoch(loader, epoch, start=0):
    loader.set_epoch(epoch, start)
    return [batch["x"].tolist() for batch in loader]


def test_drop_last_yields_full_batches_without_a_mask():
    loader = DataLoader(make_dataset(10), 4, drop_last=True)
    assert len(loader) == 2
    assert load_epoch(loader, 0) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [set(batch) for batch in loader] == [{"x"}, {"x"}]


def test_the_padded_last_batch_repeats_real_examples_and_every_batch_has_a_mask():
    batches = list(DataLoader(make_dataset(6), 4))
    assert [b["x"].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert [b["mask"].tolist() for b in batches] == [[True] * 4, [True, True, False, False]]
    assert batches[0]["mask"].dtype == bool


def test_a_dataset_smaller_than_one_batch_is_padded_for_evaluation():
    (batch,) = DataLoader(make_dataset(2), 4)
    assert batch["x"].shape == (4,)
    assert batch["mask"].tolist() == [True, True, False, False]


def test_each_sample_is_real_on_exactly_one_process_and_batch_counts_are_equal():
    loaders = [
        DataLoader(make_dataset(11), 2, DefaultSampler(11, seed=1, round_up=up, process_index=p, process_count=4))
        for up in (True, False)
        for p in range(4)
    ]
    assert {len(loader) for loader in loaders} == {2}
    for group in (loaders[:4], loaders[4:]):
        real = [x for loader in group for batch in loader for x in batch["x"][batch["mask"]].tolist()]
        assert sorted(real) == list(range(11))


def test_all_leaves_of_samples_are_stacked():
    batch = next(iter(DataLoader(Samples(5), 3, drop_last=True)))
    assert batch["x"].dtype == np.float32
    assert batch["pair"][0].tolist() == [0, 1, 2]
    assert batch["pair"][1][0].shape == (3, 2)


def test_an_epoch_starts_at_any_position_without_reading_the_samples_before():
    dataset = Samples(1000)
    loader = DataLoader(dataset, 10, DefaultSampler(1000, seed=5), drop_last=True)
    batches = load_epoch(loader, 3)
    dataset.indices.clear()
    assert load_epoch(loader, 3, start=98) == batches[98:]
    assert len(dataset.indices) == 20


def test_the_start_applies_to_one_iteration_only():
    loader = DataLoader(make_dataset(8), 2, drop_last=True)
    assert len(load_epoch(loader, 0, start=3)) == 1
    assert len(list(loader)) == 4


def test_epochs_differ_and_resuming_at_an_epoch_equals_reaching_it():
    def make_loader():
        return DataLoader(make_dataset(12), 4, DefaultSampler(12, seed=2), drop_last=True)

    loader = make_loader()
    first, second = load_epoch(loader, 0), load_epoch(loader, 1)
    assert first != second
    assert load_epoch(make_loader(), 1) == second


def test_the_saved_position_is_after_the_last_yielded_batch():
    loader = DataLoader(make_dataset(12), 4, DefaultSampler(12, seed=2), drop_last=True)
    batches = load_epoch(loader, 1)
    loader.set_epoch(1)
    next(iter(loader))
    assert loader.state_dict() == {"epoch": 1, "position": 1, "examples": 4}
    resumed = DataLoader(make_dataset(12), 4, DefaultSampler(12, seed=2), drop_last=True)
    resumed.load_state_dict(loader.state_dict())
    assert [batch["x"].tolist() for batch in resumed] == batches[1:]
    assert resumed.state_dict() == {"epoch": 2, "position": 0, "examples": 0}


def test_an_epoch_set_on_the_sampler_is_used():
    loader = DataLoader(make_dataset(12), 4, DefaultSampler(12, seed=2), drop_last=True)
    second = load_epoch(loader, 1)
    loader.set_epoch(0)
    loader.sampler.set_epoch(1)
    assert [batch["x"].tolist() for batch in loader] == second


def test_batches_of_the_infinite_sampler_cross_the_boundaries_of_permutations():
    loader = DataLoader(make_dataset(10), 4, InfiniteSampler(10, seed=1), drop_last=True)
    assert len(loader) == 2
    stream = [x for epoch in range(5) for batch in load_epoch(loader, epoch) for x in batch]
    assert [sorted(stream[k : k + 10]) for k in range(0, 40, 10)] == [list(range(10))] * 4


def test_a_foreign_sampler_determines_the_order_and_gets_the_epoch():
    class Backwards:
        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 4

        def __iter__(self):
            return iter([3 + self.epoch, 2, 1, 0])

    loader = DataLoader(make_dataset(8), 2, Backwards(), drop_last=True)
    assert load_epoch(loader, 0) == [[3, 2], [1, 0]]
    assert load_epoch(loader, 4) == [[7, 2], [1, 0]]
    loader.sampler.set_epoch(1)
    assert [batch["x"].tolist() for batch in loader] == [[4, 2], [1, 0]]


def test_a_sampler_may_have_no_set_epoch():
    loader = DataLoader(make_dataset(4), 2, [2, 0, 3, 1], drop_last=True)
    assert load_epoch(loader, 7) == [[2, 0], [3, 1]]


def test_fetching_a_whole_batch_at_once_may_return_a_list_of_samples():
    class Listed(Samples):
        def __getitems__(self, indices):
            return [{"x": np.float32(index)} for index in indices]

    loader = DataLoader(Listed(4), 2, drop_last=True)
    assert load_epoch(loader, 0) == [[0.0, 1.0], [2.0, 3.0]]


def test_a_collate_function_builds_the_batch():
    loader = DataLoader(Samples(4), 2, drop_last=True, collate_fn=lambda samples: {"x": np.array(len(samples))})
    assert load_epoch(loader, 0) == [2, 2]


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_collate_function_gets_the_samples_of_a_dataset_that_fetches_whole_batches(num_threads):
    def count(samples):
        assert isinstance(samples, list)
        return {"x": np.array([10 * sample["x"] for sample in samples])}

    loader = DataLoader(make_dataset(4), 2, collate_fn=count, num_threads=num_threads)
    assert load_epoch(loader, 0) == [[0, 10], [20, 30]]
    loader.close()


def test_a_collate_function_for_a_dataset_of_batches_alone_is_refused():
    class Batches:
        def __len__(self):
            return 4

        def __getitems__(self, indices):
            return {"x": np.asarray(indices)}

    assert load_epoch(DataLoader(Batches(), 2), 0) == [[0, 1], [2, 3]]
    with pytest.raises(
        ConfigError, match="`collate_fn` must be None for Batches, whose __getitems__ returns the batch"
    ):
        DataLoader(Batches(), 2, collate_fn=len).example()


def test_the_number_of_batches_per_epoch_can_be_limited():
    loader = DataLoader(make_dataset(100), 4, drop_last=True, num_batch_per_epoch=3)
    assert len(loader) == 3
    assert len(list(loader)) == 3


def test_no_thread_is_started_by_default():
    before = set(threading.enumerate())
    assert len(list(DataLoader(make_dataset(100), 4))) == 25
    assert set(threading.enumerate()) <= before  # those of earlier tests may end


def running():
    """Return the worker processes and threads of this process that read data."""
    threads = {thread for thread in threading.enumerate() if thread.name == "jengine-batches"}
    return threads | set(multiprocessing.active_children())


@pytest.mark.parametrize("kind", [{"num_threads": 2}, {"num_workers": 2}])
def test_prefetching_yields_the_same_batches_from_any_position_and_starts_once(kind):
    plain = DataLoader(make_dataset(10), 4, DefaultSampler(10, seed=1))
    prefetching = DataLoader(make_dataset(10), 4, DefaultSampler(10, seed=1), **kind)
    before = running()
    assert next(iter(prefetching))["x"].tolist() == load_epoch(plain, 0)[0]  # as for the example of the shapes
    started = running() - before
    assert len(started) == 2
    for epoch, start in [(0, 0), (1, 0), (5, 1), (0, 2)]:
        assert load_epoch(prefetching, epoch, start) == load_epoch(plain, epoch, start)
    assert running() - before == started
    prefetching.close()
    assert not started & set(multiprocessing.active_children())


def test_a_dataset_that_opens_a_file_at_its_first_read_is_not_read_before_workers_start(tmp_path):
    (tmp_path / "numbers").write_bytes(bytes(range(8)))

    class Opened:
        path, file = tmp_path / "numbers", None

        def __len__(self):
            return 8

        def __getitem__(self, index):
            self.file = self.file or self.path.open("rb")  # an open file cannot be pickled
            self.file.seek(index)
            return {"x": self.file.read(1)[0]}

    loader = DataLoader(Opened(), 2, num_workers=1)
    example = loader.example()["x"].tolist()
    assert loader.state_dict() == {"epoch": 0, "position": 0, "examples": 0}
    assert load_epoch(loader, 0) == [example, [2, 3], [4, 5], [6, 7]]
    loader.close()


def test_the_same_threads_repeat_an_unshuffled_pass():
    loader = DataLoader(make_dataset(4), 2, num_threads=1)
    first = load_epoch(loader, 0)
    started = running()
    assert load_epoch(loader, 0) == first == [[0, 1], [2, 3]]
    assert running() == started
    loader.close()


def test_prefetching_from_a_foreign_sampler_reads_its_order_in_each_epoch():
    order = [0, 1, 2, 3]
    loader = DataLoader(make_dataset(4), 2, order, drop_last=True, num_threads=1)
    assert load_epoch(loader, 0) == [[0, 1], [2, 3]]
    order.reverse()
    assert load_epoch(loader, 1) == [[3, 2], [1, 0]]
    loader.close()


@pytest.mark.parametrize("num_threads", [0, 1])
def test_an_error_of_the_dataset_is_raised_and_the_next_pass_reads_again(num_threads):
    class Flaky(Samples):
        broken = True

        def __getitem__(self, index):
            if self.broken:
                raise OSError(f"sample {index} cannot be read")
            return super().__getitem__(index)

    loader = DataLoader(Flaky(4), 2, num_threads=num_threads)
    with pytest.raises(OSError, match="sample 0 cannot be read"):
        list(loader)
    assert loader.state_dict() == {"epoch": 0, "position": 0, "examples": 0}
    loader.dataset.broken = False
    assert load_epoch(loader, 0) == [[0.0, 1.0], [2.0, 3.0]]
    loader.close()


def test_a_script_with_running_workers_exits_without_output(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import tempfile\n"
        "directory = tempfile.TemporaryDirectory()\n"  # finalizers are registered before multiprocessing is imported
        "import numpy as np\n"
        "from jengine.data import ArrayDataset, DataLoader\n"
        "if __name__ == '__main__':\n"
        "    loader = DataLoader(ArrayDataset({'x': np.arange(8)}), 2, num_workers=1)\n"
        "    print(next(iter(loader))['x'])\n"
        "    loader.set_epoch(1)\n"
        "    print(next(iter(loader))['x'])\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert (result.stdout, result.stderr) == ("[0 1]\n[0 1]\n", "")


def test_workers_end_with_a_main_process_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "import numpy as np\n"
        "from jengine.data import ArrayDataset, DataLoader\n"
        "if __name__ == '__main__':\n"
        "    loader = DataLoader(ArrayDataset({'x': np.arange(8)}), 2, num_workers=2)\n"
        "    print(next(iter(loader))['x'], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # ends when the last of the processes has closed its output
    result = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    assert result.returncode == -9
    assert result.stdout.startswith(b"[0 1]\n")


def test_samplers_and_datasets_pickle_for_worker_processes():
    loader = DataLoader(make_dataset(4), 2, DefaultSampler(make_dataset(4), seed=1))
    copy = pickle.loads(pickle.dumps(loader))
    assert load_epoch(copy, 2) == load_epoch(loader, 2)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_copy_does_not_change_the_position_of_its_loader(num_threads):
    dataset = make_dataset(12)
    loader = DataLoader(dataset, 4, sampler=DefaultSampler(dataset, seed=3), num_threads=num_threads)
    orders = [load_epoch(loader, epoch) for epoch in (0, 1)]
    loader.set_epoch(1)
    batches = iter(loader)
    first = next(batches)["x"].tolist()
    other = loader.copy_at_epoch(0)
    assert [batch["x"].tolist() for batch in other] == orders[0]
    other.close()
    assert (loader.epoch, loader.state_dict()) == (1, {"epoch": 1, "position": 1, "examples": 4})
    assert [first, *(batch["x"].tolist() for batch in batches)] == orders[1]
    loader.close()


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "os._exit(3)"])
def test_a_worker_that_dies_ends_the_pass_with_an_error(tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "from jengine.data import DataLoader\n"
        "class Dies:\n"
        "    def __len__(self):\n"
        "        return 64\n"
        "    def __getitem__(self, index):\n"
        f"        {how} if index == 20 else None\n"
        "        return {'x': index}\n"
        "if __name__ == '__main__':\n"
        "    list(DataLoader(Dies(), 2, num_workers=1))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    words = {"os.kill(os.getpid(), 9)": "was killed by SIGKILL, as when the memory is full", "os._exit(3)": "ended with exit code 3"}
    assert f", which builds batches, {words[how]}; what it printed is above" in done.stderr


class Hangs(Samples):
    def __getitem__(self, index):
        if index == 6:
            time.sleep(1000)
        return super().__getitem__(index)


def test_a_worker_that_hangs_writes_its_stacks_each_time_that_they_are_asked_for():
    batches = iter(DataLoader(Hangs(8), 2, num_workers=1))
    next(batches)
    for _ in range(2):
        end = time.monotonic() + 60
        stacks = ""
        while f'File "{__file__}", line' not in stacks and time.monotonic() < end:
            stacks = all_stacks().partition("Worker process ")[2]
        assert f'File "{__file__}", line' in stacks
    kill_workers()


def test_a_script_whose_workers_import_it_again_ends_with_what_to_write(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np\n"
        "from jengine.data import ArrayDataset, DataLoader\n"
        "list(DataLoader(ArrayDataset({'x': np.arange(8)}), 2, num_workers=2))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("a worker process has imported the script: what trains must be below `if __name__ == ") == 2
    assert "ended with exit code 1: it imports the script again, and so what trains must be below `if __name__ == " in done.stderr
