import json
import struct
import sys
import time

import numpy as np
import pytest

from jengine.visualization import WandbVisBackend
from jengine.visualization.convert import histogram

BLOCK = 2**15


def records(path):
    """The records of a run's file: a header of 7 bytes, then LevelDB's log format of blocks."""
    data, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # still being written
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def logged(directory):
    """What was logged: a dict for each entry, the config, and the id, of the runs below `directory`."""
    from wandb.proto import wandb_internal_pb2

    history, config, ids = [], {}, set()
    for path in sorted(directory.glob("*/wandb/offline-run-*/*.wandb")):
        for data in records(path):
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


def logged_in_the_end(directory, entries):
    """`logged`, once the process of Weights & Biases has written `entries` of them: it outlives the run's end a little."""
    deadline = time.monotonic() + 30
    while len((found := logged(directory))[0]) < entries and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))

    def make(name="first"):
        import wandb

        quiet = wandb.Settings(console="off", silent=True)
        return WandbVisBackend(tmp_path / name, init_kwargs=dict(mode="offline", project="p", settings=quiet))

    return make


def test_an_offline_run_holds_everything_with_its_step(offline, tmp_path):
    backend = offline()
    assert not (tmp_path / "first").exists()  # nothing is opened before the first value
    backend.add_config("lr = 0.1\n")
    backend.add_graph("lambda a: a")
    backend.add_scalars({"train/loss": np.float32(0.5), "lr": np.array([0.25])}, step=10, file_path="x.json")
    backend.add_scalars({"val/accuracy": 1.0}, step=1)  # validations count in epochs
    backend.add_image("cat", np.zeros((2, 3, 3), np.uint8), step=11)
    backend.add_histogram("w", histogram(np.array([0.0, 1.0]), bins=2), step=12)
    with pytest.raises(TypeError, match="an image is uint8"):
        backend.add_image("cat", np.zeros((2, 3, 3)), step=11)
    backend.close()
    backend.close()
    history, config, _ = logged_in_the_end(tmp_path, 4)
    assert history[:2] == [{"train/loss": 0.5, "lr": 0.25, "step": 10}, {"val/accuracy": 1.0, "step": 1}]
    image, bins = history[2:]
    assert image["step"] == 11
    assert (image["cat/_type"], image["cat/width"], image["cat/height"]) == ("image-file", 3, 2)
    assert bins == {"w/_type": "histogram", "w/values": [1, 1], "w/bins": [0.0, 0.5, 1.0], "step": 12}
    assert (config["config"], config["graph"]) == ("lr = 0.1\n", "lambda a: a")


def rewinding(directory):
    """The entries of each run file in the order of their start: where it branches off, and its own counter's values."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(directory.glob("*/wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name):
        branch, steps = None, []
        for data in records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run" and record.run.HasField("branch_point"):
                branch = (record.run.branch_point.run, record.run.branch_point.value)
            elif record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
        found.append((branch, steps))
    return found


def test_a_resumed_run_goes_on_with_the_run_of_the_checkpoint_as_it_stood_then(offline, tmp_path):
    backend = offline()
    backend.add_scalar("a", 1.0, step=1)
    backend.add_scalar("a", 2.0, step=2)
    saved = backend.state_dict()
    backend.add_scalar("a", 3.0, step=3)
    backend.close()
    again = offline("second")  # wandb tells the directories of one run apart by the second
    again.add_config("lr = 0.1\n")  # as a Runner does, before it knows what it resumes
    again.load_state_dict(saved, step=2)
    assert again.state_dict() == saved
    again.add_scalar("a", 3.0, step=3)
    assert again.state_dict() == {"id": saved["id"], "entries": 3}
    again.close()
    history, config, ids = logged_in_the_end(tmp_path, 4)
    assert history == [{"a": float(i), "step": i} for i in (1, 2, 3, 3)]
    assert (config["config"], ids) == ("lr = 0.1\n", {saved["id"]})
    (first, second) = sorted(rewinding(tmp_path), key=lambda run: run[0] is not None)
    assert first == (None, [0, 1, 2])
    assert second == ((saved["id"], 1), [2])  # `wandb sync` takes the entry 2 of the first away


class FakeRun:
    step, id = 7, "theirs"

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_a_server_that_cannot_rewind_is_a_warning(tmp_path, monkeypatch):
    import wandb

    asked = []

    def init(**settings):
        asked.append({name: value for name, value in settings.items() if name != "dir"})
        if "resume_from" in settings:
            raise wandb.errors.CommError("no rewinding here")
        return FakeRun()

    monkeypatch.setattr(wandb, "init", init)
    backend = WandbVisBackend(tmp_path, init_kwargs=dict(project="p", id="theirs", resume="must"))
    backend.add_scalar("a", 1.0)
    assert backend.state_dict() == {"id": "theirs", "entries": 8}  # what was there before counts
    again = WandbVisBackend(tmp_path, init_kwargs=dict(project="p", id="theirs", resume="must"))
    again.load_state_dict(backend.state_dict(), step=1)
    with pytest.warns(UserWarning, match="cannot rewind the run theirs to its entry 8.*twice: no rewinding here"):
        again.add_scalar("a", 2.0)
    assert asked == [
        dict(project="p", id="theirs", resume="must"),
        dict(project="p", resume_from="theirs?_step=7"),
        dict(project="p", id="theirs", resume="allow"),
    ]


def test_without_wandb_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'jengine\[wandb\]'"):
        WandbVisBackend(tmp_path).add_scalar("a", 1.0)
    with pytest.raises(ImportError, match=r"pip install 'jengine\[wandb\]'"):
        WandbVisBackend(tmp_path).add_config("")  # at the start of a run, not at its end
