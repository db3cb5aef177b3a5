"""Compute the losses of contrastive learning, DenseCL and SwAV, as pure functions for the loss of a model."""

from collections.abc import Sequence
from typing import NamedTuple

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


class SwAVQueue(NamedTuple):
    """Earlier embeddings, the newest first. Part of the training state from the start, so that nothing is retraced."""

    rows: jax.Array  # float32[crops for assignment, length, D], 0 where nothing came yet
    active: jax.Array  # bool[], whether it takes embeddings
    use_queue: jax.Array  # bool[], whether it is full, so that assignments are made over it too


def empty_queue(crops: int, length: int, feat_dim: int) -> SwAVQueue:
    """A queue that is not active.

    Args:
      crops: views that get assignments, each with rows of its own.
      length: rows of each.
      feat_dim: size of an embedding.
    """
    rows = jnp.zeros((crops, length, feat_dim), jnp.float32)
    return SwAVQueue(rows, active=jnp.zeros((), jnp.bool_), use_queue=jnp.zeros((), jnp.bool_))


def sinkhorn(scores: jax.Array, real: jax.Array | None = None, epsilon: float = 0.05, iterations: int = 3) -> jax.Array:
    """Assignments to prototypes that use every prototype equally (Sinkhorn and Knopp).

    Args:
      scores: float[N, K], how well each of N embeddings fits each of K prototypes.
      real: bool[N], the rows that count; None: all.
      epsilon: the smaller, the harder the assignments.
      iterations: of normalising prototypes and rows in turn.

    Returns:
      float32[N, K]; each row that counts sums to 1, the others are 0.
    """
    scores = scores.astype(jnp.float32) / epsilon
    if real is not None:
        scores = jnp.where(real[:, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max())
    for _ in range(iterations):
        weights = weights / jnp.maximum(weights.sum(axis=0, keepdims=True), 1e-30)
        weights = weights / jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
    return weights


def swav_loss(
    embeddings: jax.Array,
    prototypes: jax.Array,
    queue: SwAVQueue | None = None,
    *,
    crops_for_assign: Sequence[int] = (0, 1),
    temperature: float = 0.1,
    epsilon: float = 0.05,
    iterations: int = 3,
) -> tuple[jax.Array, SwAVQueue | None]:
    """The loss of predicting the assignment of one view from the others.

    Args:
      embeddings: float[V, B, D], L2-normalised embeddings of V views of B images.
      prototypes: float[D, K], the kernel of the layer of prototypes; its columns are normalised here.
      queue: `model_state.get('queue')`, what `SwAVHook` lends; None without a queue.
      crops_for_assign: the views that get assignments.
      temperature: of the predictions.
      epsilon, iterations: see `sinkhorn`.

    Returns:
      float32[], and the queue with the embeddings of this batch, for the new model state.
    """
    prototypes = prototypes / jnp.maximum(jnp.linalg.norm(prototypes, axis=0, keepdims=True), 1e-12)
    scores = (embeddings @ prototypes).astype(jnp.float32)
    views, batch, _ = scores.shape
    loss = jnp.zeros((), jnp.float32)
    rows = []
    use_queue = jnp.zeros((), jnp.bool_) if queue is None else queue.use_queue
    for i, crop in enumerate(crops_for_assign):
        candidates, real = scores[crop], None
        if queue is not None:
            use_queue = use_queue | (queue.active & jnp.any(queue.rows[i, -1] != 0))
            candidates = jnp.concatenate([queue.rows[i] @ prototypes, candidates])
            real = jnp.arange(len(candidates)) >= jnp.where(use_queue, 0, len(queue.rows[i]))
            rows.append(jnp.where(queue.active, push(queue.rows[i], embeddings[crop]), queue.rows[i]))
        assignment = sinkhorn(jax.lax.stop_gradient(candidates), real, epsilon, iterations)[-batch:]
        others = [view for view in range(views) if view != crop]
        for view in others:
            predicted = jax.nn.log_softmax(scores[view] / temperature)
            loss -= jnp.sum(assignment * predicted, axis=1).mean() / (len(others) * len(crops_for_assign))
    return loss, None if queue is None else SwAVQueue(jnp.stack(rows), queue.active, use_queue)
