import base64
import hashlib
import http.server
import json
import re
import threading

import fsspec
import numpy as np
import pytest

from jengine.config import format_config, load_config, resolve
from jengine.config.errors import ConfigError
from jengine.config.storage import StorageError, local_copy, read_bytes, write_bytes
from jengine.extras.augment import BaseDataset
from jengine.extras.cloud.url_files import get_filesystem
from jengine.extras.language import TokenWindows
from jengine.extras.serving.dump import write_arrays
from jengine.extras.weights import load_pretrained

CONFIG_AT_URL = "def get_config():\n    return dict(work_dir='from the web')\n"
GET_CONFIG = "import helper\ndef get_config(name='a'):\n    return dict(model=helper.NAME, work_dir=name)\n"


@pytest.fixture(params=["gs_bucket", "s3_bucket"])
def bucket(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("JENGINE_LOCAL_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def count_files(directory):
    return sum(path.is_file() for path in directory.rglob("*"))


def test_a_file_is_fetched_once_until_it_changes(bucket, cache_dir):
    url = f"{bucket}/data/tokens.npy"
    np.save(cache_dir.parent / "tokens.npy", np.arange(7))
    write_bytes(url, (cache_dir.parent / "tokens.npy").read_bytes())
    windows = TokenWindows(url, length=3)
    assert isinstance(windows.tokens, np.memmap)
    np.testing.assert_array_equal(windows[1]["targets"], [4, 5, 6])
    assert local_copy(url) == local_copy(url)
    assert local_copy(url).name == "tokens.npy"
    assert count_files(cache_dir) == 1
    np.save(cache_dir.parent / "tokens.npy", np.arange(9))
    write_bytes(url, (cache_dir.parent / "tokens.npy").read_bytes())
    assert len(TokenWindows(url, length=4)) == 2
    with pytest.raises(FileNotFoundError):
        local_copy(f"{bucket}/missing.npy")
    assert count_files(cache_dir) == 2


def test_data_may_be_at_any_url_that_fsspec_knows(cache_dir):
    fsspec.filesystem("memory").pipe("/data/a.bin", b"abc")
    assert local_copy("memory://data/a.bin").read_bytes() == b"abc"
    with pytest.raises(ConfigError, match="a scheme that fsspec knows, such as gs:// or s3://, got unknown://"):
        local_copy("unknown://bucket/a")


def test_the_annotations_of_a_dataset_are_read_at_a_url(bucket, cache_dir):
    annotations = {"metainfo": {}, "data_list": [{"img_path": "a.png"}]}
    write_bytes(f"{bucket}/coco/train.json", json.dumps(annotations).encode())
    write_bytes(f"{bucket}/coco/classes.txt", b"cat\ndog\n")
    root = f"{bucket}/coco"
    dataset = BaseDataset("train.json", dict(classes=f"{root}/classes.txt"), root, dict(img_path="images"), pipeline=[])
    assert dataset[0]["img_path"] == f"{bucket}/coco/images/a.png"
    assert dataset.metainfo == {"classes": ["cat", "dog"]}


def test_a_config_is_loaded_with_the_modules_and_base_files_next_to_it(bucket):
    write_bytes(f"{bucket}/configs/nets/helper.py", b"NAME = 'net'\n")
    write_bytes(f"{bucket}/configs/nets/digits.py", GET_CONFIG.encode())
    assert load_config(f"{bucket}/configs/nets/digits.py").to_dict() == {"model": "net", "work_dir": "a"}
    assert load_config(f"{bucket}/configs/nets/digits.py:b", ["model=other"]).to_dict() == {
        "model": "other",
        "work_dir": "b",
    }
    write_bytes(f"{bucket}/configs/base/run.py", b"train_cfg = dict(max_epochs=3)\n")
    write_bytes(f"{bucket}/configs/nets/flat.py", b"_base_ = ['../base/run.py']\ntrain_cfg = dict(val_interval=2)\n")
    assert load_config(f"{bucket}/configs/nets/flat.py").train_cfg.to_dict() == dict(max_epochs=3, val_interval=2)
    write_bytes(f"{bucket}/configs/nets/digits.py", GET_CONFIG.replace("'a'", "'new'").encode())
    assert load_config(f"{bucket}/configs/nets/digits.py").work_dir == "new"
    with pytest.raises(FileNotFoundError, match=f"the config file '{bucket}/configs/missing.py' does not exist"):
        load_config(f"{bucket}/configs/missing.py")


def test_a_config_that_a_run_wrote_finds_the_modules_at_their_url(bucket, tmp_path):
    write_bytes(f"{bucket}/configs/url_net.py", b"class Net:\n    pass\n")
    source = "def get_config():\n    return dict(model=dict(type='url_net.Net'))\n"
    write_bytes(f"{bucket}/configs/uses_net.py", source.encode())
    cfg = resolve(load_config(f"{bucket}/configs/uses_net.py"))
    for path in (f"{bucket}/run/config.py", tmp_path / "config.py"):
        text, problems = format_config(cfg, path)
        assert f"CONFIG_MODULES = {{'{bucket}/configs': ['url_net']}}" in " ".join(text.split()).replace("{ ", "{")
        assert problems == []
        write_bytes(path, text.encode())
        assert load_config(path).model.type == "url_net.Net"


def test_predictions_are_written_to_a_url(bucket, cache_dir):
    write_arrays(f"{bucket}/out/predictions.npz", {"a": np.arange(3)})
    with np.load(local_copy(f"{bucket}/out/predictions.npz")) as file:
        np.testing.assert_array_equal(file["a"], [0, 1, 2])
    assert read_bytes(f"{bucket}/out/predictions.npz")[:2] == b"PK"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answer every address with the server's `body`, `headers` and `status`; GET ends after `cut` bytes."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self, send=False):
        server = self.server
        server.requests.append((self.command, self.path))
        self.send_response(server.status)
        body = server.body[: server.cut] if send else server.body
        for name, value in {"Content-Length": len(server.body), **server.headers}.items():
            if value is not None and not (send and name == "Content-Length"):
                self.send_header(name, str(value))
        self.send_header(*("Transfer-Encoding", "chunked") if send else ("Connection", "close"))
        self.end_headers()
        if send:
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

    def do_GET(self):
        self.do_HEAD(send=True)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(cache_dir):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.body, server.headers, server.status, server.cut, server.requests = b"A" * 1000, {}, 200, None, []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def count_fetches(server):
    return sum(method == "GET" for method, _ in server.requests)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ETag": '"a"'}, {"ETag": '"b"'}),
        ({"etag": '"a"'}, {"etag": '"b"'}),
        ({"Last-Modified": "Tue, 14 Nov 2023 22:13:20 GMT"}, {"Last-Modified": "Fri, 15 Jan 2027 08:00:00 GMT"}),
    ],
    ids=["ETag", "etag", "Last-Modified"],
)
def test_a_file_on_the_web_is_fetched_again_when_any_header_says_that_it_changed(server, before, after):
    server.headers = before
    assert local_copy(f"{server.url}/tokens.npy").read_bytes() == b"A" * 1000
    assert local_copy(f"{server.url}/tokens.npy").read_bytes() == b"A" * 1000
    assert count_fetches(server) == 1
    server.headers, server.body = after, b"B" * 1000  # the same size
    assert local_copy(f"{server.url}/tokens.npy").read_bytes() == b"B" * 1000


