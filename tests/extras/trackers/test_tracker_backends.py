"""Test the backends of Aim, ClearML, Comet and Trackio with recorded calls, and where they are installed, offline."""

import inspect
import io
import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from jengine.config.errors import MissingPackageError
from jengine.extras.trackers import (
    AimVisBackend,
    ClearMLVisBackend,
    CometVisBackend,
    TrackioVisBackend,
)
from jengine.logging.convert import histogram

from .tracker_calls import (
    SIGNATURES,
    fake_aim,
    fake_clearml,
    fake_comet,
    fake_trackio,
    read_signature,
)

GRAY = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
BINS = histogram(np.array([0.0, 1.0, 1.0]), bins=2)
BACKENDS = {"aim": AimVisBackend, "clearml": ClearMLVisBackend, "comet_ml": CometVisBackend, "trackio": TrackioVisBackend}


def write(backend):
    """Write a bit of everything, as a run does."""
    backend.add_config("lr = 0.1\n")
    backend.add_scalars({"loss": np.float32(0.5), "note": "text", "iter": 10}, step=10)
    backend.add_scalars({"val/accuracy/top1": 0.75}, step=10)
    backend.add_image("cat", GRAY, step=10)
    backend.add_histogram("w", BINS, step=10)
    backend.close()


def test_aim_gets_numbers_images_bins_and_the_config(tmp_path, monkeypatch):
    module, fakes, runs = fake_aim()
    monkeypatch.setitem(sys.modules, "aim", module)
    backend = AimVisBackend(tmp_path / "vis", experiment="digits", run_name="first", tags=("a", "b"))
    assert not (tmp_path / "vis").exists()  # nothing is made before the first value
    write(backend)
    quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
    first = {"run_hash": None, "repo": str(tmp_path / "vis"), "experiment": "digits", "force_resume": False, **quiet}
    assert fakes.named("Run") == [first]
    assert (runs[0].name, fakes.named("Run.add_tag"), runs[0]["config"]) == (
        "first",
        [{"value": "a"}, {"value": "b"}],
        "lr = 0.1\n",
    )
    *scalars, image, bins = fakes.named("Run.track")
    assert scalars == [
        {"value": 0.5, "name": "loss", "step": 10}, {"value": 10.0, "name": "iter", "step": 10},
        {"value": 0.75, "name": "val/accuracy/top1", "step": 10},
    ]  # fmt: skip
    np.testing.assert_array_equal(image["value"][1]["image"], GRAY[..., 0])
    assert (bins["value"][1]["hist"].tolist(), bins["value"][1]["bin_range"]) == ([1, 2], (0.0, 1.0))
    assert len(fakes.named("Run.close")) == 1

    resumed = AimVisBackend(tmp_path / "vis", experiment="digits", run_name="first")
    resumed.load_state_dict(backend.state_dict(), step=10)
    resumed.add_scalar("loss", 0.25, step=20)
    assert fakes.named("Run")[1] == {**first, "run_hash": "hash0", "force_resume": True}
    resumed.close()
    resumed.add_scalar("loss", 0.25, step=30)  # of a test after the end of training
    assert fakes.named("Run")[2]["force_resume"] is False


def test_clearml_draws_training_and_validation_of_a_metric_in_one_plot(tmp_path, monkeypatch):
    module, fakes = fake_clearml()
    monkeypatch.setitem(sys.modules, "clearml", module)
    backend = ClearMLVisBackend(tmp_path, init_kwargs=dict(task_name="first"), offline=True)
    write(backend)
    quiet = dict.fromkeys(
        ("auto_connect_arg_parser", "auto_connect_frameworks", "auto_connect_streams", "auto_resource_monitoring"),
        False,
    )
    first = {"project_name": "jengine", "task_name": "first", "reuse_last_task_id": False, **quiet}
    assert module.Task._report_subprocess_enabled is False  # no fork of a process with JAX's threads
    assert fakes.calls[:2] == [("Task.set_offline", {"offline_mode": True}), ("Task.init", first)]
    assert fakes.named("Task.set_configuration_object") == [{"name": "config", "config_text": "lr = 0.1\n"}]
    assert fakes.named("Logger.report_scalar") == [
        {"title": "loss", "series": "train", "value": 0.5, "iteration": 10},
        {"title": "iter", "series": "train", "value": 10.0, "iteration": 10},
        {"title": "accuracy/top1", "series": "val", "value": 0.75, "iteration": 10},
    ]
    (image,) = fakes.named("Logger.report_image")
    np.testing.assert_array_equal(image["image"], GRAY[..., 0])
    assert fakes.named("Logger.report_histogram") == [
        {"title": "w", "series": "w", "values": [1, 2], "iteration": 10, "xlabels": ["0", "0.5"]}
    ]
    resumed = ClearMLVisBackend(tmp_path, init_kwargs=dict(task_name="first"))
    resumed.load_state_dict(backend.state_dict(), step=10)
    assert backend.state_dict() == {"run_id": "task0"}
    resumed.add_scalar("loss", 0.25, step=20)
    assert fakes.named("Task.init")[1] == {**first, "reuse_last_task_id": "task0", "continue_last_task": 0}


