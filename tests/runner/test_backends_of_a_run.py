import csv
import json
import pathlib

import jax


def test_every_backend_gets_every_logged_interval_with_the_same_step(make_runner):
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
