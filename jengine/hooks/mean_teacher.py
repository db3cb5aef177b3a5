"""Keeps a slowly following copy of the model, the teacher, that the loss may read."""

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
    """The hook's part of the training state."""

    params: PyTree  # the teacher's, like the parameters; floats at least float32
    model_state: PyTree  # the teacher's model state; None with skip_buffer
    steps: jax.Array  # int32[], updates and the copy before them


@HOOKS.register_module()
class MeanTeacherHook(Hook):
    """Moves a teacher towards the model: `teacher = (1 - momentum) * teacher + momentum * model`.

    Tarvainen & Valpola 2017, "Mean teachers are better role models".

    The loss of the model finds it in `hyperparams['teacher']`, `dict(params=..., model_state=...)`, as it is before the
    step; nothing is differentiated through it. It begins as a copy of the model, and is part of the compiled step and
    of the checkpoints.

    Args:
      momentum: how far it moves in an update.
      interval: iterations from one update to the next.
      skip_buffer: leave the model's state (batch statistics) out: the teacher then has the model's own.
      evaluate_on_teacher: validate and test the teacher in the place of the model.

    Raises:
      AssertionError: a momentum outside (0, 1), or an interval below 1.
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
        """A copy of the model."""
        copied = self.average.init((params, None if self.skip_buffer else model_state))
        teacher, teacher_state = copied.params
        return MeanTeacherHookState(teacher, teacher_state, copied.steps + 1)  # the copy was the first update

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Shows the teacher to the loss."""
        params, model_state = _variables(ctx.hook_state, ctx.params, ctx.model_state)
        teacher = dict(params=params, model_state=model_state)
        return ctx.replace(hyperparams={**ctx.hyperparams, "teacher": teacher})

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Moves the teacher if it is time."""
        own = ctx.hook_state
        before = AverageState((own.params, own.model_state), own.steps)
        moved = self.average.update(before, (ctx.params, None if self.skip_buffer else ctx.model_state))
        params, model_state = moved.params
        return ctx.replace(hook_state=MeanTeacherHookState(params, model_state, moved.steps))

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """As after an update: every iteration counts."""
        return self.traced_update(ctx)

    def eval_variables(self, runner: Runner, variables: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
        """Puts the teacher in the place of the model."""
        states = {} if runner.state is None else runner.state.hook_state
        own = states.get(type(self).__name__)
        if own is None or not self.evaluate_on_teacher:
            return variables
        return {**variables, "": _variables(own, *variables[""])}


def _variables(own: MeanTeacherHookState, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """The teacher in the dtypes of the model."""

    def like(teacher: PyTree, model: PyTree) -> PyTree:
        return jax.tree.map(lambda t, m: t.astype(m.dtype), teacher, model)

    return like(own.params, params), model_state if own.model_state is None else like(own.model_state, model_state)