def test_a_file_of_which_the_server_says_no_version_is_fetched_each_time(server):
    assert local_copy(f"{server.url}/tokens.npy").read_bytes() == b"A" * 1000
    server.body = b"B" * 1000
    assert local_copy(f"{server.url}/tokens.npy").read_bytes() == b"B" * 1000


def test_a_download_that_ends_early_is_an_error_and_not_kept(server, cache_dir):
    server.headers, server.cut = {"ETag": "a"}, 400
    with pytest.raises(StorageError, match="data.bin: the file must have 1,000 bytes, got 400; try again"):
        local_copy(f"{server.url}/data.bin")
    assert count_files(cache_dir) == 0
    server.cut = None
    assert len(local_copy(f"{server.url}/data.bin").read_bytes()) == 1000


def test_a_download_is_compared_with_the_checksum_that_the_server_names(server, cache_dir):
    digest = base64.b64encode(hashlib.md5(server.body).digest()).decode()
    server.headers = {"Content-MD5": digest}
    assert local_copy(f"{server.url}/a.bin").read_bytes() == server.body
    server.body = b"B" + server.body[1:]
    with pytest.raises(StorageError, match=f"b.bin: the file must have the MD5 {re.escape(digest)}, got"):
        local_copy(f"{server.url}/b.bin")
    assert count_files(cache_dir) == 1


