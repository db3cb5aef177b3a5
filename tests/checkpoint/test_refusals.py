"""What checkpoints refuse to save, to find and to load: a call, its error, and the words that must be in the message."""

import errno
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoint import (
    Checkpointer,
    CheckpointMismatchError,
    CheckpointSaveError,
    CorruptCheckpointError,
    WorkDirLock,
    WorkDirLockedError,
    find_checkpoint,
    find_latest,
    load,
    load_params,
    read_meta,
    restore,
)
from jengine.checkpoint.manifest import seal
from jengine.config.errors import ConfigError
from jengine.config.storage import StorageError, storage_path
from jengine.hooks import CheckpointHook
from tests.refusals import check_row

from .conftest import make_meta, make_state, save_and_wait


def make_large_state():
    state = make_state(2.0)
    state["params"]["table"] = jnp.arange(2.0**16)
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A work dir with epoch_1, epoch_2 and odd/iter_1, which nothing changes."""
    work_dir = tmp_path_factory.mktemp("saved")
    for path, state in (
        ("epoch_1", make_state(1.0)),
        ("epoch_2", make_large_state()),
        ("odd/iter_1", {"params": {"w": np.ones((7, 5))}}),
    ):
        writer = Checkpointer((work_dir / path).parent)
        save_and_wait(writer, work_dir / path, state, make_meta(10))
        writer.close()
    return work_dir


@pytest.fixture
def run(saved, tmp_path):
    """A copy of that work dir, to be damaged."""
    return shutil.copytree(saved, tmp_path / "run")


# Each changes a checkpoint, and returns its path.


def truncate(path):
    largest = max((path / "state").rglob("*"), key=os.path.getsize)
    os.truncate(largest, largest.stat().st_size // 2)
    return path


def truncate_and_seal(path):
    truncate(path)
    return seal_again(path)


def clear(path):
    largest = max((path / "state").rglob("*"), key=os.path.getsize)
    largest.write_bytes(bytes(largest.stat().st_size))
    return path


def change_metadata(path):
    (path / "state" / "_METADATA").write_text('{"version": "of the future"}')
    return seal_again(path)


def forge_shape(path):
    """Write the metadata of a large array without data in place of that of a small one."""
    import tensorstore

    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": f"file://{path}/state/", "path": "params.w/"},
        "metadata": {"shape": [60000, 60000], "chunks": [60000, 60000], "dtype": "<f8", "compressor": None},
        "create": True,
        "delete_existing": True,
    }
    tensorstore.open(spec).result()
    return seal_again(path)


def seal_again(path):
    (path / "manifest.json").unlink()
    seal(path, run="", is_latest=True, iteration=20)
    return path


def link(path, name):
    """Move a part of a checkpoint out of it, and link it."""
    other = path.parent / f"other_{name}"
    os.rename(path / name, other)
    (path / name).symlink_to(other)
    return path


def save_below_a_file(path):
    path.write_text("")
    save_and_wait(Checkpointer(path), path / "epoch_1", make_state(), make_meta())


def change_an_unchecked_iteration(path):
    writer = Checkpointer(path)
    save_and_wait(writer, path / "epoch_1", make_state(), make_meta(3), checksums=False)
    writer.close()
    meta = path / "epoch_1" / "meta.json"
    meta.write_text(meta.read_text().replace('"iter": 3', '"iter": 7'))
    load(path / "epoch_1")


def donated():
    state = {"params": {"kernel": jnp.ones(3)}}
    jax.jit(lambda s: jax.tree.map(jnp.negative, s), donate_argnums=0)(state)
    return state


def fail_to_list(run, monkeypatch):
    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    (run / "last_checkpoint").unlink()
    monkeypatch.setattr(os, "scandir", fail)
    find_latest(run)


def damage_both(run):
    truncate(run / "epoch_1")
    (run / "epoch_2" / "manifest.json").write_text('{"format"')
    find_latest(run)


def miss_both(run):
    truncate(run / "epoch_1")
    (run / "epoch_2" / "manifest.json").unlink()
    find_latest(run)


def unmount(tmp_path):
    writer = Checkpointer(tmp_path / "run")
    save_and_wait(writer, tmp_path / "disk" / "epoch_1", make_state(), make_meta())
    writer.close()
    shutil.rmtree(tmp_path / "disk" / "epoch_1")
    find_latest(tmp_path / "run")


def make_manifest(make, path):
    (path / "iter_3" / "state").mkdir(parents=True)
    make(path / "iter_3" / "manifest.json")
    return path


def touch(path):
    path.write_text("")
    return path


def lock_twice(tmp_path):
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    lock = WorkDirLock(tmp_path)
    lock.acquire()
    lock.acquire()
    try:
        WorkDirLock(tmp_path / "elsewhere").acquire()
    finally:
        lock.release()


def load_as(path, target=None, **arguments):
    return load_params(path, make_state()["params"] if target is None else target, **arguments)


OTHER = {"backbone": {"kernel": jnp.zeros((8, 5)), "bias": jnp.zeros(4, jnp.bfloat16)}, "neck": jnp.zeros(1)}
PIPE, DEVICE = os.mkfifo, lambda path: path.symlink_to("/dev/zero")
ORBAX = (StorageError, "Orbax", "epoch_2")
REFUSED = {
    # saves
    "a directory below a file": (lambda tmp_path: save_below_a_file(tmp_path / "file"), CheckpointSaveError, "file/epoch_1"),
    "a state that was donated": (lambda checkpointer, tmp_path: checkpointer.save(tmp_path / "epoch_1", donated(), make_meta()), ValueError, "`params.kernel`", "donated"),
    "two arrays with one dotted path": (
        lambda checkpointer, tmp_path: checkpointer.save(tmp_path / "a", {"params": {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}}, make_meta()),
        ValueError, "dotted path",
    ),
    "a second run in a process": (lock_twice, WorkDirLockedError, f"process {os.getpid()}"),
    **{
        f"{scheme}://bucket/{name!a}": (lambda url=f"{scheme}://bucket/{name}/run": storage_path("work_dir", url), ConfigError, "`work_dir`", "libraries for buckets")
        for scheme in ("gs", "s3") for name in ("run[1]", "a*b", "a?b", "a#b", "a;b", "a\nb", "a\x7fb")
    },
    "a long URL": (lambda: storage_path("work_dir", "gs://bucket/" + "é" * 401), ConfigError, "`work_dir`", "800 bytes"),
    **{
        f"names like {template}": (lambda template=template: CheckpointHook(filename_tmpl=template), ValueError, "filename_tmpl", template)
        for template in ("iter[{}]", "iter_{}?", "*{}")
    },
    # searches
    "a path of nothing": (lambda saved: find_checkpoint(saved / "epoch_9"), FileNotFoundError, "epoch_9", "epoch_1, epoch_2", "did you mean 'epoch_"),
    "a path in nothing": (lambda saved: find_checkpoint(saved / "nowhere" / "epoch_1"), FileNotFoundError, "nowhere has no files"),
    "a directory of other files": (lambda tmp_path: find_checkpoint(touch(tmp_path / "notes.txt").parent), FileNotFoundError, "state/", "work dir", "notes.txt"),
    "a file": (lambda tmp_path: find_checkpoint(touch(tmp_path / "epoch_1.pth")), FileNotFoundError, "epoch_1.pth", "neither a checkpoint"),
    "a directory that cannot be listed": (fail_to_list, StorageError, "Stale file handle"),
    "two damaged checkpoints": (damage_both, CorruptCheckpointError, "run has checkpoints", "epoch_2", "damaged", "epoch_1", "must have"),
    "one damaged and one without a manifest": (miss_both, CorruptCheckpointError, "epoch_2 (manifest.json is missing)"),
    "a disk that is not mounted": (unmount, CorruptCheckpointError, "epoch_1 (manifest.json is missing)"),
    "a pipe as a manifest, in a search": (lambda tmp_path: find_latest(make_manifest(PIPE, tmp_path)), CorruptCheckpointError, "iter_3", "regular file"),
    "a device as a manifest, in a search": (lambda tmp_path: find_latest(make_manifest(DEVICE, tmp_path)), CorruptCheckpointError, "iter_3", "regular file"),
    # loads
    "a pipe as a manifest": (lambda tmp_path: read_meta(make_manifest(PIPE, tmp_path) / "iter_3"), CorruptCheckpointError, "manifest.json", "regular file"),
    "a device as a manifest": (lambda tmp_path: read_meta(make_manifest(DEVICE, tmp_path) / "iter_3"), CorruptCheckpointError, "manifest.json", "regular file"),
    "a file that is cut": (lambda run: load(truncate(run / "epoch_2")), CorruptCheckpointError, "epoch_2", "state/", "bytes", "got "),
    "a file of zeros": (lambda run, state: restore(clear(run / "epoch_2"), state), CorruptCheckpointError, "epoch_2", "state/", "is damaged"),
    "another iteration without checksums": (lambda tmp_path: change_an_unchecked_iteration(tmp_path / "run"), CorruptCheckpointError, "meta.json is damaged"),
    "data cut below a new seal": (lambda run: load(truncate_and_seal(run / "epoch_2")), *ORBAX),
    "data cut below a new seal, into a state": (lambda run: restore(truncate_and_seal(run / "epoch_2"), make_large_state()), *ORBAX),
    "data cut below a new seal, into parameters": (lambda run: load_as(truncate_and_seal(run / "epoch_2"), make_large_state()["params"]), *ORBAX),
    "metadata of another version": (lambda run: load(change_metadata(run / "epoch_2")), *ORBAX),
    "an array without its data": (lambda run: load(forge_shape(run / "odd" / "iter_1")), CorruptCheckpointError, "28800"),
    "a link to the state of another directory": (lambda run: load(link(run / "epoch_1", "state")), CorruptCheckpointError, "state", "got a link"),
    "a link to the meta of another directory": (lambda run: load(link(run / "epoch_2", "meta.json")), CorruptCheckpointError, "meta.json", "got a link"),
    # parameters
    "parameters of another model": (
        lambda saved: load_as(saved / "epoch_1", OTHER), CheckpointMismatchError,
        "missing     neck", "unexpected  head.0", "unexpected  head.1", "mismatched  backbone.kernel  stored float32[8,4], expected float32[8,5]", "strict=False",
    ),
    "a state of another model": (
        lambda saved: restore(saved / "epoch_1", {"params": {**OTHER, "head": make_state()["params"]["head"]}}), CheckpointMismatchError,
        "missing     params.neck", "mismatched  params.backbone.kernel  stored float32[8,4], expected float32[8,5]",
    ),
    "a rename of nothing": (lambda saved: load_as(saved / "epoch_1", rename=[("backbon", "encoder")]), ValueError, "'backbon', 'encoder'", "did you mean 'backbone'"),
    "a rename of two to one": (lambda saved: load_as(saved / "epoch_1", rename=[("head.0", "x"), ("head.1", "x")]), ValueError, "'x'", "'head.0'", "'head.1'"),
    "an item of nothing": (lambda saved: load_as(saved / "epoch_1", item="hook_state.EMAHok.params"), KeyError, "'hook_state.EMAHok.params'", "did you mean 'hook_state.EMAHook.params'"),
    "a missing parameter without a value": (
        lambda saved: load_as(saved / "epoch_1", {"neck": jax.ShapeDtypeStruct((1,), jnp.float32)}, strict=False), TypeError, "`neck`", "got a ShapeDtypeStruct",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # other reads of Orbax
@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_saved_or_loaded_is_refused(row, request):
    check_row(request, *row)
