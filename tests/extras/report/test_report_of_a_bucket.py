import json

import pytest

from jengine.checkpoint.lock import make_lock
from jengine.cli import main
from jengine.config.storage import read_bytes
from jengine.extras.cloud.url_files import get_filesystem
from jengine.extras.report.page import collect_data
from tests.extras.report.report_runs import losses, write_run


@pytest.fixture(params=["gs_bucket", "s3_bucket"])
def url(request):
    return f"{request.getfixturevalue(request.param)}/runs"


def send(directory, url):
    for path in directory.rglob("*"):
        if path.is_file():
            get_filesystem(url).put_file(str(path), f"{url}/{path.relative_to(directory)}")


def curves(data):
    return {run["name"]: run["curves"] for run in data["runs"]}


def test_a_report_of_runs_in_a_bucket_equals_one_of_local_runs(tmp_path, url):
    write_run(tmp_path / "a", losses(1.0), images=[("input", 10)], config="model = 1\n")
    write_run(tmp_path / "a", losses(9.0), timestamp="20240101_120000")
    write_run(tmp_path / "b", losses(2.0), status="training")
    (tmp_path / "a/iter_40").mkdir()
    (tmp_path / "a/iter_40/state").write_bytes(b"not read")
    send(tmp_path, url)
    local, remote = collect_data([str(tmp_path)], 8), collect_data([url], 8)
    assert json.dumps(remote["runs"]).replace(url, str(tmp_path)) == json.dumps(local["runs"])
    assert [run["path"] for run in remote["runs"]] == [f"{url}/{name}/20250131_120000" for name in "ab"]
    assert [run["status"] for run in remote["runs"]] == ["finished", "stopped"]
    lease = make_lock(f"{url}/b")
    lease.acquire()
    log_dir = collect_data([f"{url}/b/20250131_120000"], 8)["runs"]
    assert [run["status"] for run in log_dir] == ["training"]
    lease.release()


def test_a_report_reads_no_checkpoints_and_nothing_twice(tmp_path, gs_bucket, google_storage):
    write_run(tmp_path / "a", losses(1.0), images=[("input", 10)])
    (tmp_path / "a/iter_40").mkdir()
    (tmp_path / "a/iter_40/state").write_bytes(b"not read")
    send(tmp_path, gs_bucket)
    google_storage.requests.clear()
    collect_data([f"{gs_bucket}/a"], 8)
    read = [path for _, path in google_storage.requests if "alt=media" in path]
    assert not any("iter_40" in path for path in read)
    assert len(read) == 6  # run.json, three files of scalars, the config, a picture
    google_storage.requests.clear()
    collect_data([f"{gs_bucket}/a"], 8)
    assert [path for _, path in google_storage.requests if "alt=media" in path and "run.lock" not in path] == []


def test_a_page_is_written_to_a_bucket(tmp_path, url, capsys):
    write_run(tmp_path / "a", losses(1.0))
    send(tmp_path, url)
    assert main(["report", f"{url}/a", "--out", f"{url}/report.html"]) == 0
    assert f"{url}/report.html shows 1 run: a" in capsys.readouterr().out
    assert b"<html" in read_bytes(f"{url}/report.html")
    assert main(["report", f"{url}/missing"]) == 2