@pytest.mark.parametrize("status", [403, 500, 503])
def test_an_error_of_a_web_server_keeps_its_status(server, cache_dir, status):
    server.status = status
    for function in (local_copy, read_bytes, load_config):
        with pytest.raises(StorageError, match=f"a.py: HTTP status {status}"):
            function(f"{server.url}/a.py")
    server.status = 404
    for function in (local_copy, read_bytes, load_config):
        with pytest.raises(FileNotFoundError):
            function(f"{server.url}/a.py")
    assert count_files(cache_dir) == 0


def test_a_server_that_does_not_answer_is_not_a_missing_file(server, cache_dir):
    server.shutdown()
    server.server_close()
    with pytest.raises(StorageError, match="Cannot connect to host"):
        local_copy(f"{server.url}/a.npz")
    assert count_files(cache_dir) == 0


@pytest.mark.parametrize("query", ["", "?download=true", "?X-Amz-Signature=a%2Fb&file=x.txt", "#part"])
def test_a_query_is_not_part_of_the_name_of_a_file(server, tmp_path, query):
    server.headers = {"ETag": "a"}
    np.savez(tmp_path / "w.npz", kernel=np.ones(3, np.float32))
    server.body = (tmp_path / "w.npz").read_bytes()
    params, *_ = load_pretrained(f"{server.url}/w.npz{query}", {"kernel": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(params["kernel"], np.ones(3))
    server.headers, server.body = {"ETag": "b"}, b'{"metainfo": {}, "data_list": [{"img_path": "a.png"}]}'
    assert len(BaseDataset(ann_file=f"{server.url}/train.json{query}")) == 1
    server.body = CONFIG_AT_URL.encode()
    assert load_config(f"{server.url}/{hash(query)}/web.py{query}")["work_dir"] == "from the web"


@pytest.mark.parametrize("name", ["x" * 300 + ".npy", "漢" * 100 + ".npy", "a/..", "..", "%2e%2e"])
def test_the_copy_of_a_file_with_any_name_is_a_file(server, cache_dir, name):
    server.headers = {"ETag": "a"}
    for _ in range(2):
        copy = local_copy(f"{server.url}/{name}")
        assert copy.read_bytes() == server.body
        assert copy.suffix == (".npy" if name.endswith(".npy") else "")
    assert count_fetches(server) == 1


def test_a_large_file_may_take_longer_than_five_minutes(server):
    limits = get_filesystem(server.url).client_kwargs["timeout"]
    assert (limits.total, limits.sock_connect, limits.sock_read) == (None, 30, 60)


def test_an_endless_redirect_is_named(server, cache_dir):
    server.status, server.headers = 302, {"Location": "/again"}
    with pytest.raises(StorageError, match="w.npz: TooManyRedirects"):
        local_copy(f"{server.url}/w.npz")
    assert count_files(cache_dir) == 0
