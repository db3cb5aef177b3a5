import fcntl
import json
import os
import pathlib
import shutil

import pytest

import jengine
from jengine.cli import main
from jengine.cli.parser import build_parser
from jengine.config.errors import ConfigError
from jengine.extras.report.run_table import read_table
from jengine.extras.sweeps.check import Request
from jengine.extras.sweeps.space import ValueRange
from jengine.extras.sweeps.sweep_check import make_plan
from jengine.extras.sweeps.trials import make_trials, read_record
from tests.refusals import check_refusal

ENDLESS = ["--config.train_cfg.max_iters=1000000", "--config.train_cfg.val_interval=1000000"]
CONFIG = pathlib.Path(__file__).parent / "swept_config.py"
WITH_SWEEP = CONFIG.with_name("config_with_sweep.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(grid={"optim_wrapper.optimizer.lrr": [1.0]}), "SGD has no argument 'lrr'; did you mean 'lr'?"),
        (dict(grid={"lr": [0.1, -1.0]}), "`optim_wrapper.optimizer.lr` must be a number of at least 0, got -1.0"),
    ],
)
def test_a_bad_value_of_any_run_is_refused_before_the_first_starts(tmp_path, arguments, message):
    with pytest.raises(ConfigError) as caught:
        jengine.sweep(CONFIG, work_dir=tmp_path / "sweep", seeds=2, **arguments)
    assert message in str(caught.value)
    assert "in the config at `optim_wrapper.optimizer`" in caught.value.__notes__
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(jobs=0), ["`jobs`", "at least 1", "got 0"]),
        (dict(launcher="slurm"), ["`launcher`", "got 'slurm'"]),
        (dict(launcher_options={"x": 1}), ["got x"]),
        (dict(random=2, search=2), ["`random`", "`search`", "above 0"]),
        (dict(search=2, seeds=2, grid={"lr": [1, 2]}), ["search", "one seed"]),
        (dict(search=2), ["search", "ranges", "grid"]),
        (dict(ranges={"lr": (1.0, 0.1)}), ["`lr`"]),
        (dict(seeds=-1), ["`seeds`", "at least 0", "got -1"]),
        (dict(grid={"lr": 0.1}), ["`lr`", "got 0.1"]),
        (dict(grid={"lr": []}), ["`lr`", "got []"]),
        (dict(grid={"lr": [0.1]}, metric="loss"), ["`metric`", "got 'loss'"]),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments, words):
    check_refusal(lambda: jengine.sweep(CONFIG, work_dir=tmp_path, **arguments), ConfigError, *words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(draws=2, seeds=[0, 1]), ["random draws", "ranges", "grid"]),
        (dict(grid={"lr": [0.1]}, ranges={"optimizer.lr": ValueRange(0.1, 1)}, draws=2), ["grid", "range", "lr"]),
        (dict(grid={"lr": [0.1], "optimizer.lr": [0.2]}), ["`optim_wrapper.optimizer.lr`"]),
        (dict(grid={"randomness.seed": [1]}, seeds=[0]), ["`randomness.seed`"]),
        (dict(search=True, grid={"lr": [0.1]}, metric="lossy"), ["val_evaluator", "got 'lossy'"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    request = Request(str(CONFIG), [], {}, {}, draws=0, search=False, seeds=[], metric=None)
    check_refusal(lambda: make_plan(request._replace(**settings)), ConfigError, *words)


def test_a_second_sweep_in_the_same_directory_is_refused(tmp_path):
    with open(tmp_path / "sweep.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 7 on host node-1")
        file.flush()
        with pytest.raises(ConfigError, match="another sweep is running in .*: process 7 on host node-1; wait for it"):
            jengine.sweep(CONFIG, work_dir=tmp_path, grid={"lr": [0.1]})
    assert os.listdir(tmp_path) == ["sweep.lock"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Run the sweep of the config, whose second run crashes, with two jobs."""
    directory = tmp_path_factory.mktemp("sweeps") / "first"
    return jengine.sweep(WITH_SWEEP, work_dir=directory, jobs=2), directory


@pytest.mark.many_processes
def test_a_crash_is_a_row_and_the_other_run_finishes(swept):
    table, directory = swept
    assert table.hyperparams == ["optim_wrapper.optimizer.lr", "custom_hooks[0].at"]
    rows = {row.hyperparams["optim_wrapper.optimizer.lr"]: row for row in table.rows}
    assert (rows[0.1].status, rows[0.1].iter, rows[0.1].error) == ("finished", 4, "")
    assert (rows[0.2].status, rows[0.2].error) == ("failed", "RuntimeError: crashed at 3")
    assert table.best().best["loss"] < 10
    assert (directory / "lr=0.1" / "last_checkpoint").exists()


@pytest.mark.many_processes
def test_a_restart_skips_what_is_done_and_continues_the_rest(swept, tmp_path, capsys):
    directory = shutil.copytree(swept[1], tmp_path / "again")
    capsys.readouterr()
    assert main(["sweep", str(WITH_SWEEP), "--work-dir", str(directory)]) == 1
    printed = capsys.readouterr()
    assert "1 of 2 runs in" in printed.out
    assert "lr=0.2,at=3 failed: RuntimeError: crashed at 3" in printed.err
    (failed,) = directory.glob("lr=0.2*")
    log = (failed / "output.log").read_text()
    assert "iteration 2." in log.split("Resumed from")[1]  # not from scratch
    assert log.count("crashed at 3") >= 2


@pytest.mark.many_processes
def test_runs_of_a_changed_config_are_not_mixed(swept):
    before = {path: path.stat().st_mtime_ns for path in swept[1].rglob("*") if path.name != "sweep.lock"}
    with pytest.raises(ConfigError, match="has the runs of another config"):
        jengine.sweep(WITH_SWEEP, work_dir=swept[1], overrides=["train_cfg.max_iters=6"])
    assert {path: path.stat().st_mtime_ns for path in swept[1].rglob("*") if path.name != "sweep.lock"} == before


@pytest.mark.many_processes
def test_a_search_ends_runs_that_are_worse_and_continues(tmp_path):
    pytest.importorskip("optuna")
    arguments = dict(work_dir=tmp_path, grid={"lr": [0.01, 0.1]}, jobs=2)
    assert len(jengine.sweep(CONFIG, search=1, **arguments).rows) == 1
    table = jengine.sweep(CONFIG, search=2, **arguments)
    assert {row.status for row in table.rows} == {"finished"}
    assert len((tmp_path / "optuna.log").read_text().splitlines()) > 4
    assert {read_record(path)["study"]["number"] for path in tmp_path.glob("lr=*")} <= {0, 1}
    with pytest.raises(ConfigError, match=r"`optim_wrapper.optimizer.lr` of a search must stay the same, \['0.01', '0"):
        jengine.sweep(CONFIG, search=3, **{**arguments, "grid": {"lr": [0.01, 0.2]}})


@pytest.mark.many_processes
def test_submitit_runs_the_jobs(tmp_path):
    pytest.importorskip("submitit")
    grid = {"custom_hooks[0].at": [1, 8]}
    options = {"cluster": "local", "timeout_min": 5}
    table = jengine.sweep(
        CONFIG, grid=grid, overrides=["train_cfg.max_iters=2"], work_dir=tmp_path, jobs=2, launcher="submitit",
        launcher_options=options,
    )  # fmt: skip
    assert {row.hyperparams["custom_hooks[0].at"]: row.status for row in table.rows} == {1: "failed", 8: "finished"}


@pytest.mark.foreign
@pytest.mark.many_processes
def test_ray_runs_the_tasks(tmp_path):
    pytest.importorskip("ray")
    options = {"num_cpus": 1}
    table = jengine.sweep(CONFIG, grid={"lr": [0.1]}, work_dir=tmp_path, launcher="ray", launcher_options=options)
    assert [row.status for row in table.rows] == ["finished"]


def test_the_command_of_a_run_sets_all_values_and_resumes(tmp_path):
    (trial,) = make_trials(tmp_path, [{"model.widths": (8, 16), "model.act": "gelu"}])
    command = trial.command("cfg.py", ["train_cfg={'max_epochs': 2, 'val_interval': 1}"])
    args, overrides = build_parser().parse_known_args(command[command.index("train") :])
    assert (args.config, args.work_dir, args.resume) == ("cfg.py", str(trial.work_dir), True)
    assert overrides == [
        "--config.train_cfg={'max_epochs': 2, 'val_interval': 1}", "--config.model.widths=(8, 16)", "--config.model.act='gelu'",
    ]  # fmt: skip


def test_names_of_work_dirs_are_short_readable_and_distinct(tmp_path):
    settings = [
        {"optim_wrapper.optimizer.lr": 0.1, "model.widths": (8, 16)},
        {"optim_wrapper.optimizer.lr": 0.1, "model.widths": [8, "16"]},
        {"optim_wrapper.optimizer.lr": 0.1, "model.widths": "../x"},
    ]
    first, second, third = (trial.name for trial in make_trials(tmp_path, settings))
    assert first == "lr=0.1,widths=8-16"
    assert second.startswith("lr=0.1,widths=8-16-")
    assert third == "lr=0.1,widths=..-x"
    colliding = [{"a.x": 1, "b.x": 2}]
    assert make_trials(tmp_path, colliding)[0].name == "a.x=1,b.x=2"


def test_runs_of_an_earlier_start_are_found_by_their_settings(tmp_path):
    setting = {"lr": 0.1, "model.widths": (8, 16)}
    (trial,) = make_trials(tmp_path, [setting])
    trial.write()
    trial.work_dir.rename(tmp_path / "renamed")
    log_dir = tmp_path / "renamed" / "20250131_120000"
    log_dir.mkdir()
    for status in ("stopped by SystemExit", "finished"):
        (log_dir / "run.json").write_text(json.dumps({"sessions": [{"status": status}]}))
        (found, new) = make_trials(tmp_path, [setting, {"lr": 0.2}])
        assert (found.name, found.status == "finished") == ("renamed", status == "finished")
    assert (new.name, new.status) == ("lr=0.2", "waiting")


@pytest.mark.parametrize(
    ("output", "code", "error"),
    [
        ("jengine: ConfigError: bad\n  in the config at `x`\n", 2, "ConfigError: bad"),
        ("Traceback\n  line\npkg.mod.OwnError: bad\nnote of it\n", 1, "pkg.mod.OwnError: bad"),
        ("", 7, "exit code 7"),
        ("", -9, "ended by SIGKILL, perhaps because memory ran out; see "),
        ("", -40, "ended by signal 40; see "),  # real-time signals have no names
    ],
)
def test_the_reason_of_a_failure_is_the_error_or_the_signal(tmp_path, output, code, error):
    (trial,) = make_trials(tmp_path, [{"lr": 0.1}])
    trial.work_dir.mkdir()
    (trial.work_dir / "output.log").write_text(output)
    trial.start()
    trial.finish(code, is_stopping=False)
    assert (trial.status, trial.error.startswith(error)) == ("failed", True)


@pytest.mark.parametrize(
    ("name", "content"),
    [("trial.json", '{"overrides": {'), ("trial.json", "[1]"), ("trial.json", "[" * 100_000), ("sweep.json", "[1]")],
    ids=["a part of a trial", "a list as a trial", "deep brackets as a trial", "a list as a sweep"],
)
def test_a_damaged_record_is_an_error_and_not_a_missing_one(tmp_path, name, content):
    path = tmp_path / "lr=0.1" / "trial.json" if name == "trial.json" else tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{name} must be as the sweep has written it, got .*; remove it"):
        jengine.sweep(CONFIG, grid={"lr": [0.1]}, work_dir=tmp_path)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(max_time="soon"), ["`max_time`", "'90s'", "'15m'", "'2h'", "'23:50:00'", "got 'soon'"]),
        (dict(max_time="1h", launcher="submitit"), ["`max_time`", "'local'", "got 'submitit'"]),
    ],
)
def test_a_time_limit_of_another_form_is_refused(tmp_path, arguments, words):
    check_refusal(lambda: jengine.sweep(CONFIG, grid={"lr": [0.1]}, work_dir=tmp_path, **arguments), ConfigError, *words)


@pytest.mark.many_processes
def test_a_run_that_takes_too_long_is_saved_and_fails(tmp_path, capsys):
    options = ["--grid", "lr=0.1", "--work-dir", str(tmp_path), "--max-time", "8s", *ENDLESS]
    assert main(["sweep", str(CONFIG), *options]) == 1
    assert "lr=0.1 failed: ended after max_time='8s'" in capsys.readouterr().err
    (row,) = read_table([tmp_path]).rows
    assert (row.status, row.error) == ("failed", "ended after max_time='8s'")
    assert (tmp_path / "lr=0.1" / f"iter_{row.iter}").is_dir()


@pytest.mark.many_processes
def test_the_exit_code_tells_of_a_run_whose_work_dir_another_process_holds(tmp_path, capsys):
    directory = tmp_path / "lr=0.1"
    directory.mkdir()
    with open(directory / "run.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["sweep", str(CONFIG), "--grid", "lr=0.1", "--work-dir", str(tmp_path)]) == 1
    assert "lr=0.1 failed: " in capsys.readouterr().err
