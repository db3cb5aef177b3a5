"""Define the model interface of the engine: three pure functions and the types of the modules."""

from collections.abc import Mapping
from typing import Any

import jax

PyTree = Any
Losses = dict[str, Any]  # name -> array of any shape (averaged), (sum, weight), or a list of these


class Model:
    """Represent a model as pure functions of `params`, which are differentiated, and `model_state`, which is not.

    Use an adapter, `LinenModel`, `NnxModel` or `FunctionalModel`, or derive from this class. To support low precision
    (`precision=`, `AmpOptimWrapper`), a subclass calls its network through `jengine.model.autocast`.

    Attributes:
      module_types: dotted module path -> class name ('backbone.norm1' -> 'LayerNorm'), set when `init` is called or
        traced; empty for plain functions. Parameter rules use it to identify norms and convolutions.
      logical_axes: dotted path of a parameter -> names of its axes (`nn.with_partitioning`), set when `init` is called
        or traced. Sharding rules can refer to these names.
    """

    module_types: Mapping[str, str] = {}
    logical_axes: Mapping[str, tuple[str | None, ...]] = {}

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)`, nested dicts of arrays.

        Args:
          rng: a PRNG key.
          batch: a batch with the structure, shapes and dtypes of the training data.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `init(rng, batch)`")

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Return the losses of a training batch and the new model state.

        Args:
          params: differentiated parameters.
          model_state: other variables of the model (running statistics); {} if there are none.
          batch: pytree of arrays with a leading batch axis.
          rng: the PRNG key of this iteration.
          hyperparams: scalars that the host passes to each step (`hyperparams['loss_lambda']`), traced.

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
        """Return the losses of one phase of a training step with several optimizers, and the new model state.

        Args:
          phase: the name of the optimizer; only its parameters are differentiated.
          params, model_state, batch, rng, hyperparams: see `loss`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is trained by several optimizers, so it must define "
            "`phase_loss(phase, params, model_state, batch, ...)`; a FunctionalModel takes a dict of losses"
        )

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Return the predictions for an evaluation batch: a pytree of arrays with a leading batch axis."""
        raise NotImplementedError(f"{type(self).__name__} must define `predict(params, model_state, batch)`")

    def merge(self, params: PyTree, model_state: PyTree, *, train: bool = False) -> Any:
        """Return a module with the given variables that works on its own, in training or in inference mode."""
        raise TypeError(
            f"a model must be a LinenModel or an NnxModel to be returned as a module, got {type(self).__name__}, whose "
            "variables are `runner.state.params` and `runner.state.model_state`"
        )

    def base_variables(self, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the variables under the paths that pretrained weights and sharding rules use.

        These are the arguments, unless the model is an adapter around another, such as `LoRA`.
        """
        return params, model_state

    def replace_base(
        self, params: PyTree, model_state: PyTree, base_params: PyTree, base_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the variables with those that `base_variables` returns replaced by `base_params` and `base_state`."""
        return base_params, base_state
