import json
import math

import pytest

from jengine.cli import main
from jengine.extras.report.run_files import read_run
from jengine.extras.report.run_metrics import find_best
from jengine.extras.report.run_table import read_table
from jengine.extras.report.table_format import sort_cells

from .report_runs import train_row, write_run


def write_trial(work_dir, lr, seed, scores, **config):
    rows = [
        {"accuracy/top1": score, "loss": 1 - score, "iter": 10 * i, "mode": "val"} for i, score in enumerate(scores, 1)
    ]
    config = {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": lr}}, "work_dir": str(work_dir), **config}
    return write_run(work_dir, rows, config=config, seed=seed)


@pytest.fixture
def sweep(tmp_path):
    """Write runs of two learning rates and two seeds, and one that failed before it had a log."""
    for name, lr, seed, scores in (
        ("a", 0.1, 0, (0.5, 0.8, 0.7)), ("b", 0.1, 1, (0.5, 0.6)), ("c", 0.3, 0, (0.9,)), ("d", 0.3, 1, (0.7,)),
    ):  # fmt: skip
        write_trial(tmp_path / name, lr, seed, scores)
    (tmp_path / "e").mkdir()
    trial = {"overrides": {"optim_wrapper.optimizer.lr": 9.0, "randomness.seed": 3}, "error": "ValueError: too large"}
    (tmp_path / "e" / "trial.json").write_text(json.dumps(trial))
    return tmp_path


def test_the_table_shows_what_differs_and_the_metrics_the_best_run_first(sweep):
    headings, rows = read_table([sweep]).cells()
    assert headings == [
        "lr", "best accuracy/top1", "last accuracy/top1", "best loss", "last loss", "seed", "status", "run",
    ]  # fmt: skip
    assert [row[:3] + row[5:] for row in rows] == [
        [0.3, 0.9, 0.9, 0, "finished", "c"],
        [0.1, 0.8, 0.7, 0, "finished", "a"],
        [0.3, 0.7, 0.7, 1, "finished", "d"],
        [0.1, 0.6, 0.6, 1, "finished", "b"],
        [9.0, None, None, 3, "failed", "e"],
    ]


def test_groups_over_seeds_have_the_mean_and_the_sample_deviation(sweep):
    table = read_table([sweep])
    best, second, failed = table.groups()
    assert (best.hyperparams, [run.name for run in best.runs]) == ({"optim_wrapper.optimizer.lr": 0.3}, ["c", "d"])
    assert best.best["accuracy/top1"] == pytest.approx((0.8, 0.02**0.5, 2))  # 0.9 and 0.7
    assert second.final["accuracy/top1"] == pytest.approx((0.65, 0.005**0.5, 2))  # 0.7 and 0.6
    assert (failed.status, failed.best) == ("failed", {})
    assert table.best().name == "c"
    assert table.best("loss").work_dir == str(sweep / "c")


def test_the_direction_and_the_main_metric_are_those_of_the_checkpoint_hook(tmp_path):
    hooks = {"checkpoint": {"type": "CheckpointHook", "save_best": "recall", "rule": "less"}}
    for name, values in (("a", (3.0, 1.0, 2.0)), ("b", (4.0, 5.0, 6.0))):
        rows = [{"acc": 1 / value, "recall": value, "iter": i, "mode": "val"} for i, value in enumerate(values)]
        write_run(tmp_path / name, rows, config={"default_hooks": hooks})
    table = read_table([tmp_path])
    assert (table.metrics[0], [row.best["recall"] for row in table.rows]) == ("recall", [1.0, 4.0])


def test_runs_without_a_validation_are_compared_by_their_training_loss(tmp_path):
    write_run(tmp_path / "a", [train_row(1, loss=3.0), train_row(2, loss=1.0), train_row(3, loss=float("nan"))])
    assert read_table([tmp_path]).best().best == {"train/loss": 1.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--csv"], ["lr,best accuracy/top1,last accuracy/top1,best loss,last loss,seed,status,run", "9.0,,,,,3,failed,e"]),
        (
            ["--markdown", "--group"],
            [
                "| lr | best accuracy/top1 | last accuracy/top1 | best loss | last loss | seeds | status |",
                "|--:|--:|--:|--:|--:|--:|---|",
                "| 0.3 | 0.8 ± 0.14 | 0.8 ± 0.14 | 0.2 ± 0.14 | 0.2 ± 0.14 | 2 | finished |",
            ],
        ),
        (["--latex", "--group"], [r"\begin{tabular}{rrrrrrl}", r"9 &  &  &  &  & 1 & failed \\", r"\end{tabular}"]),
    ],
)  # fmt: skip
def test_the_command_prints_csv_markdown_and_latex(sweep, capsys, options, expected):
    assert main(["table", str(sweep), *options]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line for line in lines if line in expected] == expected
    assert "e: ValueError: too large" in printed.err


