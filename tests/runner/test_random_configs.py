"""Train random configs in several ways: in single steps, in chunks, interrupted and resumed, and on meshes.

`make test-all` trains 200 of them; `make test` six runs with three programs.
"""

import json
import math
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.paths import flatten
from jengine.hooks import Hook
from jengine.optim.wrapper_builder import check_optim_wrapper
from jengine.runner import Runner
from tests.runner.random_configs import Config

COUNT = int(os.environ.get("JENGINE_RANDOM_CONFIGS", "0"))
PROGRAMS = (193, 50, 208)  # the seeds of the programs that `make test` compiles
WAYS = ("chunks", "parts", "mesh")
CASES = [(seed, seed, WAYS) for seed in range(COUNT)] or [
    (seed, PROGRAMS[seed % 3], WAYS[::2] if seed < 3 else WAYS[seed % 2 : seed % 2 + 1]) for seed in range(6)
]

pytestmark = pytest.mark.filterwarnings("ignore")


class StopAfter(Hook):
    """End training after some iterations: with an error, which saves nothing, or with SIGTERM, which saves."""

    def __init__(self, iterations, error=None):
        self.last = iterations - 1
        self.error = error

    def next_step(self, runner, step):
        return self.last if step <= self.last else math.inf

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == self.last:
            if self.error is not None:
                raise self.error
            signal.raise_signal(signal.SIGTERM)


def train(config, work_dir, **changes):
    runner = Runner(work_dir=work_dir, **config.arguments(**changes))
    runner.train()
    return runner


def train_in_parts(config, work_dir):
    """Train with two interruptions, in chunks at the start and at the end."""
    first, second = config.stops
    size = config.steps_per_call
    with pytest.raises(InterruptedError):
        train(config, work_dir, hooks=[StopAfter(first, InterruptedError())], steps_per_call=size)
    with pytest.raises(SystemExit):
        train(config, work_dir, hooks=[StopAfter(second)], resume=True)
    return train(config, work_dir, resume=True, steps_per_call=size)


def arrays(state):
    """Return the arrays of a state by path."""
    leaves = flatten(state).items()
    return {
        path: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for path, x in leaves
    }


def logged(runner):
    """Return the log without times."""
    path = next(pathlib.Path(runner.log_dir).glob("vis_data/scalars.json"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]  # not the report at the end of the run
    return [{name: float(line[name]) for name in line if "time" not in name and name != "mode"} for line in lines]


# From 0.11 on XLA may round an operation of an optimizer differently within a loop.
ROUNDING = dict(rtol=0, atol=0) if jax.__version_info__ < (0, 11) else dict(rtol=2e-5, atol=2e-5)


def assert_same(found, expected):
    ours, theirs = arrays(found.state), arrays(expected.state)
    assert {path: x.dtype for path, x in ours.items()} == {path: x.dtype for path, x in theirs.items()}
    for path, value in ours.items():
        np.testing.assert_allclose(value, theirs[path], **ROUNDING, err_msg=path)
    for ours, theirs in zip(logged(found), logged(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=ROUNDING["rtol"], abs=ROUNDING["atol"], nan_ok=True)


@pytest.mark.full_optimization
@pytest.mark.parametrize(("seed", "program", "ways"), CASES, ids=[str(seed) for seed, *_ in CASES])
def test_all_ways_to_train_a_config_have_the_same_results(seed, program, ways, tmp_path):
    config = Config(seed, program)
    print(config.description)
    plain = train(config, tmp_path / "plain")
    params = arrays(plain.state.params)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in params.values())
    if "chunks" in ways:
        chunks = train(config, tmp_path / "chunks", steps_per_call=config.steps_per_call)
        assert chunks.programs.chunk.traces > 0
        assert_same(chunks, plain)
    if "parts" in ways:
        assert_same(train_in_parts(config, tmp_path / "parts"), plain)
    if "mesh" in ways and config.parallel:
        mesh = train(config, tmp_path / "mesh", steps_per_call=config.steps_per_call, parallel=config.parallel)
        for path, value in arrays(mesh.state.params).items():
            np.testing.assert_allclose(value, params[path], rtol=2e-5, atol=2e-5, err_msg=path)


def test_the_optimizer_of_each_config_can_be_built():
    wrappers = [check_optim_wrapper(Config(seed, seed).wrapper)[""] for seed in range(200)]
    assert len({wrapper.optimizer.name for wrapper in wrappers}) > 20
