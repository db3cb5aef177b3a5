"""Checkpoints in buckets: sealed by the manifest, which is written last and removed first."""

import contextlib
import itertools
import os
import re

import jax
import numpy as np
import pytest
import safetensors.numpy
from etils import epath

from jengine import checkpoint
from jengine.checkpoint import (
    Checkpointer,
    CheckpointSaveError,
    CorruptCheckpointError,
    commit,
)
from jengine.checkpoint.layout import find_latest, read_meta, write_current_run
from jengine.cli import main
from jengine.config.storage import StorageError, list_files, write_bytes
from jengine.extras.report.inventory import list_checkpoint_entries, remove_checkpoints
from jengine.extras.weights import load_pretrained
from tests.checkpoint.conftest import make_meta, make_state


@pytest.fixture
def work_dir(request):
    return f"{request.getfixturevalue(getattr(request, 'param', 'gs_bucket'))}/run"


on_both_stores = pytest.mark.parametrize("work_dir", ["gs_bucket", "s3_bucket"], indirect=True)


@pytest.fixture
def writer(work_dir):
    writer = Checkpointer(work_dir, run="mine")
    yield writer
    writer.close()


def save(writer, work_dir, iteration, **options):
    path = writer.save(f"{work_dir}/iter_{iteration}", make_state(float(iteration)), make_meta(iteration), **options)
    writer.wait()
    return path


@on_both_stores
def test_a_saved_state_is_restored_bit_for_bit(writer, work_dir):
    path = save(writer, work_dir, 3)
    state, meta = checkpoint.restore(work_dir, make_state(0.0))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(_raw, state), jax.tree.map(_raw, make_state(3.0)))
    assert meta["meta"]["iter"] == 3
    assert find_latest(work_dir, checksums=True) == path == f"{work_dir}/iter_3"
    assert checkpoint.load(path).params["head"][0].tolist() == [3.0, 3.0, 3.0]


def _raw(leaf):
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@on_both_stores
def test_old_checkpoints_are_removed_and_one_is_replaced(writer, work_dir):
    for iteration in (1, 2):
        save(writer, work_dir, iteration)
    save(writer, work_dir, 3, evict=["iter_1", "iter_7", "../iter_2", ".."])
    writer.save(f"{work_dir}/iter_2", make_state(9.0), make_meta(2), latest=False)
    writer.wait()
    assert [os.path.basename(path) for path in checkpoint.list_checkpoints(work_dir)] == ["iter_2", "iter_3"]
    assert checkpoint.load(f"{work_dir}/iter_2").params["head"][0].tolist() == [9.0, 9.0, 9.0]
    assert sorted({name.partition("/")[0] for name in list_files(work_dir)}) == ["iter_2", "iter_3", "last_checkpoint"]


def test_the_list_tells_sizes_and_problems_and_removes(writer, work_dir):
    for iteration in (1, 2, 3):
        save(writer, work_dir, iteration)
    write_bytes(epath.Path(work_dir) / "iter_2/meta.json", b"{}")
    (epath.Path(work_dir) / "iter_1/state/_METADATA").unlink()
    problems = {entry.name: entry.problem for entry in list_checkpoint_entries(work_dir)}
    assert problems["iter_1"] == "state/_METADATA is missing"
    assert problems["iter_2"].startswith("meta.json must have ")
    assert problems["iter_3"] is None
    with pytest.raises(CorruptCheckpointError, match="state/_METADATA is missing"):
        checkpoint.restore(f"{work_dir}/iter_1", make_state())
    removed = remove_checkpoints(work_dir, ["iter_1", "iter_2"])
    assert [entry.name for entry in removed] == ["iter_1", "iter_2"]
    [entry] = list_checkpoint_entries(work_dir)
    assert entry.latest
    assert entry.size == sum(info.size for info in list_files(f"{work_dir}/iter_3").values())


@on_both_stores
def test_bytes_of_another_content_are_found_without_being_read(writer, work_dir):
    path = epath.Path(save(writer, work_dir, 1)) / "meta.json"
    write_bytes(path, path.read_bytes().replace(b'"epoch": 1', b'"epoch": 2'))
    assert list_checkpoint_entries(work_dir)[0].problem.startswith("meta.json is damaged")
    with pytest.raises(CorruptCheckpointError, match=r"meta.json is damaged \(its checksum is not that of the manifest\)"):
        checkpoint.restore(path.parent, make_state())


