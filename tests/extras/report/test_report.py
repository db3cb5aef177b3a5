import json
import re
import threading
import urllib.error
import urllib.request

import pytest

from jengine.cli import main
from jengine.extras.report.page import collect_data
from jengine.extras.report.server import make_server

from .report_runs import losses, train_row, write_run

pytest.importorskip("plotly")


def read_data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_one_file_holds_the_data_and_the_scripts_and_refers_to_no_other(tmp_path, capsys):
    write_run(tmp_path / "</script>", losses(1.0), images=[("sample", 1)])  # a name that must not end the data
    out = tmp_path / "pages" / "r.html"
    assert main(["report", str(tmp_path / "</script>"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out} shows 1 run: script>\n"
    page = out.read_text()
    (run,) = read_data(page)["runs"]
    assert run["name"] == "script>"
    assert [item["total"] for item in run["series"] if item["name"] == "loss"] == [40, 4]
    assert not re.findall(r"""(?:src|href)=["']?(?!data:,|#)[^"'\s>]+|@import|url\(""", page.split('id="data"')[0])
    assert 1e6 < len(page) < 3e6


def test_notes_on_a_run_are_printed(tmp_path, capsys):
    log_dir = write_run(tmp_path / "a", [])
    assert main(["report", str(log_dir), "--out", str(tmp_path / "r.html")]) == 0
    assert "  a: vis_data/scalars.json does not exist: a LocalVisBackend" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "WORK_DIR must be a directory, got"),
        ([".", "--images", "0"], "`--images` must be at least 1, got 0"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def served(tmp_path):
    """Serve the report of a run that is training; yield its work dir and the address."""
    write_run(tmp_path, [train_row(1, loss=1.0)], status="training")
    with make_server(lambda: collect_data([str(tmp_path)], 1), "127.0.0.1", 0, 7.0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def _get(url):
    with urllib.request.urlopen(url) as response:
        return response.headers["Content-Type"], response.read().decode()


def test_a_served_page_follows_its_run_and_has_no_files(served):
    work_dir, url = served
    kind, page = _get(url)
    assert (kind, read_data(page)["refresh"]) == ("text/html; charset=utf-8", 7.0)
    with open(work_dir / "20250131_120000" / "vis_data" / "scalars.json", "a") as file:
        file.write(json.dumps({**train_row(2, loss=0.5), "step": 2}) + "\n")
    kind, text = _get(f"{url}/data.json")
    (series,) = [item for item in json.loads(text)["runs"][0]["series"] if item["name"] == "loss"]
    assert (kind, series["y"]) == ("application/json; charset=utf-8", [1.0, 0.5])
    with pytest.raises(urllib.error.HTTPError, match="404"):
        _get(f"{url}/run.json")
