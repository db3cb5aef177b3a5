import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jengine.train import count_flops


def counted(fn, *args):
    return count_flops(jax.jit(fn).trace(*args).jaxpr)


X, W = jnp.ones((4, 8)), jnp.ones((8, 8))
ONCE = 2 * 4 * 8 * 8  # a multiplication and an addition for each of 4 x 8 sums of 8


def test_a_product_counts_a_multiplication_and_an_addition_a_term():
    assert counted(lambda x, w: jnp.tanh(x @ w) + 1, X, W) == {"float32": ONCE}
    assert counted(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), jnp.ones((3, 4, 8)), jnp.ones((3, 8, 8))) == {
        "float32": 3 * ONCE
    }


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_convolution_and_its_gradients_count_as_xla_counts_them(strides, groups, dilation):
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
        traced = jax.jit(fn).trace(x, kernel, y)
        assert count_flops(traced.jaxpr) == {"float32": traced.lower().cost_analysis()["flops"]}


def test_every_turn_of_a_scan_counts_and_the_longest_branch():
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]

    assert counted(scanned, X, W) == {"float32": 5 * ONCE}
    # of a loop whose turns are not known, one
    assert counted(lambda x, w, n: jax.lax.fori_loop(0, n, lambda _, x: x @ w, x), X, W, 5) == {"float32": ONCE}
    assert counted(lambda x, w: jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x), X, W) == {
        "float32": 2 * ONCE
    }


def test_the_backward_pass_counts_twice_the_forward_pass_and_recomputation_once_more():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w) @ w)

    # the first product needs no gradient of x
    assert counted(jax.grad(loss), W, X) == {"float32": (2 + 3) * ONCE}
    assert counted(jax.grad(jax.checkpoint(loss)), W, X)["float32"] > 5 * ONCE


def test_what_is_mapped_over_devices_counts_on_each():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    mapped = jax.shard_map(
        lambda x, w: x @ w,
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec("data"),
    )
    assert counted(mapped, X, W) == {"float32": ONCE}


def test_a_product_of_groups_counts_the_rows_of_each():
    sizes, w = jnp.array([1, 3]), jnp.ones((2, 8, 8))

    def product(w):
        return jax.lax.ragged_dot(X, w, sizes)

    assert counted(product, w) == {"float32": ONCE}
    assert counted(jax.grad(lambda w: product(w).sum()), w) == {"float32": 2 * ONCE}


def test_products_are_told_apart_by_what_is_multiplied():
    half = X.astype(jnp.bfloat16)
    assert counted(lambda x, w: x @ w, half, W.astype(jnp.bfloat16)) == {"bfloat16": ONCE}
    assert counted(lambda x, w: jnp.matmul(x, w, precision="highest"), X, W) == {"float32 highest": ONCE}
