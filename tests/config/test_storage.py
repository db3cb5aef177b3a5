import hashlib
import os

import pytest

from jengine.config.errors import ConfigError
from jengine.config.storage import (
    FileInfo,
    UnsafeFileError,
    check_regular,
    list_directory,
    list_files,
    read_bytes,
    read_many,
    remove_files,
    storage_path,
    write_bytes,
)
from tests.refusals import check_refusal


@pytest.fixture(params=["gs_bucket", "s3_bucket"])
def bucket(request):
    return request.getfixturevalue(request.param)


def test_files_of_a_bucket_are_written_and_read(bucket):
    path = storage_path("path", f"{bucket}/run/log.txt")
    path.write_text("one line")
    assert path.read_text() == "one line"
    path.write_text("two lines")
    assert path.read_text() == "two lines"
    assert [child.name for child in path.parent.iterdir()] == ["log.txt"]
    path.unlink()
    assert not path.exists()


@pytest.mark.parametrize("content", [b"1\n", b"1\r", b"1\r\n", bytes(range(256))])
def test_bytes_are_stored_as_they_are(bucket, content):
    write_bytes(f"{bucket}/file", content)
    assert read_bytes(f"{bucket}/file") == content


def test_a_listing_has_the_files_that_others_have_written(bucket):
    import fsspec

    directory = storage_path("path", f"{bucket}/run")
    assert not directory.exists()
    other = fsspec.filesystem(bucket[:2], skip_instance_cache=True)
    for name in "ab":
        other.pipe(f"{bucket}/run/{name}", b"12")
        assert directory.exists()
    assert [info.size for info in list_files(directory).values()] == [2, 2]


def test_a_tilde_is_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage_path("work_dir", "~/runs/a") == tmp_path / "runs" / "a"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("ftp://host/run", ["`work_dir`", "gs://", "'ftp://host/run'"]),
        ("gs://", ["'gs://bucket/run'"]),
    ],
)
def test_other_urls_are_refused(path, words):
    check_refusal(lambda: storage_path("work_dir", path), ConfigError, *words)


def test_many_small_files_are_listed_and_read(bucket):
    directory = storage_path("path", f"{bucket}/run")
    contents = {f"step_{i}/a/meta.json": b"%d" % i for i in range(20)}
    for name, content in contents.items():
        write_bytes(directory / name, content)
    paths = [str(directory / name) for name in contents]
    assert read_many([*paths, str(directory / "missing")]) == dict(zip(paths, contents.values(), strict=True))
    assert list_directory(directory) == {f"step_{i}": True for i in range(20)}
    assert list_directory(directory / "step_3/a") == {"meta.json": False}
    assert list_directory(directory / "missing") == {}
    assert list_files(directory)["step_7/a/meta.json"] == FileInfo(1, hashlib.md5(b"7").hexdigest())
    remove_files([*paths, str(directory / "missing")])
    assert list_files(directory) == {}


def test_small_files_take_one_request_each(gs_bucket, google_storage):
    path = storage_path("path", f"{gs_bucket}/run/last_checkpoint")
    write_bytes(path, b"iter_10")
    assert read_bytes(path) == b"iter_10"
    with pytest.raises(FileNotFoundError):
        read_bytes(path / "missing")
    assert [method for method, _ in google_storage.requests] == ["POST", "GET", "GET"]


@pytest.mark.parametrize("fault", ["error", "cut", "lost", "stall"])
def test_requests_that_fail_are_repeated(gs_bucket, google_storage, monkeypatch, fault):
    monkeypatch.setattr("random.random", lambda: -0.9)  # gcsfs pauses for a second before it tries again
    faults = iter([fault, None] * 3)
    google_storage.choose_fault = lambda method, path: next(faults)
    path = storage_path("path", f"{gs_bucket}/run/last_checkpoint")
    write_bytes(path, b"iter_10")
    assert read_bytes(path) == b"iter_10"
    remove_files([path])
    google_storage.choose_fault = lambda method, path: None
    assert not path.exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_pipes_and_devices_are_refused_rather_than_read(tmp_path, make):
    make(tmp_path / "last_checkpoint")
    for function in (read_bytes, check_regular):
        with pytest.raises(UnsafeFileError, match="last_checkpoint: it must be a regular file, not a pipe or a device"):
            function(tmp_path / "last_checkpoint")
    assert read_many([tmp_path / "last_checkpoint"]) == {}


def test_a_file_is_read_up_to_a_limit_even_if_its_size_is_unknown(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", limit=5) == b"12345"
    with pytest.raises(UnsafeFileError, match="file: it must have at most 4 bytes, got 5"):
        read_bytes(tmp_path / "file", limit=4)
    assert read_bytes("/proc/self/cmdline")  # whose size is 0
    with pytest.raises(UnsafeFileError, match="it must have at most 1 bytes"):
        read_bytes("/proc/self/cmdline", limit=1)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(UnsafeFileError, match="at most 1,073,741,824 bytes, got 1,099,511,627,776"):
        read_bytes(tmp_path / "sparse")


STORE = """
from etils import epath
from jengine.checkpoint.lock import WorkDirLock

provides = {"path_schemes": {"az": "my_store"}}


class Store:
    is_staged = True

    def make_path(self, name, url):
        print("prepared")
        return epath.Path(url)

    def make_lock(self, url):
        return WorkDirLock("locks")


az = Store()
"""
USE_STORE = """
from etils import epath
from jengine.checkpoint.lock import make_lock
from jengine.config.storage import find_scheme, storage_path

print(storage_path("work_dir", "az://box/run"))
print(find_scheme("az://box/run").is_staged, find_scheme("runs/a"))
make_lock("az://box/run").acquire()
try:
    storage_path("work_dir", "ftp://box/run")
except ValueError as error:
    print(str(error).partition(",")[0])
"""


def test_another_package_can_provide_a_scheme(run_python, tmp_path):
    (tmp_path / "my_store.py").write_text(STORE)
    info = tmp_path / "my_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jengine.extras]\nmy_store = my_store\n")
    done = run_python(f"sys.path.insert(0, {str(tmp_path)!r})\n{USE_STORE}", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "prepared",
        "az://box/run",
        "True None",
        "`work_dir` must be a local path or a URL of gs:// or s3:// or az://",
    ], done.stderr
    assert (tmp_path / "locks").is_dir()
