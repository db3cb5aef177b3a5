"""Test that all meshes end with the parameters of one device, with every feature at once, and resume from each other."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.model import LinenModel
from tests.parallel.conftest import make_loader
from tests.runner.conftest import build_runner

RULES = [("up.kernel", ("fsdp", "tensor")), ("down.kernel", ("tensor", "fsdp"))]
STRATEGIES = {
    "1 device": None,
    "Pjit, data 2, fsdp 2, tensor 2": dict(type="Pjit", mesh=dict(fsdp=2, tensor=2), rules=RULES, fsdp_min_size=8),
    "4 replicas": dict(type="DataParallel", devices=4),
    "8 replicas": dict(type="DataParallel", devices=8),
    "2 replicas of 4 devices": dict(type="DataParallel", mesh=dict(data=2, fsdp=4), fsdp_min_size=8),
}
ITERS = 11  # windows of 3, 3, 3 and 2 iterations
SAVED = 5  # the first two iterations of a window, the first of them with a padded batch
LENGTHS = 1 + np.arange(24) * 7 % 6  # of sentences; every second batch of 16 is half padded
RNG = np.random.RandomState(0)
DATA = ArrayDataset(
    dict(
        x=RNG.randn(24, 6, 8).astype(np.float32),
        y=RNG.randn(24, 6, 4).astype(np.float32),
        words=(np.arange(6) < LENGTHS[:, None]).astype(np.float32),
    )
)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="down")(jnp.tanh(nn.Dense(16, name="up")(x)))


def mean_over_sentence(outputs, batch):
    return (jnp.square(outputs - batch["y"]).mean(-1) * batch["words"]).sum(-1)


def mean_over_words(outputs, batch):
    words = batch["words"] * batch["mask"][:, None]
    return {"loss": ((jnp.square(outputs - batch["y"]).mean(-1) * words).sum(), words.sum())}


LOSSES = {
    "masked": mean_over_sentence,  # real examples count
    "weighted": mean_over_words,  # words count
    "mean": mean_over_sentence,  # without padding: micro-batches count the same
}


def train(work_dir, parallel, loss, max_iters=ITERS, **changes):
    """Train with AdamW, clipping, accumulation, averages, the guard and chunks of 2; batches may be padded."""
    arguments = dict(
        model=LinenModel(Net(), LOSSES[loss], inputs="x"),
        train_dataloader=make_loader(8 if loss == "mean" else 16, DATA, drop_last=loss == "mean"),
        train_cfg=dict(by_epoch=False, max_iters=max_iters, steps_per_call=2),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=0.03, weight_decay=0.1),
            accumulative_counts=3,
            clip_grad=dict(max_norm=0.2),
        ),
        param_scheduler=dict(type="LinearLR", start_factor=0.5, by_epoch=False, end=4),
        custom_hooks=[dict(type="EMAHook", momentum=0.2), dict(type="NumericsGuardHook", interval=4)],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=SAVED), logger=None),
        parallel=parallel,
        log_level="ERROR",
    )
    return build_runner(work_dir, **{**arguments, **changes}).train()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train on a strategy, once; return the parameters, their averages, and the work dir."""
    runs = {}

    def run(strategy, loss):
        if (strategy, loss) not in runs:
            path = tmp_path_factory.mktemp("run")
            state = train(path, STRATEGIES[strategy], loss)
            runs[strategy, loss] = results(state), path
        return runs[strategy, loss]

    return run


def results(state):
    return jax.device_get((state.params, state.hook_state["EMAHook"].params))


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("strategy", "loss"),
    [
        ("2 replicas of 4 devices", "masked"),
        ("8 replicas", "weighted"),
        # which the runs below that resume on these end with, too
        pytest.param("4 replicas", "masked", marks=pytest.mark.many_processes),
        pytest.param("Pjit, data 2, fsdp 2, tensor 2", "weighted", marks=pytest.mark.many_processes),
    ],
)
def test_every_mesh_has_the_parameters_of_one_device(finished, strategy, loss):
    assert_same(finished(strategy, loss)[0], finished("1 device", loss)[0])


@pytest.mark.parametrize(
    ("saved", "resumed", "loss"),
    [
        ("1 device", "4 replicas", "masked"),
        pytest.param("4 replicas", "2 replicas of 4 devices", "masked", marks=pytest.mark.many_processes),
        ("2 replicas of 4 devices", "1 device", "masked"),
        pytest.param("Pjit, data 2, fsdp 2, tensor 2", "8 replicas", "weighted", marks=pytest.mark.many_processes),
        ("8 replicas", "Pjit, data 2, fsdp 2, tensor 2", "weighted"),
        ("8 replicas", "1 device", "mean"),
    ],
)
def test_a_run_resumes_on_another_mesh_within_a_window(finished, tmp_path, saved, resumed, loss):
    path = finished(saved, loss)[1]
    state = train(tmp_path, STRATEGIES[resumed], loss, resume=path / f"iter_{SAVED}")
    assert_same(results(state), finished("1 device", loss)[0])
