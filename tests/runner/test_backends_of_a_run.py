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
        validates=True,
        visualizer=dict(type="Visualizer", vis_backends=[dict(type=kind) for kind in kinds]),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2)),
    )
    runner.train()
    vis = pathlib.Path(runner.log_dir, "vis_data")

    lines = [json.loads(line) for line in (vis / "scalars.json").read_text().splitlines()]
    steps = [line["step"] for line in lines if "lr" in line]
    assert steps == [2, 4, 6, 8]  # two epochs of four iterations
    with open(vis / "scalars.csv", newline="") as file:
        rows = [(row["name"], int(row["step"])) for row in csv.DictReader(file)]
    assert [step for name, step in rows if name == "lr"] == steps
    assert [step for name, step in rows if name == "val/loss"] == [4, 8]
    events = EventAccumulator(str(vis)).Reload()
    assert [event.step for event in events.Scalars("lr")] == steps
    assert [event.step for event in events.Scalars("val/loss")] == [4, 8]
    client = MlflowClient((vis / "mlruns").as_uri())
    run_id = runner.visualizer.get_backend("MLflowVisBackend").state_dict()["run_id"]
    assert [metric.step for metric in client.get_metric_history(run_id, "lr")] == steps
    assert [metric.step for metric in client.get_metric_history(run_id, "val/loss")] == [4, 8]
    assert client.get_run(run_id).info.status == "FINISHED"


def read_csv(runner):
    """Return the steps and values of each name, in the order in which they were written."""
    curves = {}
    with open(pathlib.Path(runner.log_dir, "vis_data", "scalars.csv"), newline="") as file:
        for row in csv.DictReader(file):
            curves.setdefault(row["name"], []).append((int(row["step"]), float(row["value"])))
    return curves


def make_runner_with_csv(make_runner, logger, **changes):
    return make_runner(
        validates=True,
        visualizer=dict(type="Visualizer", vis_backends=[dict(type="CSVVisBackend")]),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2, **logger)),
        **changes,
    )


def test_each_scalar_of_an_iteration_loop_is_a_curve_over_iterations(make_runner):
    runner = make_runner_with_csv(make_runner, {}, train_cfg=dict(by_epoch=False, max_iters=6, val_interval=3))
    runner.train()
    curves = read_csv(runner)
    for name, steps in {"loss": [2, 4, 6], "time": [2, 4, 6], "val/loss": [3, 6], "val/time": [3, 6]}.items():
        assert [step for step, _ in curves[name]] == steps
    assert [value for _, value in curves["val/loss"]] == [metrics["loss"] for _, _, metrics in runner.validations]
    assert "val/iter" not in curves
    assert "mode" not in curves


def test_the_epoch_is_a_curve_of_its_own(make_runner):
    runner = make_runner_with_csv(make_runner, {})
    runner.train()
    assert read_csv(runner)["epoch"] == [(2, 1), (4, 1), (6, 2), (8, 2)]


@pytest.mark.parametrize("hierarchy", [False, True])
def test_names_have_their_loop_once(make_runner, hierarchy):
    processor = dict(type="LogProcessor", log_with_hierarchy=hierarchy)
    runner = make_runner_with_csv(make_runner, {}, log_processor=processor)
    runner.train()
    assert {name for name in read_csv(runner) if "loss" in name} == {"train/loss" if hierarchy else "loss", "val/loss"}


def test_validations_of_an_epoch_loop_can_be_curves_over_epochs(make_runner):
    runner = make_runner_with_csv(make_runner, dict(log_metric_by_epoch=True))
    runner.train()
    assert [step for step, _ in read_csv(runner)["val/loss"]] == [1, 2]


def test_validations_of_an_iteration_loop_cannot_be_curves_over_epochs(make_runner):
    changes = dict(train_cfg=dict(by_epoch=False, max_iters=6, val_interval=3))
    runner = make_runner_with_csv(make_runner, dict(log_metric_by_epoch=True), **changes)
    runner.train()
    assert [step for step, _ in read_csv(runner)["val/loss"]] == [3, 6]
    log = pathlib.Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    assert log.count("log_metric_by_epoch=True has no effect in a loop over iterations") == 1


def test_a_test_has_curves_of_its_own(make_runner):
    dataset = make_runner(validates=True).val_dataloader.dataset
    runner = make_runner_with_csv(
        make_runner, {}, test_dataloader=dict(batch_size=4, dataset=dataset), test_cfg=dict(),
        test_evaluator=dict(type="MeanLoss", loss=lambda p, b: (p - b["y"]) ** 2),
    )  # fmt: skip
    runner.train()
    metrics = runner.test()
    assert read_csv(runner)["test/loss"] == [(8, metrics["loss"])]


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
