import json

from jengine.extras.sweeps.progress import LiveTable, RunProgress
from jengine.extras.sweeps.trials import make_trials


def write_lines(work_dir, timestamp, rows, end="\n"):
    """Append lines to the scalars of a run with 40 iterations."""
    (work_dir / timestamp / "vis_data").mkdir(parents=True, exist_ok=True)
    (work_dir / timestamp / "run.json").write_text(json.dumps({"max_iters": 40}))
    with open(work_dir / timestamp / "vis_data" / "scalars.json", "a") as file:
        file.write("\n".join(map(json.dumps, rows)) + end)


def test_progress_follows_the_lines_of_the_newest_run(tmp_path):
    progress = RunProgress(tmp_path)
    progress.update()
    assert (progress.iter, progress.max_iters, progress.validation) == (0, None, {})
    write_lines(tmp_path, "20250131_120000", [{"mode": "train", "iter": 10, "loss": 1.0}])
    write_lines(tmp_path, "20250131_120000", [{"mode": "val", "iter": 10, "acc": 0.5, "time": 1.0}], end="")
    progress.update()
    assert (progress.iter, progress.max_iters, progress.validation) == (10, 40, {})  # the last line may be incomplete
    write_lines(tmp_path, "20250131_120000", [], end="\n")
    progress.update()
    assert progress.validation == {"acc": 0.5}
    write_lines(tmp_path, "20250131_130000", [{"mode": "val", "iter": 20, "acc": 0.75}])
    progress.update()
    assert (progress.iter, progress.validation) == (20, {"acc": 0.75})


def test_a_run_that_ends_is_a_line_outside_of_a_terminal(tmp_path, capsys):
    good, bad = trials = make_trials(tmp_path, [{"lr": 0.1}, {"lr": 9.0}])
    for trial, code in ((good, 0), (bad, 3)):
        write_lines(trial.work_dir, "20250131_120000", [{"mode": "val", "iter": 10, "acc": 0.5, "loss": 1.25}])
        trial.start()
        trial.finish(code, is_stopping=False)
        with LiveTable("sweep", "acc", 2) as view:
            view.update(trials)
            view.end(trial, trials)
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] lr=0.1: finished after 0 s  acc 0.5", "[2/2] lr=9.0: failed after 0 s  exit code 3",
    ]  # fmt: skip
