import pytest

from jengine.config.errors import ConfigError
from jengine.config.storage import apply_backend_args


@pytest.mark.parametrize(
    ("path", "settings", "expected"),
    [
        ("data/a", None, "data/a"),
        (None, dict(backend="local"), None),
        ("gs://bucket/a", dict(backend="petrel"), "gs://bucket/a"),
        ("data/a", dict(backend="petrel", path_mapping={"data/": "s3://bucket/"}), "s3://bucket/a"),
        ("https://host/a", dict(backend="http"), "https://host/a"),
    ],
)
def test_backend_args_become_a_url(path, settings, expected):
    assert apply_backend_args("ann_file", path, settings) == expected


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        (
            "data/a",
            dict(backend="petrel"),
            "`ann_file` must be a path like 's3://...' with backend='petrel', got 'data/a'",
        ),
        ("s3://bucket/a", dict(backend="local"), "must be a path of the local file system with backend='local'"),
        ("a", dict(backend="memcached"), "got 'memcached'; leave backend_args out, and write a path or a URL"),
        ("a", dict(backend="s3", enable_mc=True), r"only backend and path_mapping, got \['enable_mc'\]; settings"),
    ],
)
def test_backend_args_without_an_equivalent_are_refused(path, settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_backend_args("ann_file", path, settings)


def test_backend_args_and_their_old_name_are_not_given_together():
    assert apply_backend_args("out_dir", "logs", None, dict(backend="disk")) == "logs"
    with pytest.raises(ConfigError, match="`backend_args` must be left out with file_client_args, its old name"):
        apply_backend_args("out_dir", "logs", dict(backend="local"), dict(backend="disk"))
