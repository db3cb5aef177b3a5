import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jengine.extras.plan.flops import count_flops


def count(fn, *args):
    return count_flops(jax.jit(fn).trace(*args).jaxpr)


X, W = jnp.ones((4, 8)), jnp.ones((8, 8))
ONE_PRODUCT = 2 * 4 * 8 * 8  # a multiplication and an addition for each of 4 x 8 sums of 8


def test_each_term_of_a_product_counts_as_a_multiplication_and_an_addition():
    assert count(lambda x, w: jnp.tanh(x @ w) + 1, X, W) == {"float32": ONE_PRODUCT}
    assert count(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), jnp.ones((3, 4, 8)), jnp.ones((3, 8, 8))) == {
        "float32": 3 * ONE_PRODUCT
    }


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_convolutions_and_their_gradients_have_the_count_of_xla(strides, groups, dilation):
    def conv(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (strides, strides), "SAME", rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip

    x, kernel = jnp.ones((2, 9, 7, 4)), jnp.ones((3, 3, 4 // groups, 6))
    y = jax.eval_shape(conv, x, kernel)
    for fn in (
        lambda x, kernel, y: conv(x, kernel),
        lambda x, kernel, y: jax.linear_transpose(lambda x: conv(x, kernel), x)(y),
        lambda x, kernel, y: jax.linear_transpose(lambda kernel: conv(x, kernel), kernel)(y),
    ):
        # XLA counts convolutions for CPUs only; for others they are calls of a library.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            traced = jax.jit(fn).trace(x, kernel, y)
            costs = traced.lower().cost_analysis()
        assert count_flops(traced.jaxpr) == {"float32": costs["flops"]}


def test_all_iterations_of_a_scan_and_the_longest_branch_are_counted():
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]

    assert count(scanned, X, W) == {"float32": 5 * ONE_PRODUCT}
    # one iteration of a loop whose length is unknown
    assert count(lambda x, w, n: jax.lax.fori_loop(0, n, lambda _, x: x @ w, x), X, W, 5) == {"float32": ONE_PRODUCT}
    assert count(lambda x, w: jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x), X, W) == {
        "float32": 2 * ONE_PRODUCT
    }


def test_the_backward_pass_has_twice_the_count_of_the_forward_pass_and_recomputation_adds_one():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w) @ w)

    # the first product needs no gradient of x
    assert count(jax.grad(loss), W, X) == {"float32": (2 + 3) * ONE_PRODUCT}
    assert count(jax.grad(jax.checkpoint(loss)), W, X)["float32"] > 5 * ONE_PRODUCT


def test_a_map_over_devices_counts_all_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    mapped = jax.shard_map(
        lambda x, w: x @ w,
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec("data"),
    )
    assert count(mapped, X, W) == {"float32": ONE_PRODUCT}


def test_a_ragged_product_counts_each_row_once():
    sizes, w = jnp.array([1, 3]), jnp.ones((2, 8, 8))

    def product(w):
        return jax.lax.ragged_dot(X, w, sizes)

    assert count(product, w) == {"float32": ONE_PRODUCT}
    assert count(jax.grad(lambda w: product(w).sum()), w) == {"float32": 2 * ONE_PRODUCT}


def test_counts_are_separate_for_each_dtype_and_precision():
    half = X.astype(jnp.bfloat16)
    assert count(lambda x, w: x @ w, half, W.astype(jnp.bfloat16)) == {"bfloat16": ONE_PRODUCT}
    assert count(lambda x, w: jnp.matmul(x, w, precision="highest"), X, W) == {"float32 highest": ONE_PRODUCT}
