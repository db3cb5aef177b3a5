"""Model that is trained with the outputs of a teacher."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jengine.config.annotations import NonNegative, Positive, checked
from jengine.config.errors import ConfigError
from jengine.extras.distill.features import features_sown, select_features
from jengine.extras.distill.frozen_model import FrozenModel
from jengine.model.autocast import at_least_float32, compute_in, current_dtype
from jengine.model.losses import LazyLogits
from jengine.model.model import (
    ArrayTree,
    Batch,
    Losses,
    Model,
    ModelState,
    ModelWrapper,
    Params,
    PyTree,
    get_model,
    predict_with_key,
)
from jengine.model.selection import Selector, select_array
from jengine.model.sown import Sown

PROJECTIONS = "distill_projections"  # entry of the parameters
LOGITS = "distill_loss"
_OWN_LOSS = "a loss of one's own reads the variables of a FrozenModelHook"


@checked
@dataclasses.dataclass(frozen=True)
class FeatureSettings:
    """A feature of the student that follows one of the teacher.

    Attributes:
      student, teacher: dotted path of a module, whose output it is, or of a value that a module
        sows; the teacher's is by default the student's.
      loss: 'mse', the mean square of the difference, or 'cosine', one minus the cosine along the
        last axis.
      loss_weight: weight of the loss.
      project: whether a linear map of the student's last axis is trained with the student, which
        other widths need.
    """

    student: str
    teacher: str = ""
    loss: Literal["mse", "cosine"] = "mse"
    loss_weight: NonNegative = 1.0
    project: bool = False


@checked
@dataclasses.dataclass(frozen=True)
class DistillSettings:
    """What a student learns from a teacher, see `DistillHook`."""

    temperature: Positive = 1.0
    loss_weight: NonNegative = 1.0
    task_weight: NonNegative = 1.0
    features: Sequence[FeatureSettings] = ()
    output: Selector | None = None
    teacher_output: Selector | None = None

    def weights(self) -> dict[str, float]:
        """Return the weight of each loss by its name."""
        weights = {LOGITS: self.loss_weight} if self.loss_weight else {}
        for name, feature in self.named_features().items():
            weights[name] = feature.loss_weight
        return weights

    def named_features(self) -> dict[str, FeatureSettings]:
        """Return the features by the name of their loss."""
        return {
            f"feature_loss_{i}" if i else "feature_loss": feature
            for i, feature in enumerate(self.features)
        }


class DistilledModel(ModelWrapper):
    """Student whose losses are completed by those that compare it with a teacher.

    The variables of the teacher are in `hyperparams[name]`; parameters and predictions are the
    student's, besides the projections of features, which are in `params['distill_projections']`.
    """

    def __init__(
        self, model: Model, teacher: FrozenModel, settings: DistillSettings, name: str = "teacher"
    ) -> None:
        super().__init__(model)
        self.teacher = teacher
        self.settings = settings
        self._name = name
        self._projected = {
            name: feature for name, feature in settings.named_features().items() if feature.project
        }
        # shadows the class variable: without projections the parameters are those of the student
        self.keeps_variables = not self._projected  # type: ignore[misc]

    @property
    def adapter_paths(self) -> Collection[str]:  # type: ignore[override]
        """The student's parameters that pretrained weights need not have."""
        return get_model(self.model).adapter_paths

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Initialize the student and the projections."""
        params, model_state = super().init(rng, batch)
        if not self._projected:
            return params, model_state
        if PROJECTIONS in params:
            raise ConfigError(f"a module of the student must not be called {PROJECTIONS!r}")

        def call_both() -> Any:
            _, theirs = self._call_teacher(*self.teacher.init(batch), batch)
            return self._predict_features(params, model_state, batch), theirs

        ours, theirs = jax.eval_shape(call_both)
        projections = {}
        for i, (name, feature) in enumerate(self._projected.items()):
            width = ours[feature.student].shape[-1]
            shape = width, theirs[feature.teacher or feature.student].shape[-1]
            key = jax.random.fold_in(rng, 0xD15 + i)  # apart from the keys of the student
            projections[name] = {
                "kernel": jax.nn.initializers.lecun_normal()(key, shape),
                "bias": jnp.zeros(shape[1:]),
            }
        return {**params, PROJECTIONS: projections}, model_state

    def phase_loss(self, phase: str, *args: Any, **kwargs: Any) -> tuple[Losses, PyTree]:
        """Refuse: it is not known which of several losses the teacher's belong to."""
        raise ConfigError(f"DistillHook must be in a run with one optimizer; {_OWN_LOSS}")

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the student's predictions."""
        return super().predict(_student(params), model_state, batch, rng=rng)

    def merge(self, params: Params, model_state: ModelState, *, train: bool = False) -> Any:
        """Return the student's module."""
        return get_model(self.model).merge(_student(params), model_state, train=train)

    def base_variables(self, params: Params, model_state: ModelState) -> tuple[PyTree, PyTree]:
        """Return the student's variables, without the projections."""
        return get_model(self.model).base_variables(_student(params), model_state)

    def replace_base(
        self, params: Params, model_state: ModelState, base_params: Params, base_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the variables with the student's replaced; the projections stay."""
        new, state = get_model(self.model).replace_base(
            _student(params), model_state, base_params, base_state
        )
        own = {name: x for name, x in params.items() if name == PROJECTIONS}
        return {**new, **own}, state

    def _wrap_loss(
        self,
        loss: Callable[..., Any],
        params: Params,
        model_state: ModelState,
        batch: Batch,
        **kwargs: Any,
    ) -> tuple[Losses, PyTree]:
        """Return the student's losses and those that compare it with the teacher."""
        settings = self.settings
        hyperparams = kwargs["hyperparams"]
        teacher = hyperparams[self._name]
        # not a function of the parameters, so that nothing of it is differentiated
        targets, theirs = self._call_teacher(teacher["params"], teacher["model_state"], batch)
        added: Losses = {}

        def compare(outputs: ArrayTree, sown: Sown) -> Losses:
            if settings.loss_weight:
                logits = outputs
                if not isinstance(logits, LazyLogits):
                    logits = select_array(outputs, settings.output, "output", "outputs")
                added[LOGITS] = compare_logits(logits, targets, settings.temperature)
            ours = select_features(self._names("student"), sown, self.model.module_types, "student")
            for name, feature in settings.named_features().items():
                value = ours[feature.student]
                if feature.project:
                    projection = params[PROJECTIONS][name]
                    value = value @ projection["kernel"] + projection["bias"]
                target = theirs[feature.teacher or feature.student]
                added[name] = compare_features(feature, value, target)
            return {name: hyperparams[f"{name}_weight"] * x for name, x in added.items()}

        with features_sown(self._names("student"), compare):
            losses, state = super()._wrap_loss(loss, _student(params), model_state, batch, **kwargs)
        if not added:
            kind = type(get_model(self.model)).__name__
            raise ConfigError(
                f"DistillHook must train a LinenModel or an NnxModel, got {kind}; {_OWN_LOSS}"
            )
        if settings.task_weight != 1:
            losses = {
                name: _scale(x, settings.task_weight) if "loss" in name and name not in added else x
                for name, x in losses.items()
            }
        return losses, state

    def _call_teacher(
        self, params: Params, model_state: ModelState, batch: Batch
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Return the teacher's logits, and its features by name, in inference mode."""
        model = self.teacher.model
        names = self._names("teacher")

        def use(outputs: ArrayTree, sown: Sown) -> Any:
            return outputs, select_features(names, sown, model.module_types, "teacher")

        def predict(params: Params) -> Any:
            # a model of another kind has no features, and cannot call `use`
            with features_sown(names, use) if names else contextlib.nullcontext():
                outputs = predict_with_key(model, params, model_state, batch, None)
            return outputs if names else (outputs, {})

        # in its own precision, also where an optimizer wrapper sets that of the student
        is_cast = current_dtype() is not None
        outputs, features = compute_in("float32", predict, params) if is_cast else predict(params)
        if not self.settings.loss_weight:
            return None, features
        output = self.settings.teacher_output or self.settings.output
        return select_array(outputs, output, "teacher_output", "teacher's outputs"), features

    def _predict_features(
        self, params: Params, model_state: ModelState, batch: Batch
    ) -> dict[str, jax.Array]:
        """Return the student's features by name, for their shapes."""
        names = self._names("student")

        def use(outputs: ArrayTree, sown: Sown) -> Any:
            return select_features(names, sown, self.model.module_types, "student")

        with features_sown(names, use):
            features: dict[str, jax.Array] = super().predict(
                params, model_state, batch, rng=jax.random.key(0)
            )
        return features

    def _names(self, owner: Literal["student", "teacher"]) -> Collection[str]:
        return {getattr(x, owner) or x.student for x in self.settings.features}


def _student(params: Params) -> Params:
    """Return the parameters without projections."""
    if not isinstance(params, Mapping) or PROJECTIONS not in params:
        return params
    return {name: x for name, x in params.items() if name != PROJECTIONS}


def compare_logits(logits: Any, targets: jax.Array, temperature: float) -> jax.Array:
    """Return the Kullback-Leibler divergence of the student from the teacher, f32[B, ...].

    Hinton, Vinyals & Dean 2015, "Distilling the knowledge in a neural network",
    https://arxiv.org/abs/1503.02531: both divide their logits by the temperature, and the loss is
    multiplied by its square, so that its gradients do not depend on it.

    >>> compare_logits(jnp.zeros((2, 3)), jnp.zeros((2, 3)), 4.0)
    Array([0., 0.], dtype=float32)

    Args:
      logits: f[B, ..., C], or lazy ones.
      targets: the teacher's logits, f[B, ..., C].
      temperature: above 0.

    Raises:
      ConfigError: the shapes differ.
    """
    if tuple(logits.shape) != tuple(targets.shape):
        raise ConfigError(
            "the logits of student and teacher must have one shape, got "
            f"{tuple(logits.shape)} and {tuple(targets.shape)}; loss_weight=0 leaves them out"
        )

    def divergence(logits: jax.Array, targets: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(at_least_float32(targets) / temperature)
        log_q = jax.nn.log_softmax(at_least_float32(logits) / temperature)
        return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)

    if isinstance(logits, LazyLogits):
        return logits.map_tokens(divergence, targets)
    return divergence(logits, targets)


def compare_features(feature: FeatureSettings, value: jax.Array, target: jax.Array) -> jax.Array:
    """Return the loss of a feature, f32[B, ...] without the last axis.

    Romero et al. 2015, "FitNets", https://arxiv.org/abs/1412.6550, with 'mse'.

    Args:
      feature: the settings.
      value: the student's, perhaps projected, f[B, ..., D].
      target: the teacher's.

    Raises:
      ConfigError: the shapes differ.
    """
    if value.shape != target.shape:
        hint = "" if feature.project else "; project=True trains a map to another last axis"
        raise ConfigError(
            f"the feature {feature.student!r} must have the shape of the teacher's, "
            f"{target.shape}, got {value.shape}{hint}"
        )
    value = at_least_float32(value)
    target = at_least_float32(target)
    if feature.loss == "mse":
        return jnp.square(value - target).mean(axis=-1)
    norms = jnp.linalg.norm(value, axis=-1) * jnp.linalg.norm(target, axis=-1)
    return 1 - jnp.sum(value * target, axis=-1) / jnp.maximum(norms, 1e-8)


def _scale(loss: Any, weight: float) -> Any:
    """Return a student's loss times a weight, in any form that a loss has."""
    if isinstance(loss, tuple):  # sum and weight
        return weight * loss[0], loss[1]
    return [_scale(x, weight) for x in loss] if isinstance(loss, list) else weight * loss
