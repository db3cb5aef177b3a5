import jax
import jax.numpy as jnp
import optax
import pytest

from jengine.optim import OptimWrapper


def take_three_steps(gradient=1.0, **optimizer):
    """Return the values of a parameter, initially 1, after each of three updates with the same gradient."""
    wrapper = OptimWrapper(dict(lr=0.1, **optimizer))
    params = {"w": jnp.ones(())}
    state = wrapper.init(params)

    @jax.jit
    def step(params, state):
        updates, state = wrapper.update({"w": jnp.full((), gradient)}, state, params, wrapper.hyperparams)
        return optax.apply_updates(params, updates), state

    values = []
    for _ in range(3):
        params, state = step(params, state)
        values.append(float(params["w"]))
    return values


# values of iMIX's classes in double precision
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (dict(type="BertAdam"), [0.6827822337, 0.2571497872, -0.2381218552]),
        (dict(type="BertAdam", t_total=10, warmup=0.1), [1.0, 0.5740503357, 0.1335271865]),
        (dict(type="TansformerAdamW", weight_decay=0.01), [0.899103159, 0.7983062902, 0.6976098087]),
        (
            dict(type="TansformerAdamW", weight_decay=0.01, correct_bias=False),
            [0.6830984514, 0.2578906384, -0.2368867303],
        ),
    ],
)
def test_three_updates_equal_those_of_imix(optimizer, expected):
    assert take_three_steps(**optimizer) == pytest.approx(expected, abs=1e-6)


def test_each_tensor_is_clipped_separately():
    # a gradient of 10 is clipped to 1, a gradient of 1 is unchanged (except for the 1e-6 added to the norm)
    assert take_three_steps(10.0, type="BertAdam1") == pytest.approx(take_three_steps(1.0, type="BertAdam"), abs=1e-5)
    assert take_three_steps(10.0, type="BertAdam1", max_grad_norm=100.0) == pytest.approx(
        take_three_steps(10.0, type="BertAdam"), abs=1e-6
    )


def test_the_other_schedules():
    plain = take_three_steps(type="BertAdam", weight_decay=0.0)
    assert take_three_steps(type="BertAdam", weight_decay=0.0, t_total=10, schedule="warmup_constant") == plain
    half = take_three_steps(type="BertAdam", weight_decay=0.0, t_total=10)
    assert 1 - half[0] == pytest.approx((1 - plain[0]) / 2, abs=1e-6)  # starts at half the rate without a warm-up
    cosine = take_three_steps(type="BertAdam", weight_decay=0.0, t_total=2, schedule="warmup_cosine")
    assert cosine[0] == pytest.approx(plain[0], abs=1e-6)  # cos 0
    assert cosine[2] == pytest.approx(cosine[1], abs=1e-6)  # cos pi
