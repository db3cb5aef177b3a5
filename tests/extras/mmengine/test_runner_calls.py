"""Test what scripts call on MMEngine's Runner after it is built."""

import jax
import numpy as np
import pytest

from jengine.extras.mmengine import load_checkpoint, resume

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.params, state.opt_state, state.step))]


def test_resume_and_load_checkpoint_of_a_runner(make_runner, tmp_path):
    whole = make_runner(default_hooks=SAVE, validates=True)
    final = whole.train()
    path = tmp_path / "run" / "epoch_1"
    resumed = make_runner(work_dir=tmp_path / "resumed", default_hooks=SAVE, validates=True)
    resume(resumed, path)
    assert bits(resumed.train()) == bits(final)
    with pytest.raises(ValueError, match="`resume` must come before `train`, with the same seed, got a call after the first"):
        resume(resumed, path)
    with pytest.raises(ValueError, match="got another seed in .*epoch_1"):
        resume(make_runner(randomness=dict(seed=7), validates=True), path)

    later = make_runner(work_dir=tmp_path / "later", validates=True)
    load_checkpoint(later, tmp_path / "run" / "epoch_2")
    assert later.val() == {name: value for name, value in whole.validations[-1][2].items() if name in later.val()}
    load_checkpoint(later, path)  # at once
    assert bits(later.state)[:1] != bits(final)[:1]
    renamed = make_runner(work_dir=tmp_path / "renamed", validates=True)
    load_checkpoint(renamed, {"v": np.ones(2, np.float32)}, revise_keys=[("v", "w")])  # `b` is missing: a warning
    renamed.val()
    assert renamed.state.params["w"].tolist() == [1, 1]
    load_checkpoint(renamed, {"model": {"head": {"w": np.zeros(2, np.float32)}}}, revise_keys=[(r"^model\.head\.", "")])
    assert renamed.state.params["w"].tolist() == [0, 0]
