"""Test the mixture of experts against a calculation with every expert, and its balance loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jengine.extras.networks.mixture import MixtureOfExperts

MIXTURE = MixtureOfExperts(experts=4, top_k=2, width=12)


@pytest.fixture(scope="module")
def variables():
    x = np.random.RandomState(0).randn(8, 4, 6).astype(np.float32)
    return jax.jit(MIXTURE.init)(jax.random.key(0), x)["params"], x


def with_every_expert(params, x):
    """Return the weighted sum over all experts, with the weight 0 of those that were not chosen."""
    probabilities = jax.nn.softmax(x @ params["router"]["kernel"])
    least = jnp.sort(probabilities, axis=-1)[..., -2:-1]
    weights = jnp.where(probabilities >= least, probabilities, 0)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, params["gate"])) * jnp.einsum("btd,edf->btef", x, params["up"])
    return jnp.einsum("btef,efd,bte->btd", hidden, params["down"], weights)


def test_tokens_and_gradients_are_those_of_a_sum_over_every_expert(variables):
    params, x = variables

    def total(params, x, apply):
        return jnp.sin(apply(params, x)).sum()

    def sparse(params, x):
        return MIXTURE.apply({"params": params}, x)

    @jax.jit
    def compute(params, x):
        return [(apply(params, x), jax.grad(total, (0, 1))(params, x, apply)) for apply in (sparse, with_every_expert)]

    got, expected = compute(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


MESHES = [
    dict(fsdp=2, context=2, tensor=2),
    dict(data=4, expert=2),
    dict(expert=4, data=2),
    dict(expert=2, context=2, tensor=2),
]


@pytest.mark.parametrize(
    ("axes", "examples"),
    [*zip(MESHES, (3, 8, 3, 8), strict=True), (MESHES[-1], 3)],
    ids=["no axis of experts", "two experts each", "one each", "all axes", "all axes, indivisible"],
)
def test_a_mesh_divides_tokens_and_experts_and_keeps_values_and_gradients(variables, axes, examples):
    params, x = variables

    def total(params, x):
        y, sown = MIXTURE.apply({"params": params}, x, mutable=["losses"])
        return jnp.sin(y).sum() + sown["losses"]["balance"][0], y

    # The router likes the first expert, so one device has most rows and some have none.
    params = {**params, "router": {"kernel": params["router"]["kernel"].at[:, 0].set(x[0, 0])}}
    x = x[:examples]
    expected = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, expected)


def test_the_balance_loss_is_1_for_equal_shares_and_the_number_of_experts_for_one(variables):
    params, x = variables

    @jax.jit
    def balance(kernel):
        changed = {**params, "router": {"kernel": kernel}}
        mixture = MIXTURE.clone(top_k=1)
        (value,) = mixture.apply({"params": changed}, jnp.abs(x), mutable=["losses"])[1]["losses"]["balance"]
        return value

    assert float(balance(jnp.zeros((6, 4)))) == pytest.approx(1)
    assert float(balance(jnp.zeros((6, 4)).at[:, 2].set(50))) == pytest.approx(4, rel=1e-3)
