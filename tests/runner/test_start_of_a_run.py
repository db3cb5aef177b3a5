"""Test a run from the config to the first step."""

import contextlib
import os
import pathlib
import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.train import programs


def test_a_hook_can_read_the_state_before_the_first_step(make_runner):
    class Reads(Hook):
        def before_train(self, runner):
            self.step, self.params = int(runner.state.step), jax.tree.map(np.asarray, runner.state.params)

    reads = Reads()
    runner = make_runner(custom_hooks=[reads])
    runner.train()
    assert reads.step == 0
    params, _ = runner.model.init(jax.random.fold_in(jax.random.key(runner.seed), 0), None)
    jax.tree.map(np.testing.assert_array_equal, reads.params, params)


def test_a_run_without_jit_has_the_same_result(make_runner):
    compiled = make_runner().train().params
    with jax.disable_jit():
        found = make_runner().train().params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, compiled)


def test_thread_local_settings_of_jax_apply_to_the_state(make_runner):
    with jax.enable_x64(True):
        params = make_runner().train().params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float64)}


def deep_model():
    """Return a model with 54 tensors in 27 layers."""
    return FunctionalModel(
        init=lambda: {f"layer_{i}": {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros((2,))} for i in range(27)},
        loss=lambda params, batch: sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params)) * batch["x"][:, 0],
        predict=lambda params, batch: batch["y"],
    )


RULES = {f"layer_{i}.kernel": dict(lr_mult=1 / (i + 1)) for i in range(27)}


def train_deep_model(make_runner, **changes):
    """Train for one iteration with 20 rules that match parameters and one that does not, and 14 hooks."""
    optim_wrapper = dict(
        optimizer=dict(type="SGD", lr=0.1, weight_decay=0.01),
        paramwise_cfg=dict(bias_decay_mult=0.0, custom_keys={**RULES, "laier": dict(lr_mult=2.0)}),
    )
    runner = make_runner(
        model=deep_model(), optim_wrapper=optim_wrapper, train_cfg=dict(by_epoch=False, max_iters=1, val_interval=9),
        default_hooks=None, custom_hooks=[*[Hook() for _ in range(8)], dict(type="EMAHook")], **changes,
    )  # fmt: skip
    runner.train()
    return runner


def test_at_most_40_lines_are_printed_before_the_first_step_and_the_log_file_has_the_rest(make_runner, capsys):
    runner = train_deep_model(make_runner)
    start = capsys.readouterr().out.split("Iter(train)")[0].splitlines()
    assert len(start) <= 40
    text = "\n".join(start)
    for part in (
        f"devices:    1 x cpu, jax {jax.__version__}, python {platform.python_version()}, platform {platform.platform()}", "model:      54 tensors, 162 parameters, 0.00 MiB",
        "train data: DataLoader(ArrayDataset), 4 batches of 4", "| no match", "… 22 more …",
        "| EMAHook ", "| update, accumulate |", "Checkpoints will be saved to",
    ):  # fmt: skip
        assert part in text
    assert "paramwise_options" not in text
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    for part in (
        f"optax {optax.__version__}",
        "INFO - paramwise_options -- layer_26.bias:weight_decay=0.0",
        "| layer_26.bias",
        "after_train_iter:",
    ):
        assert part in log


def test_all_details_are_printed_at_the_level_debug(make_runner, capsys):
    train_deep_model(make_runner, log_level="DEBUG")
    out = capsys.readouterr().out
    assert out.count("paramwise_options -- ") >= 54
    assert "after_train_iter:" in out


@pytest.mark.parametrize("parallel", [dict(type="DataParallel"), dict(type="Pjit")])
def test_the_start_names_the_mesh(make_runner, capsys, parallel):
    data = make_runner().train_dataloader.dataset
    loader = dict(batch_size=8, dataset=data)
    make_runner(parallel=parallel, train_dataloader=loader, val_dataloader=loader, validates=True).train()
    assert "devices:    8 x cpu, mesh {'data': 8" in capsys.readouterr().out


def test_only_the_first_call_of_each_step_can_be_reported_as_compiling(make_runner, monkeypatch):
    names = []

    def report_if_slow(name):
        names.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(programs, "report_if_slow", report_if_slow)
    make_runner(validates=True).train()
    assert names == ["compiling the training step", "compiling the step of the validation"]


def test_the_names_of_mmengines_runner_can_be_read_before_training(make_runner, tmp_path):
    runner = make_runner(experiment_name="first", randomness=dict(seed=3), cfg=dict(note="x"))
    assert (runner.iter, runner.epoch, runner.max_iters, runner.max_epochs) == (0, 0, 0, 0)
    assert (runner.rank, runner.world_size, runner.distributed) == (0, 1, False)
    assert (runner.seed, runner.work_dir, runner.cfg) == (3, str(tmp_path / "run"), {"note": "x"})
    assert runner.experiment_name == f"first_{runner.timestamp}"
    assert runner.log_dir == os.path.join(runner.work_dir, runner.timestamp)
    assert runner.logger is runner.run.logger
    assert runner.message_hub.instance_name == runner.experiment_name
    assert runner.is_training_configured
    assert runner.train_loop is None
