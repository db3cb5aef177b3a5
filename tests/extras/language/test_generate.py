"""Test generation against the model without caches: what it generates is what teacher forcing predicts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jengine.config.errors import ConfigError
from jengine.extras.language import generate, sample
from jengine.extras.networks import TransformerLM, nnx_transformer, split_transformer
from tests.refusals import check_refusal

SIZES = dict(vocab_size=32, width=16, heads=4, kv_heads=2, mlp_width=32)
VARIANTS = {
    "llama": {},
    "gpt2": dict(positions="learned", max_length=16, norm="layer", mlp="plain", bias=True, tied=True),
    "window": dict(window=3, scan=False, rotary_scaling=dict(kind="linear", factor=2.0)),
}
PROMPTS = np.random.RandomState(0).randint(0, 32, (3, 5))
LENGTHS = np.array([5, 3, 1])


@pytest.fixture(scope="module", params=VARIANTS)
def trained(request):
    model = TransformerLM(**SIZES, **VARIANTS[request.param])
    params = jax.jit(model.init)(jax.random.key(1), PROMPTS)["params"]
    return model, jax.tree.map(lambda x: 3 * x, params)  # larger logits: no ties


def test_greedy_tokens_are_those_of_teacher_forcing_for_prompts_of_other_lengths(trained):
    model, params = trained
    tokens = generate(model, params, PROMPTS, 8, lengths=LENGTHS)
    assert tokens.dtype == jnp.int32
    sequences = np.zeros((3, 13), np.int32)  # what is behind a token does not change its logits
    for sequence, row, prompt, length in zip(sequences, tokens, PROMPTS, LENGTHS, strict=True):
        sequence[: length + 8] = [*prompt[:length], *row]
    logits = jax.jit(model.apply)({"params": params}, sequences)
    for row, length, found in zip(tokens, LENGTHS, logits, strict=True):
        np.testing.assert_array_equal(row, found[length - 1 : length + 7].argmax(axis=-1))


def test_a_stop_token_ends_and_fills_a_sequence(trained):
    model, params = trained
    free = np.asarray(generate(model, params, PROMPTS, 8))
    stop = int(free[0, 2])
    first = list(free[0]).index(stop)
    stopped = np.asarray(generate(model, params, PROMPTS, 8, stop_token=stop))
    assert list(stopped[0]) == [*free[0, : first + 1], *[stop] * (7 - first)]
    unused = next(token for token in range(32) if token not in free[0])
    several = np.asarray(generate(model, params, PROMPTS, 8, stop_token=[unused, stop]))
    assert list(several[0]) == [*free[0, : first + 1], *[unused] * (7 - first)]


def test_a_mesh_generates_the_same_tokens():
    model = TransformerLM(**SIZES)
    params = jax.tree.map(lambda x: 3 * x, jax.jit(model.init)(jax.random.key(1), PROMPTS)["params"])
    prompts = np.concatenate([PROMPTS, PROMPTS[:1]])
    expected = generate(model, params, prompts, 6)
    mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, jax.NamedSharding(mesh, PartitionSpec()))
        np.testing.assert_array_equal(generate(model, params, prompts, 6), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_nnx_module_has_the_parameters_logits_and_texts_of_the_linen_one(variant):
    module = nnx_transformer(nnx.Rngs(1), **SIZES, **VARIANTS[variant])
    linen, params = split_transformer(module)
    structs = jax.eval_shape(linen.init, jax.random.key(0), PROMPTS)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, structs)
    expected = jax.jit(linen.apply)({"params": params}, PROMPTS)
    np.testing.assert_allclose(nnx.jit(lambda module: module(PROMPTS))(module), expected, atol=1e-6)
    tokens = generate(module, None, PROMPTS, 6, lengths=LENGTHS)
    np.testing.assert_array_equal(tokens, generate(linen, params, PROMPTS, 6, lengths=LENGTHS))
    with pytest.raises(TypeError, match="must be from `nnx_transformer`, got Linear"):
        generate(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), None, PROMPTS, 6)
    with pytest.raises(ConfigError, match="`experts` must be None, got 4"):
        nnx_transformer(nnx.Rngs(1), **SIZES, experts=4)


def test_packed_sequences_are_predicted_as_if_each_had_a_row_of_its_own(trained):
    model, params = trained
    first, second = PROMPTS[0], PROMPTS[1, :3]
    apply = jax.jit(model.apply)
    packed = apply(
        {"params": params},
        np.concatenate([first, second])[None],
        segment_ids=np.array([[1] * 5 + [2] * 3]),
        positions=np.array([[0, 1, 2, 3, 4, 0, 1, 2]]),
    )[0]
    alone = [apply({"params": params}, tokens[None])[0] for tokens in (first, second)]
    np.testing.assert_allclose(packed, np.concatenate(alone), atol=2e-5)


def test_sampling_takes_tokens_in_proportion_to_their_probabilities():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.log(jnp.tile(probabilities, (20_000, 1)))

    def frequencies(**settings):
        return np.bincount(sample(logits, jax.random.key(0), **settings), minlength=4) / 20_000

    np.testing.assert_allclose(frequencies(), probabilities, atol=0.01)
    np.testing.assert_allclose(frequencies(top_k=2), [0.625, 0.375, 0, 0], atol=0.01)
    np.testing.assert_allclose(frequencies(top_p=0.6), [0.625, 0.375, 0, 0], atol=0.01)
    np.testing.assert_allclose(frequencies(top_p=0.3), [1, 0, 0, 0])
    squared = probabilities**2 / (probabilities**2).sum()
    np.testing.assert_allclose(frequencies(temperature=0.5), squared, atol=0.01)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(temperature=1.0), ["`temperature`", "`rng`"]),
        (dict(top_k=3), ["`temperature`"]),
        (dict(temperature=1.0, rng=0, top_k=33), ["`top_k`", "vocab_size", "32", "got 33"]),
        (dict(temperature=1.0, rng=0, top_p=0.0), ["`top_p`", "got 0.0"]),
        (dict(temperature=1.0, rng=0), ["`rng`", "jax.random.key", "(0)", "got 0"]),
        (dict(max_new_tokens=0), ["`max_new_tokens`", "at least 1", "got 0"]),
        (dict(stop_token=32), ["`stop_token`", "31", "vocab_size", "32", "got 32"]),
        (dict(lengths=[5, 3, 0]), ["`lengths`", "got [5, 3, 0]"]),
        (dict(lengths=[5, 3]), ["`lengths`", "[3]", "got int64[2]"]),
        (dict(prompts=[[1, 2], [3]]), ["`prompts`", "`lengths`"]),
        (dict(prompts=[[1, 32]]), ["`prompts`", "31", "vocab_size", "32", "got 1 to 32"]),
        (dict(prompts=[[1.0, 2.0]]), ["`prompts`", "[B, T]", "got float64[1, 2]"]),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, words):
    check_refusal(lambda: generate(TransformerLM(**SIZES), {}, **{"prompts": PROMPTS, "max_new_tokens": 4, **settings}), ValueError, *words)
