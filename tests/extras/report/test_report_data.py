import base64
import json
import math

import pytest

from jengine.extras.report.page import collect_data, render_page
from jengine.extras.report.page_data import MAX_IMAGE_NAMES, build_page_data, thin
from jengine.extras.report.run_files import find_runs, name_runs, read_run, read_runs
from jengine.extras.report.run_metrics import compare_configs, find_rule, read_curves

from .report_runs import losses, train_row, write_run


@pytest.fixture
def two_runs(tmp_path):
    """Write two runs that differ in the learning rate and in the scale of their losses."""
    for name, scale in (("a", 1.0), ("b", 2.0)):
        config = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1 * scale)), custom_hooks=[dict(interval=5)])
        write_run(
            tmp_path / name, losses(scale), config=config, images=[("val/sample", step) for step in range(0, 40, 4)]
        )
    return tmp_path


def series(run, name, mode):
    (found,) = [item for item in run["series"] if (item["name"], item["mode"]) == (name, mode)]
    return found


def test_curves_of_training_and_validation_share_a_panel_and_the_axis_of_iterations(two_runs):
    data = collect_data([str(two_runs)], images=2)
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert [(panel["group"], panel["name"]) for panel in data["panels"]] == [
        ("Losses", "loss"), ("Metrics", "accuracy/top1"), ("Learning rates", "lr"),
        ("Time and memory", "time"), ("Time and memory", "data_time"),
    ]  # fmt: skip
    training, validation = (series(data["runs"][1], "loss", mode) for mode in ("train", "val"))
    assert (training["x"], training["y"][:3], training["total"]) == (list(range(1, 41)), [2.0, 1.0, 0.6666667], 40)
    assert (validation["x"], validation["y"]) == ([10, 20, 30, 40], [0.4, 0.2, 0.1333333, 0.1])


def test_the_best_validation_follows_the_rule_of_each_metric(two_runs):
    best = {item["metric"]: item for item in collect_data([str(two_runs / "a")], images=1)["runs"][0]["best"]}
    assert best["loss"] == {
        "metric": "loss",
        "rule": "less",
        "best": {"value": 0.05, "iter": 40},
        "last": 0.05,
        "count": 4,
    }
    assert best["accuracy/top1"]["best"] == {"value": 0.4, "iter": 40}


def test_the_rule_of_the_checkpoint_hook_comes_first_and_an_unknown_one_gives_no_best(tmp_path):
    rows = [
        {"speed_of": value, "recall": value, "iter": step, "mode": "val"}
        for step, value in ((1, 3.0), (2, 1.0), (3, 2.0))
    ]
    config = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best=["recall"], rule=["less"])))
    write_run(tmp_path, rows, config=config)
    best = {item["metric"]: item for item in collect_data([str(tmp_path)], images=1)["runs"][0]["best"]}
    assert best["recall"]["best"] == {"value": 1.0, "iter": 2}
    assert (best["speed_of"]["rule"], best["speed_of"]["best"], best["speed_of"]["last"]) == ("", None, 2.0)


@pytest.mark.parametrize(
    "config",
    [
        dict(default_hooks=dict(checkpoint=dict(save_best=["loss", "recall"], rule="less"))),  # one rule for all
        dict(default_hooks=dict(checkpoint=dict(save_best="auto", less_keys="recall"))),
        dict(custom_hooks=[dict(type="EarlyStoppingHook", monitor="recall", rule="less")]),
        dict(custom_hooks=dict(type="CheckpointHook", save_best="recall", rule="less")),
    ],
)
def test_the_rule_of_any_hook_is_that_of_the_report(config):
    assert find_rule("recall", config) == "less"
    assert find_rule("precision", config) == "greater"


def test_a_page_of_fifty_runs_has_fewer_points_and_stays_below_five_megabytes(tmp_path):
    pytest.importorskip("plotly")
    rows = [train_row(step, **{f"part_{i}": math.sin(step * i) for i in range(5)}) for step in range(1, 601)]
    for name in ("a", "b"):
        write_run(tmp_path / name, rows, images=[("sample", step) for step in range(10)])
    runs = read_runs([str(tmp_path)])
    few = build_page_data(runs)
    assert [len(item["x"]) for item in few["runs"][0]["series"]] == [600] * 8  # with the rate and the times
    assert len(few["runs"][0]["images"][0]["items"]) == 8
    many = build_page_data({f"{name}_{i}": run for i in range(25) for name, run in runs.items()})
    assert max(len(item["x"]) for item in many["runs"][0]["series"]) == 300  # 120,000 points in 400 curves
    assert len(many["runs"][0]["images"][0]["items"]) == 1
    assert len(render_page({"created": "", **many})) < 5e6