def test_rows_are_sorted_by_a_column_and_a_wrong_one_is_refused(sweep, capsys):
    assert main(["table", str(sweep), "--csv", "--sort", "seed", "--reverse"]) == 0
    seeds = [line.split(",")[5] for line in capsys.readouterr().out.splitlines()[1:]]
    assert seeds == ["3", "1", "1", "0", "0"]
    assert main(["table", str(sweep), "--sort", "lrr"]) == 2
    assert "`--sort` must be one of lr, " in capsys.readouterr().err


def test_of_several_paths_those_without_a_run_are_left_out(sweep, capsys):
    (sweep / "sweep.json").touch()
    (sweep / "empty").mkdir()
    assert main(["table", *map(str, sorted(sweep.iterdir())), "--csv"]) == 0  # as `table work_dirs/*`
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + 5
    assert f"left out, as they have no run: {sweep / 'empty'}, {sweep / 'sweep.json'}" in printed.err
    assert main(["table", str(sweep / "sweep.json")]) == 2
    assert "WORK_DIR must be a directory, got the file" in capsys.readouterr().err


def test_none_is_a_value_and_a_missing_one_is_empty(tmp_path):
    for name, clip in (("a", {"clip_grad": None}), ("b", {"clip_grad": 1.0}), ("c", {})):
        write_trial(tmp_path / name, 0.1, 0, (0.5,), **clip)
    table = read_table([tmp_path])
    assert {row[-1]: row[0] for row in table.cells()[1]} == {"a": "None", "b": 1.0, "c": None}
    assert repr(table) == table.format()  # short enough for a console


def write_setting(work_dir, setting, score, *, seed=0, config=None):
    """Write a run of a sweep; `config` is None for one that failed before it had a log."""
    if config is None:
        work_dir.mkdir()
    else:
        rows = [{"acc": score, "iter": 10, "mode": "val"}]
        config = {
            "optim_wrapper": {"type": "OptimWrapper"},
            "randomness": {"seed": seed},
            "work_dir": work_dir.name,
            **config,
        }
        write_run(work_dir, rows, config=config, seed=seed)
    error = {"error": "ValueError: no"} if config is None else {}
    (work_dir / "trial.json").write_text(json.dumps({"overrides": {**setting, "randomness.seed": seed}, **error}))


