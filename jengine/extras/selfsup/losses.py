"""Contrastive, DenseCL and SwAV losses, as pure functions for a model's loss."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jengine.parallel.replica_axis import gather_replicas, select_replica

# --- Contrastive learning ---


def info_nce(
    query: jax.Array, positive: jax.Array, negatives: jax.Array, temperature: float = 0.2
) -> jax.Array:
    """Compute MoCo's contrastive loss (He et al., 2020, arXiv:1911.05722).

    >>> query = jnp.array([[1.0, 0.0]])
    >>> loss = info_nce(query, query, negatives=jnp.array([[0.0, 1.0]]), temperature=1.0)
    >>> f"{loss[0]:.3f}"
    '0.313'

    Args:
      query: float[..., D], L2-normalized.
      positive: float[..., D], the matching keys, L2-normalized.
      negatives: float[N, D], keys that match no query.
      temperature: divides the similarities.

    Returns:
      float32[...], cross entropy of the positive among all keys.
    """
    similarity = jnp.sum(query * positive, axis=-1, keepdims=True)
    logits = (
        jnp.concatenate([similarity, query @ negatives.T], axis=-1).astype(jnp.float32)
        / temperature
    )
    return jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]


def push(queue: jax.Array, embeddings: jax.Array) -> jax.Array:
    """Add embeddings float[B, D] at the front of a queue float[N, D], and drop as many at the end.

    No gradient flows through the embeddings.

    >>> push(jnp.array([[3.0], [2.0], [1.0]]), jnp.array([[4.0]])).ravel().tolist()
    [4.0, 3.0, 2.0]
    """
    embeddings = jax.lax.stop_gradient(embeddings).astype(queue.dtype)
    return jnp.concatenate([embeddings, queue[: len(queue) - len(embeddings)]])


# --- DenseCL ---


def dense_match(features: jax.Array, key_features: jax.Array, keys: jax.Array) -> jax.Array:
    """Return for each position in one view the key for the most similar position in the other view.

    Source: Wang et al., Dense Contrastive Learning, 2021, arXiv:2011.09157, section 3.3.

    Args:
      features: float[B, S, C], backbone features at S positions in one view.
      key_features: float[B, S, C], backbone features in the other view.
      keys: float[B, S, D], dense keys in the other view.

    Returns:
      float[B, S, D].
    """
    norm = jnp.linalg.norm(key_features, axis=-1, keepdims=True)
    similarity = jnp.einsum("bsc,btc->bst", features, key_features / jnp.maximum(norm, 1e-12))
    return jnp.take_along_axis(keys, similarity.argmax(axis=-1)[..., None], axis=1)


def densecl_losses(
    loss_single: jax.Array, loss_dense: jax.Array, loss_lambda: jax.Array
) -> dict[str, jax.Array]:
    """Weight DenseCL's two losses.

    >>> densecl_losses(2.0, 4.0, 0.5)
    {'loss_single': 1.0, 'loss_dense': 2.0}

    Args:
      loss_single: float[...], the loss over whole images.
      loss_dense: float[...], the loss over positions.
      loss_lambda: float32[], dense loss weight: `hyperparams['loss_lambda']`, which `DenseCLHook`
        sets.
    """
    return {"loss_single": loss_single * (1 - loss_lambda), "loss_dense": loss_dense * loss_lambda}


# --- SwAV ---


class SwAVQueue(NamedTuple):
    """Earlier embeddings, the newest first.

    In the training state from the start, to avoid recompilation.
    """

    rows: jax.Array  # float32[crops for assignment, length, D], 0 where not filled yet
    active: jax.Array  # bool[], whether embeddings are added
    use_queue: jax.Array  # bool[], whether the queue is full, so that assignments use it


def empty_queue(crops: int, length: int, feat_dim: int) -> SwAVQueue:
    """Return an inactive queue with `length` embeddings of size `feat_dim` for each view with
    assignments.

    >>> empty_queue(crops=2, length=64, feat_dim=8).rows.shape
    (2, 64, 8)
    """
    rows = jnp.zeros((crops, length, feat_dim), jnp.float32)
    return SwAVQueue(rows, active=jnp.zeros((), jnp.bool_), use_queue=jnp.zeros((), jnp.bool_))


def sinkhorn(
    scores: jax.Array, mask: jax.Array | None = None, epsilon: float = 0.05, iterations: int = 3
) -> jax.Array:
    """Assign embeddings to prototypes so that all prototypes are used equally, by the
    Sinkhorn-Knopp algorithm.

    >>> sinkhorn(jnp.array([[1.0, 0.0], [0.9, 0.0]])).argmax(axis=1).tolist()
    [0, 1]

    Args:
      scores: float[N, K], similarity between N embeddings and K prototypes.
      mask: bool[N], the embeddings to assign; None for all.
      epsilon: entropy regularization; a smaller value gives harder assignments.
      iterations: number of normalizations over prototypes and embeddings.

    Returns:
      float32[N, K]; rows sum to 1, or are 0 where `mask` is False.
    """
    scores = scores.astype(jnp.float32) / epsilon
    if mask is not None:
        # a weight of 0, without changing shapes
        scores = jnp.where(mask[:, None], scores, -jnp.inf)
    # the maximum cancels in the normalization, and avoids overflow
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
    """Compute the SwAV loss, which predicts the assignments in one view from the other views.

    Source: Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster
    Assignments, 2020, arXiv:2006.09882.

    Under `DataParallel` each replica gathers the other replicas' embeddings: the assignments are
    for the whole batch, and all replicas have the same queue.

    Args:
      embeddings: float[V, B, D], L2-normalized embeddings for V views of B images.
      prototypes: float[D, K], kernel of the prototype layer; the columns are normalized here.
      queue: `model_state.get('queue')`, which `SwAVHook` adds; None without a queue.
      crops_for_assign: the views to compute assignments for.
      temperature: divides the scores in the predictions.
      epsilon, iterations: see `sinkhorn`.

    Returns:
      float32[], and the queue with this batch's embeddings, for the new model state.
    """
    prototypes = prototypes / jnp.maximum(jnp.linalg.norm(prototypes, axis=0, keepdims=True), 1e-12)
    scores = (embeddings @ prototypes).astype(jnp.float32)
    num_views, batch_size, _ = scores.shape
    loss = jnp.zeros((), jnp.float32)
    queued = []
    use_queue = jnp.zeros((), jnp.bool_) if queue is None else queue.use_queue
    for i, crop in enumerate(crops_for_assign):
        mask = None
        newest = gather_replicas(jax.lax.stop_gradient(embeddings[crop]))
        candidates = gather_replicas(jax.lax.stop_gradient(scores[crop]))
        if queue is not None:
            use_queue = use_queue | (queue.active & jnp.any(queue.rows[i, -1] != 0))
            candidates = jnp.concatenate([queue.rows[i] @ prototypes, candidates])
            mask = jnp.arange(len(candidates)) >= jnp.where(use_queue, 0, len(queue.rows[i]))
            queued.append(jnp.where(queue.active, push(queue.rows[i], newest), queue.rows[i]))
        assigned = sinkhorn(jax.lax.stop_gradient(candidates), mask, epsilon, iterations)[
            -len(newest) :
        ]
        assignments = select_replica(assigned, batch_size)
        # a view never predicts its own assignment
        others = [view for view in range(num_views) if view != crop]
        for view in others:
            log_probs = jax.nn.log_softmax(scores[view] / temperature)
            loss -= jnp.sum(assignments * log_probs, axis=1).mean() / (
                len(others) * len(crops_for_assign)
            )
    return loss, None if queue is None else SwAVQueue(jnp.stack(queued), queue.active, use_queue)
