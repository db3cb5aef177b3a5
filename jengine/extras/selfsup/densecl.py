"""DenseCL's dense loss, turned on after a number of iterations."""

from typing import Any

from jengine.config.annotations import Index
from jengine.config.errors import ArgumentError
from jengine.config.registry import HOOKS
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import Model


@HOOKS.register_module()
class DenseCLHook(Hook):
    """Hook that keeps `loss_lambda`, the dense loss weight, at 0 in the first iterations, when
    matches are meaningless.

    The later value is the model's attribute `loss_lambda`. The model's loss reads the current value
    from `hyperparams['loss_lambda']`, an input to the compiled step, so that the switch does not
    recompile it.

    >>> DenseCLHook(start_iters=500).start_iters
    500

    Args:
      start_iters: number of iterations without the dense loss.

    Raises:
      ArgumentError: at the beginning of training, if the model has no `loss_lambda`.
    """

    acts_on = "hyperparams"

    def __init__(self, start_iters: Index = 1000) -> None:
        self.start_iters = start_iters

    def before_train(self, runner: RunnerProtocol) -> None:
        """Set the first value, so that the step is traced with it, and check the model."""
        self.before_train_iter(runner, 0)

    def before_train_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Set the value for this iteration."""
        value = _find_loss_lambda(runner.model)
        runner.hyperparams["loss_lambda"] = value if runner.iter >= self.start_iters else 0.0


def _find_loss_lambda(model: Model) -> float:
    """Return the attribute of a model, or of a model or module inside it, as under a precision
    policy.
    """
    visited: list[str] = []
    current: Any = model
    while current is not None:
        if hasattr(current, "loss_lambda"):
            return current.loss_lambda
        visited.append(type(current).__name__)
        # models of any user class
        current = getattr(current, "model", None) or getattr(current, "module", None)
    raise ArgumentError(
        "DenseCLHook: the model must have the attribute 'loss_lambda', got "
        f"{' around '.join(visited)} without it; set "
        "`model.loss_lambda`, or define it in a subclass"
    )
