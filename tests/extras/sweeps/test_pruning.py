import json

import pytest

from jengine.config.errors import ConfigError
from jengine.extras.sweeps import OptunaPruningHook
from jengine.hooks import Hook
from tests.runner_fixture import QuickRunner

optuna = pytest.importorskip("optuna")


class Follower(Hook):
    """Pass on the scores of epochs that were evaluated elsewhere, an epoch later."""

    priority = "LOWEST"

    def __init__(self, hook, values):
        self.hook, self.values = hook, values

    def after_train_epoch(self, runner):
        if runner.epoch:
            self.hook.take_score(runner, 4 * runner.epoch, {"acc": self.values[runner.epoch - 1]})


def train(tmp_path, others, values, elsewhere=False):
    """Train a trial with a validation in each epoch, perhaps elsewhere, after five others that are complete."""
    from jengine.extras.sweeps.search import open_study

    record = {"path": str(tmp_path / "optuna.log"), "name": "study"}
    study = open_study(record, "maximize")
    for value in others:
        steps = {4: value, 8: value, 12: value}
        study.add_trial(optuna.trial.create_trial(value=value, intermediate_values=steps))
    trial = study.ask()
    (tmp_path / "trial.json").write_text(json.dumps({"overrides": {}, "study": {**record, "number": trial.number}}))
    hooks = [OptunaPruningHook(monitor="acc")]
    hooks += [Follower(hooks[0], values)] if elsewhere else []
    validations = [] if elsewhere else [{"acc": value} for value in values]
    runner = QuickRunner(tmp_path, hooks, epochs=3, validations=validations)
    runner.train()
    return runner, study.trials[trial.number], json.loads((tmp_path / "trial.json").read_text())


def test_a_run_whose_best_value_is_above_the_median_goes_on(tmp_path):
    runner, trial, record = train(tmp_path, [0.5, 0.6, 0.7, 0.8, 0.9], [0.75, 0.4, 0.4])
    assert trial.intermediate_values == {4: 0.75, 8: 0.4, 12: 0.4}
    assert (runner.epoch, record.get("pruned")) == (3, None)


def test_a_run_that_is_worse_than_the_median_ends_and_is_marked(tmp_path):
    runner, trial, record = train(tmp_path, [0.5, 0.6, 0.7, 0.8, 0.9], [0.6, 0.9, 0.9])
    assert trial.intermediate_values == {4: 0.6}
    assert (runner.epoch, record["pruned"]) == (1, True)


def test_a_run_is_pruned_by_validations_elsewhere_under_their_iterations(tmp_path):
    runner, trial, record = train(tmp_path, [0.5, 0.6, 0.7, 0.8, 0.9], [0.6, 0.9], elsewhere=True)
    assert trial.intermediate_values == {4: 0.6}
    assert (runner.epoch, record["pruned"]) == (2, True)


def test_a_run_of_no_search_is_refused(tmp_path):
    runner = QuickRunner(tmp_path, [OptunaPruningHook(monitor="acc")])
    with pytest.raises(ConfigError, match="the run must be one of `jengine sweep --search`"):
        runner.train()
    assert runner.iter == 0


class DamageStudy(Hook):
    """Overwrite the study after the first validation, as a full disk or another program may."""

    def after_train_epoch(self, runner):
        with open(f"{runner.work_dir}/optuna.log", "ab") as file:
            file.write(b"no JSON\n\n")


def test_a_run_goes_on_when_the_file_of_the_study_is_damaged(tmp_path, caplog):
    from jengine.extras.sweeps.search import open_study

    caplog.set_level("WARNING", "jengine")
    record = {"path": str(tmp_path / "optuna.log"), "name": "study"}
    trial = open_study(record, "maximize").ask()
    (tmp_path / "trial.json").write_text(json.dumps({"overrides": {}, "study": {**record, "number": trial.number}}))
    hooks = [OptunaPruningHook(monitor="acc"), DamageStudy()]
    runner = QuickRunner(tmp_path, hooks, epochs=3, validations=[{"acc": 0.5}] * 3)
    runner.train()
    assert runner.epoch == 3
    assert "Optuna did not compare acc at iteration 12 with the other runs, so training goes on: " in caplog.text
