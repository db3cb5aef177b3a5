"""Keep a slowly moving copy of the model, the teacher, which the loss can read."""

from typing import Annotated, Any, NamedTuple

import jax

from jengine.annotations import Count, Range
from jengine.averaging import AverageState, ExponentialMovingAverage
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.train import StepContext

PyTree = Any


class MeanTeacherHookState(NamedTuple):
    """Hold the hook's part of the training state."""

    params: PyTree  # the teacher's parameters, like the model's; floats at least float32
    model_state: PyTree  # the teacher's model state; None with skip_buffer
    steps: jax.Array  # int32[], updates, including the initial copy


@HOOKS.register_module()
class MeanTeacherHook(Hook):
    """Move a teacher towards the model: `teacher = (1 - momentum) * teacher + momentum * model`.

    Tarvainen & Valpola 2017, "Mean teachers are better role models".

    The model's loss reads the teacher in `hyperparams['teacher']`, `dict(params=..., model_state=...)`, with its values
    before the step and without gradients. The teacher starts as a copy of the model, is updated in the compiled step,
    and is saved in checkpoints.

    Args:
      momentum: weight of the model in an update.
      interval: iterations between two updates.
      skip_buffer: do not average the model's state (batch statistics): the teacher uses the model's own.
      evaluate_on_teacher: validate and test the teacher instead of the model.

    Raises:
      ArgumentError: a momentum outside (0, 1), or an interval below 1.
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
        return MeanTeacherHookState(teacher, teacher_state, average.steps + 1)  # the copy was the first update

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Pass the teacher to the loss."""
        params, model_state = _cast_like(ctx.hook_state, ctx.params, ctx.model_state)
        teacher = dict(params=params, model_state=model_state)
        return ctx.replace(hyperparams={**ctx.hyperparams, "teacher": teacher})

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Update the teacher if it is due."""
        state: MeanTeacherHookState = ctx.hook_state
        average = AverageState((state.params, state.model_state), state.steps)
        average = self.average.update(average, (ctx.params, None if self.skip_buffer else ctx.model_state))
        params, model_state = average.params
        return ctx.replace(hook_state=MeanTeacherHookState(params, model_state, average.steps))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Update the teacher as after an update: every iteration counts."""
        return self.traced_update(ctx)

    def eval_variables(self, runner: Runner, variables: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
        """Replace the model by the teacher."""
        states = {} if runner.state is None else runner.state.hook_state
        state = states.get(type(self).__name__)
        if state is None or not self.evaluate_on_teacher:
            return variables
        return {**variables, "": _cast_like(state, *variables[""])}

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Record under `evaluated` that the teacher is validated, for predictions from the checkpoint."""
        name = type(self).__name__
        state = checkpoint["state"]["hook_state"].get(name)
        if state is not None and self.evaluate_on_teacher:
            items = [item for item in ("params", "model_state") if jax.tree.leaves(getattr(state, item))]
            checkpoint["evaluated"] = {item: f"hook_state.{name}.{item}" for item in items}


def _cast_like(state: MeanTeacherHookState, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Return the teacher in the dtypes of the model, with the model's state if it has none of its own."""

    def cast(teacher: PyTree, model: PyTree) -> PyTree:
        return jax.tree.map(lambda t, m: t.astype(m.dtype), teacher, model)

    teacher_state = model_state if state.model_state is None else cast(state.model_state, model_state)
    return cast(state.params, params), teacher_state
