"""Base class of hooks: 22 host stages, four traced points, and a state that is saved in
checkpoints.
"""

import math
import operator
from collections.abc import Mapping, Sized
from typing import Any, ClassVar, Literal

from jengine.config.annotations import checked
from jengine.config.errors import ConfigError
from jengine.data.batch_check import Batch
from jengine.hooks.priority import Priority
from jengine.train.traced_hooks import StepContext

# step metrics by name, device arrays; None ahead of a chunk, for hooks that set hyperparameters
Outputs = Mapping[str, Any] | None

# The default `before_val_iter` calls `_before_iter`, and so on.
_SHARED_METHODS = {
    f"{when}_{mode}_{what}": f"_{when}_{what}"
    for when in ("before", "after")
    for mode in ("train", "val", "test")
    for what in ("epoch", "iter")
}


class Hook:
    """Code that runs at fixed points of a run, in one of two ways or in both.

    * **Host stages** (`before_run` … `after_run`, MMEngine's names and arguments) are called by the
      Runner in priority order, outside the compiled step. They can read metrics, files and the
      clock. Annotate `runner: Runner` and `outputs: Mapping[str, Any] | None` for an editor.
    * **Traced points** (`traced_batch`, `traced_grads`, `traced_update`, `traced_accumulate`) are
      pure functions `context -> context` that are compiled into the step, in the same order. They
      should keep values in the traced state (see `init_traced_state`): an attribute read inside a
      trace is frozen at its first value.

    With `steps_per_call=K` the Runner runs chunks of K steps in one call of the compiled step. No
    chunk crosses a step at which a hook acts on the training state: a hook that acts at each step
    limits chunks to one step.

    Attributes:
      every: `before_train_iter` and `after_train_iter` are called at each `every`-th training
        iteration, counted from 1 over the whole run; None calls them at each one, -1 at none.
      acts_on: what these two stages use. With 'state', a chunk ends at the step at which they act.
        With 'metrics', they only read metrics and progress: `after_train_iter` is called after the
        chunk for each of its steps. With 'hyperparams', they only set values that the step reads:
        they are called for each step before the chunk runs, without `outputs`.
      priority: order among the hooks of a stage, unless overridden at registration.
      update_on_skipped_steps: whether the traced state is updated at skipped steps
        (`StepContext.apply_update`).
      is_single: whether a run has at most one hook of the class, subclasses included.

    Examples:
      >>> class StopAtLoss(Hook):
      ...     def after_val_epoch(self, runner, metrics=None):
      ...         runner.train_loop.stop_training = metrics["loss"] < 0.1
      >>> StopAtLoss().get_triggered_stages()
      ['after_val_epoch']
    """

    every: int | None = None
    acts_on: Literal["state", "metrics", "hyperparams"] = "state"
    priority: int | str | Priority = "NORMAL"
    update_on_skipped_steps: ClassVar[bool] = False
    is_single: ClassVar[bool] = False

    stages: ClassVar[tuple[str, ...]] = (
        "before_run",
        "after_load_checkpoint",
        "before_train",
        "before_train_epoch",
        "before_train_iter",
        "after_train_iter",
        "after_train_epoch",
        "before_val",
        "before_val_epoch",
        "before_val_iter",
        "after_val_iter",
        "after_val_epoch",
        "after_val",
        "before_save_checkpoint",
        "after_train",
        "before_test",
        "before_test_epoch",
        "before_test_iter",
        "after_test_iter",
        "after_test_epoch",
        "after_test",
        "after_run",
    )
    traced_points: ClassVar[tuple[str, ...]] = (
        "traced_batch",
        "traced_grads",
        "traced_update",
        "traced_accumulate",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checked(cls)  # so that the work dir's config has the hooks of a run in Python

    # --- Host stages, in the order of a run. ---

    def before_run(self, runner: Any) -> None:
        """Run once before training, validation or testing begins."""

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Run after a checkpoint is read and before it is used.

        `checkpoint` may be edited in place.
        """

    def before_train(self, runner: Any) -> None:
        """Run before the first training iteration."""

    def before_train_epoch(self, runner: Any) -> None:
        """Run before each training epoch; once in an iteration loop."""
        self._before_epoch(runner, mode="train")

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Batch = None) -> None:
        """Run before each training step, with the batch on its device."""
        self._before_iter(runner, batch_idx=batch_idx, data_batch=data_batch, mode="train")

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Any = None,
    ) -> None:
        """Run after each training step is dispatched.

        `outputs` are step metrics, device arrays that may be pending.
        """
        self._after_iter(
            runner, batch_idx=batch_idx, data_batch=data_batch, outputs=outputs, mode="train"
        )

    def after_train_epoch(self, runner: Any) -> None:
        """Run after each training epoch; once in an iteration loop."""
        self._after_epoch(runner, mode="train")

    def before_val(self, runner: Any) -> None:
        """Run before a validation."""

    def before_val_epoch(self, runner: Any) -> None:
        """Run before the first batch of a validation."""
        self._before_epoch(runner, mode="val")

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Batch = None) -> None:
        """Run before each validation step."""
        self._before_iter(runner, batch_idx=batch_idx, data_batch=data_batch, mode="val")

    def after_val_iter(
        self, runner: Any, batch_idx: int, data_batch: Batch = None, outputs: Any = None
    ) -> None:
        """Run after each validation step; `outputs` are the predictions, on the device."""
        self._after_iter(
            runner, batch_idx=batch_idx, data_batch=data_batch, outputs=outputs, mode="val"
        )

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Run after a validation, with its metrics as Python numbers."""
        self._after_epoch(runner, mode="val")

    def after_val(self, runner: Any) -> None:
        """Run after a validation and its `after_val_epoch`."""

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is written; `checkpoint` may be edited in place."""

    def after_train(self, runner: Any) -> None:
        """Run after the last training iteration."""

    def before_test(self, runner: Any) -> None:
        """Run before a test."""

    def before_test_epoch(self, runner: Any) -> None:
        """Run before the first batch of a test."""
        self._before_epoch(runner, mode="test")

    def before_test_iter(self, runner: Any, batch_idx: int, data_batch: Batch = None) -> None:
        """Run before each test step."""
        self._before_iter(runner, batch_idx=batch_idx, data_batch=data_batch, mode="test")

    def after_test_iter(
        self, runner: Any, batch_idx: int, data_batch: Batch = None, outputs: Any = None
    ) -> None:
        """Run after each test step; `outputs` are the predictions, on the device."""
        self._after_iter(
            runner, batch_idx=batch_idx, data_batch=data_batch, outputs=outputs, mode="test"
        )

    def after_test_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Run after a test, with its metrics as Python numbers."""
        self._after_epoch(runner, mode="test")

    def after_test(self, runner: Any) -> None:
        """Run after a test and its `after_test_epoch`."""

    def after_run(self, runner: Any) -> None:
        """Run once after training, validation or testing."""

    # --- Shared by the three modes: override these to act in training, validation and test. ---

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        """Run before each epoch of any mode ('train', 'val', 'test')."""

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        """Run after each epoch of any mode."""

    def _before_iter(
        self, runner: Any, batch_idx: int, data_batch: Batch = None, mode: str = "train"
    ) -> None:
        """Run before each iteration of any mode."""

    def _after_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """Run after each iteration of any mode."""

    # --- Traced points: pure, compiled into the training step. ---

    def init_traced_state(self, params: Any, model_state: Any) -> Any:
        """Return the hook's entry in `TrainState.hook_state`: a pytree of arrays, or None.

        Leaves must be separate arrays (copy a parameter): each step donates the state, and a buffer
        only once.
        """
        return None

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Run before the loss; may change `ctx.batch`, `ctx.hyperparams`, `ctx.hook_state`."""
        return ctx

    def traced_grads(self, ctx: StepContext) -> StepContext:
        """Run between the gradients and the update.

        May change `ctx.grads`, `ctx.metrics`, `ctx.hook_state`.
        """
        return ctx

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Run after the update, with the new `ctx.params`.

        May change them, `ctx.model_state`, `ctx.hook_state`.
        """
        return ctx

    def traced_accumulate(self, ctx: StepContext) -> StepContext:
        """Run instead of `traced_update` where gradients were only accumulated: `ctx.params` are
        unchanged.
        """
        return ctx

    def wrap_model(self, model: Any) -> Any:
        """Return the model that the run uses, `model` or a `ModelWrapper` around it.

        Called once, while the Runner is built.
        """
        return model

    # --- Evaluation. ---

    def eval_variables(
        self, runner: Any, variables: dict[str, tuple[Any, Any]]
    ) -> dict[str, tuple[Any, Any]]:
        """Return the variables to evaluate, one pass per entry: suffix of the metric names ->
        `(params, model_state)`.

        An averaged model replaces the raw one here; the training state does not change. `variables`
        is what the previous hook returned; for the first hook, the training state under the suffix
        ''.
        """
        return variables

    def monitored_metrics(self) -> list[tuple[str, str, str]]:
        """Return `(argument, metric, rule)` for each validation metric that the hook requires.

        `argument` is the hook argument that names the metric, and `rule` is 'greater' or 'less',
        whichever value is better. The table of validations marks the best values.
        """
        return []

    # --- Host state, saved in every checkpoint. ---

    def state_dict(self) -> dict[str, Any]:
        """Return what the hook needs after a restart: numbers, strings, bytes, arrays, lists,
        tuples and dicts.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values that `state_dict` returned."""

    def list_directories(self, work_dir: str) -> list[str]:
        """Return the directories besides the work dir to which the hook writes checkpoints.

        The run locks them.
        """
        return []

    # --- When the hook acts. ---

    def next_step(self, runner: Any, step: int) -> float:
        """Return the first step from `step` on at which `before_train_iter` and `after_train_iter`
        are called.

        Override it for steps that `every` cannot describe. They count from 0 over the whole run,
        like `runner.iter`; `math.inf` is none.
        """
        return step if self.every is None else self.next_multiple(self.every, step)

    # --- Helpers. ---

    def next_multiple(self, n: int, step: int, begin: int = 0) -> float:
        """Return the first step from `step` on for which `every_n_train_iters(runner, n, begin)` is
        true.

        Examples:
          >>> Hook().next_multiple(10, step=3)
          9
        """
        if n <= 0:
            return math.inf
        count = max(step + 1, begin)  # counted from 1, as `begin`
        return count - 1 + (begin - count) % n

    def every_n_epochs(self, runner: Any, n: int, start: int = 0) -> bool:
        """Return whether the current epoch is every `n`-th from epoch `start` on, counted from
        1.
        """
        return n > 0 and runner.epoch + 1 >= start and (runner.epoch + 1 - start) % n == 0

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Return whether the current iteration is every `n`-th in the epoch."""
        return n > 0 and (batch_idx + 1) % n == 0

    def every_n_train_iters(self, runner: Any, n: int, start: int = 0) -> bool:
        """Return whether the current training iteration is every `n`-th from iteration `start`
        on, counted from 1.
        """
        return n > 0 and runner.iter + 1 >= start and (runner.iter + 1 - start) % n == 0

    def end_of_epoch(self, dataloader: Sized, batch_idx: int) -> bool:
        """Return whether this is the last batch of the loader; False if its length is unknown."""
        # `len` would raise for a stream
        return batch_idx + 1 == operator.length_hint(dataloader, -1)

    def require_epoch_length(self, runner: Any) -> int:
        """Return the epoch length in iterations.

        ConfigError if it is unknown, because the data have no length.
        """
        if (length := runner.train_loop.epoch_length) is None:
            name = type(self).__name__
            raise ConfigError(
                f"`train_cfg.epoch_length` must be given for {name}, because the data have no "
                "length, got none"
            )
        return length

    def is_last_train_epoch(self, runner: Any) -> bool:
        """Return whether the current epoch is the last."""
        return runner.epoch + 1 == runner.max_epochs

    def is_last_train_iter(self, runner: Any) -> bool:
        """Return whether the current iteration is the last."""
        return runner.iter + 1 == runner.max_iters

    def is_left_out(self, runner: Any, metric: str) -> bool:
        """Return whether the current validation leaves out the evaluation of a metric, which has
        its own interval.
        """
        return metric.partition("/")[0] in runner.message_hub.get_info("evaluations_left_out", ())

    def get_triggered_stages(self) -> list[str]:
        """Return the host stages that this hook defines, in the order of `stages`."""
        methods = {*Hook.stages, *_SHARED_METHODS.values()}
        cls = type(self)
        # A method may also be set on the instance, or be one of the shared ones
        defined = {
            x for x in methods if x in self.__dict__ or getattr(cls, x) is not getattr(Hook, x)
        }
        return [
            stage
            for stage in Hook.stages
            if not defined.isdisjoint((stage, _SHARED_METHODS.get(stage)))
        ]

    def get_traced_points(self) -> list[str]:
        """Return the traced points that this hook defines."""
        return [
            point
            for point in Hook.traced_points
            if getattr(type(self), point) is not getattr(Hook, point)
        ]
