"""Distillation: a hook that adds a frozen teacher to the loss of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from jengine.config.annotations import NonNegative, Positive
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import HOOKS
from jengine.extras.distill.distilled_model import (
    PROJECTIONS,
    DistilledModel,
    DistillSettings,
    FeatureSettings,
)
from jengine.extras.distill.frozen_model import FrozenModel, FrozenModelHook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import Model
from jengine.model.selection import Selector


@HOOKS.register_module()
class DistillHook(FrozenModelHook):
    """Distillation: the model also learns the outputs of a frozen teacher, in the same step.

    Hinton, Vinyals & Dean 2015, "Distilling the knowledge in a neural network",
    https://arxiv.org/abs/1503.02531. The teacher gets the same batch, after augmentation, and
    computes in inference mode and in its own precision. Its variables are an input of the step, see
    `FrozenModelHook`; gradients do not reach it. The run's model, a `LinenModel` or an `NnxModel`,
    and the teacher may be of different kinds.

    The log has the losses as `distill_loss`, `feature_loss`, `feature_loss_1`, ... and the model's
    own beside them. Their weights are `runner.hyperparams['distill_loss_weight']` and so on, which
    a hook such as `WarmupParamHook` may change during training.

    Args:
      teacher: the teacher with its weights: a checkpoint or a work dir, or a dict, see
        `FrozenModel`.
      temperature: by which the logits of both are divided; the loss is multiplied by its square.
      loss_weight: weight of the Kullback-Leibler divergence of the logits; 0 leaves it out.
      task_weight: weight of the model's own losses.
      features: features that follow the teacher's, each with the fields of `FeatureSettings`.
      output: the model output with the logits; None if the outputs are the logits.
      teacher_output: the teacher's; by default the same.
      name: under which the step finds the variables of the teacher.

    Examples:
      >>> hook = DistillHook("work_dirs/teacher", temperature=4.0, features=[dict(student="stem")])
    """

    is_single = True

    def __init__(
        self,
        teacher: Any,
        temperature: Positive = 1.0,
        loss_weight: NonNegative = 1.0,
        task_weight: NonNegative = 1.0,
        features: Sequence[Mapping[str, Any]] = (),
        output: Selector | None = None,
        teacher_output: Selector | None = None,
        name: str = "teacher",
    ) -> None:
        with config_path("teacher"):
            self.frozen = FrozenModel(teacher)
        self.name = name
        built = []
        for i, feature in enumerate(features):
            with config_path("features", i):
                built.append(FeatureSettings(**feature))
        self.settings = DistillSettings(
            temperature, loss_weight, task_weight, tuple(built), output, teacher_output
        )
        if not self.settings.weights():
            raise ConfigError("`loss_weight` must be above 0 without `features`, got 0")
        self._model: DistilledModel | None = None

    def wrap_model(self, model: Model) -> DistilledModel:
        """Return the model with the further losses."""
        self._model = DistilledModel(model, self.frozen, self.settings, self.name)
        return self._model

    def before_train(self, runner: RunnerProtocol) -> None:
        """Read the teacher.

        Raises:
          ConfigError: the run has no loss to which the hook can add: several optimizers, a
            `train_step` of the model, or a hook that was added later.
        """
        if self._model is None:
            raise ConfigError("DistillHook must be among the hooks with which the Runner is built")
        if self._model.has_train_step or isinstance(runner.optim_wrapper, Mapping):
            raise ConfigError(
                "DistillHook must be in a run with one optimizer and without a `train_step` of the "
                "model, which reads the variables of a FrozenModelHook itself"
            )
        super().before_train(runner)
        # a new value is a new input of the step, so that a hook may change it
        for loss, weight in self.settings.weights().items():
            runner.hyperparams[f"{loss}_weight"] = weight

    def before_save_checkpoint(self, runner: RunnerProtocol, checkpoint: dict[str, Any]) -> None:
        """Record under `auxiliary` the parameters that the model does not have without this hook,
        for predictions from the checkpoint.
        """
        if PROJECTIONS in checkpoint["state"]["params"]:
            checkpoint["auxiliary"] = [PROJECTIONS]
