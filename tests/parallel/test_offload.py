"""Test the optimizer state in the memory of the host: values, resumption, and refusals."""

import jax
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.parallel import Pjit
from jengine.parallel.pjit import check_host_memory

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


def test_chunks_are_refused_when_the_runner_is_built(make_run):
    with pytest.raises(ConfigError, match="`train_cfg.steps_per_call` must be 1 with `parallel.offload`, .* got 2"):
        make_run(OFFLOADED, train_cfg=dict(by_epoch=False, max_iters=4, steps_per_call=2))


def test_devices_without_such_memory_and_other_parts_are_refused(make_run):
    class Memory:
        kind = "device"

    class Device:
        platform = "npu"

        def addressable_memories(self):
            return [Memory()]

    with pytest.raises(
        ConfigError, match="must not offload with devices without 'pinned_host' memory, got npu devices with device"
    ):
        check_host_memory("offload", Device())
    with pytest.raises(ConfigError, match="offload"):
        make_run(dict(type="Pjit", offload="parameters"))
    assert Pjit(devices=1).shardings({"opt_state": np.zeros(2)})["opt_state"].memory_kind == "device"
