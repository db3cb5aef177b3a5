"""Train image classifiers and pairs of encoders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.extras.networks import CLIP, ConvNeXt, contrastive_loss
from jengine.extras.networks.resnet import ConvNorm
from jengine.extras.networks.vision_transformer import TextTransformer

IMAGES = np.random.RandomState(0).randn(4, 8, 8, 3).astype(np.float32)


def draw(model, *inputs):
    """Return random parameters."""
    structs = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]
    rng = np.random.RandomState(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.randn(*x.shape), x.dtype), structs)


def test_the_blocks_of_a_convnext_are_skipped_in_training_the_more_the_deeper_they_are():
    model = ConvNeXt(widths=(4,), depths=(3,), patch=2, num_classes=None, layer_scale=1.0, drop_path=0.999)
    params = draw(model, IMAGES)
    apply = jax.jit(
        lambda params, train: model.apply({"params": params}, IMAGES, train, rngs={"dropout": jax.random.key(1)}),
        static_argnums=1,
    )

    def find_change(block, train):
        zeros = jax.tree.map(jnp.zeros_like, params[block])
        return np.abs(apply(params, train) - apply({**params, block: zeros}, train)).max(axis=1)

    # in training the last block is skipped always, the first one never
    np.testing.assert_allclose(find_change("stage0_2", True), 0, atol=1e-6)
    assert find_change("stage0_2", False).max() > 0.01
    assert find_change("stage0_0", True).min() > 0.001


def test_a_batch_norm_keeps_its_statistics_but_in_training():
    model = ConvNorm(width=2, window=1)
    variables = dict(params=draw(model, IMAGES, False), batch_stats={"bn": dict(mean=jnp.zeros(2), var=jnp.ones(2))})
    kernel = variables["params"]["conv"]["kernel"][0, 0]
    apply = jax.jit(lambda train: model.apply(variables, IMAGES, train, mutable=["batch_stats"])[1], static_argnums=0)
    updated, kept = apply(True)["batch_stats"]["bn"], apply(False)["batch_stats"]
    np.testing.assert_allclose(updated["mean"], 0.1 * (IMAGES @ kernel).mean(axis=(0, 1, 2)), rtol=1e-3, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, kept, variables["batch_stats"])


def test_the_contrastive_loss_is_the_mean_of_both_directions():
    logits = np.random.RandomState(1).randn(3, 3)
    rows, columns = (-np.diag(x - np.log(np.exp(x).sum(axis=1, keepdims=True))) for x in (logits, logits.T))
    np.testing.assert_allclose(contrastive_loss(jnp.asarray(logits), {})["loss"], (rows + columns) / 2, rtol=1e-5)


SIZES = dict(width=8, depth=1, heads=2)


def test_the_features_of_pairs_have_length_one_and_give_the_logits():
    model = CLIP(image=dict(patch=4, **SIZES), text=dict(vocab_size=9, max_length=5, **SIZES), width=6)
    tokens = np.array([[1, 2, 8, 0, 0], [3, 8, 8, 8, 8]])
    variables = {"params": draw(model, IMAGES, tokens)}
    images = jax.jit(lambda: model.apply(variables, IMAGES, method="embed_image"))()
    texts = jax.jit(lambda: model.apply(variables, tokens, method="embed_text"))()
    np.testing.assert_allclose(jnp.linalg.norm(texts, axis=1), [1, 1], rtol=1e-5)
    logits = jax.jit(model.apply)(variables, IMAGES, tokens)
    np.testing.assert_allclose(logits, np.exp(variables["params"]["log_factor"]) * images @ texts.T, rtol=1e-4, atol=1e-5)


def test_a_text_ends_with_its_first_end_or_largest_token_and_has_a_largest_length():
    tokens = np.array([[1, 7, 2, 8, 0], [3, 8, 7, 8, 8]])
    changed = np.array([[1, 7, 5, 8, 3], [3, 8, 1, 2, 3]])
    for end, first_of_both in ((7, [True, False]), (None, [False, True])):
        model = TextTransformer(vocab_size=9, max_length=5, end_token=end, **SIZES)
        variables = {"params": draw(model, tokens)}
        before, after = (jax.jit(model.apply)(variables, x) for x in (tokens, changed))
        assert [bool(np.allclose(a, b, atol=1e-6)) for a, b in zip(before, after, strict=True)] == first_of_both
    with pytest.raises(ValueError, match="CLIP: texts must have at most max_length = 5 tokens, got 6"):
        model.apply(variables, np.zeros((1, 6), int))
