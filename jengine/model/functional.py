"""Build a model from plain functions."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jengine.model.adapters import accepts, to_loss_dict
from jengine.model.model import Losses, Model, PyTree
from jengine.registry import MODELS


@MODELS.register_module()
class FunctionalModel(Model):
    """Adapt plain functions. Each function receives, by name, the arguments that are in its signature.

    To support low precision (`precision=`, `AmpOptimWrapper`), call the network through `jengine.model.autocast`.

    Args:
      init: function of any of `rng, batch`; returns `params`, or `(params, model_state)` if `loss` has an argument
        `model_state`.
      loss: function of any of `params, model_state, batch, rng, hyperparams`; returns an array or a dict of losses, or
        `(losses, model_state)` if it has an argument `model_state`. For several optimizers, a dict of such functions
        by the name of the optimizer (see `OptimWrapperDict`).
      predict: function of any of `params, model_state, batch`; returns the predictions. Only validation and test
        require it.

    Example:
      >>> model = FunctionalModel(
      ...     init=lambda rng: {"w": jax.numpy.zeros((2,))},
      ...     loss=lambda params, batch: ((batch["x"] @ params["w"] - batch["y"]) ** 2),
      ...     predict=lambda params, batch: batch["x"] @ params["w"],
      ... )
    """

    def __init__(
        self,
        init: Callable[..., Any],
        loss: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        predict: Callable[..., Any] | None = None,
    ) -> None:
        losses = dict(loss) if isinstance(loss, Mapping) else {"": loss}
        for name, fn in (("init", init), *((f"loss {name}".strip(), fn) for name, fn in losses.items())):
            if not callable(fn):
                raise TypeError(f"FunctionalModel: `{name}` must be a function, got {fn!r}")
        self._init = init
        self._losses = losses
        self._predict = predict
        self._has_state = any(accepts(fn, "model_state") for fn in losses.values())

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)`; the state is {} if `loss` has no argument `model_state`."""
        variables = _call(self._init, rng=rng, batch=batch)
        return _check_pair("init", "params", variables) if self._has_state else (variables, {})

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Return the losses and the new model state."""
        return self.phase_loss("", params, model_state, batch, rng=rng, hyperparams=hyperparams)

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
        """Return the losses of `phase` and the new model state.

        Raises:
          KeyError: if `loss` is not a dict with the key `phase`.
        """
        if phase not in self._losses:
            names = [name for name in self._losses if name]
            required = f"a dict with the optimizer {phase!r}" if phase else "a function if there is a single optimizer"
            given = f"a dict with {names}" if names else "a function"
            raise KeyError(f"FunctionalModel: `loss` must be {required}, got {given}")
        fn = self._losses[phase]
        losses = _call(fn, params=params, model_state=model_state, batch=batch, rng=rng, hyperparams=hyperparams)
        if accepts(fn, "model_state"):
            losses, model_state = _check_pair("loss", "losses", losses)
        return to_loss_dict(losses), model_state

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Return the predictions.

        Raises:
          TypeError: if the model has no prediction function.
        """
        if self._predict is None:
            raise TypeError("FunctionalModel: `predict` must be a function for validation and test, got None")
        return _call(self._predict, params=params, model_state=model_state, batch=batch)


def _call(fn: Callable[..., Any], **available: Any) -> Any:
    """Call `fn` with the available arguments that it accepts."""
    return fn(**{name: value for name, value in available.items() if accepts(fn, name)})


def _check_pair(function: str, first: str, value: Any) -> tuple[Any, Any]:
    """Return `value`, the result of a function of a model with state, if it is a pair; raise TypeError otherwise."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(
            f"FunctionalModel: `{function}` must return ({first}, model_state), because `loss` has an argument "
            f"`model_state`, got {type(value).__name__}"
        )
    return value
