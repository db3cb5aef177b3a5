"""Test that a report reads nothing outside of its runs, and that no file in them makes it fail or wait."""

import http.client
import json
import os
import pathlib
import threading

import pytest

from jengine.cli import main
from jengine.extras.report.page import collect_data, to_json
from jengine.extras.report.server import make_server

from .report_runs import losses, train_row, write_run

PNG = b"\x89PNG\r\n\x1a\n"
SCALARS, CONFIG, RECORD, IMAGES = "vis_data/scalars.json", "vis_data/config.py", "run.json", "vis_data/vis_image"
ROW = json.dumps({**train_row(50, loss=0.5), "step": 50}) + "\n"


def config(**values):
    return f"def get_config():\n    return {values!r}\n"


def visualizer(*directories):
    backends = [dict(type="LocalVisBackend", img_save_dir=directory) for directory in directories]
    return config(visualizer=dict(vis_backends=backends))


def record(**changes):
    session = {"started": "2025-01-31 12:00:00", "status": "finished", "versions": {"jax": "1"}, "devices": "1 x cpu"}
    return json.dumps({"sessions": [session], **changes})


# What is written to a file of a complete run, and a part of the notes on it: text or bytes, or a function of its path.
HOSTILE = {
    "a record of nothing": (RECORD, "", "run.json cannot be read: Expecting value"),
    "a truncated record": (RECORD, record()[:40], "run.json cannot be read: "),
    "a binary record": (RECORD, bytes(range(256)), "run.json cannot be read: "),
    "a record that is a list": (RECORD, "[1, 2, 3]", "run.json cannot be read: "),
    "a record nested too deeply": (RECORD, "[" * 200_000, "run.json cannot be read: "),
    "sessions that are text": (RECORD, record(sessions="many"), "1 entries of run.json have another form: run.json.sess"),
    "a session that is a number": (RECORD, record(sessions=[1, {}]), "have another form: run.json.sessions[0]"),
    "a session of lists": (RECORD, record(sessions=[{"started": [], "versions": [], "seconds": [1]}]), "3 entries of run"),
    "seconds that are text": (RECORD, record(sessions=[{"seconds": {"step": "1"}}]), "run.json.sessions[0].seconds.step"),
    "sums of seconds beyond floats": (RECORD, record(sessions=[{"seconds": {"step": 1e308}}] * 3), "3 entries of run.json"),
    "NaN and infinities": (RECORD, record(seed=float("nan"), max_iters=float("inf")), "run.json.seed, run.json.max_iters"),
    "a huge integer": (RECORD, record(seed=10**400), "have another form: run.json.seed"),
    "an integer of too many digits": (RECORD, '{"seed": ' + "9" * 5000 + "}", "run.json cannot be read: "),
    "groups without a model": (RECORD, record(groups={"columns": ["a"], "rows": [["1"]]}), None),
    "groups of numbers": (RECORD, record(groups={"columns": 3, "rows": [3]}), "run.json.groups.columns"),
    "a record that is a directory": (RECORD, pathlib.Path.mkdir, "run.json cannot be read: Is a directory"),
    "a record that is a pipe": (RECORD, os.mkfifo, "run.json cannot be read: it must be a regular file"),
    "a record that is a loop of links": (RECORD, lambda path: path.symlink_to(path), "run.json cannot be read: "),
    "a record elsewhere": (RECORD, lambda path: path.symlink_to(__file__), "run.json cannot be read: it leads out"),
    "a record that is a device": (RECORD, lambda path: path.symlink_to("/dev/zero"), "run.json cannot be read: it leads"),
    "scalars that are a directory": (SCALARS, pathlib.Path.mkdir, "scalars.json cannot be read: Is a directory"),
    "scalars that are a pipe": (SCALARS, os.mkfifo, "scalars.json cannot be read: it must be a regular file"),
    "scalars that are binary": (SCALARS, os.urandom(4096) + b"\n", "lines of vis_data/scalars.json cannot be read"),
    "lines of other types": (SCALARS, 'null\n[]\n"a"\n1\n{}\n', "5 lines of vis_data/scalars.json cannot be read"),
    "a line nested too deeply": (SCALARS, '{"step": ' + "[" * 200_000 + "\n" + ROW, "1 lines of vis_data/scalars.json"),
    "a line of ten megabytes": (SCALARS, ROW.replace("0.5", "[" + "1," * 5_000_000 + "1]", 1), "not drawn, because"),
    "steps of other types": (SCALARS, '{"step": "a"}\n{"step": null}\n{"step": NaN}\n{"step": [1]}\n', "4 lines of"),
    "modes of other types": (SCALARS, '{"step": 1, "mode": ["a"]}\n{"step": 1, "mode": {}, "iter": 1}\n', "2 lines of"),
    "iterations beyond floats": (SCALARS, f'{{"step": 1, "iter": {10**400}}}\n', "1 lines of"),
    "values of other types": (SCALARS, '{"step": 1, "loss": [1], "a": {}, "b": null, "c": "x"}\n', "not drawn, because"),
    "values beyond floats": (SCALARS, f'{{"step": 1, "loss": {10**400}, "speed/x": "a", "speed/y": NaN}}\n', "not drawn"),
    "values that are not finite": (SCALARS, '{"step": 1, "loss": NaN}\n{"step": 2, "loss": -Infinity}\n', None),
    "many names": (SCALARS, json.dumps({"step": 1, **{f"{i}/x": i for i in range(20_000)}}) + "\n", None),
    "a config that is code": (CONFIG, "import os\nos.abort()\n", "config.py cannot be read: the text of a config must"),
    "a config nested too deeply": (CONFIG, f"def f():\n    return {'-' * 100_000}1\n", "config.py cannot be read"),
    "a config in brackets": (CONFIG, f"def f():\n    return {'[' * 10_000}\n", "config.py cannot be read: "),
    "a config with a null character": (CONFIG, "def f():\n    return {'a': '\0'}\n", "config.py cannot be read: "),
    "a config with a list as a key": (CONFIG, "def f():\n    return {[]: 1}\n", "config.py cannot be read: "),
    "sections of other types": (CONFIG, config(visualizer=3, default_hooks=[1], model=None), None),
    "hooks of other types": (CONFIG, config(default_hooks=dict(checkpoint=dict(save_best=[{}], rule=3))), None),
    "backends of other types": (CONFIG, config(visualizer=dict(vis_backends=[1, None, dict(img_save_dir=[2])])), None),
    "an image directory elsewhere": (CONFIG, visualizer("/usr"), "/usr cannot be read: it leads out of"),
    "an image directory above": (CONFIG, visualizer("../../..", "vis_image/../../../../.."), "cannot be read: it leads out"),
    "an image directory with a null character": (CONFIG, visualizer("a\0b"), None),
    "images that are a link": (IMAGES, lambda path: path.symlink_to("/usr"), "vis_image cannot be read: it leads out of"),
    "images that are a file": (IMAGES, "text", None),
    "an image elsewhere": ("vis_data/vis_image/x_1.png", lambda path: path.symlink_to(__file__), "it leads out of"),
    "an image that is a pipe": ("vis_data/vis_image/x_1.png", os.mkfifo, "x_1.png cannot be read: it must be a regular"),
    "an image that is none": ("vis_data/vis_image/x_1.png", "<script>", "x_1.png cannot be read: it must be a PNG file"),
    "a test of other types": ("20250131_120000.json", '{"a": NaN, "b": [1], "c": {}, "acc": 0.5}', None),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_note_and_the_rest_of_the_run_is_shown(tmp_path, case):
    name, content, expected = HOSTILE[case]
    log_dir = write_run(tmp_path / "run", losses(1.0))
    path = log_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    data = collect_data([str(log_dir)], 2)
    page = to_json(data)  # it has no numbers that JSON lacks
    (run,) = data["runs"]
    assert expected is None or expected in "\n".join(run["notes"])
    assert all("\n" not in note and len(note) < 700 for note in run["notes"])
    assert run["series"] or name == SCALARS
    assert len(page) < 10_000_000


def test_images_in_the_directory_of_the_config_within_the_run_are_shown(tmp_path):
    log_dir = write_run(tmp_path, losses(1.0))
    (log_dir / "vis_data" / "config.py").write_text(visualizer("../pictures"))
    (log_dir / "pictures").mkdir()
    (log_dir / "pictures" / "x_3.png").write_bytes(PNG)
    (run,) = collect_data([str(log_dir)], 1)["runs"]
    assert [(image["name"], image["items"][0]["step"]) for image in run["images"]] == [("x", 3)]
    assert run["notes"] == []


def test_a_run_behind_a_link_out_of_the_work_dir_is_not_read(tmp_path, capsys):
    private = write_run(tmp_path / "private", losses(7.0))
    work_dir = tmp_path / "shared"
    write_run(work_dir, losses(1.0))
    (work_dir / "20990101_000000").symlink_to(private)
    (run,) = collect_data([str(work_dir)], 1)["runs"]
    assert run["path"] == str(work_dir / "20250131_120000")
    assert run["notes"] == [f"20990101_000000 cannot be read: it leads out of {work_dir}"]
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "20990101_000000").symlink_to(private)
    assert main(["report", str(alone), "--out", str(tmp_path / "r.html")]) == 2
    assert "20990101_000000 cannot be read: it leads out of" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(work_dir)  # named by the user
    assert len(collect_data([str(tmp_path / "link")], 1)["runs"]) == 1


