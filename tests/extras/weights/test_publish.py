import os

import pytest

from jengine.checkpoint import Checkpointer, find_latest, load, publish
from tests.checkpoint.conftest import make_meta, make_state


@pytest.fixture
def checkpointer(tmp_path):
    return Checkpointer(tmp_path)


@pytest.fixture
def path(checkpointer, tmp_path):
    path = checkpointer.save(
        tmp_path / "epoch_1", make_state(2.0), make_meta(hooks={}, message_hub={"lr": 0.1})
    )
    checkpointer.wait()
    return path


def test_a_published_copy_has_the_given_keys_and_is_named_after_its_content(path):
    copy, removed = publish(path, ["state_dict", "meta"])
    name, _, digest = os.path.basename(copy).rpartition("-")
    assert name == "epoch_1"
    assert len(digest) == 8
    assert int(digest, 16) >= 0
    assert removed == ["hook_state", "hooks", "message_hub", "opt_state", "rng", "step"]
    published = load(copy)
    assert list(published.state) == ["model_state", "params"]
    assert published.params["head"][0][0] == 2.0
    assert published.meta == {"meta": {"iter": 3, "epoch": 1}}


def test_the_name_depends_on_the_arrays_alone(path, checkpointer, tmp_path):
    same = checkpointer.save(tmp_path / "epoch_2", make_state(2.0), make_meta(99))
    other = checkpointer.save(tmp_path / "epoch_3", make_state(3.0), make_meta(99))
    checkpointer.wait()
    first, second, third = (
        publish(p, ["params"])[0].rpartition("-")[2] for p in (path, same, other)
    )
    assert first == second != third


def test_a_run_is_not_resumed_from_a_published_copy(path, tmp_path):
    publish(path, ["params"])
    (tmp_path / "last_checkpoint").unlink()
    assert find_latest(tmp_path) == path
