import contextlib
import errno
import os
import pathlib
import shutil

import pytest

from jengine.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    find_checkpoint,
    find_latest,
    list_checkpoints,
    load,
    read_meta,
)
from jengine.checkpoint.layout import write_current_run, write_pointer
from jengine.config.storage import StorageError, storage_path

from .conftest import make_meta, make_state


@pytest.fixture
def run(checkpointer, tmp_path):
    """Create a work dir with epoch_1 and epoch_2, whose parameters are 1 and 2."""
    for number in (1, 2):
        checkpointer.save(
            tmp_path / f"epoch_{number}", make_state(float(number)), make_meta(10 * number)
        )
    checkpointer.wait()
    return tmp_path


def truncate(path):
    """Cut the largest file of a checkpoint in half."""
    files = [
        os.path.join(root, name)
        for root, _, names in os.walk(path)
        for name in names
        if name != "manifest.json"
    ]
    largest = max(files, key=os.path.getsize)
    os.truncate(largest, os.path.getsize(largest) // 2)


def test_the_pointer_determines_the_latest(run):
    assert find_latest(run) == str(run / "epoch_2")
    (run / "last_checkpoint").write_text(str(run / "epoch_1"))
    assert find_latest(run) == str(run / "epoch_1")


def test_an_empty_or_missing_directory_has_no_latest(tmp_path):
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "missing") is None


def test_without_a_pointer_the_checkpoint_with_the_most_iterations_is_the_latest(run):
    (run / "last_checkpoint").unlink()
    os.rename(run / "epoch_2", run / "a_name_that_sorts_first")
    assert find_latest(run) == str(run / "a_name_that_sorts_first")


def test_regular_checkpoints_come_before_best_ones(run, checkpointer):
    checkpointer.save(run / "best_acc", make_state(), make_meta(30), latest=False)
    checkpointer.wait()
    (run / "last_checkpoint").unlink()
    assert find_latest(run) == str(run / "epoch_2")


def test_a_moved_work_dir_finds_its_checkpoints(run, caplog):
    moved = run.with_name("moved")
    os.rename(run, moved)
    assert find_latest(moved) == str(moved / "epoch_2")


def test_a_copied_work_dir_finds_its_own_checkpoints(run, checkpointer, tmp_path_factory):
    copy = shutil.copytree(run, tmp_path_factory.mktemp("copies") / "copy")
    old_copy = shutil.copytree(run, copy.with_name("old_copy"))
    (old_copy / "last_checkpoint").write_text(
        str(run / "epoch_2")
    )  # as earlier versions and MMEngine write it
    checkpointer.save(run / "epoch_3", make_state(3.0), make_meta(30))
    checkpointer.wait()
    assert find_latest(run) == str(run / "epoch_3")
    assert find_latest(copy) == str(copy / "epoch_2")
    assert find_latest(old_copy) == str(old_copy / "epoch_2")
    assert load(copy).params["head"][0][0] == 2.0


def test_a_copy_of_work_dir_and_out_dir_finds_its_own_checkpoints(tmp_path):
    with contextlib.closing(Checkpointer(tmp_path / "project" / "work" / "run")) as checkpointer:
        (tmp_path / "project" / "work" / "run").mkdir(parents=True)
        checkpointer.save(
            tmp_path / "project" / "out" / "run" / "epoch_1", make_state(), make_meta(10)
        )
    assert (tmp_path / "project/work/run/last_checkpoint").read_text() == "../../out/run/epoch_1"
    copy = shutil.copytree(tmp_path / "project", tmp_path / "copy")
    os.symlink(copy / "work" / "run", tmp_path / "link")
    shutil.rmtree(tmp_path / "project")
    assert find_latest(copy / "work" / "run") == str(copy / "out" / "run" / "epoch_1")
    assert find_latest(tmp_path / "link") == str(copy / "out" / "run" / "epoch_1")


@pytest.fixture
def fail_reads(monkeypatch):
    """Return a function that makes the next reads of files of a name fail."""
    original = os.open

    def fail(name, count, code=errno.ESTALE):
        left = [count]

        def open_file(path, *args, **kwargs):
            if os.path.basename(path) == name and left[0] > 0:
                left[0] -= 1
                raise OSError(code, os.strerror(code), str(path))
            return original(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", open_file)

    return fail


@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "last_checkpoint", "current_run"])
def test_a_file_that_cannot_be_read_is_read_again_and_then_an_error(run, fail_reads, name):
    write_current_run(run, "")
    fail_reads(name, 2)
    read = read_meta if name == "meta.json" else find_latest
    assert read(run) in (str(run / "epoch_2"), make_meta(20))
    fail_reads(name, 1000, errno.EIO)
    with pytest.raises(StorageError, match=rf"{name} cannot be read: Input/output error"):
        read(run)
    assert sorted(os.listdir(run)) == ["current_run", "epoch_1", "epoch_2", "last_checkpoint"]


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b"", lambda content: b"\xff"])
def test_a_damaged_name_of_the_run_hides_none_of_its_checkpoints(run, caplog, damage):
    write_current_run(run, "0123456789abcdef0123456789abcdef")
    assert find_latest(run) is None  # they are of another run
    path = run / "current_run"
    path.write_bytes(damage(path.read_bytes()))
    assert find_latest(run) == str(run / "epoch_2")
    assert f"skipped {path}: it is damaged" in caplog.text