def test_the_times_of_a_page_are_those_of_all_sessions_with_the_lost_steps(tmp_path):
    log_dir = write_run(tmp_path, losses(1.0), first_iter=30)
    record = json.loads((log_dir / "run.json").read_text())
    killed = dict(first_iter=0, iter=40, seconds={"step": 8.0, "setup": 1.0})  # 10 of 40 iterations ran again
    (log_dir / "run.json").write_text(json.dumps({**record, "sessions": [killed, *record["sessions"]]}))
    (run,) = collect_data([str(tmp_path)])["runs"]
    assert run["seconds"] == {"step": 6.0 + 3.0, "setup": 1.0, "compile": 1.0, "lost steps": 2.0}


def test_the_table_of_the_page_has_what_differs_and_means_over_seeds(tmp_path):
    for name, lr, seed, scale in (("a", 0.1, 0, 2.0), ("b", 0.1, 1, 4.0), ("c", float("inf"), 0, 1.0)):
        config = {"optim_wrapper": {"lr": lr}, "randomness": {"seed": seed}}
        write_run(tmp_path / name, losses(scale), config=config, seed=seed)
    data = collect_data([str(tmp_path)])
    table = data["table"]
    assert (table["hyperparams"], table["main"]) == ({"optim_wrapper.lr": "lr"}, "accuracy/top1")
    assert table["metrics"] == {"accuracy/top1": "greater", "loss": "less"}
    assert [group["runs"] for group in table["groups"]] == [["c"], ["a", "b"]]
    assert table["groups"][1]["values"]["best"]["accuracy/top1"] == pytest.approx((0.15, 0.05 * 2**0.5, 2))  # 0.2, 0.1
    assert [run["group"] for run in data["runs"]] == [1, 1, 0]
    assert [run["hyperparams"] for run in data["runs"]] == [{"optim_wrapper.lr": x} for x in (0.1, 0.1, "inf")]
    assert data["runs"][2]["values"] == {
        "best": {"accuracy/top1": 0.4, "loss": 0.05}, "final": {"accuracy/top1": 0.4, "loss": 0.05},
    }  # fmt: skip


def test_configs_are_compared_by_path():
    rows = compare_configs([{"a": {"b": 1, "c": [1, 2]}}, {"a": {"b": 2, "c": [1, 2]}, "d": [{"type": "X"}]}])
    assert rows == [
        {"path": "a.b", "values": ["1", "2"], "differs": True},
        {"path": "a.c", "values": ["[1, 2]", "[1, 2]"], "differs": False},
        {"path": "d[0].type", "values": ["", "'X'"], "differs": True},
    ]


def test_facts_of_a_run_come_from_its_record(tmp_path):
    rows = [train_row(1, loss=1.0), {"seconds/step": 3.0, "speed/iterations_per_second": 20.0, "iter": 1}]
    log_dir = write_run(tmp_path, rows)
    (log_dir / f"{log_dir.name}.json").write_text('{"accuracy/top1": 0.75, "time": 0.1, "text": "x"}')
    (run,) = collect_data([str(tmp_path)], images=1)["runs"]
    assert (run["seconds"], run["speed"]) == ({"step": 3.0, "compile": 1.0}, {"iterations_per_second": 20.0})
    assert run["groups"] == {"columns": ["group", "lr"], "rows": [["0", "0.1"]]}
    assert run["versions"] == {"jengine": "0.1.0", "jax": "0.10.2"}
    assert run["tests"] == [{"checkpoint": "", "metrics": {"accuracy/top1": 0.75}}]
    assert {item["name"] for item in run["series"]} == {"lr", "time", "data_time", "loss"}


def test_images_are_embedded_from_the_first_step_to_the_last(two_runs):
    (image,) = collect_data([str(two_runs / "a")], images=4)["runs"][0]["images"]
    assert (image["name"], image["total"]) == ("val/sample", 10)
    assert [item["step"] for item in image["items"]] == [0, 12, 24, 36]
    kind, encoded = image["items"][0]["url"].split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(encoded).startswith(b"\x89PNG")


def test_omitted_names_of_images_are_reported(tmp_path):
    write_run(tmp_path, [], images=[(f"sample_{i:03}_of", 0) for i in range(MAX_IMAGE_NAMES + 2)])
    (run,) = collect_data([str(tmp_path)], images=1)["runs"]
    assert len(run["images"]) == MAX_IMAGE_NAMES
    assert any(note.startswith("2 names of images are not shown") for note in run["notes"])


