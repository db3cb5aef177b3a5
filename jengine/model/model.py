"""The interface that the engine sees: three pure functions and the types of the modules."""

from collections.abc import Mapping
from typing import Any

import jax

PyTree = Any
Losses = dict[str, Any]  # name -> array of any shape (its mean counts), (sum, weight), or a list of those


class Model:
    """What the engine trains: pure functions over `params` (differentiated) and `model_state` (carried along).

    Adapters: `LinenModel`, `NnxModel` and `FunctionalModel`; or derive from this class. In low precision
    (`precision=`, `AmpOptimWrapper`) a class of your own calls its network through `jengine.model.autocast`.

    Attributes:
      module_types: dotted module path -> class name ('backbone.norm1' -> 'LayerNorm'), known after `init` was called or
        traced; empty for plain functions. Rules over parameters read from it what is a norm or a convolution.
      logical_axes: dotted path of a parameter -> names that the model gives its axes (`nn.with_partitioning`), known
        likewise; what divides parameters over devices may go by them.
    """

    module_types: Mapping[str, str] = {}
    logical_axes: Mapping[str, tuple[str | None, ...]] = {}

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Makes `(params, model_state)`, nested dicts of arrays, from a key and a batch of the training data's form."""
        raise NotImplementedError(f"{type(self).__name__} must define `init(rng, batch)`")

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """The losses of a training batch, and the new model state.

        Args:
          params: differentiated parameters.
          model_state: what the model carries besides (running statistics); {} where there is none.
          batch: pytree of arrays with a leading batch axis.
          rng: a key of this iteration.
          hyperparams: the scalars that the host hands to each step (`hyperparams['loss_lambda']`), traced.

        Returns:
          Losses by name and the new `model_state`. The total is the sum of the entries with 'loss' in their name; the
          others are only logged.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `loss(params, model_state, batch, ...)`")

    def phase_loss(
        self,
        phase: str,
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        *,
        rng: jax.Array,
        hyperparams: Mapping[str, Any],
    ) -> tuple[Losses, PyTree]:
        """The losses of one phase of a training step with several optimizers, otherwise like `loss`.

        Args:
          phase: the name of the optimizer that acts; its parameters alone are differentiated.
          params, model_state, batch, rng, hyperparams: see `loss`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is trained by several optimizers, so it must define "
            "`phase_loss(phase, params, model_state, batch, ...)`; a FunctionalModel takes a dict of losses"
        )

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Predictions for an evaluation batch: a pytree whose arrays have the batch axis first."""
        raise NotImplementedError(f"{type(self).__name__} must define `predict(params, model_state, batch)`")
