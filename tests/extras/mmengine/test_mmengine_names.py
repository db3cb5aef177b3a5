import logging

import jax
import numpy as np
import pytest

from jengine.hooks import Hook
from jengine.runner import Runner

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.params, state.opt_state, state.step))]


def test_resume_and_load_checkpoint_of_a_runner(make_runner, tmp_path):
    whole = make_runner(default_hooks=SAVE)
    final = whole.train()
    path = tmp_path / "run" / "epoch_1"
    resumed = make_runner(work_dir=tmp_path / "resumed", default_hooks=SAVE)
    resumed.resume(path)
    assert bits(resumed.train()) == bits(final)
    with pytest.raises(ValueError, match="must come before `train`, with the same seed, got a call after the first"):
        resumed.resume(path)
    with pytest.raises(ValueError, match="got another seed in .*epoch_1"):
        make_runner(randomness=dict(seed=7)).resume(path)

    later = make_runner(work_dir=tmp_path / "later")
    later.load_checkpoint(tmp_path / "run" / "epoch_2")
    assert later.val() == {name: value for name, value in whole.validations[-1][2].items() if name in later.val()}
    later.load_checkpoint(path)  # at once
    assert bits(later.state)[:1] != bits(final)[:1]
    renamed = make_runner(work_dir=tmp_path / "renamed")
    renamed.load_checkpoint({"v": np.ones(2, np.float32)}, revise_keys=[("v", "w")])  # `b` is missing: a warning
    renamed.val()
    assert renamed.state.params["w"].tolist() == [1, 1]
    renamed.load_checkpoint({"model": {"head": {"w": np.zeros(2, np.float32)}}}, revise_keys=[(r"^model\.head\.", "")])
    assert renamed.state.params["w"].tolist() == [0, 0]


def test_what_the_loops_and_processes_know_is_on_the_runner(make_runner):
    runner = make_runner(train_cfg=dict(max_epochs=4, val_begin=2, val_interval=2))
    assert (runner.val_begin, runner.val_interval) == (2, 2)
    assert (runner.distributed, runner.rank, runner.world_size, runner.launcher) == (False, 0, 1, "none")
    assert make_runner(train_cfg=dict(by_epoch=False, max_iters=2)).val_interval == 1000

    class Intervals(Hook):
        seen = ()

        def after_train_epoch(self, runner):
            self.seen += ((runner.train_loop.val_interval, runner.val_interval),)

    intervals = Intervals()
    train_cfg = dict(max_epochs=4, val_interval=2, dynamic_intervals=[(3, 1)])
    make_runner(train_cfg=train_cfg, custom_hooks=[intervals]).train()
    assert intervals.seen == ((2, 2), (2, 2), (1, 1), (1, 1))


def test_a_subclass_builds_its_own_logger_message_hub_and_visualizer(make_runner):
    class Own(Runner):
        def build_logger(self, log_level="INFO", log_file=None):
            logger = super().build_logger(log_level, log_file)
            logger.own = log_file
            return logger

        def build_message_hub(self):
            hub = super().build_message_hub()
            hub.update_info("own", True)
            return hub

        def build_visualizer(self, visualizer=None):
            return super().build_visualizer(dict(vis_backends=[dict(type="CSVVisBackend", name="own")]))

    runner = make_runner(runner_class=Own)
    assert isinstance(runner.logger, logging.Logger)
    assert runner.logger.own.endswith(f"{runner.timestamp}.log")
    assert runner.message_hub.get_info("own") is True
    assert list(runner.visualizer.vis_backends) == ["own"]
