import pytest

from jengine.errors import ConfigError
from jengine.storage import get_filesystem, storage_path


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


def test_a_listing_has_the_files_that_others_have_written(bucket):
    import fsspec

    directory = storage_path("path", f"{bucket}/run")
    assert not directory.exists()
    other = fsspec.filesystem(bucket[:2], skip_instance_cache=True)
    for name in "ab":
        other.pipe(f"{bucket}/run/{name}", b"12")
        assert directory.exists()
    assert [info["size"] for info in get_filesystem(directory).find(str(directory), detail=True).values()] == [2, 2]


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