def test_a_copy_of_a_bucket_is_verified_on_a_disk_and_the_other_way_round(writer, work_dir, tmp_path):
    for name in list_files(save(writer, work_dir, 1)):
        (tmp_path / "iter_1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "iter_1" / name).write_bytes((epath.Path(work_dir) / "iter_1" / name).read_bytes())
    assert checkpoint.load(tmp_path / "iter_1").meta["meta"]["iter"] == 1
    with contextlib.closing(Checkpointer(tmp_path)) as local:
        local.save(tmp_path / "iter_2", make_state(2.0), make_meta(2))
    for name in list_files(tmp_path / "iter_2"):
        write_bytes(f"{work_dir}/iter_2/{name}", (tmp_path / "iter_2" / name).read_bytes())
    assert checkpoint.load(f"{work_dir}/iter_2").meta["meta"]["iter"] == 2
    write_bytes(f"{work_dir}/iter_2/meta.json", b" " * len((tmp_path / "iter_2/meta.json").read_bytes()))
    with pytest.raises(CorruptCheckpointError, match="meta.json is damaged"):
        checkpoint.load(f"{work_dir}/iter_2")


def test_what_has_no_seal_does_not_exist(writer, work_dir):
    save(writer, work_dir, 1)
    save(writer, work_dir, 2)
    (epath.Path(work_dir) / "iter_2/manifest.json").unlink()
    assert find_latest(work_dir) == f"{work_dir}/iter_1"
    assert [entry.name for entry in list_checkpoint_entries(work_dir)] == ["iter_1"]
    save(writer, work_dir, 2)  # over the rest of the other
    assert find_latest(work_dir) == f"{work_dir}/iter_2"


def test_files_that_are_not_of_a_checkpoint_are_kept(writer, work_dir):
    write_bytes(f"{work_dir}/iter_1/notes.txt", b"mine")
    with pytest.raises(CheckpointSaveError, match="iter_1 exists and is not a checkpoint of this run"):
        save(writer, work_dir, 1)
    with pytest.raises(FileExistsError, match="not a checkpoint"):
        commit.delete(epath.Path(f"{work_dir}/iter_1"))
    assert list(list_files(f"{work_dir}/iter_1")) == ["notes.txt"]


def test_the_next_run_removes_what_a_killed_one_has_left(writer, work_dir):
    for iteration in (1, 2, 3):
        save(writer, work_dir, iteration)
    root = epath.Path(work_dir)
    for name in ("iter_1.outgoing", "iter_2.incoming", "iter_3.incoming"):  # killed in a removal, a save and after one
        write_bytes(root / name, b"mine")
    (root / "iter_2/manifest.json").unlink()
    with contextlib.closing(Checkpointer(work_dir, run="mine")) as other:
        save(other, work_dir, 4)
    assert {name.partition("/")[0] for name in list_files(work_dir)} == {"iter_3", "iter_4", "last_checkpoint"}


def test_a_run_is_not_continued_from_the_checkpoints_of_another(writer, work_dir):
    save(writer, work_dir, 1)
    write_current_run(epath.Path(work_dir), "other")
    assert find_latest(work_dir) is None
    commit.move(epath.Path(work_dir) / "iter_1", epath.Path(work_dir) / "earlier_1/iter_1")
    assert checkpoint.list_checkpoints(work_dir) == []
    assert checkpoint.load(f"{work_dir}/earlier_1/iter_1").meta["meta"]["iter"] == 1


def test_a_published_copy_is_next_to_the_checkpoint(writer, work_dir):
    path, left_out = checkpoint.publish(save(writer, work_dir, 1), ["params"])
    assert path.startswith(f"{work_dir}/iter_1-")
    assert "opt_state" in left_out
    assert list(checkpoint.load(path).state) == ["params"]
    assert find_latest(work_dir) == f"{work_dir}/iter_1"


@on_both_stores
def test_weights_are_loaded_from_a_url(work_dir, tmp_path):
    params = {"fc": {"kernel": np.ones((2, 3), np.float32)}}
    safetensors.numpy.save_file({"fc.kernel": np.full((2, 3), 2.0, np.float32)}, tmp_path / "model.safetensors")
    write_bytes(f"{work_dir}/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    for path in (f"{work_dir}/model.safetensors", work_dir):
        loaded, _, report = load_pretrained(path, params)
        assert loaded["fc"]["kernel"].sum() == 12
    assert report.fits


def test_the_commands_take_urls(writer, work_dir, capsys):
    save(writer, work_dir, 1)
    save(writer, work_dir, 2)
    main(["ckpt", "ls", work_dir])
    assert "2 checkpoints, " in (out := capsys.readouterr().out)
    assert f" in {work_dir}" in out
    main(["ckpt", "export", f"{work_dir}/iter_1", f"{work_dir}/model.safetensors"])
    loaded, _, _ = load_pretrained(f"{work_dir}/model.safetensors", make_state(0.0)["params"])
    assert loaded["head"][0].tolist() == [1.0, 1.0, 1.0]
    main(["ckpt", "rm", work_dir, "iter_1"])
    assert [entry.name for entry in list_checkpoint_entries(work_dir)] == ["iter_2"]


def test_orbax_lists_and_restores_the_steps(gs_bucket):
    import orbax.checkpoint as ocp

    with contextlib.closing(Checkpointer(f"{gs_bucket}/run")) as writer:
        for iteration in (10, 20):
            save(writer, f"{gs_bucket}/run", iteration)
    (epath.Path(gs_bucket) / "run/iter_20/commit_success.txt").unlink()
    options = ocp.CheckpointManagerOptions(step_prefix="iter", read_only=True)
    manager = ocp.CheckpointManager(f"{gs_bucket}/run", options=options, item_names=("state",))
    assert manager.all_steps() == [10]
    with ocp.PyTreeCheckpointer() as reader:
        restored = reader.restore(f"{gs_bucket}/run/iter_10/state")
    assert restored["params"]["head"][0].tolist() == [10.0, 10.0, 10.0]


def test_a_lagging_listing_hides_no_checkpoint(gs_bucket, google_storage):
    work_dir = f"{gs_bucket}/run"
    with contextlib.closing(Checkpointer(work_dir, run="mine")) as writer:
        save(writer, work_dir, 1)
        list_files(f"{work_dir}/iter_1")
        google_storage.choose_fault = lambda method, path: "lag"
        for iteration in (2, 3, 2):
            save(writer, work_dir, iteration, evict=["iter_1"])
            assert find_latest(work_dir, checksums=True) == f"{work_dir}/iter_{iteration}"
            assert read_meta(work_dir)["meta"]["iter"] == iteration


def test_requests_do_not_grow_with_the_number_of_checkpoints(gs_bucket, google_storage):
    work_dir = f"{gs_bucket}/run"
    with contextlib.closing(Checkpointer(work_dir)) as writer:
        save(writer, work_dir, 1)
        for number in range(2, 30):
            google_storage.copy(f"{work_dir}/iter_1", f"{work_dir}/iter_{number}")
        google_storage.requests.clear()
        save(writer, work_dir, 30)
    assert sum("/state/" not in path for _, path in google_storage.requests) == 13  # the others are Orbax's
    google_storage.requests.clear()
    checkpoint.restore(work_dir, make_state())
    assert sum("/state" not in path for _, path in google_storage.requests) <= 14  # meta.json twice: what has been exchanged, and its values
    assert not [path for _, path in google_storage.requests if re.search(r"iter_(?!30\b)", path)]  # none of another checkpoint
    assert len(google_storage.requests) < 60  # 44, and on a busy machine up to 50, as Orbax joins fewer reads


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "state/d/"])
def test_one_answer_with_another_bit_changes_nothing(request, scheme, name):
    store = request.getfixturevalue({"gs": "google_storage", "s3": "s3_storage"}[scheme])
    work_dir = f"{request.getfixturevalue(f'{scheme}_bucket')}/run"
    with contextlib.closing(Checkpointer(work_dir)) as writer:
        save(writer, work_dir, 1)
        save(writer, work_dir, 2)
    flipped = []

    def flip(method, path):
        is_content = method == "GET" and f"iter_2/{name}" in path and "prefix=" not in path
        if is_content and not flipped:
            flipped.append(path)
            return "flip"
        return None

    store.choose_fault = flip
    loaded = checkpoint.load(work_dir)
    assert len(flipped) == 1
    assert loaded.meta["meta"]["iter"] == 2
    assert loaded.params["head"][0].tolist() == [2.0, 2.0, 2.0]


