"""Model adapter for plain functions."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jengine.config.errors import ConfigError
from jengine.config.paths import closest_paths, flatten
from jengine.config.plugins import load_provided
from jengine.config.registry import MODELS
from jengine.model.adapters import to_loss_dict, train_arguments
from jengine.model.model import (
    FROZEN,
    ONE_GRADIENT,
    Batch,
    Losses,
    Model,
    ModelState,
    Params,
    PyTree,
)
from jengine.model.module_types import has_equinox_modules

_INIT_ARGUMENTS = ("rng", "batch")
_LOSS_ARGUMENTS = ("params", "model_state", "batch", "rng", "hyperparams")
_PREDICT_ARGUMENTS = ("params", "model_state", "batch", "rng")
_MAIN_ARGUMENTS = ("params", "batch")  # of a loss or prediction with arguments of other names
_ARGS = inspect.Parameter.VAR_POSITIONAL
_KWARGS = inspect.Parameter.VAR_KEYWORD


@MODELS.register_module()
class FunctionalModel(Model):
    """Model from plain functions.

    Each function receives, by name, the arguments that are in its signature.

    Required arguments with other names are, in order, `rng` and `batch` for `init`, and `params`
    and `batch` for `loss` and `predict`: `init(key)`, `init(key, x)`, `loss(p, b)`. An argument
    `train`, `training`, `is_train`, `is_training` or `deterministic` of `loss` and `predict` is set
    for the mode. Others with a default value keep it. For low precision (`precision=`,
    `AmpOptimWrapper`), call the network through `jengine.model.autocast`.

    If `init` returns modules of Equinox, so do the other functions receive them, `predict` in
    inference mode, and `model_state` is an `eqx.nn.State`. Their floating-point arrays are the
    parameters, as nested dicts.

    >>> model = FunctionalModel(
    ...     init=lambda rng: {"w": jax.numpy.zeros((2,))},
    ...     loss=lambda params, batch: (batch["x"] @ params["w"] - batch["y"]) ** 2,
    ...     predict=lambda params, batch: batch["x"] @ params["w"],
    ... )

    Args:
      init: function with any of `rng, batch`; returns `params`, or `(params, model_state)` if
        `loss` has an argument `model_state`.
      loss: function with any of `params, model_state, batch, rng, hyperparams`; returns an array or
        a dict with losses, or `(losses, model_state)` if it has an argument `model_state`. For
        several optimizers, a dict with one function per optimizer name (see `OptimWrapperDict`).
      predict: function with any of `params, model_state, batch, rng`, where `rng` is the batch's
        key for models that sample; only validation and test require it.
      module_types: class names by dotted module path, such as `{"block.bn": "BatchNorm"}`, for the
        rules in `paramwise_cfg`. Without it, names and shapes tell norms and convolutions.
      train_step: function `(state, batch, ctx) -> (state, metrics)`, a whole training step in the
        place of the built-in one; see `Model.train_step`. `loss` is not needed then, and `init` may
        return `(params, model_state)`. The loss functions that it passes to `ctx` get what `loss`
        would get, such as a module of Equinox.
      trainable: the parameters to train: a function `(path, array) -> bool`, where a path is
        dotted, or a list of regular expressions for paths; None for all. The others are in
        `model_state['frozen']`. The functions get all of them, as `init` returns them, and
        `state.params` are nested dicts.

    Raises:
      TypeError: an argument is not a function, or a function requires something else.
      ConfigError: from `init`, `module_types` has a path without parameters.
    """

    def __init__(
        self,
        init: Callable[..., Any],
        loss: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        predict: Callable[..., Any] | None = None,
        module_types: Mapping[str, str] | None = None,
        train_step: Callable[..., Any] | None = None,
        trainable: Callable[[str, Any], bool] | Sequence[str] | None = None,
    ) -> None:
        if loss is None and train_step is None:
            raise TypeError(
                "FunctionalModel: `loss` must be a function unless there is a `train_step`, got "
                "None"
            )
        self._train_step = train_step
        # '' is the phase of a step with a single optimizer.
        losses = dict(loss) if isinstance(loss, Mapping) else {"": loss} if loss is not None else {}
        self._init = _NamedArguments("init", init, _INIT_ARGUMENTS, _INIT_ARGUMENTS, optional=True)
        self._losses = {
            name: _NamedArguments(
                f"loss {name}".strip(), fn, _LOSS_ARGUMENTS, _MAIN_ARGUMENTS, train=True
            )
            for name, fn in losses.items()
        }
        self._predict = predict and _NamedArguments(
            "predict", predict, _PREDICT_ARGUMENTS, _MAIN_ARGUMENTS, train=False
        )
        self._given_types = self.module_types = dict(module_types or {})
        self._trainable = trainable
        self._partition: Any = None  # what `init` found beside trained arrays
        self._has_state = any(fn.accepts("model_state") for fn in self._losses.values())

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)`.

        The state is {} if `loss` has no argument `model_state`.
        """
        variables = self._init(rng=rng, batch=batch)
        self._has_state = self._has_state or (
            self._train_step is not None and type(variables) is tuple
        )
        params, model_state = (
            _check_pair("init", "params", variables) if self._has_state else (variables, {})
        )
        # A misspelled path would switch rules for norms off without a word.
        leaves = flatten(params) if self._given_types else {}
        for module in self._given_types:
            if not any(path == module or path.startswith(f"{module}.") for path in leaves):
                raise ConfigError(
                    f"FunctionalModel: `module_types` must be paths of modules, got {module!r}"
                    f"{closest_paths(module, leaves)}"
                )
        if self._trainable is not None or has_equinox_modules(params):
            split = load_provided("module_trees", "split_module")
            self._partition, params, model_state, types = split(
                params, model_state, self._trainable
            )
            self.module_types = dict(self._given_types or types)
            if self._partition.has_frozen:  # pretrained weights need not have tables and keys
                self.adapter_paths = frozenset(
                    path
                    for path, leaf in flatten(model_state[FROZEN]).items()
                    if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
                )
        return params, model_state

    def loss(
        self, params: Params, model_state: ModelState, batch: Batch, **kwargs: Any
    ) -> tuple[Losses, PyTree]:
        """Return the losses and the new model state."""
        return self.phase_loss("", params, model_state, batch, **kwargs)

    def phase_loss(
        self, phase: str, params: Params, model_state: ModelState, batch: Batch, **kwargs: Any
    ) -> tuple[Losses, PyTree]:
        """Return the losses for `phase` and the new model state."""
        if phase not in self._losses:
            names = [name for name in self._losses if name]
            required = (
                f"a dict with the optimizer {phase!r}"
                if phase
                else "a function if there is a single optimizer"
            )
            given = f"a dict with {names}" if names else f"a function{ONE_GRADIENT}"
            raise KeyError(f"FunctionalModel: `loss` must be {required}, got {given}")
        fn = self._losses[phase]
        module, state = self._combine(params, model_state)
        losses = fn(params=module, model_state=state, batch=batch, **kwargs)
        # A loss that does not take the state cannot change it, and need not return it.
        if fn.accepts("model_state"):
            losses, new_state = _check_pair("loss", "losses", losses)
            model_state = (
                new_state
                if self._partition is None
                else self._partition.update(model_state, new_state)
            )
        return to_loss_dict(losses), model_state

    @property
    def has_train_step(self) -> bool:
        """Whether there is a `train_step`."""
        return (
            self._train_step is not None or type(self).train_step is not FunctionalModel.train_step
        )

    def train_step(self, state: Any, batch: Batch, ctx: Any) -> tuple[Any, Mapping[str, Any]]:
        """Run the training step that was given; see `Model.train_step`."""
        if self._train_step is None:
            return super().train_step(state, batch, ctx)
        if self._partition is not None:
            ctx = ctx.with_modules(self._combine, self._partition.update)
        return self._train_step(state, batch, ctx)

    @property
    def predicts_with_rng(self) -> bool:
        """Whether the prediction function has the argument `rng`."""
        return self._predict is not None and self._predict.accepts("rng")

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the predictions; ConfigError if the model has no prediction function."""
        if self._predict is None:
            raise ConfigError(
                "`model.predict` must be a function for validation, test, prediction and export, "
                "got None"
            )
        module, state = self._combine(params, model_state, train=False)
        # Without a key, as from a notebook, a sampler gets a fixed one, like the streams of Flax
        # modules.
        rng = jax.random.key(0) if rng is None and self.predicts_with_rng else rng
        return self._predict(params=module, model_state=state, batch=batch, rng=rng)

    def merge(self, params: Params, model_state: ModelState, *, train: bool = False) -> Any:
        """Return what `init` has returned, such as a module of Equinox or the pair of it and its
        state, in training or in inference mode.
        """
        if self._partition is None:
            return super().merge(params, model_state, train=train)
        module, state = self._combine(params, model_state, train=train)
        return (module, state) if self._has_state else module

    def _combine(
        self, params: Params, model_state: ModelState, *, train: bool = True
    ) -> tuple[PyTree, PyTree]:
        """Return the variables as the user's functions take them: as `init` has returned them."""
        if self._partition is None:
            return params, model_state
        module, state = self._partition.combine(params, model_state, train)
        return module, state


