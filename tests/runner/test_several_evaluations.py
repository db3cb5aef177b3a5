"""Several evaluations by name: results, intervals, what follows their metrics, and config errors."""

import json
import pathlib

import numpy as np
import pytest

from jengine.checkpoint import read_meta
from jengine.config.errors import ConfigError
from jengine.data import DataLoader
from jengine.evaluation import Evaluator, MeanLoss
from jengine.evaluation.sections import list_dataloaders, split_dataloaders
from tests.refusals import check_refusal
from tests.runner.conftest import linear_model, make_dataset, squared_error

LOSS = dict(type="MeanLoss", loss=squared_error)
CLEAN, ROBUST = dict(batch_size=4, dataset=make_dataset(6)), dict(batch_size=4, dataset=make_dataset(12))
SEVERAL = dict(
    val_dataloader=dict(clean=CLEAN, robust=ROBUST), val_evaluator=LOSS, val_cfg=dict(robust=dict(interval=3))
)


@pytest.fixture
def make(make_runner):
    """Return a function that makes a Runner with the validations `clean` and, every third epoch, `robust`."""
    return lambda **changes: make_runner(**{**SEVERAL, "train_cfg": dict(max_epochs=5), **changes}, validates=True)


def read_lines(runner):
    lines = pathlib.Path(runner.log_dir, "vis_data", "scalars.json").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line.get("mode") == "val"]


def test_each_evaluation_has_the_result_that_it_has_alone(make_runner, make):
    for loader, name in ((CLEAN, "clean"), (ROBUST, "robust")):
        alone = make_runner(val_dataloader=loader, validates=True).val()["loss"]
        assert make().val()[f"{name}/loss"] == alone


