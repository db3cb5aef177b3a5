"""Mixed precision: which parts AmpOptimWrapper computes in low precision, and its loss scale against GradScaler."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jengine.model import LinenModel
from jengine.optim import SGD, AdamW, AmpOptimWrapper, OptimWrapper
from tests.refusals import check_refusal


def train(wrapper, grads):
    """Call `update` with gradients of the unscaled loss; yield w and the state after each update."""
    params = {"w": jnp.zeros(())}
    state = wrapper.init(params)
    for grad in grads:
        updates, state = wrapper.update({"w": grad * optax.tree.get(state, "loss_scale")}, state, params)
        params = optax.apply_updates(params, updates)
        yield float(params["w"]), state


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_network_computes_in_low_precision_and_parameters_stay_float32(dtype):
    seen = []

    def network(params, x):
        logits = x @ params["w"]
        seen.append(logits.dtype)
        return logits

    def loss(params, x):
        return wrapper.autocast(network)(params, x).mean()

    wrapper = AmpOptimWrapper(optimizer=AdamW(lr=0.1), dtype=dtype, loss_scale=128.0)
    params = {"w": jnp.ones(3)}
    state = wrapper.init(params)
    params, state, value = wrapper.update_params(loss, params, state, jnp.ones((2, 3)))
    assert set(seen) == {jnp.dtype(dtype)}
    assert float(value) == pytest.approx(3.0, rel=1e-2)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((params, state)) if leaf.ndim}
    assert dtypes == {jnp.dtype("float32")}
    np.testing.assert_allclose(params["w"], 1 - 0.1 * 0.01 - 0.1, rtol=1e-5)  # decay, and one Adam step of lr


def linear(params, x):
    return x @ params["w"]


PARAMS = {"w": jnp.full((2,), 0.5)}
X, TARGET = jnp.ones((4, 2)), jnp.full((4,), 3000.7)


def squared_error(apply_fn):
    """Return a function `(params, x, target) -> loss`, and a dict in which it records the dtypes."""
    dtypes = {}

    def loss(params, x, target):
        outputs = apply_fn(params, x)
        dtypes.update(params=params["w"].dtype.name, x=x.dtype.name, outputs=outputs.dtype.name)
        dtypes["target"] = target.dtype.name
        return jnp.square(outputs - target).mean()

    return loss, dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_targets_and_the_loss_are_float32(dtype):
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype=dtype, loss_scale=None)
    loss, dtypes = squared_error(wrapper.autocast(linear))
    value, grads = jax.jit(wrapper.value_and_grad(loss))(PARAMS, wrapper.init(PARAMS), X, TARGET)
    assert set(dtypes.values()) == {"float32"}
    # the output is 2 * 0.5 = 1 in any dtype; bfloat16 would make the target 3008, and float16 the square an infinity
    assert float(value) == pytest.approx((3000.7 - 1) ** 2, rel=1e-6)
    assert grads["w"].dtype == jnp.float32
    # d/dw = 2 (output - target) x; the backward pass of the network rounds it to `dtype`
    np.testing.assert_allclose(grads["w"], 2 * (1 - 3000.7), rtol=2**-7 if dtype == "bfloat16" else 2**-10)


def test_outputs_of_autocast_have_the_values_of_low_precision():
    w, x = jnp.float32([1 / 3, 0.1]), jnp.float32([[0.7, 3.3]])
    actual = AmpOptimWrapper(optimizer=SGD(lr=1.0)).autocast(linear)({"w": w}, x)
    expected = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(actual, expected)
    assert abs(float(actual[0] - (x @ w)[0])) > 1e-4


def test_autocast_of_a_plain_wrapper_is_the_function_itself():
    assert OptimWrapper(SGD(lr=1.0)).autocast(linear) is linear


def test_autocast_does_not_cast_integers_keys_flags_and_python_numbers():
    seen = []

    def apply(params, ids, *, rngs, train, rate):
        seen.append(
            (params["w"].dtype.name, ids.dtype.name, jnp.issubdtype(rngs.dtype, jax.dtypes.prng_key), train, rate)
        )
        return {"logits": params["w"][ids], "ids": ids}

    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))
    actual = wrapper.autocast(apply)({"w": jnp.ones(3)}, jnp.arange(2), rngs=jax.random.key(0), train=True, rate=0.5)
    assert seen == [("bfloat16", "int32", True, True, 0.5)]
    assert {name: leaf.dtype.name for name, leaf in actual.items()} == {"logits": "float32", "ids": "int32"}


def test_running_statistics_of_a_linen_module_stay_float32():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(3)(x))

    net, x = Net(), jax.random.normal(jax.random.key(1), (64, 5))
    variables = net.init(jax.random.key(0), x)
    variables = {**variables, "batch_stats": {"BatchNorm_0": {"mean": jnp.full(3, 1.001), "var": jnp.full(3, 1.001)}}}
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))
    outputs, updated = wrapper.autocast(net.apply)(variables, x, mutable=["batch_stats"])
    _, expected = net.apply(variables, x, mutable=["batch_stats"])
    assert outputs.dtype == jnp.float32
    # a tenth of the statistics comes from the batch, in bfloat16; 1.001 would be 1 in bfloat16
    actual = np.stack(jax.tree.leaves(updated)) - 0.9009
    np.testing.assert_allclose(actual, np.stack(jax.tree.leaves(expected)) - 0.9009, rtol=2e-2, atol=3e-4)


def test_scalar_arguments_are_passed_to_the_loss_unchanged():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale=None)
    value, grads = wrapper.value_and_grad(lambda p, x, name: p["w"] * x[name])(
        {"w": jnp.float32(3000.7)}, wrapper.init({"w": jnp.float32(3000.7)}), {"a": 2.0}, "a"
    )
    assert float(value) == np.float32(3000.7) * 2
    assert float(grads["w"]) == 2.0


def test_a_loss_that_closes_over_its_batch_may_call_its_network_through_autocast():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))
    loss, _ = squared_error(wrapper.autocast(linear))
    value, _ = wrapper.value_and_grad(lambda params: loss(params, X, TARGET))(PARAMS, wrapper.init(PARAMS))
    assert float(value) == pytest.approx((3000.7 - 1) ** 2, rel=1e-6)


def test_products_are_found_in_inner_programs():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))

    def scanned(params, x):
        def body(h, w):
            return jax.checkpoint(jax.jit(jnp.dot))(h, w), None

        return jax.lax.scan(body, x, params["w"])[0]

    params = {"w": jnp.ones((2, 3, 3))}
    run = lambda apply_fn: wrapper.value_and_grad(lambda p, x: apply_fn(p, x).sum())(  # noqa: E731
        params, wrapper.init(params), jnp.ones((1, 3))
    )
    with pytest.raises(ValueError, match="got float32 in all"):
        run(scanned)
    assert float(run(wrapper.autocast(scanned))[0]) == 27.0


def test_float32_products_next_to_low_precision_ones_are_allowed():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))

    def loss(params, x):
        outputs = wrapper.autocast(linear)(params, x)
        return outputs @ outputs  # in float32

    value, _ = wrapper.value_and_grad(loss)(PARAMS, wrapper.init(PARAMS), X)
    assert float(value) == 4.0


def test_a_loss_without_products_needs_no_autocast():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))
    value, _ = wrapper.value_and_grad(lambda p: (p["w"] ** 2).sum())(PARAMS, wrapper.init(PARAMS))
    assert float(value) == 0.5


def test_a_loss_that_is_not_compiled_may_branch_on_its_parameters():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))
    value, _ = wrapper.value_and_grad(lambda p: p["w"].sum() if p["w"].sum() > 0 else 0.0)(PARAMS, wrapper.init(PARAMS))
    assert float(value) == 1.0


def test_the_loss_function_is_traced_once():
    wrapper, calls = AmpOptimWrapper(optimizer=SGD(lr=1.0)), []

    def loss(params, x):
        calls.append(1)
        return wrapper.autocast(linear)(params, x).sum(), {"aux": x}

    (value, aux), _ = jax.jit(wrapper.value_and_grad(loss, has_aux=True))(PARAMS, wrapper.init(PARAMS), X)
    assert (len(calls), float(value), list(aux)) == (1, 4.0, ["aux"])


def test_an_adapter_computes_in_the_dtype_of_the_wrapper():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))
    seen = []

    def error(outputs, batch):
        seen.append((outputs.dtype.name, batch["target"].dtype.name))
        return jnp.square(outputs[:, 0] - batch["target"])

    model = LinenModel(nn.Dense(1, kernel_init=nn.initializers.ones), error, inputs="x")
    batch = {"x": jnp.full((4, 2), 1.001), "target": TARGET}
    params, state = model.init(jax.random.key(0), batch)

    def loss(params, batch):
        losses, _ = model.loss(params, state, batch, rng=jax.random.key(0), hyperparams={})
        return losses["loss"].mean()

    value, _ = wrapper.value_and_grad(loss)(params, wrapper.init(params), batch)
    assert seen == [("float32", "float32")]
    assert float(value) == pytest.approx((3000.7 - 2) ** 2, rel=1e-6)  # 1.001 is 1 in bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_other_dtypes_than_float16_have_no_loss_scale_by_default(dtype):
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype=dtype)
    state = wrapper.init(PARAMS)
    assert (wrapper.loss_scale, optax.tree.get(state, "loss_scale"), wrapper.metrics(state, state)) == (None, None, {})
    updates, state = wrapper.update({"w": jnp.ones(2)}, state, PARAMS)
    np.testing.assert_array_equal(updates["w"], [-1.0, -1.0])
    assert (wrapper.metrics(state, state), wrapper.is_finite(state)) == ({}, None)
    assert "loss_scaler" not in wrapper.state_dict(state)
    assert AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype=dtype, loss_scale="dynamic").loss_scale.init_scale == 65536


def test_float16_has_a_dynamic_loss_scale_by_default():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype="float16")
    state = wrapper.init(PARAMS)
    assert (float(optax.tree.get(state, "loss_scale")), wrapper.loss_scale.growth_interval) == (65536.0, 2000)
    assert set(wrapper.metrics(state, state)) == {"loss_scale", "skipped_steps"}
    unscaled = AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype="float16", loss_scale=None).init(PARAMS)
    assert optax.tree.get(unscaled, "loss_scale") is None


def test_a_state_with_a_loss_scaler_loads_into_a_wrapper_without_one():
    scaled = AmpOptimWrapper(optimizer=SGD(lr=0.5), dtype="float16")
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0))
    state = wrapper.load_state_dict(scaled.state_dict(scaled.init(PARAMS)), wrapper.init(PARAMS))
    assert jax.tree.structure(state) == jax.tree.structure(wrapper.init(PARAMS))
    assert wrapper.get_lr() == {"lr": [0.5]}


def test_overflow_skips_the_update_and_halves_the_scale():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale={"growth_interval": 3})
    grads = [1, 1, 1, np.inf, 1, 1, 1]
    seen = [
        (w, float(optax.tree.get(s, "loss_scale")), int(optax.tree.get(s, "growth_tracker")))
        for w, s in train(wrapper, grads)
    ]
    # torch.amp.GradScaler(init_scale=65536, growth_interval=3)
    assert seen == [
        (-1, 65536, 1), (-2, 65536, 2), (-3, 131072, 0), (-3, 65536, 0), (-4, 65536, 1), (-5, 65536, 2),
        (-6, 131072, 0),
    ]  # fmt: skip


def test_skipped_update_does_not_change_the_optimizer_state_and_is_counted():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0, momentum=0.9), loss_scale="dynamic")
    states = [state for _, state in train(wrapper, [1.0, np.nan])]
    assert [float(optax.tree.get(state, "trace")["w"]) for state in states] == [1.0, 1.0]
    assert [float(wrapper.metrics(state, state)["skipped_steps"]) for state in states] == [0.0, 1.0]
    assert [bool(wrapper.is_finite(state)) for state in states] == [True, False]


def test_static_scale_is_constant_and_still_skips_updates():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale=128.0)
    seen = [(w, float(optax.tree.get(s, "loss_scale"))) for w, s in train(wrapper, [1, np.inf, 1])]
    assert seen == [(-1, 128), (-1, 128), (-2, 128)]


def test_scale_given_as_a_dict():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale={"init_scale": 8.0, "growth_interval": 1})
    assert [float(optax.tree.get(s, "loss_scale")) for _, s in train(wrapper, [1, 1, 1])] == [16, 32, 64]


def test_scale_stays_between_minimum_and_maximum():
    wrapper = AmpOptimWrapper(
        optimizer=SGD(lr=1.0),
        loss_scale={"init_scale": 4.0, "growth_interval": 1, "min_scale": 2.0, "max_scale": 8.0},
    )
    assert [float(optax.tree.get(s, "loss_scale")) for _, s in train(wrapper, [1, 1, np.inf, np.inf, np.inf])] == [
        8,
        8,
        4,
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("loss_scale", "error", "words"),
    [
        ("foo", TypeError, ["'dynamic'"]),
        (128, TypeError, ["'dynamic'"]),
        ({"init_scael": 1.0}, TypeError, ["'init_scael'", "did you mean 'init_scale'"]),
        (-1.0, ValueError, ["init_scale`", "above 0"]),
        ({"backoff_factor": 2.0}, ValueError, ["backoff_factor"]),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, ["min_scale"]),
    ],
)
def test_invalid_loss_scale(loss_scale, error, words):
    check_refusal(lambda: AmpOptimWrapper(optimizer=SGD(lr=1.0), loss_scale=loss_scale), error, *words)


def test_state_dict_has_the_keys_of_gradscaler_and_loads_without_them():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), dtype="float16")
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


def test_a_loaded_state_has_the_scale_and_the_wrapper_its_own_growth_factor():
    def loss(params):
        return params["w"].sum()

    def scale_after_an_iteration(wrapper, state):
        _, state, _ = wrapper.update_params(loss, PARAMS, state)
        return float(optax.tree.get(state, "loss_scale"))

    scaler = dict(growth_interval=1)
    quadruple = AmpOptimWrapper(optimizer=SGD(lr=0.1), loss_scale=dict(scaler, init_scale=8.0, growth_factor=4.0), dtype="float32")
    saved = quadruple.state_dict(quadruple.init(PARAMS))
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=0.1), loss_scale=dict(scaler, init_scale=2.0, growth_factor=2.0), dtype="float32")
    assert scale_after_an_iteration(wrapper, wrapper.init(PARAMS)) == 4.0
    state = wrapper.load_state_dict(saved, wrapper.init(PARAMS))
    assert scale_after_an_iteration(wrapper, state) == 16.0  # 8.0 * 2.0