class _NamedArguments:
    """Function `fn` that is called with those available arguments that it has.

    Arguments called `names` are passed by name. Those in `main` may have other names in `fn`, in
    order: all, as one alone would be ambiguous, or the first ones with `optional`. `role` is the
    argument of `FunctionalModel`, for error messages. `train` is the mode for arguments that select
    training or inference, None to leave them alone.
    """

    def __init__(
        self,
        role: str,
        fn: Callable[..., Any],
        names: Sequence[str],
        main: Sequence[str],
        optional: bool = False,
        train: bool | None = None,
    ) -> None:
        self._modes = {} if train is None else train_arguments(fn, train=train)
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except ValueError:  # a builtin such as `dict`, which is called without arguments
            parameters = []
        kinds = {p.kind for p in parameters}
        named = [p.name for p in parameters if p.name in names]
        other = [
            p
            for p in parameters
            if p.name not in (*names, *self._modes)
            and p.default is p.empty
            and p.kind not in (_ARGS, _KWARGS)
        ]
        free = [name for name in main if name not in named]
        # else ambiguous
        is_clear = not other or len(other) == len(free) or (optional and len(other) < len(free))
        # `f(*args)` does not say what it expects, so nothing can be passed.
        only_args = _ARGS in kinds and _KWARGS not in kinds and not named and not other
        if not is_clear or only_args or any(p.kind is p.KEYWORD_ONLY for p in other):
            signature = ", ".join(str(p) for p in parameters)
            raise TypeError(
                f"FunctionalModel: `{role}` must have arguments of the names {', '.join(names)}, "
                "which are passed by "
                f"keyword, or the arguments ({', '.join(main)}) under any names, got ({signature})"
            )
        sources = {
            **{name: name for name in named},
            **dict(zip((p.name for p in other), free, strict=False)),
        }
        # `**kwargs` gets whatever is available and not taken by another argument.
        if _KWARGS in kinds:
            sources.update({name: name for name in names if name not in sources.values()})
        positional_only = [
            p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in sources
        ]
        self._fn = fn
        # `pop`, so that no argument is passed twice.
        self._args = [sources.pop(name) for name in positional_only]
        self._kwargs = sources

    def accepts(self, name: str) -> bool:
        """Return whether the function receives the argument `name`."""
        return name in self._args or name in self._kwargs.values()

    def __call__(self, **available: Any) -> Any:
        args = [available[source] for source in self._args]
        named = {name: available[source] for name, source in self._kwargs.items()}
        return self._fn(*args, **named, **self._modes)


def _check_pair(function: str, first: str, value: Any) -> tuple[Any, Any]:
    """Return `value`, the result from a function for a model with state, if it is a pair.

    Raise TypeError otherwise.
    """
    # a NamedTuple of two fields may be the parameters
    if type(value) is not tuple or len(value) != 2:
        raise TypeError(
            f"FunctionalModel: `{function}` must return ({first}, model_state), because `loss` "
            f"has an argument `model_state`, got {type(value).__name__}"
        )
    return value
