"""Plain functions as a model."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jengine.model.adapters import accepts, named
from jengine.model.model import Losses, Model, PyTree
from jengine.registry import MODELS


@MODELS.register_module()
class FunctionalModel(Model):
    """A model of plain functions, each of which takes what it names.

    For low precision (`precision=`, `AmpOptimWrapper`) they call the network through `jengine.model.autocast`.

    Args:
      init: `(rng, batch)`, either or none of them; returns `params`, or `(params, model_state)` when `loss` names
        `model_state`.
      loss: any of `params, model_state, batch, rng, hyperparams`, by name; returns an array, a dict of losses, or, when
        it names `model_state`, `(losses, model_state)`. Or a dict of such functions by the name of the optimizer whose
        loss each is (see `OptimWrapperDict`).
      predict: any of `params, model_state, batch`; returns the predictions. Needed for validation and test only.

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
                raise TypeError(f"FunctionalModel: {name} is a function, found {fn!r}")
        self._init = init
        self._losses = losses
        self._predict = predict
        self._has_state = any(accepts(fn, "model_state") for fn in losses.values())

    def init(self, rng: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Makes `(params, model_state)`; the state is {} when the loss names none."""
        made = _call(self._init, rng=rng, batch=batch)
        if not self._has_state:
            return made, {}
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(
                "FunctionalModel: `loss` names model_state, so `init` must return (params, model_state); "
                f"found {type(made).__name__}"
            )
        return made

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, *, rng: jax.Array, hyperparams: Mapping[str, Any]
    ) -> tuple[Losses, PyTree]:
        """Calls the loss function with what it names."""
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
        """Calls the loss function of `phase` with what it names.

        Raises:
          KeyError: there is no loss of that name.
        """
        if phase not in self._losses:
            named_losses = [name for name in self._losses if name]
            what = f"the losses {named_losses}" if named_losses else "one loss, for a single optimizer"
            raise KeyError(f"FunctionalModel: no loss is called {phase!r}; it was made with {what}")
        fn = self._losses[phase]
        made = _call(fn, params=params, model_state=model_state, batch=batch, rng=rng, hyperparams=hyperparams)
        if not accepts(fn, "model_state"):
            return named(made), model_state
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(
                "FunctionalModel: `loss` names model_state, so it must return (losses, model_state); "
                f"found {type(made).__name__}"
            )
        return named(made[0]), made[1]

    def predict(self, params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Calls the prediction function with what it names."""
        if self._predict is None:
            raise TypeError("FunctionalModel: validation and test need `predict`; this model was made without one")
        return _call(self._predict, params=params, model_state=model_state, batch=batch)


def _call(fn: Callable[..., Any], **available: Any) -> Any:
    return fn(**{name: value for name, value in available.items() if accepts(fn, name)})
