"""Contrastive losses over a queue of negatives, and what DenseCL adds to them: pure functions for a model's loss."""

import jax
import jax.numpy as jnp


def info_nce(query: jax.Array, positive: jax.Array, negatives: jax.Array, temperature: float = 0.2) -> jax.Array:
    """The contrastive loss of MoCo (He et al., 2020, arXiv:1911.05722).

    Args:
      query: float[..., D], L2-normalised.
      positive: float[..., D], the key that each query should find, L2-normalised.
      negatives: float[N, D], the keys that it should not find.
      temperature: divides the similarities.

    Returns:
      float32[...], the cross entropy of finding the positive among all keys.
    """
    similar = jnp.sum(query * positive, axis=-1, keepdims=True)
    logits = jnp.concatenate([similar, query @ negatives.T], axis=-1).astype(jnp.float32) / temperature
    return jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]


def dense_match(features: jax.Array, key_features: jax.Array, keys: jax.Array) -> jax.Array:
    """The key of each place: that of the place in the other view whose features are most alike.

    Source: Wang et al., Dense Contrastive Learning, 2021, arXiv:2011.09157, section 3.3.

    Args:
      features: float[B, S, C], the backbone's features at the S places of one view.
      key_features: float[B, S, C], those of the other view.
      keys: float[B, S, D], the dense keys of the other view.

    Returns:
      float[B, S, D], one key for each place of the first view.
    """
    norm = jnp.linalg.norm(key_features, axis=-1, keepdims=True)
    likeness = jnp.einsum("bsc,btc->bst", features, key_features / jnp.maximum(norm, 1e-12))
    return jnp.take_along_axis(keys, likeness.argmax(axis=-1)[..., None], axis=1)


def densecl_losses(loss_single: jax.Array, loss_dense: jax.Array, loss_lambda: jax.Array) -> dict[str, jax.Array]:
    """The two losses of DenseCL in their proportion.

    Args:
      loss_single: float[...], the loss over whole images.
      loss_dense: float[...], the loss over places.
      loss_lambda: float32[], the part of the dense loss: `hyperparams['loss_lambda']`, which `DenseCLHook` owns.
    """
    return {"loss_single": loss_single * (1 - loss_lambda), "loss_dense": loss_dense * loss_lambda}


def push(queue: jax.Array, rows: jax.Array) -> jax.Array:
    """A queue with new rows at its front; as many fall off its end.

    Args:
      queue: float[N, D].
      rows: float[B, D], at most N; no gradient flows through them.
    """
    rows = jax.lax.stop_gradient(rows).astype(queue.dtype)
    return jnp.concatenate([rows, queue[: len(queue) - len(rows)]])
