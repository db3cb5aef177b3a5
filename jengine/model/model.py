"""The engine's model interface: three pure functions and the module types."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from jengine.config import paths
from jengine.config.annotations import checked, is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import MODELS
from jengine.logging.tables import format_table

PyTree = Any
ArrayTree: TypeAlias = PyTree  # any pytree of arrays
Params: TypeAlias = ArrayTree  # nested dicts in the adapters
ModelState: TypeAlias = Mapping[str, Any]  # nested dicts of arrays
Batch: TypeAlias = ArrayTree  # a dict or a tuple, mostly
Losses = dict[str, Any]  # name -> array of any shape (averaged), (sum, weight), or a list of these
# hyperparameters by name; traced, so the host can change them between steps
Scalars = Mapping[str, Any]
FROZEN = "frozen"  # item of the model state with parameters that are not trained, see `Model`
# for a loss without phases
ONE_GRADIENT = (
    "; one loss for several networks has one gradient, and takes one optimizer: "
    "`paramwise_cfg.custom_keys` with a `lr` for each, or optax.partition"
)
# apart from the keys of training steps, which fold a small number into the same seed
_PREDICTION_STREAM = 0x70726564


def check_state_names(kind: str, names: Iterable[str]) -> None:
    """Raise ConfigError if a variable of the module has the name of the item with frozen
    parameters.
    """
    if FROZEN in names:
        raise ConfigError(
            f"{kind} of the module must not be called {FROZEN!r}, as the item of the model state "
            "with parameters that are not trained; give it another name"
        )


def is_number(value: Any) -> bool:
    """Return whether a value is a number on the host.

    >>> [is_number(value) for value in (1, 0.5, np.float32(2), True, "1")]
    [True, True, True, False, False]
    """
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


class Model:
    """Model as pure functions of `params`, which are differentiated, and `model_state`, which is
    not.

    You can use an adapter (`LinenModel`, `NnxModel`, `FunctionalModel`) or derive from this class.
    For low precision (`precision=`, `AmpOptimWrapper`), a subclass should call the network through
    `jengine.model.autocast`.

    `model_state['frozen']`, if there is one, holds parameters that are not trained, which `loss`
    must return as they are: they have no gradients, optimizer state or averages. The rules for
    parameters shard them, and replicas, which have their own model state otherwise, share them.

    >>> class Scale(Model):
    ...     def init(self, rng, batch):
    ...         return {"w": jax.numpy.ones(())}, {}
    ...
    ...     def loss(self, params, model_state, batch, *, rng, hyperparams):
    ...         return {"loss": (params["w"] * batch["x"] - batch["y"]) ** 2}, model_state

    Attributes:
      module_types: dotted module path -> class name ('backbone.norm1' -> 'LayerNorm'), set when
        `init` is called or traced; empty for plain functions. Parameter rules use it to identify
        norms and convolutions.
      logical_axes: dotted parameter path -> axis names (`nn.with_partitioning`), set when `init` is
        called or traced. Sharding rules can refer to these names.
      adapter_paths: dotted paths of parameters that pretrained weights need not have, such as LoRA
        matrices, set when `init` is called or traced.
    """

    module_types: Mapping[str, str] = {}
    logical_axes: Mapping[str, tuple[str | None, ...]] = {}
    adapter_paths: Collection[str] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checked(cls)  # so that the work dir's config has the model of a run in Python

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        A number that a hook sets during training becomes an input of the compiled step.
        """
        super().__setattr__(name, value)
        # a weak reference, which copies of the model may have
        follower = self.__dict__.get("_follower")
        if follower is not None and is_number(value) and not name.startswith("_"):
            programs = follower()
            if programs is not None:
                programs.assign(name, value)

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)`, nested dicts with arrays.

        Args:
          rng: a PRNG key.
          batch: a batch with the structure, shapes and dtypes that training will see.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `init(rng, batch)`")

    def loss(
        self,
        params: Params,
        model_state: ModelState,
        batch: Batch,
        *,
        rng: jax.Array,
        hyperparams: Scalars,
    ) -> tuple[Losses, PyTree]:
        """Return the losses for a training batch and the new model state.

        Args:
          params: differentiated parameters.
          model_state: other variables, such as running statistics; {} if there are none.
          batch: arrays with a leading batch axis.
          rng: the PRNG key for this iteration.
          hyperparams: scalars that the host passes to each step (`hyperparams['loss_lambda']`),
            traced.

        Returns:
          Losses by name and the new `model_state`. The total is the sum over entries with 'loss' in
          the name; the others are only logged.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `loss(params, model_state, batch, ...)`"
        )

    def phase_loss(
        self,
        phase: str,
        params: Params,
        model_state: ModelState,
        batch: Batch,
        *,
        rng: jax.Array,
        hyperparams: Scalars,
    ) -> tuple[Losses, PyTree]:
        """Return the losses for one phase in a training step with several optimizers, and the new
        model state.

        `phase` is the optimizer name; only the parameters that it updates are differentiated.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is trained by several optimizers, so it must define "
            "`phase_loss(phase, params, model_state, batch, ...)`; a FunctionalModel takes a dict "
            f"of losses{ONE_GRADIENT}"
        )

    @property
    def has_train_step(self) -> bool:
        """Whether the model has its own `train_step`."""
        # `train_step` is defined here for its documentation, so its presence tells nothing.
        return type(self).train_step is not Model.train_step

    def train_step(self, state: Any, batch: Batch, ctx: Any) -> tuple[Any, Mapping[str, Any]]:
        """Run a whole training step in the place of the built-in one; a model need not define it.

        It is compiled, so it must be pure. `Model.loss` is not called then, unless you call it.

        Args:
          state: the `jengine.train.TrainState`.
          batch: a training batch.
          ctx: the parts of a step, a `jengine.train.UpdateContext`: `ctx.update(state, loss_fn)`,
            `ctx.gradients(state, loss_fn)`, `ctx.apply(state, grads)`, `ctx.rng`,
            `ctx.hyperparams`, ...

        Returns:
          The new state, `state.replace(...)` with the same structure, and the metrics, scalars by
          name. The loss that is logged and watched is 'loss', or the sum of the entries with 'loss'
          in their names.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `train_step(state, batch, ctx)`")

    @property
    def predicts_with_rng(self) -> bool:
        """Whether `predict` takes the argument `rng`."""
        return "rng" in inspect.signature(type(self).predict).parameters

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the predictions for an evaluation batch: arrays with a leading batch axis.

        A model that does not sample need not have the argument `rng`, the batch's key; see
        `prediction_key`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `predict(params, model_state, batch)`"
        )

    def merge(self, params: Params, model_state: ModelState, *, train: bool = False) -> Any:
        """Return a module with the given variables that works on its own, in training or in
        inference mode.
        """
        raise TypeError(
            "a model must be a LinenModel or an NnxModel to be returned as a module, got "
            f"{type(self).__name__}, whose "
            "variables are `runner.state.params` and `runner.state.model_state`"
        )

    def tabulate(self, batch: Batch, width: int = 160) -> str:
        """Return a table of the layers with shapes, parameters and FLOPs of the prediction.

        Here of the parameters.

        Nothing is allocated on a device. The text has up to `width` columns.
        """
        params, _ = jax.eval_shape(self.init, jax.random.key(0), batch)
        rows = [
            [path, str(leaf.dtype), str(leaf.shape), leaf.size, leaf.size * leaf.dtype.itemsize]
            for path, leaf in paths.flatten(params).items()
        ]
        rows.append(["total", "", "", *(sum(row[i] for row in rows) for i in (3, 4))])
        return format_table(["parameter", "dtype", "shape", "numbers", "bytes"], rows)

    def base_variables(self, params: Params, model_state: ModelState) -> tuple[PyTree, PyTree]:
        """Return the variables under the paths that pretrained weights and sharding rules use.

        These are the arguments, with the frozen parameters in a model state `{'frozen': ...,
        'state': ...}` among the parameters; or those of another model, for an adapter such as
        `LoRA`.
        """
        if not _has_frozen(model_state):
            return params, model_state
        merged = {**paths.flatten(model_state[FROZEN]), **paths.flatten(params)}
        return paths.nest(merged), model_state["state"]

    def replace_base(
        self, params: Params, model_state: ModelState, base_params: Params, base_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the variables with those that `base_variables` returns replaced by
        `base_params` and `base_state`.

        Those that are not in `base_params`, such as adapters, stay.
        """
        if not _has_frozen(model_state):
            return base_params, base_state
        # A part of the parameters is in the state, and a base checkpoint has them all in one tree.
        base = paths.flatten(base_params)
        params, frozen = (
            paths.map_with_path(lambda path, leaf: base.get(path, leaf), tree)
            for tree in (params, model_state[FROZEN])
        )
        return params, {FROZEN: frozen, "state": base_state}


def _has_frozen(model_state: ModelState) -> bool:
    return isinstance(model_state, Mapping) and set(model_state) == {FROZEN, "state"}


class ModelWrapper(Model):
    """Model around another one, to which it passes every call; subclasses change some of them.

    Args:
      model: the inner model, or a config for it.

    Attributes:
      keeps_variables: whether parameters and model state are those of the inner model, which
        `get_model` then returns.
    """

    keeps_variables: ClassVar[bool] = False

    def __init__(self, model: Any) -> None:
        with config_path("model"):
            self.model: Model = (
                MODELS.build(model) if isinstance(model, str) or is_mapping(model) else model
            )

    @property
    def module_types(self) -> Mapping[str, str]:  # type: ignore[override]
        """The inner model's module types."""
        return self.model.module_types

    @property
    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:  # type: ignore[override]
        """The inner model's logical axes."""
        return self.model.logical_axes

    @property
    def predicts_with_rng(self) -> bool:
        """Whether the inner model's `predict` takes the argument `rng`, and that of the wrapper
        passes it on.
        """
        # The base class takes `rng`, but a subclass may override `predict` without it.
        return super().predicts_with_rng and self.model.predicts_with_rng

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Initialize the inner model."""
        return self.model.init(rng, self._prepare(batch))

    def loss(self, *args: Any, **kwargs: Any) -> tuple[Losses, PyTree]:
        """Return the losses and the new model state."""
        return self._wrap_loss(self.model.loss, *args, **kwargs)

    def phase_loss(self, phase: str, *args: Any, **kwargs: Any) -> tuple[Losses, PyTree]:
        """Return the losses for one phase, see `loss`."""
        return self._wrap_loss(functools.partial(self.model.phase_loss, phase), *args, **kwargs)

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the inner model's predictions."""
        return predict_with_key(self.model, params, model_state, self._prepare(batch), rng)

    def tabulate(self, batch: Batch, width: int = 160) -> str:
        """Return the inner model's table."""
        return self.model.tabulate(self._prepare(batch), width)

    @property
    def has_train_step(self) -> bool:
        """Whether the inner model has its own `train_step`."""
        return self.model.has_train_step

    def train_step(self, state: Any, batch: Batch, ctx: Any) -> tuple[Any, Mapping[str, Any]]:
        """Run the inner model's training step."""
        return self.model.train_step(state, self._prepare(batch), ctx)

    def _wrap_loss(
        self,
        loss: Callable[..., Any],
        params: Params,
        model_state: ModelState,
        batch: Batch,
        **kwargs: Any,
    ) -> tuple[Losses, PyTree]:
        """Call one of the inner model's losses; subclasses change the variables or the result."""
        return loss(params, model_state, self._prepare(batch), **kwargs)

    def _prepare(self, batch: Batch) -> Batch:
        """Return the batch as the inner model gets it; subclasses change it."""
        return batch


def get_model(model: Model) -> Model:
    """Return the model without the wrappers that keep its variables, such as those for precision
    and preprocessing.
    """
    while isinstance(model, ModelWrapper) and model.keeps_variables:
        model = model.model
    return model


def prediction_key(seed: int | jax.Array, batch_index: int | jax.Array) -> jax.Array:
    """Return the key for a batch of an evaluation or prediction, from the run's seed and the number
    of batches before.

    It does not depend on the training, so that validations compare weights with the same noise,
    also after a resume.

    >>> prediction_key(0, 0) == prediction_key(0, 1)
    Array(False, dtype=bool)
    """
    return jax.random.fold_in(
        jax.random.fold_in(jax.random.key(seed), _PREDICTION_STREAM), batch_index
    )


def predict_with_key(
    model: Model, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
) -> Any:
    """Return a model's predictions, with the key if its `predict` takes one."""
    if model.predicts_with_rng:
        return model.predict(params, model_state, batch, rng=rng)
    return model.predict(params, model_state, batch)
