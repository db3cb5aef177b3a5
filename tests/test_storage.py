import hashlib

import pytest

from jengine.errors import ConfigError
from jengine.storage import (
    FileInfo,
    list_directory,
    list_files,
    read_bytes,
    read_many,
    remove_files,
    storage_path,
    write_bytes,
)


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
    ("path", "message"),
    [
        ("ftp://host/run", "a local path or a URL of gs:// or s3://"),
        ("gs://", "name of a bucket, like 'gs://bucket/run'"),
    ],
)
def test_other_urls_are_refused(path, message):
    with pytest.raises(ConfigError, match=message):
        storage_path("work_dir", path)


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