def test_comet_gets_numbers_png_images_and_the_summary_of_a_histogram(tmp_path, monkeypatch):
    from PIL import Image

    module, fakes = fake_comet()
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    backend = CometVisBackend(
        tmp_path, init_kwargs=dict(online=False), experiment_kwargs=dict(name="first", log_graph=True)
    )
    write(backend)
    (start,) = fakes.named("start")
    config = start.pop("experiment_config")
    assert start == {"project_name": "jengine", "online": False}
    assert (config["name"], config["log_graph"], config["log_code"]) == ("first", True, False)
    assert config["offline_directory"] == str(tmp_path)
    assert fakes.named("CometExperiment.log_asset_data") == [
        {"data": "lr = 0.1\n", "name": "config.py", "overwrite": True}
    ]
    summary = {"w/mean": 2 / 3, "w/std": pytest.approx(2**0.5 / 3), "w/min": 0.0, "w/max": 1.0}  # of 0, 1, 1
    assert [(call["dic"], call["step"]) for call in fakes.named("CometExperiment.log_metrics")] == [
        ({"loss": 0.5, "iter": 10.0}, 10), ({"val/accuracy/top1": 0.75}, 10), (summary, 10),
    ]  # fmt: skip
    (image,) = fakes.named("CometExperiment.log_image")
    np.testing.assert_array_equal(np.asarray(Image.open(image["image_data"])), GRAY[..., 0])
    backend.add_scalar("loss", 0.25, step=20)
    again = {name: value for name, value in fakes.named("start")[1].items() if name != "experiment_config"}
    assert again == {"project_name": "jengine", "online": False, "experiment_key": "key0", "mode": "get"}


def test_trackio_gets_numbers_images_bins_and_reports_at_their_steps(tmp_path, monkeypatch):
    module, fakes = fake_trackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    backend = TrackioVisBackend(tmp_path / "vis", init_kwargs=dict(project="digits", auto_log_gpu=True))
    write(backend)
    assert not (tmp_path / "vis").exists()  # Trackio has a directory of its own
    first = {"project": "digits", "auto_log_cpu": False, "auto_log_gpu": True, "embed": False}
    assert fakes.named("init") == [first]
    text, scalars, validation, image, bins = fakes.named("Run.log")
    assert text == {"metrics": {"config": {"text": "```\nlr = 0.1\n\n```"}}, "step": 0}
    assert scalars == {"metrics": {"loss": 0.5, "iter": 10.0}, "step": 10}
    assert validation == {"metrics": {"val/accuracy/top1": 0.75}, "step": 10}
    np.testing.assert_array_equal(image["metrics"]["cat"]["value"], GRAY[..., 0])
    counts, edges = bins["metrics"]["w"]["np_histogram"]
    assert (counts.tolist(), edges.tolist(), bins["step"]) == ([1, 2], [0.0, 0.5, 1.0], 10)
    assert len(fakes.named("Run.finish")) == 1
    resumed = TrackioVisBackend(tmp_path, init_kwargs=dict(project="digits", name="other"))
    resumed.load_state_dict(backend.state_dict(), step=10)
    resumed.add_scalars({"time": 0.2, "data_time": 0.1}, step=20)  # Trackio would rename `time`, which is its own
    assert fakes.named("init")[1] == {**first, "auto_log_gpu": False, "name": "brave-sunset-0", "resume": "allow"}
    assert fakes.named("Run.log")[-1]["metrics"] == {"train/time": 0.2, "data_time": 0.1}


@pytest.mark.parametrize("package", BACKENDS)
def test_without_the_package_the_error_names_the_extra_before_anything_is_written(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    backend = BACKENDS[package]
    message = rf"pip install 'jengine\[{backend.extra}\]'"
    with pytest.raises(MissingPackageError, match=message):
        backend(tmp_path / "vis").add_config("")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.foreign
@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in SIGNATURES for name in SIGNATURES[package]]
)
def test_the_recorded_signatures_are_those_of_the_package(package, name):
    module = pytest.importorskip(package)
    real = module
    for part in name.split("."):
        real = getattr(real, part) if hasattr(real, part) else getattr(module.experiment, part)
    found = [parameter for parameter in inspect.signature(real).parameters.values() if parameter.name != "self"]
    recorded = list(read_signature(package, name).parameters.values())
    assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in recorded]


