"""Text generation with a cache of keys and values."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from jengine.extras.networks.transformer import TransformerLM
from jengine.extras.networks.transformer_nnx import split_transformer
from jengine.model.autocast import cast_floating, current_dtype
from jengine.model.model import Params

if TYPE_CHECKING:
    from flax import nnx


def generate(
    model: "TransformerLM | nnx.Module",
    params: Params | None,
    prompts: jax.Array | np.ndarray,
    max_new_tokens: int,
    *,
    lengths: jax.Array | np.ndarray | None = None,
    rng: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | Sequence[int] | None = None,
) -> jax.Array:
    """Continue token sequences, each token by the model's distribution after all before it.

    >>> model = TransformerLM(vocab_size=32, width=8, heads=2, mlp_width=16)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 4), int))["params"]
    >>> generate(
    ...     model, params, jnp.array([[1, 2, 3], [4, 5, 0]]), 5, lengths=jnp.array([3, 2])
    ... ).shape
    (2, 5)

    Under a mesh (`jax.set_mesh`), examples and heads are sharded as in training. The compiled
    programs are reused for equal shapes and settings.

    Args:
      model: the module, whose `cache_length` is set here; or an `nnx_transformer`.
      params: the parameters; None for those of an NNX module.
      prompts: int[B, T], each with at least one token.
      max_new_tokens: number of tokens to add to each.
      lengths: int[B], the tokens in each prompt, which others pad on the right; None for T.
      rng: key for sampling, which temperature 0 does not use.
      temperature: divides the logits; 0 takes the most probable token.
      top_k: sample from so many most probable tokens; None for all.
      top_p: sample from the fewest most probable tokens whose probabilities add up to it; None for
        all.
      stop_token: token that ends a sequence, and fills it up; or several, of which the first fills
        up; None for no such token.

    Returns:
      int32[B, max_new_tokens], without the prompts.

    Raises:
      ValueError: a setting out of range, prompts that are no int[B, T] of the model's tokens, or
        sampling without a key.

    Sources: Fan et al. 2018 (top-k sampling); Holtzman et al. 2020 (top-p sampling).
    """
    if not isinstance(model, TransformerLM):
        model, own = split_transformer(model)
        params = own if params is None else params
    stop_tokens = tuple(
        np.atleast_1d([] if stop_token is None else stop_token).astype(int).tolist()
    )
    prompts, counts = _check_prompts(model, prompts, lengths, stop_tokens)
    if max_new_tokens < 1:
        raise ValueError(f"generate: `max_new_tokens` must be at least 1, got {max_new_tokens}")
    if temperature < 0 or (temperature > 0 and rng is None):
        raise ValueError(
            f"generate: `temperature` must be 0, or positive with an `rng`, got {temperature} and "
            f"{rng}"
        )
    check_sampling(model.vocab_size, temperature, top_k, top_p)
    if rng is not None and not isinstance(rng, jax.Array):
        raise ValueError(f"generate: `rng` must be a key, such as jax.random.key(0), got {rng!r}")
    total = prompts.shape[1] + max_new_tokens
    check_length(model, total)
    # What a cached call needs no gradient for: rematerialization only adds to its program.
    cached = model.clone(cache_length=total, remat=False)
    if cached.rotary_scaling is not None:
        # the module is static: hashable
        cached = cached.clone(rotary_scaling=FrozenDict(cached.rotary_scaling))
    key = jax.random.key(0) if rng is None else rng
    # of a precision policy; `autocast` would cast the cache back
    if (dtype := current_dtype()) is not None:
        params = cast_floating(params, dtype)
    return _generate(
        cached, max_new_tokens, temperature, top_k, top_p, stop_tokens, params, prompts, counts, key
    )


def check_sampling(
    vocab_size: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Raise ValueError for settings of `generate` that do not choose what to sample from."""
    if not temperature and (top_k is not None or top_p is not None):
        raise ValueError(
            "generate: `top_k` and `top_p` need a positive `temperature`: they choose what to "
            "sample from"
        )
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(
            f"generate: `top_k` must be from 1 to vocab_size = {vocab_size}, got {top_k}"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"generate: `top_p` must be in (0, 1], got {top_p}")


