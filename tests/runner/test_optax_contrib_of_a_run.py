"""Every optimizer of `optax.contrib` in a run, by name and as an object, saved and resumed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from jengine.optim.optimizers.optax_optimizers import OPTAX_CONTRIB_NAMES
from jengine.runner import Runner
from tests.runner.conftest import build_runner

X = np.random.RandomState(0).randn(32, 6).astype(np.float32)
WRAPPERS = {  # those that are made from others
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.05)),
    "galore": lambda: contrib.galore(0.05),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.05)),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.05), contrib.reduce_on_plateau()),
    "sam": lambda: contrib.sam(optax.sgd(0.05), optax.chain(contrib.normalize(), optax.sgd(0.05))),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.05), 0.05),
    "sophia": lambda: contrib.sophia(0.05),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.sgd(0.05)),
}
CASES = {name: lambda name=name: dict(optimizer=dict(type=name, learning_rate=0.05)) for name in OPTAX_CONTRIB_NAMES}
CASES |= {f"{name} as an object": make for name, make in WRAPPERS.items()}


def loss(params, batch):
    return jnp.square(batch["x"] @ params["kernel"] + params["bias"] - 3).sum(-1)


def train(work_dir, optimizer, iterations=8, model_loss=loss, init=None, **changes):
    params = init or {"kernel": np.ones((6, 4), np.float32), "bias": np.zeros(4, np.float32)}
    runner = build_runner(
        work_dir,
        FunctionalModel(lambda: jax.tree.map(jnp.asarray, params), model_loss),
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(dict(x=X))),
        train_cfg=dict(by_epoch=False, max_iters=iterations, on_recompile="raise"),
        optim_wrapper=optimizer,
        default_hooks=dict(logger=None, checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=4)),
        **changes,
    )
    return runner.train()


@pytest.mark.parametrize("name", CASES)
def test_a_model_with_a_bias_trains_and_resumes(tmp_path, name):
    whole = train(tmp_path / "whole", CASES[name]())
    assert not np.array_equal(whole.params["bias"], np.zeros(4))
    resumed = train(tmp_path / "run", CASES[name](), resume=tmp_path / "whole" / "iter_4")
    jax.tree.map(assert_same, resumed.opt_state, whole.opt_state)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def assert_same(actual, expected):
    """Assert that two arrays, or typed keys, are equal."""
    if jnp.issubdtype(actual.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    np.testing.assert_array_equal(actual, expected)


def test_sophia_equals_its_loop_by_hand(tmp_path):
    found = train(tmp_path, dict(optimizer=dict(type="sophia", learning_rate=0.05)), 4).params
    tx, params = contrib.sophia(0.05), {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}
    state = tx.init(params)
    order = list(Runner(  # the batches of the run
        FunctionalModel(lambda: params, loss), tmp_path / "order",
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(dict(x=X))),
        train_cfg=dict(by_epoch=False, max_iters=4), optim_wrapper=optax.sgd(0.1),
    ).train_dataloader)  # fmt: skip
    for batch in order:
        obj_fn = lambda params, batch=batch: loss(params, batch).mean()  # noqa: E731
        updates, state = tx.update(jax.grad(obj_fn)(params), state, params, obj_fn=obj_fn)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, params)


def test_replicas_of_sophia_have_the_curvature_of_the_whole_batch(tmp_path):
    cfg = dict(optimizer=dict(type="sophia", learning_rate=0.05))
    one = train(tmp_path / "one", cfg)
    many = train(tmp_path / "many", cfg, parallel=dict(type="DataParallel", devices=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one.params, many.params)


@pytest.mark.parametrize("parallel", [None, dict(type="DataParallel", devices=2), dict(type="Pjit")])
def test_parameters_without_elements_train_and_resume(tmp_path, parallel):
    init = {"kernel": np.ones((6, 4), np.float32), "a": np.zeros((6, 0), np.float32), "b": np.zeros((0, 4), np.float32)}

    def adapted(params, batch):
        return jnp.square(batch["x"] @ (params["kernel"] + params["a"] @ params["b"])).sum(-1)

    cfg = dict(model_loss=adapted, init=init, parallel=parallel, custom_hooks=[dict(type="EMAHook")])
    whole = train(tmp_path / "whole", optax.adam(0.05), **cfg)
    resumed = train(tmp_path / "run", optax.adam(0.05), resume=tmp_path / "whole" / "iter_4", **cfg)
    assert resumed.params["a"].shape == (6, 0)
    jax.tree.map(np.testing.assert_array_equal, resumed.opt_state, whole.opt_state)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_an_array_without_elements_must_have_the_stored_shape(tmp_path):
    init = {"kernel": np.ones((6, 4), np.float32), "a": np.zeros((6, 0), np.float32)}
    train(tmp_path, optax.sgd(0.05), 4, lambda params, batch: batch["x"] @ params["kernel"], init)
    other = {**init, "a": np.zeros((0, 3), np.float32)}
    with pytest.raises(ValueError, match=r"params.a  stored float32\[6,0\], expected float32\[0,3\]"):
        train(tmp_path, optax.sgd(0.05), 8, lambda params, batch: batch["x"] @ params["kernel"], other, resume=True)
    assert not (tmp_path / "iter_8").exists()
