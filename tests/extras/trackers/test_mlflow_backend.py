import json

import numpy as np
import pytest

from jengine.extras.trackers import MLflowVisBackend
from jengine.logging.convert import histogram


@pytest.fixture
def backend(tmp_path):
    backend = MLflowVisBackend(tmp_path, exp_name="digits", run_name="first", tags={"who": "test"}, params={"lr": 0.1})
    yield backend
    backend.close()


def get_run(backend):
    return backend.experiment.get_run(backend.state_dict()["run_id"])


def find_artifact(backend, path):
    (file,) = (backend.save_dir / "mlruns").glob(f"*/*/artifacts/{path}")
    return file


def test_scalars_are_logged_as_metrics_with_their_steps(backend):
    backend.add_scalars({"train/loss": np.float32(0.5), "note": "x"}, step=10)
    backend.add_scalar("train/loss", float("nan"), step=20)
    history = backend.experiment.get_metric_history(get_run(backend).info.run_id, "train/loss")
    assert [(m.step, str(m.value)) for m in history] == [(10, "0.5"), (20, "nan")]
    assert list(get_run(backend).data.metrics) == ["train/loss"]


def test_run_has_the_configured_name_tags_and_params(backend):
    backend.add_scalar("a", 1.0)
    run = get_run(backend)
    assert (run.info.run_name, run.data.tags["who"], run.data.params) == ("first", "test", {"lr": "0.1"})
    assert backend.experiment.get_experiment_by_name("digits").experiment_id == run.info.experiment_id


def test_a_new_experiment_keeps_its_artifacts_at_the_given_place(tmp_path):
    backend = MLflowVisBackend(tmp_path / "run", artifact_location=(tmp_path / "artifacts").as_uri())
    backend.add_graph("lambda a: a")
    backend.close()
    (graph,) = (tmp_path / "artifacts").glob("*/artifacts/graph.txt")
    assert graph.read_text() == "lambda a: a"


def test_images_histograms_and_config_are_logged_as_artifacts(backend):
    from PIL import Image

    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    backend.add_image("val/cat", image, step=4)
    backend.add_histogram("w", histogram(np.array([0.0, 1.0]), bins=2), step=5)
    backend.add_config("lr = 0.1\n")
    backend.add_graph("lambda a: a")
    np.testing.assert_array_equal(np.asarray(Image.open(find_artifact(backend, "images/val/cat_4.png"))), image)
    bins = json.loads(find_artifact(backend, "histograms/w_5.json").read_text())
    assert bins == {"counts": [1, 1], "edges": [0.0, 0.5, 1.0]}
    assert find_artifact(backend, "config.py").read_text() == "lr = 0.1\n"
    assert find_artifact(backend, "graph.txt").read_text() == "lambda a: a"
    with pytest.raises(TypeError, match="`image` must be uint8"):
        backend.add_image("x", image.astype(np.float32))


def test_resuming_continues_the_run_of_the_checkpoint(backend, tmp_path):
    backend.add_scalar("a", 1.0, step=1)
    backend.close()
    backend.close()
    resumed = MLflowVisBackend(tmp_path, exp_name="digits")
    resumed.load_state_dict(backend.state_dict(), step=1)
    resumed.add_scalar("a", 2.0, step=2)
    assert get_run(resumed).info.status == "RUNNING"
    history = resumed.experiment.get_metric_history(get_run(resumed).info.run_id, "a")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 2.0)]
    resumed.close()
    assert get_run(resumed).info.status == "RUNNING"  # the read above opened it again
    resumed.close()


def test_repeated_steps_are_not_logged_twice(backend, tmp_path):
    backend.add_config("lr = 0.1\n")
    for step in (1, 2):
        backend.add_scalars({"a": float(step), "b": 0.0}, step=step)
    backend.add_scalar("val", 0.5, step=1)  # validations count in epochs
    saved = backend.state_dict()
    backend.add_scalar("val", 0.5, step=1)  # the checkpoint's epoch, validated after the save
    backend.add_scalars({"a": 3.0, "b": 0.0}, step=3)
    backend.close()

    resumed = MLflowVisBackend(tmp_path, exp_name="digits")
    resumed.add_config("lr = 0.2\n")  # as the Runner does, before it resumes
    resumed.load_state_dict(saved, step=2)
    resumed.add_scalar("val", 0.5, step=1)
    for step in (3, 4):
        resumed.add_scalars({"a": float(step), "new": 1.0}, step=step)
    client, run_id = resumed.experiment, resumed.state_dict()["run_id"]
    assert run_id == saved["run_id"]
    steps = {name: [m.step for m in client.get_metric_history(run_id, name)] for name in ("a", "b", "val", "new")}
    assert steps == {"a": [1, 2, 3, 4], "b": [1, 2, 3], "val": [1, 1], "new": [3, 4]}
    assert resumed.state_dict()["counts"] == {"a": 4, "b": 2, "val": 2, "new": 2}
    assert find_artifact(resumed, "config.py").read_text() == "lr = 0.2\n"
    resumed.close()


def test_nothing_is_created_before_the_first_value(backend, tmp_path):
    assert list(tmp_path.iterdir()) == []
    assert backend.state_dict() == {}
