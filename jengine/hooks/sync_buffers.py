"""Averages over replicas what the model keeps beside its parameters, such as the statistics of BatchNorm."""

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Puts the mean over replicas in the place of the model's running statistics, as MMEngine does.

    At the end of each training epoch, and before a validation that no such end came before (as in an iteration loop).
    It matters under `parallel=dict(type='DataParallel')`, where each replica keeps its own; otherwise statistics are
    those of the whole batch, and nothing happens. Integers stay as they are.
    """

    priority = "NORMAL"

    def __init__(self) -> None:
        self._done = False

    def after_train_epoch(self, runner: Runner) -> None:
        """Averages."""
        self._average(runner)
        self._done = True

    def before_val_epoch(self, runner: Runner) -> None:
        """Averages, unless the end of an epoch has just done so."""
        if not self._done:
            self._average(runner)
        self._done = False

    def _average(self, runner: Runner) -> None:
        assert runner.state is not None
        averaged = runner.strategy.mean_over_replicas(runner.state.model_state)
        if averaged is not runner.state.model_state:
            runner.state = runner.state.replace(model_state=averaged)
