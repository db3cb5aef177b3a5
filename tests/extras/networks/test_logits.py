"""Test that a loss on chunks of logits is the loss on all of them, also on a mesh."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jengine.extras.networks import TransformerLM
from jengine.model import CrossEntropy, LinenModel

SMALL = dict(vocab_size=48, width=8, depth=1, heads=2, mlp_width=16, remat=False)
RNG = np.random.RandomState(0)
BATCH = dict(tokens=RNG.randint(0, 48, (4, 16)), targets=RNG.randint(-1, 48, (4, 16)))


def compile_gradients(mesh, **options):
    """Return the compiled loss with gradients, and its arguments."""
    loss = CrossEntropy("targets", label_smoothing=0.1, ignore_index=-1)
    model = LinenModel(TransformerLM(**SMALL, **options), loss, inputs="tokens")
    params, _ = jax.jit(model.init)(jax.random.key(0), BATCH)

    def mean_loss(params, batch):
        total, weight = model.loss(params, {}, batch, rng=jax.random.key(0), hyperparams={})[0]["loss"]
        return total / weight

    # Replicated parameters and a batch divided over `data`: the module constrains what is between.
    batch = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(jax.value_and_grad(mean_loss)).lower(params, batch).compile(), (params, batch)


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_have_the_gradients_of_all_logits_which_never_exist_at_once(tied):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    results, sizes = [], []
    for options in (dict(), dict(logits_chunk=4)):
        compiled, arguments = compile_gradients(mesh, tied=tied, **options)
        results.append(compiled(*arguments))
        # Half of the words, 24, are on a device: no other array has this size in an axis.
        shapes = re.findall(r"f32\[([\d,]*\b24)\]", compiled.as_text())
        sizes.append(max(np.prod([int(size) for size in shape.split(",")]) for shape in shapes))
    (loss, gradients), (chunked_loss, chunked_gradients) = results
    np.testing.assert_allclose(chunked_loss, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), chunked_gradients, gradients)
    assert sizes == [2 * 16 * 24, 2 * 4 * 24]


def test_chunks_of_capped_logits_have_the_gradients_of_all():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    results = []
    for options in (dict(), dict(logits_chunk=4), dict(logits_cap=None)):
        compiled, arguments = compile_gradients(mesh, **{"logits_cap": 0.1, **options})
        results.append(compiled(*arguments))
    (loss, gradients), (chunked_loss, chunked_gradients), (uncapped_loss, _) = results
    np.testing.assert_allclose(chunked_loss, loss, rtol=1e-6)
    assert abs(uncapped_loss - loss) > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), chunked_gradients, gradients)


def test_predictions_are_logits_and_a_chunk_must_divide_the_tokens():
    model = LinenModel(TransformerLM(**SMALL, logits_chunk=5), CrossEntropy("targets"), inputs="tokens")
    params, _ = jax.jit(model.init)(jax.random.key(0), BATCH)
    assert jax.eval_shape(model.predict, params, {}, BATCH).shape == (4, 16, 48)
    with pytest.raises(ValueError, match=r"`logits_chunk` must divide the number of tokens, 16, got 5"):
        jax.eval_shape(functools.partial(model.loss, hyperparams={}), params, {}, BATCH, rng=jax.random.key(0))
