"""Test that damaged checkpoints are detected, that foreign directories are left alone, and that saves are durable."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jengine.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    find_latest,
    load,
    publish,
)
from jengine.checkpoint.checkpointer import CheckpointSaveError
from jengine.checkpoint.layout import write_current_run
from jengine.checkpoint.manifest import read_manifest

from .conftest import make_meta, make_state, save_and_wait


@pytest.fixture
def two_checkpoints(checkpointer, tmp_path):
    for number in (1, 2):
        checkpointer.save(tmp_path / f"epoch_{number}", make_state(number), make_meta(10 * number))
    checkpointer.wait()
    return tmp_path


def flip_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_detected_and_the_earlier_checkpoint_is_found(
    two_checkpoints, tmp_path
):
    newest = two_checkpoints / "epoch_2"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    assert len(files) > 5
    for path in files:
        for position in (
            {0, path.stat().st_size // 2, path.stat().st_size - 1} if path.stat().st_size else ()
        ):
            content = path.read_bytes()
            flip_bit(path, position)
            assert find_latest(two_checkpoints, checksums=True) == str(
                two_checkpoints / "epoch_1"
            ), path
            with pytest.raises(CorruptCheckpointError):
                load(newest)
            path.write_bytes(content)
    assert find_latest(two_checkpoints, checksums=True) == str(newest)


def test_without_checksums_only_sizes_of_arrays_are_compared(checkpointer, tmp_path):
    path = checkpointer.save(tmp_path / "epoch_1", make_state(), make_meta(), checksums=False)
    checkpointer.wait()
    digests = {name: x[1] for name, x in read_manifest(pathlib.Path(path)).files.items()}
    assert [name for name, digest in digests.items() if digest is not None] == ["meta.json"]
    flip_bit(pathlib.Path(path) / "meta.json", -2)
    with pytest.raises(CorruptCheckpointError, match=r"epoch_1 \(meta\.json is damaged"):
        find_latest(tmp_path, checksums=True)
    assert find_latest(tmp_path) == path


def test_a_published_copy_without_meta_loads(two_checkpoints):
    path, _ = publish(two_checkpoints / "epoch_2", ["params"])
    assert load(path).params["head"][0][0] == 2.0


@pytest.mark.parametrize("files", [None, 3, {"meta.json": 5}])
def test_a_manifest_of_another_structure_is_unreadable(two_checkpoints, files):
    path = two_checkpoints / "epoch_2" / "manifest.json"
    content = {"format": 2, "run": "", "complete": True, "latest": True, "iter": 20, "files": files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "sha256": digest}))
    assert find_latest(two_checkpoints) == str(two_checkpoints / "epoch_1")


@pytest.mark.parametrize(
    "break_pointer",
    [
        lambda path: path.write_bytes(b"\xff\xfe\x00garbage"),
        lambda path: path.write_text("x" * 5000),
        lambda path: path.write_text(""),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["garbage", "long", "empty", "a directory"],
)
def test_an_unreadable_pointer_is_skipped(two_checkpoints, break_pointer):
    break_pointer(two_checkpoints / "last_checkpoint")
    assert find_latest(two_checkpoints) == str(two_checkpoints / "epoch_2")


def test_directories_without_a_manifest_are_never_removed_or_replaced(
    two_checkpoints, checkpointer
):
    for name in ("mine.incoming", "mine.outgoing", "epoch_3"):
        (two_checkpoints / name).mkdir()
        (two_checkpoints / name / "notes.txt").write_text("keep")
    with pytest.raises(
        CheckpointSaveError, match="epoch_3 exists and is not a checkpoint of this run"
    ):
        save_and_wait(checkpointer, two_checkpoints / "epoch_3", make_state(), make_meta(30))
    checkpointer.save(
        two_checkpoints / "epoch_4", make_state(), make_meta(40), evict=["mine.incoming", "epoch_3"]
    )
    checkpointer.wait()
    with pytest.raises(FileExistsError, match="epoch_3 is not a checkpoint"):
        checkpointer.delete(two_checkpoints / "epoch_3")
    kept = [
        (two_checkpoints / name / "notes.txt").exists()
        for name in ("mine.incoming", "mine.outgoing", "epoch_3")
    ]
    assert kept == [True, True, True]


def test_a_name_to_evict_is_never_a_path(two_checkpoints, checkpointer, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "epoch_1"
    shutil.copytree(two_checkpoints / "epoch_1", other)
    names = [
        str(other),
        os.path.relpath(other, two_checkpoints),
        "../" + two_checkpoints.name + "/epoch_1",
    ]
    checkpointer.save(two_checkpoints / "epoch_3", make_state(), make_meta(30), evict=names)
    checkpointer.evict(two_checkpoints, names)
    assert other.is_dir()
    assert (two_checkpoints / "epoch_1").is_dir()


def test_checkpoints_of_other_runs_are_neither_evicted_nor_replaced(two_checkpoints):
    other = Checkpointer(two_checkpoints, run="other")
    other.save(two_checkpoints / "epoch_3", make_state(), make_meta(30), evict=["epoch_1"])
    with pytest.raises(
        CheckpointSaveError, match="epoch_2 exists and is not a checkpoint of this run"
    ):
        save_and_wait(other, two_checkpoints / "epoch_2", make_state(), make_meta(20))
    assert sorted(path.name for path in two_checkpoints.glob("epoch_*")) == [
        "epoch_1",
        "epoch_2",
        "epoch_3",
    ]


def test_a_run_resumes_only_from_its_own_checkpoints(two_checkpoints):
    write_current_run(two_checkpoints, "new")
    assert find_latest(two_checkpoints) is None
    checkpointer = Checkpointer(two_checkpoints, run="new")
    path = checkpointer.save(two_checkpoints / "epoch_9", make_state(), make_meta(1))
    checkpointer.close()
    assert find_latest(two_checkpoints) == path


def test_an_interrupted_save_or_removal_does_not_block_the_next_save(two_checkpoints, checkpointer):
    (two_checkpoints / "epoch_3.incoming").mkdir()  # killed before its manifest was written
    for name in ("manifest.json.new", "meta.json.new", "states.bin.new", "manifest.1.json"):
        (two_checkpoints / "epoch_3.incoming" / name).write_text("{")
    for name in (
        "epoch_1.outgoing",
        "epoch_0.outgoing",
        "iter_7.incoming",
    ):  # killed before the directory was removed
        (two_checkpoints / name).mkdir()
    checkpointer.save(two_checkpoints / "epoch_3", make_state(), make_meta(30), evict=["epoch_1"])
    checkpointer.wait()
    names = [path.name for path in two_checkpoints.iterdir() if path.is_dir()]
    assert sorted(names) == ["epoch_2", "epoch_3"]


SAVE = """
import numpy as np, sys
from jengine.checkpoint import Checkpointer
writer = Checkpointer(sys.argv[1])
for number in (1, 2):
    evict = [f"epoch_{number - 1}"]
    writer.save(f"{sys.argv[1]}/epoch_{number}", {"w": np.ones(9)}, {"meta": {"iter": number}}, evict=evict)
