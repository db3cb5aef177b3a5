import json
import os
import pathlib
import socket
import stat
import tempfile
import time

import pytest

from jengine.config.errors import ConfigError
from jengine.config.storage import write_bytes
from jengine.extras.cloud.upload import UploadedFiles, choose_local_dir, is_private
from jengine.extras.cloud.url_files import get_filesystem


@pytest.fixture(params=["gs_bucket", "s3_bucket"])
def url(request):
    return f"{request.getfixturevalue(request.param)}/run"


def read_all(url):
    """Return all files below a URL by relative path."""
    store = get_filesystem(url)
    listed = store.find(url, detail=True).items()
    found = {name: store.cat_file(name) for name, info in listed if info["type"] == "file"}
    return {name.removeprefix(f"{url.partition('://')[2]}/"): content for name, content in found.items()}


def write(directory, **files):
    for name, content in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_files_are_sent_when_they_change_and_at_the_end(tmp_path, url):
    files = UploadedFiles(str(tmp_path), url, interval=0.05)
    write(tmp_path, log="one\n", vis__scalars="1\n")
    files.start()
    deadline = time.monotonic() + 30
    while read_all(url) != {"log": b"one\n", "vis/scalars": b"1\n"}:
        assert time.monotonic() < deadline
    with open(tmp_path / "log", "a") as file:
        file.write("two\n")
    files.close()
    assert read_all(url) == {"log": b"one\ntwo\n", "vis/scalars": b"1\n"}


def test_only_changed_files_are_sent(tmp_path, gs_bucket, google_storage):
    files = UploadedFiles(str(tmp_path), f"{gs_bucket}/run")
    write(tmp_path, a="1", b="2", c__d="3")
    (tmp_path / "run.json.new").write_text("{")  # will be renamed
    files.send()
    assert len(google_storage.requests) == 3
    google_storage.requests.clear()
    files.send()
    write(tmp_path, b="20")
    files.send()
    assert [path.partition("/o?")[0] for _, path in google_storage.requests] == [
        "/upload/storage/v1" + f"/b/{gs_bucket[5:]}"
    ]
    assert read_all(f"{gs_bucket}/run") == {"a": b"1", "b": b"20", "c/d": b"3"}


def test_a_run_continues_the_files_of_another_machine(tmp_path, url):
    first = UploadedFiles(str(tmp_path / "first"), url)
    files = dict(
        t1__log="one\n", t1__vis__scalars="1\n", t1__image="", t2__log="other", status="s", last_checkpoint="c"
    )
    write(tmp_path / "first", **files)
    (tmp_path / "first/t1/image_1.png").write_bytes(b"png")
    first.send()
    write_bytes(f"{url}/t1/evaluations/epoch_1/scores.json", b"{}")  # of a follower, at the URL alone
    write_bytes(f"{url}/t1/verdict.json", b"{}")
    second = UploadedFiles(str(tmp_path / "second"), url)
    second.fetch("t1", skip=("last_checkpoint",))
    found = sorted(
        str(path.relative_to(tmp_path / "second")) for path in (tmp_path / "second").rglob("*") if path.is_file()
    )
    assert found == [".session", "status", "t1/image", "t1/log", "t1/vis/scalars"]
    with open(tmp_path / "second/t1/log", "a") as file:
        file.write("two\n")
    second.fetch("t1")  # a second call takes nothing back
    second.send()
    assert read_all(url)["t1/log"] == b"one\ntwo\n"
    assert read_all(url)["t1/image_1.png"] == b"png"


def test_what_a_killed_process_of_this_machine_has_not_sent_is_taken_over(run_python, tmp_path, gs_bucket):
    url = f"{gs_bucket}/run"
    code = f"""
import os, pathlib
from jengine.extras.cloud.upload import UploadedFiles
root = pathlib.Path({str(tmp_path)!r}, "run-00000001")
files = UploadedFiles(str(root), {url!r}, interval=3600)  # sends when it is told
files.start()
(root / "t1").mkdir()
for name in ("log", "other", "image_1.png"):
    (root / "t1" / name).write_text("one")
files.send()
for name, text in {{"log": "one, two", "other": "new, longer", "image_2.png": "png"}}.items():
    (root / "t1" / name).write_text(text)
(root / "t2").write_text("of another run")
os._exit(9)
"""
    assert run_python(code).returncode == 9
    write(tmp_path, **{"run-00000002__t1__log": "one, three: of a run that is alive"})
    UploadedFiles(str(tmp_path / "run-00000002"), url).fetch("t3")
    second = UploadedFiles(str(tmp_path / "run-00000003"), url)
    second.fetch("t1")
    second.send()
    found = read_all(url)
    assert found["t1/log"] == b"one, two"
    assert found["t1/other"] == b"one"  # the file in the bucket is no beginning of this one
    assert (found["t1/image_1.png"], found["t1/image_2.png"]) == (b"one", b"png")
    assert "t2" not in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-00000002", "run-00000003"]


