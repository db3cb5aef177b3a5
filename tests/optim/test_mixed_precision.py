"""AmpOptimWrapper: what is low precision and what is not, and the loss scale of GradScaler."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.optim import SGD, AdamW, AmpOptimWrapper, OptimWrapper


def train(wrapper, grads):
    """Runs `update` on gradients of the unscaled loss; yields w and the state after each."""
    params = {"w": jnp.zeros(())}
    state = wrapper.init(params)
    for grad in grads:
        updates, state = wrapper.update({"w": grad * optax.tree.get(state, "loss_scale")}, state, params)
        params = optax.apply_updates(params, updates)
        yield float(params["w"]), state


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_loss_is_computed_in_low_precision_and_parameters_stay_float32(dtype):
    seen = []

    def loss(params, x):
        logits = x @ params["w"]
        seen.append(logits.dtype)
        return logits.astype("float32").mean()

    wrapper = AmpOptimWrapper(optimizer=AdamW(lr=0.1), dtype=dtype, loss_scale=128.0)
    params = {"w": jnp.ones(3)}
    state = wrapper.init(params)
    params, state, value = wrapper.update_params(loss, params, state, jnp.ones((2, 3)))
    assert set(seen) == {jnp.dtype(dtype)}
    assert float(value) == pytest.approx(3.0, rel=1e-2)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((params, state)) if leaf.ndim}
    assert dtypes == {jnp.dtype("float32")}
    np.testing.assert_allclose(params["w"], 1 - 0.1 * 0.01 - 0.1, rtol=1e-5)  # decay, and one Adam step of lr


def test_overflow_skips_the_update_and_halves_the_scale():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale={"growth_interval": 3})
    grads = [1, 1, 1, np.inf, 1, 1, 1]
    seen = [(w, float(optax.tree.get(s, "loss_scale")), int(optax.tree.get(s, "growth_tracker"))) for w, s in train(wrapper, grads)]
    # torch.amp.GradScaler(init_scale=65536, growth_interval=3)
    assert seen == [
        (-1, 65536, 1), (-2, 65536, 2), (-3, 131072, 0), (-3, 65536, 0), (-4, 65536, 1), (-5, 65536, 2),
        (-6, 131072, 0),
    ]  # fmt: skip


def test_skipped_update_leaves_the_optimizer_state_and_is_counted():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0, momentum=0.9))
    states = [state for _, state in train(wrapper, [1.0, np.nan])]
    assert [float(optax.tree.get(state, "trace")["w"]) for state in states] == [1.0, 1.0]
    assert [float(wrapper.metrics(state)["skipped_steps"]) for state in states] == [0.0, 1.0]
    assert [bool(wrapper.is_finite(state)) for state in states] == [True, False]


def test_static_scale_never_moves_and_still_skips():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale=128.0)
    seen = [(w, float(optax.tree.get(s, "loss_scale"))) for w, s in train(wrapper, [1, np.inf, 1])]
    assert seen == [(-1, 128), (-1, 128), (-2, 128)]


def test_scale_given_as_a_dict():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale={"init_scale": 8.0, "growth_interval": 1})
    assert [float(optax.tree.get(s, "loss_scale")) for _, s in train(wrapper, [1, 1, 1])] == [16, 32, 64]


def test_scale_stays_between_floor_and_ceiling():
    wrapper = AmpOptimWrapper(
        optimizer=SGD(lr=1.0),
        loss_scale={"init_scale": 4.0, "growth_interval": 1, "min_scale": 2.0, "max_scale": 8.0},
    )
    assert [float(optax.tree.get(s, "loss_scale")) for _, s in train(wrapper, [1, 1, np.inf, np.inf, np.inf])] == [8, 8, 4, 2, 2]


@pytest.mark.parametrize(
    ("loss_scale", "error", "message"),
    [
        ("foo", TypeError, "must be 'dynamic', a float or a dict"),
        (128, TypeError, "must be 'dynamic', a float or a dict"),
        ({"init_scael": 1.0}, TypeError, "no 'init_scael'; did you mean 'init_scale'"),
        (-1.0, ValueError, "init_scale must be above 0"),
        ({"backoff_factor": 2.0}, ValueError, "backoff_factor"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "min_scale"),
    ],
)
def test_bad_loss_scale(loss_scale, error, message):
    with pytest.raises(error, match=message):
        AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale=loss_scale)


def test_unknown_dtype():
    with pytest.raises(ValueError, match="unknown dtype 'flaot16'; did you mean 'float16'"):
        AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype="flaot16")


def test_state_dict_has_the_keys_of_gradscaler_and_loads_without_them():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))
    params = {"w": jnp.zeros(())}
    state = wrapper.init(params)
    saved = wrapper.state_dict(state)
    assert saved["loss_scaler"] == {
        "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0,
    }  # fmt: skip
    (_, moved), *_ = train(wrapper, [np.inf])
    assert float(optax.tree.get(wrapper.load_state_dict(saved, moved), "loss_scale")) == 65536.0
    plain = OptimWrapper(SGD(lr=0.5))
    loaded = wrapper.load_state_dict(plain.state_dict(plain.init(params)), moved)
    assert float(optax.tree.get(loaded, "loss_scale")) == 32768.0
    assert wrapper.get_lr() == {"lr": [0.5]}


def test_accumulated_scaled_gradients_are_divided_and_unscaled_once():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), accumulative_counts=2, loss_scale=8.0, dtype="float32")
    params = {"w": jnp.zeros(())}
    state = wrapper.init(params)
    for x in (1.0, 3.0):
        params, state, _ = wrapper.update_params(lambda p, x: p["w"] * x, params, state, jnp.float32(x))
    assert float(params["w"]) == -2.0