def test_a_long_curve_keeps_the_extremes_of_each_part():
    y = [0.0] * 1000
    y[123], y[877], y[500] = 9.0, -9.0, math.nan
    x, thinned = thin(range(1000), y, 100)
    assert len(thinned) <= 100
    assert dict(zip(x, thinned, strict=True))[123] == 9.0
    assert min(thinned) == -9.0


def test_values_that_are_not_finite_are_gaps_and_counted(tmp_path):
    write_run(tmp_path, [train_row(step, loss=loss) for step, loss in ((1, 1.0), (2, math.nan), (3, math.inf))])
    found = series(collect_data([str(tmp_path)], images=1)["runs"][0], "loss", "train")
    assert (found["y"], found["not_finite"]) == ([1.0, None, None], {"count": 2, "first": 2})


def test_the_base_learning_rate_is_shown_only_where_it_differs(tmp_path):
    for name, base_lr in (("same", 0.1), ("other", 0.2)):
        write_run(tmp_path / name, [train_row(1, loss=1.0, base_lr=base_lr)])
    other, same = collect_data([str(tmp_path)], images=1)["runs"]
    names = [{item["name"] for item in run["series"]} & {"lr", "base_lr"} for run in (other, same)]
    assert names == [{"lr", "base_lr"}, {"lr"}]


def test_values_that_are_not_numbers_are_named(tmp_path):
    write_run(tmp_path, [train_row(1, loss=1.0, confusion=[[1, 0], [0, 1]])])
    (run,) = collect_data([str(tmp_path)], images=1)["runs"]
    assert run["notes"] == ["not drawn, because they are not numbers: confusion"]


def test_lines_without_a_mode_are_told_apart_by_their_names():
    rows = [
        {"loss": 3.0, "data_time": 0.1, "iter": 10, "step": 10},
        {"loss": 2.0, "data_time": 0.1, "step": 1},  # a validation whose step is its epoch
        {"own": 5.0, "step": 11},
        {"val/loss": 1.0, "iter": 12, "step": 12, "mode": "val"},
    ]
    curves, _ = read_curves(rows)
    assert curves["train", "loss"] == ([10], [3.0])
    assert curves["val", "loss"] == ([10, 12], [2.0, 1.0])
    assert curves["train", "own"] == ([11], [5.0])


def test_an_incomplete_last_line_is_skipped_and_an_unreadable_one_is_counted(tmp_path):
    log_dir = write_run(tmp_path, [train_row(1, loss=1.0)], status="training")
    with open(log_dir / "vis_data" / "scalars.json", "a") as file:
        file.write('nonsense\n{"loss": 0.5, "it')
    run = read_run(log_dir)
    assert [row["loss"] for row in run.rows] == [1.0]
    assert run.notes == ["1 lines of vis_data/scalars.json cannot be read"]


def test_a_killed_run_has_stopped_and_a_locked_one_is_training(tmp_path):
    from jengine.checkpoint import WorkDirLock

    log_dir = write_run(tmp_path, [], status="training")
    earlier = write_run(tmp_path, [], status="training", timestamp="20240131_120000")
    assert read_run(log_dir).status == "stopped"
    lock = WorkDirLock(tmp_path)
    lock.acquire()
    try:
        assert (read_run(log_dir).status, read_run(earlier).status) == ("training", "stopped")
    finally:
        lock.release()


def test_a_path_stands_for_its_newest_run_or_for_those_of_its_directories(tmp_path):
    old, new = (write_run(tmp_path / "a", [], timestamp=stamp) for stamp in ("20240101_000000", "20250101_000000"))
    other = write_run(tmp_path / "b", [])
    assert find_runs(tmp_path) == [new, other]
    assert find_runs(tmp_path / "a") == [new]
    assert find_runs(old) == [old]
    (tmp_path / "c").mkdir()
    with pytest.raises(FileNotFoundError, match=r"WORK_DIR must contain a run \(TIMESTAMP/run.json or .*, got"):
        find_runs(tmp_path / "c")


def test_runs_have_the_shortest_names_that_differ(tmp_path):
    paths = [tmp_path / "x" / "cnn" / "20240101_000000", tmp_path / "y" / "cnn" / "20240101_000000", tmp_path / "vit"]
    assert name_runs(paths) == ["x/cnn", "y/cnn", "vit"]
    assert name_runs([paths[0], paths[0].with_name("20250101_000000")]) == [
        "cnn/20240101_000000", "cnn/20250101_000000",
    ]  # fmt: skip
