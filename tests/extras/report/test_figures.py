"""Draw curves of runs into files: means over seeds for a paper, and the panels of a report."""

import math

import pytest

from jengine.cli import main
from jengine.extras.report.figures import average

from .report_runs import losses, train_row, write_run

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the directory of a sweep: two learning rates with two seeds each."""
    root = tmp_path_factory.mktemp("sweep")
    for lr in (0.1, 0.3):
        for seed in (0, 1):
            config = dict(optimizer=dict(lr=lr), randomness=dict(seed=seed))
            write_run(root / f"lr{lr}_seed{seed}", losses(1 + lr + seed), config=config, seed=seed)
    return root


def test_a_mean_is_over_the_curves_that_reach_an_iteration():
    longest, shorter = ([10, 20, 30], [1.0, 2.0, 6.0]), ([10, 20], [3.0, math.nan])
    x, mean, spread = average([longest, shorter])
    assert x.tolist() == [10, 20, 30]
    assert mean.tolist() == [2.0, 2.0, 6.0]
    assert spread.tolist() == pytest.approx([math.sqrt(2), 0, 0])  # of 1 and 3


def test_a_table_draws_a_line_for_each_setting_with_its_spread(runs, tmp_path, capsys):
    assert main(["table", str(runs), "--plot", str(tmp_path / "acc.svg")]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"{tmp_path}/acc.svg shows accuracy/top1 of 2 settings, mean ± deviation over seeds\n"
    assert "| run" in shown.out
    picture = (tmp_path / "acc.svg").read_text()
    assert all(f">{text}</text>" in picture for text in ("lr=0.1", "lr=0.3", "iteration", "accuracy/top1"))
    assert picture.count('id="FillBetweenPolyCollection') == 2


def test_a_plot_is_of_the_metric_that_is_named(runs, tmp_path, capsys):
    assert main(["table", str(runs), "--plot", str(tmp_path / "loss.svg"), "--metric", "loss"]) == 0
    assert ">loss</text>" in (tmp_path / "loss.svg").read_text()
    assert main(["table", str(runs), "--plot", str(tmp_path / "new" / "loss.pdf")]) == 0
    assert (tmp_path / "new" / "loss.pdf").read_bytes().startswith(b"%PDF")


def test_a_run_without_validation_is_drawn_by_its_loss(tmp_path, capsys):
    write_run(tmp_path / "a", [train_row(step, loss=1 / step) for step in range(1, 9)])
    assert main(["table", str(tmp_path / "a"), "--plot", str(tmp_path / "loss.svg")]) == 0
    assert capsys.readouterr().err == f"{tmp_path}/loss.svg shows train/loss of 1 setting\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "acc.txt"], "`--plot` must end in .pdf, .svg or .png, got 'acc.txt'"),
        (["--metric", "loss"], "`--metric` must come with `--plot FILE`, got it alone"),
        (["--plot", "acc.png", "--metric", "los"], "the metric must be one of accuracy/top1, loss, got 'los'"),
    ],
)
def test_wrong_arguments_of_a_plot_are_refused(runs, arguments, words, capsys):
    assert main(["table", str(runs), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_report_as_a_picture_has_a_panel_for_each_scalar(runs, tmp_path, capsys):
    out = tmp_path / "report.svg"
    assert main(["report", str(runs), "--png", str(out)]) == 0
    assert capsys.readouterr().out == f"{out} shows the curves of 4 runs\n"
    picture = out.read_text()
    assert all(f">{text}</text>" in picture for text in ("loss", "accuracy/top1", "lr", "lr0.1_seed0", "lr0.3_seed1"))
    assert ">data_time</text>" not in picture
    assert main(["report", str(runs / "lr0.1_seed0"), "--png", str(tmp_path / "one.png")]) == 0
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_curves_is_no_picture(tmp_path, capsys):
    write_run(tmp_path / "new", [], iter=0, status="training")
    assert main(["report", str(tmp_path / "new"), "--png", str(tmp_path / "a.png")]) == 2
    assert "`--png` must have a run with a log line, got no curves yet" in capsys.readouterr().err
