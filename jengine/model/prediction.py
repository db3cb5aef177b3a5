"""Predictions of models that sample: each batch has a key of its own."""

from typing import Any

import jax

from jengine.model.model import Batch, Model, ModelState, Params

_STREAM = 0x70726564  # apart from the keys of training steps, which fold a small number into the same seed


def prediction_key(seed: int | jax.Array, batch_index: int | jax.Array) -> jax.Array:
    """Return the key for a batch of an evaluation or prediction.

    It does not depend on the training, so that validations compare weights with the same noise, also after a resume.

    >>> prediction_key(0, 0) == prediction_key(0, 1)
    Array(False, dtype=bool)

    Args:
      seed: the run's seed.
      batch_index: number of batches before it.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STREAM), batch_index)


def predict_with_key(model: Model, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None) -> Any:
    """Return a model's predictions, with the key if its `predict` takes one."""
    if model.predicts_with_rng:
        return model.predict(params, model_state, batch, rng=rng)
    return model.predict(params, model_state, batch)
