import contextlib
import os
import resource

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jengine.checkpoint import CheckpointSaveError, find_latest, load
from tests.refusals import check_refusal

from .conftest import make_meta, make_state, save_and_wait


@contextlib.contextmanager
def limit_file_size(size):
    """Let the kernel refuse files larger than `size` bytes, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_is_an_error_and_leaves_the_earlier_checkpoint(checkpointer, tmp_path):
    first = checkpointer.save(tmp_path / "epoch_1", make_state(1.0), make_meta(1))
    checkpointer.wait()
    noise = {"params": np.random.default_rng(0).random(100_000)}  # 800 kB that do not compress
    with (
        limit_file_size(50_000),
        pytest.raises(
            CheckpointSaveError, match="could not save checkpoint .*epoch_2 .others are intact"
        ) as error,
    ):
        save_and_wait(checkpointer, tmp_path / "epoch_2", noise, make_meta(2), evict=[first])
    assert error.value.path == tmp_path / "epoch_2"
    assert find_latest(tmp_path) == first
    assert load(first).params["head"][0][0] == 1.0
    assert sorted(os.listdir(tmp_path)) == ["epoch_1", "last_checkpoint"]
    checkpointer.save(tmp_path / "epoch_3", make_state(3.0), make_meta(3))
    checkpointer.wait()
    assert find_latest(tmp_path) == str(tmp_path / "epoch_3")


def test_a_failed_replacement_leaves_the_old_checkpoint(checkpointer, tmp_path):
    path = checkpointer.save(tmp_path / "best", make_state(1.0), make_meta(1))
    checkpointer.wait()
    noise = {"params": np.random.default_rng(0).random(100_000)}
    with limit_file_size(50_000), pytest.raises(CheckpointSaveError):
        save_and_wait(checkpointer, path, noise, make_meta(2))
    assert load(path).params["head"][0][0] == 1.0


def test_a_failure_in_the_background_is_raised_once_by_the_next_save(checkpointer, tmp_path):
    (tmp_path / "last_checkpoint").mkdir()  # cannot be replaced by a file
    checkpointer.save(tmp_path / "epoch_1", make_state(), make_meta(1))
    with pytest.raises(
        CheckpointSaveError,
        match=r"could not save checkpoint .*epoch_1 \(others are intact\)",
    ):
        checkpointer.save(tmp_path / "epoch_2", make_state(), make_meta(2))
    checkpointer.wait()
    assert not (tmp_path / "epoch_2").exists()


def test_a_leaf_that_cannot_be_stored_is_an_error_before_anything_is_written(
    checkpointer, tmp_path
):
    with pytest.raises(TypeError, match=r"`params\.layer` must be an array, got str"):
        checkpointer.save(tmp_path / "epoch_1", {"params": {"layer": "text"}}, make_meta())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("section", "entry", "words"),
    [
        (
            "hooks",
            {"seen": {1, 2}},
            ["`Mine.state_dict().seen`", "got set"],
        ),
        (
            "infos",
            {"seen": {1, 2}},
            ["`checkpoint.infos.Mine.seen`", "JSON", "got set"],
        ),
        ("infos", {3: "x"}, ["`checkpoint.infos.Mine`", "got 3"]),
    ],
)
def test_a_value_that_cannot_be_stored_is_an_error_with_its_path(checkpointer, tmp_path, state, section, entry, words):
    check_refusal(lambda: checkpointer.save(tmp_path / "epoch_1", state, make_meta(**{section: {"Mine": entry}})), TypeError, *words)


def test_a_save_whose_arrays_cannot_be_read_back_does_not_count(
    checkpointer, tmp_path, monkeypatch
):
    first = checkpointer.save(tmp_path / "epoch_1", make_state(1.0), make_meta(1))
    checkpointer.wait()
    finalize = ocp.PyTreeCheckpointHandler.finalize

    def lose_the_index(handler, directory):
        finalize(handler, directory)
        (directory / "manifest.ocdbt").unlink()

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", lose_the_index)
    with pytest.raises(CheckpointSaveError, match="epoch_2.*Orbax cannot read the arrays"):
        save_and_wait(
            checkpointer, tmp_path / "epoch_2", make_state(2.0), make_meta(2), evict=["epoch_1"]
        )
    assert find_latest(tmp_path) == first
    assert sorted(os.listdir(tmp_path)) == ["epoch_1", "last_checkpoint"]