def test_names_with_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    write_run(tmp_path / "a\x1b[2J", [{"step": 1, "iter": 1, "\x1b]0;x\x07": "text"}])
    assert main(["report", str(tmp_path / "a\x1b[2J"), "--out", str(tmp_path / "r.html")]) == 0
    out = capsys.readouterr().out
    assert r"shows 1 run: a\x1b[2J" in out
    assert r"\x1b]0;x\x07" in out
    assert "\x1b" not in out


@pytest.fixture
def address(tmp_path):
    """Serve a run; return the port and the work dir."""
    write_run(tmp_path / "run", losses(1.0))
    with make_server(lambda: collect_data([str(tmp_path / "run")], 1), "127.0.0.1", 0, 7.0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1], tmp_path / "run"
        server.shutdown()
        thread.join()


def request(port, *hosts):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.putrequest("GET", "/data.json", skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, response.reason


def test_the_server_answers_only_requests_to_its_own_names(address):
    port, _ = address
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "192.168.0.7:80"):
        assert request(port, host)[0] == 200, host
    for hosts in ((f"evil.example:{port}",), ("localhost.evil.example",), (), ("[::1",), ("localhost", "evil.example")):
        assert request(port, *hosts)[0] == 403, hosts


def test_the_server_survives_a_run_that_is_gone(address):
    port, work_dir = address
    work_dir.rename(work_dir.with_name("moved"))
    status, reason = request(port, "localhost")
    assert (status, reason.split(", got")[0]) == (500, "WORK_DIR must be a directory")
    work_dir.with_name("moved").rename(work_dir)
    assert request(port, "localhost")[0] == 200
