import jax
import numpy as np
import pytest

from jengine.train import RecompilationError, RecompilationGuard


def batch(features=2):
    return {"x": np.ones((4, features), np.float32), "y": np.ones(4, np.float32)}


class Renamed(dict):
    pass


jax.tree_util.register_pytree_with_keys(
    Renamed,
    lambda tree: ([(jax.tree_util.DictKey(k), tree[k]) for k in sorted(tree)], tuple(sorted(tree))),
    lambda keys, children: Renamed(zip(keys, children, strict=True)),
)


def read_log(runner):
    with open(f"{runner.log_dir}/{runner.timestamp}.log") as file:
        return file.read()


def test_a_run_warns_once_about_another_structure_and_continues(make_runner):
    runner = make_runner(
        train_dataloader=[batch(), Renamed(batch()), batch(), Renamed(batch())],
        train_cfg=dict(max_epochs=2, on_recompile="warn"),
        val_dataloader=[batch(), Renamed(batch())], validates=True,
    )
    runner.train()
    assert runner.iter == 8
    assert runner.programs.update.traces == 2
    log = read_log(runner)
    assert log.count("the training step is compiled again, because its arguments changed") == 1
    # the padded batches of a validation are dicts again
    assert log.count("the step of the validation is compiled again") == 0
    assert "  batch: was a dict, is a Renamed" in log


def test_a_run_with_on_recompile_raise_stops_before_compiling(make_runner):
    batches = [batch(), Renamed(batch())]
    runner = make_runner(train_dataloader=batches, train_cfg=dict(max_epochs=1, on_recompile="raise"))
    with pytest.raises(RecompilationError, match="batch: was a dict, is a Renamed"):
        runner.train()
    assert (runner.iter, runner.programs.update.traces) == (1, 1)


def test_training_and_validation_are_compiled_once_each(make_runner, monkeypatch):
    checks = []
    monkeypatch.setattr(RecompilationGuard, "record_shapes", lambda self, *args: checks.append(self.name))
    make_runner(train_cfg=dict(max_epochs=3), validates=True).train()
    assert checks == ["the training step", "the step of the validation"]  # only where something was compiled


def test_every_compilation_is_attributed_to_the_phase_compile(make_runner, monkeypatch):
    runner = make_runner(
        train_dataloader=[batch(), Renamed(batch())], train_cfg=dict(max_epochs=3, on_recompile="warn"),
    )  # fmt: skip
    phases = []
    monkeypatch.setattr(runner.stopwatch, "relabel", phases.append)
    runner.train()
    assert phases == ["compile", "compile"]
