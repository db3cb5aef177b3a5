import pytest

from jengine.config.errors import ConfigError
from jengine.config.storage import apply_backend_args
from tests.refusals import check_refusal


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
    ("path", "settings", "words"),
    [
        (
            "data/a",
            dict(backend="petrel"),
            ["`ann_file`", "'s3://...'", "'petrel'", "got 'data/a'"],
        ),
        ("s3://bucket/a", dict(backend="local"), ["'local'"]),
        ("a", dict(backend="memcached"), ["got 'memcached'", "backend_args", "URL"]),
        ("a", dict(backend="s3", enable_mc=True), ["path_mapping", "got ['enable_mc']"]),
    ],
)
def test_backend_args_without_an_equivalent_are_refused(path, settings, words):
    check_refusal(lambda: apply_backend_args("ann_file", path, settings), ConfigError, *words)


def test_backend_args_and_their_old_name_are_not_given_together():
    assert apply_backend_args("out_dir", "logs", None, dict(backend="disk")) == "logs"
    with pytest.raises(ConfigError, match="`backend_args` must be left out with file_client_args, its old name"):
        apply_backend_args("out_dir", "logs", dict(backend="local"), dict(backend="disk"))
