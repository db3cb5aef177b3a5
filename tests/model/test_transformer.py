"""Test the decoder-only transformer, and the constraint of its shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jengine import paths
from jengine.model import TransformerLM
from jengine.model.constrain import constrain
from jengine.model.transformer import rotate

SMALL = dict(vocab_size=11, width=8, depth=3, heads=2, mlp_width=12)
TOKENS = np.random.RandomState(0).randint(0, 11, (2, 6))


@pytest.fixture(scope="module")
def params():
    return jax.jit(TransformerLM(**SMALL).init)(jax.random.key(0), TOKENS)["params"]


def test_the_parameters_of_the_blocks_are_stacked_and_differ(params):
    shapes = {path: leaf.shape for path, leaf in paths.flatten(params).items()}
    assert shapes == {
        "embed.embedding": (11, 8),
        "layers.attn_norm.scale": (3, 8),
        "layers.attn.query.kernel": (3, 8, 2, 4),
        "layers.attn.key.kernel": (3, 8, 2, 4),
        "layers.attn.value.kernel": (3, 8, 2, 4),
        "layers.attn.out.kernel": (3, 2, 4, 8),
        "layers.mlp_norm.scale": (3, 8),
        "layers.mlp.gate.kernel": (3, 8, 12),
        "layers.mlp.up.kernel": (3, 8, 12),
        "layers.mlp.down.kernel": (3, 12, 8),
        "norm.scale": (8,),
        "head.kernel": (8, 11),
    }
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    assert float(jnp.abs(kernel[0] - kernel[1]).max()) > 0.1


def test_logits_depend_only_on_earlier_tokens(params):
    model = TransformerLM(**SMALL)
    apply = jax.jit(model.apply)
    logits = apply({"params": params}, TOKENS)
    changed = TOKENS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    difference = np.abs(apply({"params": params}, changed) - logits).max(axis=(0, 2))
    assert logits.shape == (2, 6, 11)
    assert difference[:4].max() == 0
    assert difference[4:].min() > 1e-3


def test_remat_changes_what_is_kept_for_the_backward_pass_but_no_gradient(params):
    def loss(params, remat):
        return jnp.square(TransformerLM(**SMALL, remat=remat).apply({"params": params}, TOKENS)).sum()

    products = "dots_with_no_batch_dims_saveable"
    plain, *others = (
        jax.jit(jax.grad(functools.partial(loss, remat=remat)))(params) for remat in (False, True, products)
    )
    for gradients in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, gradients)

    def count_kept(remat):
        backward = jax.eval_shape(lambda params: jax.vjp(functools.partial(loss, remat=remat), params)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    assert count_kept(True) < count_kept(False) / 2
    assert count_kept(True) == count_kept("nothing_saveable") < count_kept(products) < count_kept(False)


def test_scores_depend_on_the_distance_of_rotated_queries_and_keys():
    x = jnp.broadcast_to(jnp.arange(1.0, 9.0), (1, 6, 1, 8))
    rotated = rotate(x)[0, :, 0]
    scores = rotated @ rotated.T
    np.testing.assert_allclose(np.diag(scores, 1), np.full(5, scores[0, 1]), rtol=1e-5)
    np.testing.assert_allclose(np.diag(scores, 3), np.full(3, scores[0, 3]), rtol=1e-5)
    assert abs(float(scores[0, 1] - scores[0, 3])) > 1
    assert rotate(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"`width` must be a multiple of 2 \* heads = 6, got 8"):
        TransformerLM(**{**SMALL, "heads": 3}).init(jax.random.key(0), TOKENS)


def test_a_constraint_uses_the_axes_of_the_mesh_that_divide_and_none_without_a_mesh():
    x = jnp.ones((8, 6))
    assert constrain(x, ("data", "fsdp")) is x
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def spec(*axes):
        def constrained(x):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return constrain(x, *axes)

        replicated = jax.NamedSharding(mesh, PartitionSpec())
        return jax.jit(constrained)(jax.device_put(x, replicated)).sharding.spec

    assert spec(("data", "fsdp"), "tensor") == PartitionSpec(("data", "fsdp"), "tensor")
    assert spec(None, ("data", "fsdp")) == PartitionSpec()  # 4 devices do not divide 6
    assert spec("model") == PartitionSpec()