def check_length(model: TransformerLM, total: int) -> None:
    """Raise ValueError if the model has learned fewer than `total` positions."""
    if model.positions == "learned" and model.max_length is not None and total > model.max_length:
        raise ValueError(
            f"generate: prompts and new tokens must fit into {model.max_length} positions, got "
            f"{total}"
        )


def _check_prompts(
    model: TransformerLM,
    prompts: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray | None,
    stop_tokens: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Return prompts int32[B, T] and their lengths int32[B].

    Values are checked unless they are traced.
    """
    try:
        found = prompts if isinstance(prompts, jax.Array) else np.asarray(prompts)
    except ValueError:  # of NumPy, for lists of several lengths
        raise ValueError(
            "generate: `prompts` must have one length, padded on the right, with `lengths`"
        ) from None
    if found.ndim != 2 or not found.shape[1] or not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(
            "generate: `prompts` must be int[B, T] with at least one token, got "
            f"{found.dtype}{list(found.shape)}"
        )
    batch, length = found.shape
    counts = np.full(batch, length) if lengths is None else lengths
    counts = counts if isinstance(counts, jax.Array) else np.asarray(counts)
    if counts.shape != (batch,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"generate: `lengths` must be int[{batch}], got {counts.dtype}{list(counts.shape)}"
        )
    if not isinstance(counts, jax.core.Tracer) and ((counts < 1) | (counts > length)).any():
        raise ValueError(
            f"generate: `lengths` must be from 1 to {length}, got {np.asarray(counts).tolist()}"
        )
    if not isinstance(found, jax.core.Tracer) and ((found < 0) | (found >= model.vocab_size)).any():
        raise ValueError(
            f"generate: `prompts` must be tokens from 0 to {model.vocab_size - 1}, as vocab_size "
            f"= {model.vocab_size}, got {int(found.min())} to {int(found.max())}"
        )
    for stop_token in stop_tokens:
        if not 0 <= stop_token < model.vocab_size:
            raise ValueError(
                f"generate: `stop_token` must be from 0 to {model.vocab_size - 1}, as vocab_size = "
                f"{model.vocab_size}, got {stop_token}"
            )
    return jnp.asarray(found, jnp.int32), jnp.asarray(counts, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _generate(
    model: TransformerLM,
    count: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_tokens: tuple[int, ...],
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    rng: jax.Array,
) -> jax.Array:
    def choose(logits: jax.Array, step: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = sample(logits, jax.random.fold_in(rng, step), temperature, top_k, top_p)
        # Rows that have ended repeat the stop token: the number of steps is fixed, and rows end at
        # different ones.
        if not stop_tokens:
            return token, done
        token = jnp.where(done, stop_tokens[0], token)
        return token, done | jnp.isin(token, jnp.array(stop_tokens))

    def add_token(carry: tuple[Any, ...], step: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
        cache, token, done = carry
        # From each prompt's own length: shorter prompts are padded on the right, and their next
        # token follows the last real one.
        positions = (lengths + step - 1)[:, None]
        logits, updated = model.apply(
            {"params": params, "cache": cache},
            token[:, None],
            positions=positions,
            mutable=["cache"],
        )
        token, done = choose(logits[:, 0], step, done)
        return (updated["cache"], token, done), token

    logits, updated = model.apply({"params": params}, prompts, mutable=["cache"])
    # The logits after the last real token, not those after the padding.
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    # The first token comes out of the prompt's own pass, so that the scan has one step less.
    first, done = choose(last, jnp.int32(0), jnp.zeros(prompts.shape[0], bool))
    _, others = jax.lax.scan(add_token, (updated["cache"], first, done), jnp.arange(1, count))
    return jnp.concatenate([first[:, None], others.T], axis=1)


def sample(
    logits: jax.Array,
    rng: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """Return tokens, int32[B], drawn from logits f[B, V]; see `generate` for the settings."""
    if not temperature:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / temperature
    if top_k is not None:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
        # the first one is always in
        least = jnp.where(before < top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(rng, logits).astype(jnp.int32)