def test_an_evaluation_runs_at_its_interval_and_at_the_end(make, caplog):
    runner = make(default_hooks=dict(checkpoint=None))
    runner.train()
    assert [(epoch, list(metrics)) for epoch, _, metrics in runner.validations] == [
        (1, ["clean/loss"]),
        (2, ["clean/loss"]),
        (3, ["clean/loss", "robust/loss"]),
        (4, ["clean/loss"]),
        (5, ["clean/loss", "robust/loss"]),
    ]
    assert [line["step"] for line in read_lines(runner) if "robust/loss" in line] == [12, 20]  # no old value again
    assert all("clean/loss" in line for line in read_lines(runner))
    passes = [text for text in caplog.messages if text.startswith("Epoch(val) ")]
    assert [text.split("    ")[0] for text in passes] == [
        "Epoch(val) [1][2/2]", "Epoch(val) [2][2/2]", "Epoch(val) [3][5/5]", "Epoch(val) [4][2/2]", "Epoch(val) [5][5/5]",
    ]  # fmt: skip
    assert ["robust/loss" in text for text in passes] == [False, False, True, False, True]
    header = next(line for line in caplog.text.splitlines() if line.startswith("| epoch"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "epoch",
        "iter",
        "clean/loss",
        "robust/loss",
        "best",
    ]


def test_an_iteration_loop_stops_for_the_shorter_interval(make):
    train_cfg = dict(by_epoch=False, max_iters=10, val_interval=4)
    runner = make(train_cfg=train_cfg)
    runner.train()
    assert [(iteration, len(metrics)) for _, iteration, metrics in runner.validations] == [
        (3, 1), (4, 1), (6, 1), (8, 1), (9, 1), (10, 2)
    ]  # fmt: skip
    assert [next(iter(metrics)) for _, _, metrics in runner.validations][:3] == [
        "robust/loss",
        "clean/loss",
        "robust/loss",
    ]


def test_best_checkpoints_early_stopping_and_schedules_follow_any_of_them(make, tmp_path):
    plateau = dict(type="ReduceOnPlateauLR", monitor="robust/loss", patience=0, threshold=1e9, threshold_rule="abs")
    stop = dict(type="EarlyStoppingHook", monitor="robust/loss", patience=2, min_delta=1e9)
    changes = dict(
        train_cfg=dict(max_epochs=20), param_scheduler=plateau, custom_hooks=[stop],
        default_hooks=dict(checkpoint=dict(interval=-1, save_best=["robust/loss", "clean/loss"], type="CheckpointHook"), logger=None),
    )  # fmt: skip
    runner = make(**changes)
    runner.train()
    assert runner.epoch == 9  # the first of three validations at epochs 3, 6, 9 is an improvement
    assert runner.optim_wrapper.get_lr()["lr"][0] == pytest.approx(0.1 * 0.1**2)  # the first loss is the best
    best = {key: entries[0]["score"] for key, entries in runner.hooks[-2].state_dict()["best"].items()}
    scores = {key: [m[key] for _, _, m in runner.validations if key in m] for key in best}
    assert best == {key: min(values) for key, values in scores.items()}
    assert (tmp_path / "run" / "best_robust_loss_epoch_9").is_dir()
    saved = read_meta(tmp_path / "run" / "best_robust_loss_epoch_9")["hooks"]["CheckpointHook"]["best"]
    assert saved["robust/loss"][0]["score"] == best["robust/loss"]


def test_a_resumed_run_has_the_same_validations(make, tmp_path):
    checkpoints = dict(checkpoint=dict(type="CheckpointHook", interval=1, save_best="robust/loss"), logger=None)
    whole = make(default_hooks=checkpoints)
    whole.train()
    make(default_hooks=checkpoints, train_cfg=dict(max_epochs=4), work_dir=tmp_path / "second").train()
    resumed = make(default_hooks=checkpoints, work_dir=tmp_path / "second", resume=True)
    resumed.train()
    assert resumed.validations[4:] == whole.validations[4:]
    assert resumed.hooks[-1].state_dict()["best"]["robust/loss"] == whole.hooks[-1].state_dict()["best"]["robust/loss"]


def test_evaluations_with_equal_batches_and_metrics_are_compiled_once(make):
    traces = []

    def predict(params, batch):
        traces.append(batch["x"].shape)
        return batch["x"] @ params["w"] + params["b"]

    model = linear_model()
    model.predict = lambda params, model_state, batch: predict(params, batch)
    three = dict(a=CLEAN, b=ROBUST, c=dict(ROBUST, batch_size=6))
    evaluators = dict(a=dict(LOSS), b=dict(LOSS), c=dict(LOSS))
    runner = make(model=model, val_dataloader=three, val_evaluator=evaluators, val_cfg=dict())
    metrics = runner.val()
    assert traces == [(4, 2), (6, 2)]
    assert metrics["b/loss"] == pytest.approx(metrics["c/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("loaders", "evaluators", "names"),
    [
        ([CLEAN, ROBUST], LOSS, ["0/loss", "1/loss"]),
        ([CLEAN, ROBUST], [dict(metrics=LOSS), dict(metrics=dict(LOSS, prefix="own"))], ["0/loss", "1/own/loss"]),
        ([CLEAN, ROBUST], [LOSS, dict(LOSS, prefix="p")], ["0/loss", "0/p/loss", "1/loss", "1/p/loss"]),
        (dict(a=CLEAN, b=ROBUST), dict(a=LOSS, b=Evaluator(MeanLoss(squared_error, prefix="own"))), ["a/loss", "b/own/loss"]),
        (dict(a=DataLoader(**CLEAN), b=ROBUST), Evaluator(MeanLoss(squared_error)), ["a/loss", "b/loss"]),
        (dict(a=[dict(make_dataset(4)[np.arange(4)])], b=ROBUST), LOSS, ["a/loss", "b/loss"]),
    ],
)  # fmt: skip
def test_tests_take_dicts_and_lists_with_evaluators_for_all_or_for_each(make, loaders, evaluators, names):
    runner = make(test_dataloader=loaders, test_cfg=dict(type="MultiTestLoop"), test_evaluator=evaluators)
    metrics = runner.test()
    assert list(metrics) == names
    assert all(metrics[name] == metrics[names[0]] for name in names if name[:1] == names[0][:1])


def test_settings_for_all_hold_unless_an_evaluation_has_its_own(make):
    runner = make(val_cfg=dict(epoch_length=1, robust=dict(epoch_length=2)))
    runner.val()
    assert {name: x.epoch_length for name, x in runner.val_loop.evaluations.items()} == {"clean": 1, "robust": 2}
    assert runner.val_loop.epoch_length == 3
    assert {name: loader.length for name, loader in runner.val_dataloader.items()} == {"clean": 2, "robust": 3}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(val_dataloader=dict(clean=CLEAN, batch_size=4)), TypeError, ["'clean'"]),
        (dict(val_dataloader={"a/b": CLEAN}), ConfigError, ["'_'", "'-'", "got 'a/b'"]),
        (dict(val_dataloader=dict(datset=[1])), TypeError, ["'datset'", "did you mean 'dataset'"]),
        (dict(val_dataloader=dict(clean=CLEAN, robust=dict(ROBUST, batch_sise=4))), TypeError, ["did you mean 'batch_size'"]),
        (dict(val_evaluator=dict(clean=LOSS, robst=LOSS)), ConfigError, ["got clean, robst", "did you mean 'robust'"]),
        (dict(val_evaluator=dict(clean=LOSS)), ConfigError, ["got clean"]),
        (dict(val_evaluator=dict(clean=LOSS, robust=dict(type="MeanLos"))), KeyError, ["did you mean 'MeanLoss'"]),
        (dict(val_cfg=dict(robst=dict(interval=5))), TypeError, ["'robst'"]),
        (dict(val_cfg=dict(robust=dict(intervall=5))), TypeError, ["did you mean 'interval'"]),
        (dict(val_cfg=dict(robust=dict(interval=0))), ValueError, ["at least 1", "None", "got 0"]),
        (dict(val_cfg=dict(robust=dict(interval="5"))), TypeError, ["at least 1", "None", "got '5'"]),
        (dict(test_dataloader=[CLEAN, ROBUST], test_evaluator=LOSS, test_cfg={"1": dict(interval=2)}), ConfigError, ["a validation"]),
        (dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best="robst/loss"))), ConfigError, ["val_evaluator", "got 'robst/loss'", "did you mean 'robust/loss'"]),
    ],
)  # fmt: skip
def test_a_wrong_section_is_refused_with_what_was_probably_meant(make, changes, error, words):
    check_refusal(lambda: make(**changes), error, *words)


@pytest.mark.parametrize(
    "section",
    [
        CLEAN,
        dict(dataset=dict(type="Digits")),
        dict(type="DataLoader", dataset=[1]),
        [{"x": np.ones(2)}, {"x": np.ones(2)}],
        [{"dataset": np.ones(2), "x": np.ones(2)}],  # a batch with an entry of this name
        [],
        DataLoader(**CLEAN),
        lambda: iter([]),
    ],
)
def test_one_dataloader_is_not_mistaken_for_several(section):
    split = split_dataloaders("val_dataloader", section)
    assert list(split) == [""]
    assert split[""] is section


def test_the_dataloaders_of_a_config_are_listed_by_mode_and_name():
    cfg = dict(train_dataloader=CLEAN, val_dataloader=dict(clean=CLEAN, robust=ROBUST), test_dataloader=[CLEAN, ROBUST])
    assert list(list_dataloaders(cfg)) == ["train", "val.clean", "val.robust", "test.0", "test.1"]
    assert list_dataloaders(cfg)["val.robust"] is ROBUST
