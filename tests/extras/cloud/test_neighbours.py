"""Test that a run continues from copies on the disks of other hosts when one is lost."""

import concurrent.futures
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from jengine import checkpoint
from jengine.config.errors import ConfigError
from jengine.extras.cloud import LocalCheckpointHook
from jengine.extras.cloud.kept_copies import KeptCopies
from jengine.extras.cloud.local_copies import (
    announce_copies,
    copies_path,
    find_disk,
    find_newer_copy,
)
from jengine.extras.cloud.neighbours import choose_keepers, exchange, pack, unpack
from jengine.parallel.processes import SingleProcess
from tests.crash import kills
from tests.extras.cloud import replaced_disk
from tests.parallel.test_processes import ROOT, address, environment

RUN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("hosts", "neighbours", "expected"),
    [
        ("ab", 1, [((0, 1), (1, 0))]),
        ("abcd", 1, [((0, 1), (1, 2), (2, 3), (3, 0))]),
        ("aabb", 1, [((0, 2), (1, 3), (2, 0), (3, 1))]),  # processes of one host have keepers on the other
        ("abab", 1, [((0, 1), (1, 2), (2, 3), (3, 0))]),
        ("abc", 2, [((0, 1), (1, 2), (2, 0)), ((0, 2), (1, 0), (2, 1))]),
        ("ab", 2, [((0, 1), (1, 0))]),  # there is only one other host
        ("aab", 1, [((1, 2), (2, 0))]),  # the other host has a single process, which keeps one copy
        ("a", 1, []),
        ("aaa", 1, []),
        ("abcd", 0, []),
    ],
)
def test_a_copy_is_kept_on_another_host(hosts, neighbours, expected):
    rings = choose_keepers([(host, "/disk") for host in hosts], neighbours)
    assert [len(ring) for ring in rings] == [len(ring) for ring in expected]
    for ring in rings:
        assert all(hosts[owner] != hosts[keeper] for owner, keeper in ring)
        assert len({owner for owner, _ in ring}) == len({keeper for _, keeper in ring}) == len(ring)
    if "abab" not in hosts:
        assert rings == expected
    by_owner = [(owner, hosts[keeper]) for ring in rings for owner, keeper in ring]
    assert len(set(by_owner)) == len(by_owner)  # two neighbours are two hosts


def test_on_one_machine_other_directories_count_as_hosts():
    assert choose_keepers([("a", "/disk_0"), ("a", "/disk_1")], 1) == [((0, 1), (1, 0))]
    assert choose_keepers([("a", "/disk_0"), ("b", "/disk_0"), ("b", "/disk_1")], 1) == [((0, 1), (2, 0))]


def write(directory, iteration=3, session="", run=RUN, size=2):
    state = {"x": np.arange(size, dtype=np.float32), "y": jax.numpy.ones(3, "bfloat16")}
    writer = checkpoint.Checkpointer(directory, run, alone=True)
    path = writer.save(
        directory / f"iter_{iteration}", state, {"meta": {"iter": iteration, "session": session}}, latest=False
    )
    writer.close()
    return pathlib.Path(path)