writer.close()
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_files_are_on_disk_before_the_rename_and_the_pointer_before_a_removal(tmp_path):
    log, work_dir = tmp_path / "calls", tmp_path / "run"
    calls = "fsync,rename,renameat2,unlink,unlinkat,rmdir"
    command = [
        "strace",
        "-f",
        "-y",
        "-qq",
        "-e",
        f"trace={calls}",
        "-o",
        log,
        sys.executable,
        "-c",
        SAVE,
        work_dir,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace" in result.stderr:
        pytest.skip("this machine does not allow strace")
    assert result.returncode == 0, result.stderr
    lines = log.read_text().splitlines()

    def first(pattern):
        return next(i for i, line in enumerate(lines) if re.search(pattern, line))

    commit = first(r"rename\(.*epoch_2\.incoming\", .*epoch_2\"\)")
    synced = {
        match[1]
        for line in lines[:commit]
        if (match := re.search(r"fsync\(\d+<.*epoch_2\.incoming/?(.*?)>\)", line))
    }
    files = [
        str(path.relative_to(work_dir / "epoch_2"))
        for path in (work_dir / "epoch_2").rglob("*")
        if path.is_file()
    ]
    written = {f"{name}.new" if name == "manifest.json" else name for name in files}
    assert written | {""} <= synced
    parent = next(
        i
        for i, line in enumerate(lines)
        if i > commit and re.search(rf"fsync\(\d+<{work_dir}>\)", line)
    )
    pointer = first(r"rename\(.*last_checkpoint\.new\"") if parent < commit else None
    pointers = [
        i for i, line in enumerate(lines) if re.search(r"rename\(.*last_checkpoint\.new\"", line)
    ]
    removal = first(r"rename\(.*epoch_1\", .*epoch_1\.outgoing\"\)")
    assert pointer is None
    assert commit < parent < pointers[1] < removal
    synced_pointer = [
        i
        for i, line in enumerate(lines)
        if re.search(r"fsync\(\d+<.*last_checkpoint\.new>\)", line)
    ]
    assert synced_pointer[1] < pointers[1]