def test_a_failure_is_named_once_and_the_files_are_sent_later(tmp_path, gs_bucket, google_storage, caplog, monkeypatch):
    caplog.set_level("INFO", "jengine")
    monkeypatch.setattr("asyncio.sleep", lambda seconds: no_pause())
    google_storage.choose_fault = lambda method, path: "error"
    write(tmp_path, log="one\n")
    files = UploadedFiles(str(tmp_path), gs_bucket, interval=0.01)
    files.start()
    deadline = time.monotonic() + 30
    while len(google_storage.requests) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    google_storage.choose_fault = lambda method, path: None
    files.close()
    assert read_all(gs_bucket) == {"log": b"one\n"}
    assert [r.getMessage().partition(", which")[0] for r in caplog.records if r.name == "jengine"] == [
        f"files of the run could not be sent to {gs_bucket}",
        f"files of the run are sent to {gs_bucket} again.",
    ]


def test_a_store_that_refuses_files_for_a_while_is_asked_again(tmp_path, gs_bucket, google_storage, monkeypatch):
    monkeypatch.setattr("asyncio.sleep", lambda seconds: no_pause())
    write(tmp_path, log="one\n")
    files = UploadedFiles(str(tmp_path), gs_bucket, interval=0.01)
    google_storage.choose_fault = lambda method, path: "error" if len(google_storage.requests) < 20 else None
    assert not files.try_to_send()
    assert len(google_storage.requests) < 20
    assert files.try_to_send(patience=30)
    assert read_all(gs_bucket) == {"log": b"one\n"}


def test_a_file_that_cannot_be_read_does_not_keep_the_others(tmp_path, gs_bucket):
    write(tmp_path, log="one\n")
    (tmp_path / "unreadable").symlink_to("/proc/self/mem")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "newest").symlink_to("log")
    files = UploadedFiles(str(tmp_path), gs_bucket)
    assert not files.try_to_send(patience=3600)  # it is not tried again
    assert read_all(gs_bucket) == {"log": b"one\n", "newest": b"one\n"}


async def no_pause():
    pass


def test_a_run_that_another_has_replaced_sends_nothing(tmp_path, gs_bucket, caplog):
    def check():
        raise ConfigError("another run is training")

    write(tmp_path, log="one\n")
    files = UploadedFiles(str(tmp_path), gs_bucket, check)
    files.start()
    files.close()
    assert read_all(gs_bucket) == {}
    assert f"some files of the run were not sent to {gs_bucket}: they are in {tmp_path}" in caplog.text


def test_the_local_directory_of_a_url_is_new(tmp_path, monkeypatch):
    monkeypatch.setenv("JENGINE_LOCAL_DIR", str(tmp_path))
    first, second = choose_local_dir("gs://bucket/run"), choose_local_dir("gs://bucket/run")
    assert first != second
    assert os.path.dirname(first) == str(tmp_path)
    assert os.path.basename(first).startswith("run-")
    assert os.listdir(tmp_path) == []


def leave_session(parent, url):
    """Leave the directory of a killed process with a file and a link to a secret, as another user may plant it."""
    (parent.parent / "id_rsa").write_text("PRIVATE KEY")
    session = parent / "run-00000001"
    write(session, t1__log="one", **{".session": json.dumps(dict(url=url, host=socket.gethostname(), pid=2**22 + 1))})
    (session / "t1" / "notes.txt").symlink_to(parent.parent / "id_rsa")
    (session / "t1" / "outside").symlink_to(parent.parent)
    return session


def resume(parent, url):
    files = UploadedFiles(str(parent / "run-00000002"), url)
    files.fetch("t1")
    files.send()
    return read_all(url)


def test_a_link_that_leads_out_of_a_session_is_neither_followed_nor_sent(tmp_path, gs_bucket):
    leave_session(tmp_path / "local", f"{gs_bucket}/run").chmod(0o700)
    assert resume(tmp_path / "local", f"{gs_bucket}/run") == {"t1/log": b"one"}


def test_a_session_is_private_whatever_the_umask(tmp_path, gs_bucket):
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1").chmod(0o775)
    UploadedFiles(str(tmp_path / "run-1"), f"{gs_bucket}/run").fetch("t1")
    assert is_private(tmp_path / "run-1")


def test_a_session_that_others_can_write_to_is_not_taken_over(tmp_path, gs_bucket):
    leave_session(tmp_path / "local", f"{gs_bucket}/run").chmod(0o777)
    assert resume(tmp_path / "local", f"{gs_bucket}/run") == {}


def test_a_session_that_another_user_made_is_not_taken_over(tmp_path, gs_bucket, monkeypatch):
    leave_session(tmp_path / "local", f"{gs_bucket}/run").chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert resume(tmp_path / "local", f"{gs_bucket}/run") == {}


def open_directory(path):
    path.mkdir()
    path.chmod(0o777)


def link_directory(path):
    path.with_name("elsewhere").mkdir()
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("plant", [open_directory, link_directory, pathlib.Path.touch])
def test_the_directory_for_sessions_is_used_only_if_nobody_else_can_write_to_it(tmp_path, monkeypatch, caplog, plant):
    monkeypatch.delenv("JENGINE_LOCAL_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / f"jengine-{os.getuid()}"
    chosen = pathlib.Path(choose_local_dir("gs://bucket/run"))
    assert chosen.parent == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert pathlib.Path(choose_local_dir("gs://bucket/run")).parent == path
    assert caplog.text == ""
    path.rmdir()
    plant(path)
    chosen = pathlib.Path(choose_local_dir("gs://bucket/run"))
    assert chosen.parent != path
    assert is_private(chosen.parent)
    assert f"{path} must be a directory that only you can write to" in caplog.text