def files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def large_copy(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sent"), size=5_000_000)  # 20 MB, more than a piece


def send(packed):
    """Send from this process to itself."""
    return exchange(((0, 0),), packed, [packed.size])


def test_a_copy_arrives_with_the_same_files(large_copy, tmp_path):
    unpack(send(pack(large_copy)), tmp_path / "iter_3", RUN)
    assert files(tmp_path / "iter_3") == files(large_copy)
    unpack(send(pack(large_copy)), tmp_path / "iter_3", RUN)  # in the place of the same
    assert os.listdir(tmp_path) == ["iter_3"]


@pytest.mark.parametrize("what", ["changed bytes", "a file that is gone"])
def test_a_copy_that_arrives_with_other_bytes_is_not_kept(large_copy, tmp_path, what, caplog):
    packed = pack(large_copy)
    if what == "a file that is gone":
        lost = large_copy.parent / "lost"
        shutil.copytree(large_copy, lost)
        packed = pack(lost)
        shutil.rmtree(lost / "state" / "d")
    content = send(packed)
    if what == "changed bytes":
        content[-packed.size // 2] ^= 1
    with pytest.raises(OSError, match=r"iter_3 is not what was sent: .* is damaged"):
        unpack(content, tmp_path / "iter_3", RUN)
    assert os.listdir(tmp_path) == []
    assert ("A local copy could not be sent to another host" in caplog.text) is (what != "changed bytes")


class Thread(SingleProcess):
    """One of several processes, each of which is a thread here."""

    def __init__(self, index, values, barrier):
        self.index, self.count, self.values, self.barrier = index, len(values), values, barrier

    def all_gather(self, name, value):
        self.barrier.wait(10)
        self.values[self.index] = value
        self.barrier.wait(10)
        return list(self.values)

    def broadcast(self, name, value, source=0):
        return self.all_gather(name, value)[source]


@pytest.fixture
def disk(tmp_path):
    """A disk that both of two processes see."""
    checkpoint.layout.write_current_run(tmp_path, RUN)
    announce_copies(tmp_path, f"{tmp_path}/disk")
    return find_disk(f"{tmp_path}/disk", tmp_path, RUN)


@pytest.fixture
def find(tmp_path, disk):
    """Return a function that returns the copies that two processes find."""

    def find():
        values, barrier = [None, None], threading.Barrier(2)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            processes = [Thread(index, values, barrier) for index in (0, 1)]
            found = list(pool.map(functools.partial(find_newer_copy, tmp_path, None), processes))
        return [None if copy is None else copy[0] for copy in found]

    return find


def write_both(disk, *args, owners=(0, 1)):
    return [str(write(copies_path(disk, owner, 2), *args)) for owner in owners]


def test_copies_of_different_starts_do_not_belong_together(disk, find, caplog):
    write_both(disk, 9, "first", owners=[0])
    write_both(disk, 9, "second", owners=[1])
    assert find() == [None, None]
    assert "although some are newer than the checkpoint: no disk has the copy of process 0 of iteration 9." in caplog.text
    older = write_both(disk, 6, "first")
    assert find() == older


def test_a_copy_that_is_damaged_on_one_disk_is_used_by_no_process(disk, find, caplog):
    older, newer = write_both(disk, 6, "first"), write_both(disk, 9, "first")
    assert find() == newer
    for path in pathlib.Path(newer[1]).rglob("d/*"):
        path.write_bytes(b"x" * path.stat().st_size)
    assert find() == older
    assert f"skipped the local copy {newer[1]}" in caplog.text
    (pathlib.Path(newer[0]) / "meta.json").write_text("{}")
    assert find() == older
    assert f"skipped the local copy {newer[0]}" in caplog.text


def test_what_is_kept_here_no_longer_is_removed(disk):
    places = [("a", "/disk"), ("b", "/disk"), ("c", "/disk")]
    for owner, count in [(0, 3), (1, 3), (2, 3), (0, 2)]:
        for iteration in (3, 6):
            write(copies_path(disk, owner, count), iteration)
    unfinished = copies_path(disk, 0, 3) / "iter_9.incoming"
    (unfinished / "state").mkdir(parents=True)
    KeptCopies(disk, RUN, places, 1, Thread(1, [None] * 3, None)).tidy(last=3)
    # process 1 keeps its own and those of process 0
    assert sorted(str(path.relative_to(disk)) for path in disk.glob("*/*")) == [
        "process_0_of_3/iter_3",
        "process_1_of_3/iter_3",
    ]


def test_a_directory_may_have_an_environment_variable(monkeypatch):
    monkeypatch.setenv("LOCAL_DISK", "/local/ssd")
    assert LocalCheckpointHook("$LOCAL_DISK/jengine", interval=5).directory == "/local/ssd/jengine"
    monkeypatch.delenv("LOCAL_DISK")
    with pytest.raises(ConfigError, match=r"directory` must have environment variables that are set, got '\$LOCAL_DISK/j"):
        LocalCheckpointHook("$LOCAL_DISK/jengine", interval=5)


def test_a_replaced_host_gets_its_copy_from_its_neighbour_and_the_run_has_the_same_bits(tmp_path):
    env = environment(devices=1)
    command = [sys.executable, replaced_disk.__file__, str(tmp_path), address()]
    processes = [
        subprocess.Popen([*command, str(index)], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for index in (0, 1)
    ]
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "Each local copy is kept on another host too." in outputs[0]
    assert "newer than any checkpoint. Process 1 gets its copy from the disk of process 0." in outputs[0]
    assert re.search(r"Resumed from .*/disk_0/.*/process_0_of_2/iter_(5|10): ", outputs[0])
    actual, expected = (checkpoint.load(tmp_path / name).state for name in ("run", "expected"))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.many_processes
@pytest.mark.parametrize(("count", "seed"), [(2, 0), (4, 2)])
def test_runs_of_which_a_host_is_killed_and_replaced_are_bit_identical(tmp_path, count, seed):
    interrupted, restored = kills.run_with_lost_disks(tmp_path, seed, count)
    assert interrupted == 2
    assert restored >= 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("killed_in_copies")


@pytest.mark.many_processes
@pytest.mark.parametrize("seed", range(4))
def test_runs_that_are_killed_while_they_write_copies_are_bit_identical(directory, seed):
    kills.run_killed_in_copies(directory, seed, count=2)


@pytest.mark.many_processes
def test_four_hosts_in_another_order_continue_and_two_lost_neighbours_are_named(tmp_path):
    options = dict(count=4, save=0, local=5)
    run = tmp_path / "run"
    kills.finish(run, 12, **options)
    expected = checkpoint.load(run).state

    def lose_checkpoints():
        shutil.rmtree(run / "iter_12")
        (run / "last_checkpoint").unlink()

    def reorder(order):
        for index in range(4):
            kills.disk_path(run, index).rename(tmp_path / str(index))
        for index, other in enumerate(order):
            (tmp_path / str(other)).rename(kills.disk_path(run, index))

    lose_checkpoints()
    reorder([2, 3, 0, 1])
    kills.finish(run, 12, **options)
    output = kills.output_path(run).read_text()
    for index in range(4):
        assert f" Process {index} gets its copy from the disk of process" in output
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(run).state, expected)
    lose_checkpoints()
    for index in (1, 2):
        shutil.rmtree(kills.disk_path(run, index))
    kills.finish(run, 12, **options)
    # process 3 keeps that of process 2, if it had the time
    assert re.search(r"no disk has the copy of process 1(, 2)? of iteration", kills.output_path(run).read_text())
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(run).state, expected)