def test_values_of_a_sweep_that_are_dicts_are_columns(tmp_path):
    number = 0
    for kind, lr, momentum in (("SGD", 0.1, {"momentum": 0.9}), ("SGD", 0.2, {"momentum": 0.9}), ("Adam", 0.1, {})):
        for seed in (0, 1):
            optimizer = {"type": kind, "lr": lr, **momentum}
            # Before it has a config, a trial is a row of the same setting.
            config = {"optim_wrapper": {"optimizer": optimizer}} if (kind, seed) != ("Adam", 1) else None
            setting = {"optim_wrapper.optimizer": {"_delete_": True, **optimizer}}
            write_setting(tmp_path / str(number), setting, lr + seed / 100, seed=seed, config=config)
            number += 1
    table = read_table([tmp_path])
    assert table.cells()[0][:3] == ["type", "lr", "momentum"]
    groups = {tuple(group.hyperparams.values()): [run.seed for run in group.runs] for group in table.groups()}
    assert groups == {("SGD", 0.1, 0.9): [1, 0], ("SGD", 0.2, 0.9): [1, 0], ("Adam", 0.1): [0, 1]}
    for style in ("text", "latex", "csv", "markdown"):
        assert "Adam" in table.format(style, group=True)


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("custom_hooks.0.interval", lambda x: {"custom_hooks": [{"type": "EMAHook", "interval": x}]}),
        ("custom_hooks[-1].interval", lambda x: {"custom_hooks": [{"type": "EMAHook", "interval": x}]}),
        ("paramwise_cfg['layer.0'].lr_mult", lambda x: {"paramwise_cfg": {"layer.0": {"lr_mult": x}}}),
        ("custom_hooks", lambda x: {"custom_hooks": [{"type": "EMAHook", "interval": x}]}),
        ("vars.width", lambda x: {"vars": {"width": x}, "model": {"width": 8 * x}}),
        ("randomness", lambda x: {"randomness": {"seed": 0, "impl": f"threefry{x}"}}),
        ("model.size", lambda x: {"model": {"type": "MLP", "widths": [8] * x}}),  # a name that stands for others
        ("work_dir", lambda x: {"model": {"loss": f"loss_{x}"}}),
    ],
)  # fmt: skip
def test_runs_with_different_configs_are_never_seeds_of_one(tmp_path, path, make):
    for x in (1, 2):
        write_setting(tmp_path / str(x), {path: f"{x}"}, x / 10, config=make(x))
    table = read_table([tmp_path])
    assert [len(group.runs) for group in table.groups()] == [1, 1]
    first, second = table.rows
    assert first.hyperparams != second.hyperparams  # a column says how they differ


def test_what_is_logged_and_where_makes_no_other_setting(tmp_path):
    for x in (1, 2):
        places = {
            "visualizer": {"name": f"run {x}"},
            "experiment_name": f"run_{x}",
            "log_level": ["INFO", "DEBUG"][x - 1],
        }
        write_setting(tmp_path / str(x), {"train_cfg.max_epochs": 1}, x / 10, seed=x, config=places)
    (group,) = read_table([tmp_path]).groups()
    assert group.best["acc"] == pytest.approx((0.15, 0.005**0.5, 2))  # 0.1 and 0.2


def test_the_first_of_equal_validations_is_the_best(tmp_path):
    rows = [{"acc": acc, "iter": i, "mode": "val"} for i, acc in ((10, 0.5), (20, 0.7), (30, 0.7))]
    run = read_run(write_run(tmp_path / "a", rows))
    assert find_best(run.curves[0], run.config)[0]["best"] == {"value": 0.7, "iter": 20}


def test_an_infinite_value_is_a_number_and_may_be_the_best(tmp_path):
    rows = [
        {"psnr": psnr, "mse": mse, "iter": i, "mode": "val"}
        for i, psnr, mse in ((1, 30.0, "Infinity"), (2, "Infinity", 0.0))
    ]
    run = read_run(write_run(tmp_path / "a", rows))
    best = {found["metric"]: found["best"] for found in find_best(run.curves[0], run.config)}
    assert best == {"psnr": {"value": math.inf, "iter": 2}, "mse": {"value": 0.0, "iter": 2}}


def test_nan_comes_last_in_both_directions():
    rows = [[0.5], [math.nan], [None], [0.7]]
    for reverse, expected in ((False, [0.5, 0.7]), (True, [0.7, 0.5])):
        sort_cells(["acc"], rows, "acc", reverse)
        assert [row[0] for row in rows[:2]] == expected


def test_runs_whose_configs_cannot_be_read_are_no_seeds_of_one(tmp_path):
    for name in ("a", "b"):
        log_dir = write_run(tmp_path / name, [{"acc": 0.5, "iter": 10, "mode": "val"}], config={"model": {"size": 1}})
        (log_dir / "vis_data" / "config.py").write_text("def get_config(:")
    assert [len(group.runs) for group in read_table([tmp_path]).groups()] == [1, 1]