def test_the_name_of_a_run_that_an_earlier_version_wrote_is_read(run):
    (run / "current_run").write_text("0123456789abcdef0123456789abcdef")
    assert find_latest(run) is None


@pytest.mark.parametrize(
    "text", ["", "..", "../elsewhere/epoch_2", "\0", "https://host/run/epoch_2"]
)
def test_a_work_dir_whose_checkpoints_are_elsewhere_and_lost_is_an_error(run, tmp_path, text):
    work_dir = tmp_path / "work_dir"
    work_dir.mkdir()
    write_pointer(storage_path("work_dir", work_dir), storage_path("path", run / "epoch_2"))
    assert find_latest(work_dir) == str(run / "epoch_2")
    (work_dir / "last_checkpoint").write_text(text)
    with pytest.raises(CorruptCheckpointError, match="has checkpoints, but none can be read"):
        find_latest(work_dir)


@pytest.mark.parametrize("name", ["manifest.json", "meta.json"])
def test_one_read_of_other_bytes_is_no_damage(run, tmp_path, monkeypatch, name):
    original, flipped = os.open, []
    copy = tmp_path / "flipped"

    def open_file(path, *args, **kwargs):
        if os.path.basename(path) == name and path not in flipped:
            flipped.append(path)
            content = pathlib.Path(path).read_bytes()
            copy.write_bytes(content[:30] + bytes([content[30] ^ 1]) + content[31:])
            path = copy
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_file)
    assert find_latest(run, checksums=True) == str(run / "epoch_2")
    flipped.clear()
    assert load(run).meta["meta"]["iter"] == 20


@pytest.mark.parametrize(
    "corrupt",
    [
        truncate,
        lambda path: os.remove(path / "meta.json"),
        lambda path: os.remove(path / "manifest.json"),
        lambda path: (path / "manifest.json").write_text('{"format"'),
        lambda path: shutil.rmtree(path / "state"),
        shutil.rmtree,
    ],
    ids=["truncated", "no meta", "no manifest", "cut manifest", "no state", "gone"],
)
def test_a_corrupt_checkpoint_is_skipped_with_a_warning(run, caplog, corrupt):
    corrupt(run / "epoch_2")
    with caplog.at_level("WARNING", logger="jengine"):
        assert find_latest(run) == str(run / "epoch_1")
    assert len(caplog.records) == 1
    assert f"checkpoint {run / 'epoch_2'}" in caplog.text
    assert "skipped" in caplog.text


def test_a_process_killed_while_writing_leaves_the_earlier_checkpoint(run, checkpointer):
    shutil.copytree(run / "epoch_2" / "state", run / "epoch_3.incoming" / "state")
    assert find_latest(run) == str(run / "epoch_2")
    checkpointer.save(run / "epoch_3", make_state(3.0), make_meta(30))  # the next save cleans up
    checkpointer.wait()
    assert sorted(os.listdir(run)) == ["epoch_1", "epoch_2", "epoch_3", "last_checkpoint"]


def test_a_process_killed_between_the_renames_of_a_replacement_loses_nothing(run, checkpointer):
    os.rename(run / "epoch_2", run / "epoch_2.incoming")
    shutil.copytree(run / "epoch_1", run / "epoch_2.outgoing")
    assert find_latest(run) == str(run / "epoch_2.incoming")
    assert find_checkpoint(run / "epoch_2") == str(run / "epoch_2.incoming")
    assert load(run / "epoch_2").params["head"][0][0] == 2.0
    checkpointer.save(run / "epoch_3", make_state(3.0), make_meta(30))
    checkpointer.wait()
    assert sorted(os.listdir(run)) == ["epoch_1", "epoch_2", "epoch_3", "last_checkpoint"]
    assert load(run / "epoch_2").params["head"][0][0] == 2.0


def test_a_work_dir_resolves_to_its_newest_checkpoint(run):
    assert find_checkpoint(run) == str(run / "epoch_2")
    assert load(run).params["head"][0][0] == 2.0


def test_listing_leaves_out_other_directories(run):
    (run / "20250131_120000").mkdir()
    assert list_checkpoints(run) == [str(run / "epoch_1"), str(run / "epoch_2")]
    assert list_checkpoints(run / "missing") == []
