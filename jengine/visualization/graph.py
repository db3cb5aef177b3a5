"""A model described as text."""

from typing import Any


def graph_text(model: Any, data_batch: Any = None) -> str:
    """What the visualizer writes as the graph of `model`.

    Args:
      model: the text itself, a function of a batch, or a model with `init(rng, batch)` and
        `predict(params, model_state, batch)`.
      data_batch: a pytree of arrays. With it the text is the jaxpr of the prediction, traced without computing
        anything; without it, the repr of `model` (Flax modules list their fields and submodules in it).
    """
    if isinstance(model, str):
        return model
    if data_batch is None:
        return repr(model)
    import jax

    if hasattr(model, "init") and hasattr(model, "predict"):
        params, model_state = jax.eval_shape(model.init, jax.random.key(0), data_batch)
        return str(jax.make_jaxpr(model.predict)(params, model_state, data_batch))
    return str(jax.make_jaxpr(model)(data_batch))
