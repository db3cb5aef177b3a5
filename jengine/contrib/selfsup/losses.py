"""Compute the losses of contrastive learning, DenseCL and SwAV, as pure functions for the loss of a model."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jengine.sharding import gather_replicas, select_replica

# --- Contrastive learning ---


def info_nce(query: jax.Array, positive: jax.Array, negatives: jax.Array, temperature: float = 0.2) -> jax.Array:
    """Compute the contrastive loss of MoCo (He et al., 2020, arXiv:1911.05722).

    Args:
      query: float[..., D], L2-normalized.
      positive: float[..., D], the matching key of each query, L2-normalized.
      negatives: float[N, D], keys that match no query.
      temperature: divides the similarities.

    Returns:
      float32[...], the cross entropy of the positive among all keys.
    """
    similarity = jnp.sum(query * positive, axis=-1, keepdims=True)
    logits = jnp.concatenate([similarity, query @ negatives.T], axis=-1).astype(jnp.float32) / temperature
    return jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]


def push(queue: jax.Array, embeddings: jax.Array) -> jax.Array:
    """Add embeddings at the front of a queue, and drop as many at its end.

    Args:
      queue: float[N, D].
      embeddings: float[B, D] with B <= N; no gradient flows through them.

    Returns:
      float[N, D].
    """
    embeddings = jax.lax.stop_gradient(embeddings).astype(queue.dtype)
    return jnp.concatenate([embeddings, queue[: len(queue) - len(embeddings)]])


# --- DenseCL ---


def dense_match(features: jax.Array, key_features: jax.Array, keys: jax.Array) -> jax.Array:
    """Return for each position of one view the key of the most similar position of the other view.

    Source: Wang et al., Dense Contrastive Learning, 2021, arXiv:2011.09157, section 3.3.

    Args:
      features: float[B, S, C], backbone features at the S positions of one view.
      key_features: float[B, S, C], backbone features of the other view.
      keys: float[B, S, D], dense keys of the other view.

    Returns:
      float[B, S, D].
    """
    norm = jnp.linalg.norm(key_features, axis=-1, keepdims=True)
    similarity = jnp.einsum("bsc,btc->bst", features, key_features / jnp.maximum(norm, 1e-12))
    return jnp.take_along_axis(keys, similarity.argmax(axis=-1)[..., None], axis=1)


def densecl_losses(loss_single: jax.Array, loss_dense: jax.Array, loss_lambda: jax.Array) -> dict[str, jax.Array]:
    """Weight the two losses of DenseCL.

    Args:
      loss_single: float[...], the loss over whole images.
      loss_dense: float[...], the loss over positions.
      loss_lambda: float32[], weight of the dense loss: `hyperparams['loss_lambda']`, which `DenseCLHook` sets.
    """
    return {"loss_single": loss_single * (1 - loss_lambda), "loss_dense": loss_dense * loss_lambda}


# --- SwAV ---


class SwAVQueue(NamedTuple):
    """Hold earlier embeddings, the newest first. In the training state from the start, to avoid recompilation."""

    rows: jax.Array  # float32[crops for assignment, length, D], 0 where not filled yet
    active: jax.Array  # bool[], whether embeddings are added
    use_queue: jax.Array  # bool[], whether the queue is full, so that assignments use it


def empty_queue(crops: int, length: int, feat_dim: int) -> SwAVQueue:
    """Return an inactive queue.

    Args:
      crops: number of views with assignments, each with a queue.
      length: number of embeddings per view.
      feat_dim: size of an embedding.
    """
    rows = jnp.zeros((crops, length, feat_dim), jnp.float32)
    return SwAVQueue(rows, active=jnp.zeros((), jnp.bool_), use_queue=jnp.zeros((), jnp.bool_))


def sinkhorn(scores: jax.Array, mask: jax.Array | None = None, epsilon: float = 0.05, iterations: int = 3) -> jax.Array:
    """Assign embeddings to prototypes so that all prototypes are used equally, by the Sinkhorn-Knopp algorithm.

    Args:
      scores: float[N, K], similarity of N embeddings and K prototypes.
      mask: bool[N], the embeddings to assign; None for all.
      epsilon: entropy regularization; a smaller value gives harder assignments.
      iterations: number of normalizations over prototypes and embeddings.

    Returns:
      float32[N, K]; rows sum to 1, or are 0 where `mask` is False.
    """
    scores = scores.astype(jnp.float32) / epsilon
    if mask is not None:
        scores = jnp.where(mask[:, None], scores, -jnp.inf)
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
    """Compute the loss of predicting the assignments of one view from the other views.

    Source: Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, 2020,
    arXiv:2006.09882.

    Under `DataParallel` the assignments are those of the whole batch, and the queue has its embeddings in the same
    order on all replicas: each replica gathers the embeddings of the others.

    Args:
      embeddings: float[V, B, D], L2-normalized embeddings of V views of B images.
      prototypes: float[D, K], the kernel of the prototype layer; its columns are normalized here.
      queue: `model_state.get('queue')`, which `SwAVHook` adds; None without a queue.
      crops_for_assign: the views to compute assignments for.
      temperature: temperature of the predictions.
      epsilon, iterations: see `sinkhorn`.

    Returns:
      float32[], and the queue with the embeddings of this batch, for the new model state.
    """
    prototypes = prototypes / jnp.maximum(jnp.linalg.norm(prototypes, axis=0, keepdims=True), 1e-12)
    scores = (embeddings @ prototypes).astype(jnp.float32)
    num_views, batch_size, _ = scores.shape
    loss = jnp.zeros((), jnp.float32)
    queued = []
    use_queue = jnp.zeros((), jnp.bool_) if queue is None else queue.use_queue
    for i, crop in enumerate(crops_for_assign):
        mask, newest = None, gather_replicas(jax.lax.stop_gradient(embeddings[crop]))
        candidates = gather_replicas(jax.lax.stop_gradient(scores[crop]))
        if queue is not None:
            use_queue = use_queue | (queue.active & jnp.any(queue.rows[i, -1] != 0))
            candidates = jnp.concatenate([queue.rows[i] @ prototypes, candidates])
            mask = jnp.arange(len(candidates)) >= jnp.where(use_queue, 0, len(queue.rows[i]))
            queued.append(jnp.where(queue.active, push(queue.rows[i], newest), queue.rows[i]))
        assigned = sinkhorn(jax.lax.stop_gradient(candidates), mask, epsilon, iterations)[-len(newest) :]
        assignments = select_replica(assigned, batch_size)
        others = [view for view in range(num_views) if view != crop]
        for view in others:
            log_probs = jax.nn.log_softmax(scores[view] / temperature)
            loss -= jnp.sum(assignments * log_probs, axis=1).mean() / (len(others) * len(crops_for_assign))
    return loss, None if queue is None else SwAVQueue(jnp.stack(queued), queue.active, use_queue)
