"""Test that training on every mesh, with every optimizer, has the results of a single device."""

import optax
import pytest

from jengine.config import paths
from jengine.model import LinenModel
from jengine.parallel.replica_axis import is_per_replica
from tests.parallel.conftest import Net, make_loader, squared_error
from tests.runner.conftest import build_runner

# All leaves with two axes are sharded over `fsdp` and `tensor`; vectors of 16 elements over `fsdp` by their size.
RULES = [("up.kernel", ("fsdp", "tensor")), ("down.kernel", ("tensor", "fsdp"))]
MESHES = {
    "data 1": dict(devices=1),
    "data 8": dict(),
    "fsdp 8": dict(mesh=dict(data=1, fsdp=8), fsdp_min_size=16),
    "data 2, fsdp 2, tensor 2": dict(mesh=dict(fsdp=2, tensor=2), rules=RULES, fsdp_min_size=16),
}
SHARD_SHAPES = {  # of the 8 x 16 kernel and the 16 scales of BatchNorm
    "fsdp 8": {(8, 2), (2,)},
    "data 2, fsdp 2, tensor 2": {(4, 8), (8,)},
}
OPTIMIZERS = {
    "SGD": dict(type="SGD", lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": dict(type="AdamW", lr=0.01, weight_decay=0.1),
    "LARS": dict(type="LARS", lr=1.0, momentum=0.9, weight_decay=1e-3, eta=0.01),
}
# The first update overflows and is skipped; then the scale grows every third update.
OVERFLOWS = dict(init_scale=2.0**127, backoff_factor=2.0**-64, growth_interval=3)


def train(work_dir, parallel, optimizer, dtype="float32", loss_scale=OVERFLOWS, model=None):
    """Train 20 iterations with BatchNorm, averages (also of its statistics), loss scale, clipping and accumulation."""
    runner = build_runner(
        work_dir,
        LinenModel(model or Net(), squared_error, inputs="x"),
        train_dataloader=make_loader(),
        train_cfg=dict(by_epoch=False, max_iters=20),
        optim_wrapper=dict(
            type="AmpOptimWrapper",
            dtype=dtype,
            loss_scale=loss_scale,
            optimizer=optimizer,
            accumulative_counts=2,
            clip_grad=dict(max_norm=0.5),
        ),
        custom_hooks=[dict(type="EMAHook", momentum=0.1, update_buffers=True)],
        parallel=parallel,
        log_level="ERROR",
    )
    state = runner.train()
    assert (runner.programs.update.traces, runner.programs.accumulate.traces) == (1, 1)
    return state


def final_values(state):
    opt_state = state.opt_state
    window = opt_state.inner_state  # without the accumulated gradients of the finished window
    return state.params, state.model_state, state.hook_state, opt_state.hyperparams, window.inner_state


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    """Train without a mesh, once for all meshes; the arguments are those of `train`."""
    states = {}

    def run(name, **changes):
        key = (name, *changes.items())
        if key not in states:
            states[key] = train(tmp_path_factory.mktemp("one"), None, OPTIMIZERS[name], **changes)
        return states[key]

    return run


@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        pytest.param("SGD", "data 1", marks=pytest.mark.many_processes),
        pytest.param("SGD", "data 2, fsdp 2, tensor 2", marks=pytest.mark.many_processes),  # also below, in half precision
        pytest.param("AdamW", "data 8", marks=pytest.mark.many_processes),
        ("AdamW", "fsdp 8"),
        ("LARS", "data 2, fsdp 2, tensor 2"),  # whose norms are over the shards
        pytest.param("LARS", "fsdp 8", marks=pytest.mark.many_processes),
    ],
)
def test_twenty_steps_have_the_results_of_one_device(tmp_path, on_one_device, assert_close, optimizer, mesh):
    expected = on_one_device(optimizer)
    assert optax.tree.get(expected.opt_state, "skipped_steps") == 1
    state = train(tmp_path, dict(type="Pjit", **MESHES[mesh]), OPTIMIZERS[optimizer])
    assert_close(final_values(state), final_values(expected))
    if mesh in SHARD_SHAPES:
        leaves = state.params["up"]["kernel"], state.params["bn"]["scale"]
        assert {leaf.addressable_shards[0].data.shape for leaf in leaves} == SHARD_SHAPES[mesh]


@pytest.mark.parametrize("mesh", [pytest.param("data 8", marks=pytest.mark.many_processes), "data 2, fsdp 2, tensor 2"])
def test_half_precision_skips_the_same_updates_on_every_mesh(tmp_path, on_one_device, assert_close, mesh):
    changes = dict(dtype="float16", loss_scale="dynamic")
    expected = on_one_device("SGD", **changes)
    assert optax.tree.get(expected.opt_state, "skipped_steps") == 1
    state = train(tmp_path, dict(type="Pjit", **MESHES[mesh]), OPTIMIZERS["SGD"], **changes)
    for name in ("loss_scale", "growth_tracker", "skipped_steps"):
        assert_close(optax.tree.get(state.opt_state, name), optax.tree.get(expected.opt_state, name))
    # sums over devices are rounded to half precision, 2^-11 of a gradient: 5e-5 after 20 steps
    assert_close(state.params, expected.params, atol=2e-4)


@pytest.mark.parametrize(
    ("optimizer", "parallel"),
    [
        pytest.param("SGD", dict(type="DataParallel", devices=4), marks=pytest.mark.many_processes),
        ("AdamW", dict(type="DataParallel")),
        ("LARS", dict(type="DataParallel", **MESHES["data 2, fsdp 2, tensor 2"])),
    ],
    ids=["SGD, 4 replicas", "AdamW, 8 replicas", "LARS, 2 replicas of 4 devices"],
)
def test_replicas_that_share_statistics_have_the_results_of_one_device(
    tmp_path, on_one_device, assert_close, optimizer, parallel
):
    expected = on_one_device(optimizer)
    state = train(tmp_path, parallel, OPTIMIZERS[optimizer], model=Net(statistics_axis="data"))

    def take_first_replica(path, leaf):
        return leaf[0] if is_per_replica(path) else leaf

    assert_close(final_values(paths.map_with_path(take_first_replica, state)), final_values(expected))
