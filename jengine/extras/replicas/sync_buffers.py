"""BatchNorm statistics that are averaged over replicas."""

from jengine.config.registry import HOOKS
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Mean over replicas of the model's running statistics, as in MMEngine.

    The hook acts at the end of each training epoch, and before a validation elsewhere, as in an
    iteration loop. You need it under `parallel=dict(type='DataParallel')`, where replicas keep
    separate statistics; other strategies compute them from the whole batch, and nothing happens.
    Integers do not change.
    """

    def __init__(self) -> None:
        self._is_synced = False

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Average the statistics."""
        self._average(runner)
        self._is_synced = True

    def before_val_epoch(self, runner: RunnerProtocol) -> None:
        """Average the statistics, unless the end of an epoch has just done so."""
        if not self._is_synced:  # an epoch loop validates right after an epoch
            self._average(runner)
        self._is_synced = False

    def _average(self, runner: RunnerProtocol) -> None:
        model_state = runner.strategy.mean_over_replicas(runner.state.model_state)
        # without replicas the strategy returns the same object
        if model_state is not runner.state.model_state:
            runner.state = runner.state.replace(model_state=model_state)
