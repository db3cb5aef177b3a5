"""Mean teacher: a slowly moving copy of the model, which the loss can read."""

from typing import Annotated, Any, NamedTuple

import jax

from jengine.config.annotations import Count, Range
from jengine.config.registry import HOOKS
from jengine.hooks.ema import cast_average
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.train.average import AverageState, ExponentialMovingAverage
from jengine.train.traced_hooks import StepContext

PyTree = Any


class MeanTeacherHookState(NamedTuple):
    """The hook's entry in the training state."""

    params: PyTree  # teacher parameters, like those of the model; floats at least float32
    model_state: PyTree  # teacher state; None with skip_buffer
    steps: jax.Array  # int32[], updates, including the initial copy


@HOOKS.register_module()
class MeanTeacherHook(Hook):
    """Teacher that follows the model: `teacher = (1 - momentum) * teacher + momentum * model`.

    Tarvainen & Valpola 2017, "Mean teachers are better role models".

    The model loss reads the teacher in `hyperparams['teacher']`, `dict(params=...,
    model_state=...)`, as it was before the step and without gradients. The teacher starts as a copy
    of the model, is updated in the compiled step, and is saved in checkpoints.

    Args:
      momentum: weight of the model in an update, in (0, 1).
      interval: iterations between two updates.
      skip_buffer: do not average the model state (batch statistics): the teacher uses that of the
        model.
      evaluate_on_teacher: validate and test the teacher instead of the model.

    Examples:
      >>> MeanTeacherHook(momentum=0.01).get_traced_points()
      ['traced_batch', 'traced_update', 'traced_accumulate']
    """

    def __init__(
        self,
        momentum: Annotated[float, Range(gt=0, lt=1)] = 0.001,
        interval: Count = 1,
        skip_buffer: bool = True,
        evaluate_on_teacher: bool = True,
    ) -> None:
        self.average = ExponentialMovingAverage(momentum=momentum, interval=interval)
        self.skip_buffer = skip_buffer
        self.evaluate_on_teacher = evaluate_on_teacher

    def init_traced_state(self, params: PyTree, model_state: PyTree) -> MeanTeacherHookState:
        """Return a copy of the model."""
        average = self.average.init((params, None if self.skip_buffer else model_state))
        teacher, teacher_state = average.params
        # the copy was the first update
        return MeanTeacherHookState(teacher, teacher_state, average.steps + 1)

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Pass the teacher to the loss."""
        params, model_state = cast_average(ctx.hook_state, ctx.params, ctx.model_state)
        teacher = dict(params=params, model_state=model_state)
        # Not differentiated: gradients are those of the parameters alone
        return ctx.replace(hyperparams={**ctx.hyperparams, "teacher": teacher})

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Update the teacher if it is due."""
        state: MeanTeacherHookState = ctx.hook_state
        average = AverageState((state.params, state.model_state), state.steps)
        average = self.average.update(
            average, (ctx.params, None if self.skip_buffer else ctx.model_state)
        )
        params, model_state = average.params
        return ctx.replace(hook_state=MeanTeacherHookState(params, model_state, average.steps))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Update the teacher as after an update: every iteration counts."""
        return self.traced_update(ctx)

    def eval_variables(
        self, runner: RunnerProtocol, variables: dict[str, tuple[Any, Any]]
    ) -> dict[str, tuple[Any, Any]]:
        """Replace the model by the teacher."""
        state = None if runner.state is None else runner.state.hook_state.get(type(self).__name__)
        if state is None or not self.evaluate_on_teacher:
            return variables
        return {**variables, "": cast_average(state, *variables[""])}

    def before_save_checkpoint(self, runner: RunnerProtocol, checkpoint: dict[str, Any]) -> None:
        """Record under `evaluated` that the teacher is validated, for predictions from the
        checkpoint.
        """
        name = type(self).__name__
        state = checkpoint["state"]["hook_state"].get(name)
        if state is not None and self.evaluate_on_teacher:
            items = [
                item for item in ("params", "model_state") if jax.tree.leaves(getattr(state, item))
            ]
            checkpoint["evaluated"] = {item: f"hook_state.{name}.{item}" for item in items}
