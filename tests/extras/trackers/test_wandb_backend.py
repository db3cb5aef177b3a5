import json
import struct
import time
import types

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.extras.trackers import WandbVisBackend
from jengine.logging.convert import histogram

BLOCK = 2**15


def read_records(path):
    """Yield the records of a run file: a header of 7 bytes, then blocks in LevelDB's log format."""
    data, offset, parts = path.read_bytes(), 7, []
    while offset + 7 <= len(data):
        if BLOCK - offset % BLOCK < 7:
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        if offset + 7 + length > len(data):
            return  # still being written
        parts.append(data[offset + 7 : offset + 7 + length])
        offset += 7 + length
        if kind in (1, 4):  # a complete record, or its last part
            yield b"".join(parts)
            parts = []


def read_runs(directory):
    """Return the entries as dicts, the config and the run ids of all runs below `directory`."""
    from wandb.proto import wandb_internal_pb2

    history, config, ids = [], {}, set()
    for path in sorted(directory.glob("*/wandb/offline-run-*/*.wandb")):
        for data in read_records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                entry = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                history.append({name: value for name, value in entry.items() if not name.startswith("_")})
            elif kind == "config":
                config.update({i.key: json.loads(i.value_json) for i in record.config.update})
            elif kind == "run":
                ids.add(record.run.run_id)
    return history, config, ids


def wait_for_runs(directory, entries):
    """Return `read_runs` once `entries` entries are written: the W&B process ends slightly later than the run."""
    deadline = time.monotonic() + 30
    while len((runs := read_runs(directory))[0]) < entries and time.monotonic() < deadline:
        time.sleep(0.05)
    return runs


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))

    def make_backend(name="first"):
        import wandb

        quiet = wandb.Settings(console="off", silent=True)
        return WandbVisBackend(tmp_path / name, init_kwargs=dict(mode="offline", project="p", settings=quiet))

    return make_backend


def test_offline_run_contains_everything_with_its_step(offline, tmp_path):
    backend = offline()
    assert not (tmp_path / "first").exists()  # nothing is created before the first value
    backend.add_config("lr = 0.1\n")
    backend.add_graph("lambda a: a")
    backend.add_scalars({"train/loss": np.float32(0.5), "lr": np.array([0.25])}, step=10, file_path="x.json")
    backend.add_scalars({"val/accuracy": 1.0}, step=1)  # validations count in epochs
    backend.add_image("cat", np.zeros((2, 3, 3), np.uint8), step=11)
    backend.add_histogram("w", histogram(np.array([0.0, 1.0]), bins=2), step=12)
    with pytest.raises(TypeError, match="`image` must be uint8"):
        backend.add_image("cat", np.zeros((2, 3, 3)), step=11)
    backend.close()
    backend.close()
    history, config, _ = wait_for_runs(tmp_path, 4)
    assert history[:2] == [{"train/loss": 0.5, "lr": 0.25, "step": 10}, {"val/accuracy": 1.0, "step": 1}]
    image, bins = history[2:]
    assert image["step"] == 11
    assert (image["cat/_type"], image["cat/width"], image["cat/height"]) == ("image-file", 3, 2)
    assert bins == {"w/_type": "histogram", "w/values": [1, 1], "w/bins": [0.0, 0.5, 1.0], "step": 12}
    assert (config["config"], config["graph"]) == ("lr = 0.1\n", "lambda a: a")


def test_metrics_are_defined_with_their_arguments_and_the_code_is_uploaded(monkeypatch, tmp_path):
    calls = []
    run = types.SimpleNamespace(
        id="a", step=0, config={}, log=lambda entry: None, finish=lambda: None,
        define_metric=lambda name, **arguments: calls.append((name, arguments)),
        log_code=lambda name: calls.append((name, {})),
    )  # fmt: skip
    monkeypatch.setattr("wandb.init", lambda **arguments: run)
    goal = dict(name="val/loss", summary="min", goal="minimize")
    WandbVisBackend(tmp_path, define_metric_cfg=[goal], log_code_name="source").add_scalar("a", 1.0)
    WandbVisBackend(tmp_path, define_metric_cfg={"val/acc": "max"}).add_scalar("a", 1.0)
    every = ("*", {"step_metric": "step"})
    assert calls == [
        every, ("val/loss", {"step_metric": "step", "summary": "min", "goal": "minimize"}), ("source", {}),
        every, ("val/acc", {"step_metric": "step", "summary": "max"}),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"`define_metric_cfg\[0\]` must have the key 'name', got \['summary'\]"):
        WandbVisBackend(tmp_path, define_metric_cfg=[dict(summary="min")])


def read_branches(directory):
    """Return the branch point and the counter values of each run file, in the order in which the runs started."""
    from wandb.proto import wandb_internal_pb2

    branches = []
    for path in sorted(directory.glob("*/wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name):
        branch, steps = None, []
        for data in read_records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run" and record.run.HasField("branch_point"):
                branch = (record.run.branch_point.run, record.run.branch_point.value)
            elif record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
        branches.append((branch, steps))
    return branches


def test_resuming_rewinds_the_run_to_the_entry_of_the_checkpoint(offline, tmp_path):
    backend = offline()
    backend.add_scalar("a", 1.0, step=1)
    backend.add_scalar("a", 2.0, step=2)
    saved = backend.state_dict()
    backend.add_scalar("a", 3.0, step=3)
    backend.close()
    resumed = offline("second")  # wandb names the directories of a run by the second
    resumed.add_config("lr = 0.1\n")  # as the Runner does, before it resumes
    resumed.load_state_dict(saved, step=2)
    assert resumed.state_dict() == saved
    resumed.add_scalar("a", 3.0, step=3)
    assert resumed.state_dict() == {"id": saved["id"], "entries": 3}
    resumed.close()
    history, config, ids = wait_for_runs(tmp_path, 4)
    assert history == [{"a": float(i), "step": i} for i in (1, 2, 3, 3)]
    assert (config["config"], ids) == ("lr = 0.1\n", {saved["id"]})
    (first, second) = sorted(read_branches(tmp_path), key=lambda run: run[0] is not None)
    assert first == (None, [0, 1, 2])
    assert second == ((saved["id"], 1), [2])  # `wandb sync` removes entry 2 of the first


class FakeRun:
    step, id = 7, "existing"

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_warning_if_the_server_cannot_rewind(tmp_path, monkeypatch):
    import wandb

    init_calls = []

    def init(**settings):
        init_calls.append({name: value for name, value in settings.items() if name != "dir"})
        if "resume_from" in settings:
            raise wandb.errors.CommError("not supported")
        return FakeRun()

    monkeypatch.setattr(wandb, "init", init)
    backend = WandbVisBackend(tmp_path, init_kwargs=dict(project="p", id="existing", resume="must"))
    backend.add_scalar("a", 1.0)
    assert backend.state_dict() == {"id": "existing", "entries": 8}  # includes the entries of the existing run
    resumed = WandbVisBackend(tmp_path, init_kwargs=dict(project="p", id="existing", resume="must"))
    resumed.load_state_dict(backend.state_dict(), step=1)
    with pytest.warns(UserWarning, match="cannot rewind the run existing to its entry 8.*twice: not supported"):
        resumed.add_scalar("a", 2.0)
    assert init_calls == [
        dict(project="p", id="existing", resume="must"),
        dict(project="p", resume_from="existing?_step=7"),
        dict(project="p", id="existing", resume="allow"),
    ]