def test_metadata_with_another_bit_at_each_read_is_an_error(gs_bucket, google_storage):
    work_dir = f"{gs_bucket}/run"
    with contextlib.closing(Checkpointer(work_dir)) as writer:
        save(writer, work_dir, 1)
    google_storage.choose_fault = lambda method, path: "flip" if method == "GET" and "meta.json" in path else None
    with pytest.raises(CorruptCheckpointError, match=r"meta.json is damaged \(its checksum"):
        read_meta(f"{work_dir}/iter_1")
    google_storage.choose_fault = lambda method, path: None
    assert read_meta(f"{work_dir}/iter_1")["meta"]["iter"] == 1


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("fault", ["error", "lost", "cut", "html"])
def test_faults_of_a_store_change_no_checkpoint(request, scheme, fault):
    store = request.getfixturevalue({"gs": "google_storage", "s3": "s3_storage"}[scheme])
    work_dir = f"{request.getfixturevalue(f'{scheme}_bucket')}/run"
    numbers = itertools.count()
    store.choose_fault = lambda method, path: fault if "/o?" not in path and next(numbers) % 23 == 9 else None
    with contextlib.closing(Checkpointer(work_dir)) as writer:
        save(writer, work_dir, 1)
    assert checkpoint.load(work_dir).params["head"][0].tolist() == [1.0, 1.0, 1.0]


def test_a_store_that_does_not_answer_is_no_reason_to_start_from_scratch(s3_bucket, s3_storage):
    work_dir = f"{s3_bucket}/run"
    with contextlib.closing(Checkpointer(work_dir)) as writer:
        save(writer, work_dir, 1)
    s3_storage.choose_fault = lambda method, path: "html" if "manifest.json" in path else None
    with pytest.raises(StorageError, match="manifest.json"):
        find_latest(work_dir)
    s3_storage.choose_fault = lambda method, path: None
    assert find_latest(work_dir) == f"{work_dir}/iter_1"
