"""Test the optimizer state in the memory of the host: values, resumption, and refusals."""

import jax
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.parallel import Pjit

MESH = dict(type="Pjit", mesh=dict(fsdp=4, data=2), fsdp_min_size=16)


OFFLOADED = {**MESH, "offload": "optimizer"}


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def test_a_run_with_an_offloaded_optimizer_has_the_results_of_one_without_and_resumes(make_run, tmp_path):
    changes = dict(
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.01), accumulative_counts=2, clip_grad=dict(max_norm=1.0)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=3), logger=None),
    )

    def train(work_dir, parallel, **others):
        runner = make_run(parallel, work_dir, train_cfg=dict(by_epoch=False, max_iters=6), **changes, **others)
        return runner.train()

    expected = train("device", MESH)
    state = train("host", OFFLOADED)
    assert kinds(state.opt_state) == {"pinned_host"}
    assert kinds(state.params) == kinds(expected.opt_state) == {"device"}
    jax.tree.map(np.testing.assert_array_equal, state, expected)

    resumed = train("rest", OFFLOADED, resume=tmp_path / "host" / "iter_3")
    assert kinds(resumed.opt_state) == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, resumed, expected)


def test_a_chunk_has_the_results_of_single_steps(make_run, tmp_path):
    single = make_run(OFFLOADED, tmp_path / "single", train_cfg=dict(by_epoch=False, max_iters=4)).train()
    chunked = make_run(
        OFFLOADED, tmp_path / "chunked", train_cfg=dict(by_epoch=False, max_iters=4, steps_per_call=2)
    ).train()
    assert kinds(chunked.opt_state) == kinds(single.opt_state)
    jax.tree.map(np.testing.assert_array_equal, chunked, single)


def test_other_parts_are_refused(make_run):
    with pytest.raises(ConfigError, match="offload"):
        make_run(dict(type="Pjit", offload="parameters"))
    assert Pjit(devices=1).shardings({"opt_state": np.zeros(2)})["opt_state"].memory_kind == "device"
