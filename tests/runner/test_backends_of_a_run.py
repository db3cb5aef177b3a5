import csv
import json
import pathlib

import jax
import pytest

from jengine.hooks import Hook


def test_all_backends_receive_the_same_steps(make_runner):
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = ("LocalVisBackend", "CSVVisBackend", "TensorboardVisBackend", "MLflowVisBackend")
    runner = make_runner(
        visualizer=dict(type="Visualizer", vis_backends=[dict(type=kind) for kind in kinds]),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2)),
    )
    runner.train()
    vis = pathlib.Path(runner.log_dir, "vis_data")

    lines = [json.loads(line) for line in (vis / "scalars.json").read_text().splitlines()]
    steps = [line["step"] for line in lines if "lr" in line]
    assert steps == [2, 4, 6, 8]  # two epochs of four iterations
    with open(vis / "scalars.csv", newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["name"] == "lr"] == steps
    events = EventAccumulator(str(vis)).Reload()
    assert [event.step for event in events.Scalars("lr")] == steps
    client = MlflowClient((vis / "mlruns").as_uri())
    run_id = runner.visualizer.get_backend("MLflowVisBackend").state_dict()["run_id"]
    assert [metric.step for metric in client.get_metric_history(run_id, "lr")] == steps
    assert client.get_run(run_id).info.status == "FINISHED"


def test_processes_other_than_the_first_open_no_backend(make_runner, monkeypatch):
    runner = make_runner(visualizer=dict(type="Visualizer", vis_backends=[dict(type="CSVVisBackend")]))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    runner.visualizer.add_scalars({"a": 1.0}, step=1)
    runner.visualizer.add_histogram("a", [1.0])
    assert not pathlib.Path(runner.log_dir, "vis_data").exists()


class Failing(Hook):
    """Fail in iteration 6, two iterations after the last checkpoint."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 6:
            raise RuntimeError("out of power")


def test_a_resumed_run_continues_the_run_of_its_backend_without_duplicates(make_runner):
    from mlflow.tracking import MlflowClient

    arguments = dict(
        cfg=dict(lr=0.1),  # a Runner writes it before it resumes
        experiment_name="one",
        visualizer=dict(type="Visualizer", vis_backends=[dict(type="MLflowVisBackend", run_name="one")]),
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=1), logger=dict(type="LoggerHook", interval=1)
        ),
    )
    with pytest.raises(RuntimeError, match="out of power"):
        make_runner(custom_hooks=[Failing()], **arguments).train()
    runner = make_runner(resume=True, **arguments)
    runner.train()
    (store,) = pathlib.Path(runner.work_dir).glob("*/vis_data/mlruns")
    client = MlflowClient(store.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("jengine").experiment_id])
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "lr")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.info.status == "FINISHED"