def run_offline(script, tmp_path):
    """Run a script in a process of its own, as clients keep threads; return what it prints in its last line."""
    head = "import numpy as np\nfrom tests.extras.trackers.test_tracker_backends import *\n"
    environment = {"HOME": str(tmp_path), "CLEARML_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", head + script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


TWO_RUNS = """
backend = make()
write(backend)
resumed = make()
resumed.load_state_dict(backend.state_dict(), step=10)
for step, value in ((10, 0.4), (20, 0.3)):
    resumed.add_scalar("loss", value, step=step)
resumed.close()
"""


@pytest.mark.foreign
def test_a_resumed_run_of_aim_replaces_repeated_steps(tmp_path):
    pytest.importorskip("aim")
    script = (
        f"make = lambda: AimVisBackend({str(tmp_path)!r})\n{TWO_RUNS}"
        + f"""
import aim
run = aim.Run(backend.state_dict()["run_id"], repo={str(tmp_path)!r}, system_tracking_interval=None)  # one that only reads waits for Aim's index
print(json.dumps({{metric.name: sorted(metric.values.sparse_list()[1]) for metric in run.metrics()}}))
print(json.dumps(run["config"]))
"""
    )
    *_, metrics, config = run_offline(script, tmp_path).splitlines()
    assert json.loads(metrics) == {"loss": [0.3, 0.4], "iter": [10.0], "val/accuracy/top1": [0.75]}  # 0.5 is gone
    assert json.loads(config) == "lr = 0.1\n"


@pytest.mark.foreign
def test_an_offline_session_of_clearml_has_both_parts_of_a_resumed_run(tmp_path):
    pytest.importorskip("clearml")
    run_offline(f"make = lambda: ClearMLVisBackend({str(tmp_path)!r}, offline=True)\n{TWO_RUNS}", tmp_path)
    (folder,) = [path for path in (tmp_path / "cache" / "offline").iterdir() if path.is_dir()]
    events = [event for line in (folder / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)]
    scalars = [
        (e["metric"], e["variant"], e["iter"], e["value"]) for e in events if e["type"] == "training_stats_scalar"
    ]
    assert [x for x in scalars if x[0] == "loss"] == [
        ("loss", "train", 10, 0.5),
        ("loss", "train", 10, 0.4),
        ("loss", "train", 20, 0.3),
    ]
    assert ("accuracy/top1", "val", 10, 0.75) in scalars
    assert "lr = 0.1" in (folder / "task.json").read_text()


@pytest.mark.foreign
def test_offline_archives_of_comet_continue_the_experiment(tmp_path):
    pytest.importorskip("comet_ml")
    run_offline(
        f"make = lambda: CometVisBackend({str(tmp_path)!r}, init_kwargs=dict(online=False))\n{TWO_RUNS}", tmp_path
    )
    archives = [zipfile.ZipFile(path) for path in tmp_path.glob("*.zip")]
    assert len({json.loads(archive.read("experiment.json"))["offline_id"] for archive in archives}) == 1
    lines = [json.loads(line) for archive in archives for line in io.BytesIO(archive.read("messages.json"))]
    metrics = [line["payload"]["metric"] for line in lines if line["type"] == "metric_msg"]
    found = sorted(
        (metric["step"], float(metric["metricValue"])) for metric in metrics if metric["metricName"] == "loss"
    )
    assert found == [(10, 0.4), (10, 0.5), (20, 0.3)]


@pytest.mark.foreign
def test_a_run_of_trackio_has_both_parts_of_a_resumed_run(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    script = (
        f"make = lambda: TrackioVisBackend({str(tmp_path)!r})\n{TWO_RUNS}"
        + """
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("jengine")
print(json.dumps(SQLiteStorage.get_logs("jengine", name)))
"""
    )
    (line,) = [line for line in run_offline(script, tmp_path).splitlines() if line.startswith("[")]
    logs = json.loads(line)  # what Trackio itself prints surrounds it
    assert sorted((log["step"], log["loss"]) for log in logs if "loss" in log) == [(10, 0.4), (10, 0.5), (20, 0.3)]
    (config,) = [log["config"] for log in logs if "config" in log]
    assert config["_value"] == "```\nlr = 0.1\n\n```"
    (bins,) = [log["w"] for log in logs if "w" in log]
    assert bins["values"] == [1, 2]
    (image,) = [log["cat"] for log in logs if "cat" in log]
    assert (tmp_path / "trackio" / "media" / image["file_path"]).is_file()
