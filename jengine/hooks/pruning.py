"""End of runs that are worse than the others of a search."""

import pathlib
from typing import Any, Literal

from jengine.checkpoint import infer_rule, pick_metric
from jengine.errors import ConfigError
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.json_codec import decode, encode
from jengine.registry import HOOKS
from jengine.storage import write_bytes


@HOOKS.register_module()
class OptunaPruningHook(Hook):
    """Early end of a run by Optuna's pruner, which compares each validation with those of the other runs.

    `jengine sweep --search` adds this hook to its runs. The default pruner ends a run whose best value so far is below
    the median of the others at the same iteration, once five runs are complete.

    Args:
      monitor: the metric.
      rule: 'greater' or 'less', which value is better; by default inferred from the name.

    Examples:
      >>> OptunaPruningHook(monitor="accuracy/top1").monitor
      'accuracy/top1'
    """

    priority = "LOWEST"
    extra = "sweep"

    def __init__(self, monitor: str, rule: Literal["greater", "less"] | None = None) -> None:
        self.monitor = monitor
        self.rule = infer_rule(monitor) if rule is None else rule
        self._record = pathlib.Path()
        self._trial: Any = None

    def monitored_metrics(self) -> list[tuple[str, str, str]]:
        """Return the monitored metric."""
        return [("monitor", self.monitor, self.rule)]

    def before_train(self, runner: RunnerProtocol) -> None:
        """Find the trial in the study that the sweep's record names."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self._record = pathlib.Path(runner.work_dir, "trial.json")
        study = decode(self._record.read_text()).get("study") if self._record.exists() else None
        if study is None:
            raise ConfigError("OptunaPruningHook: the run must be one of `jengine sweep --search`, got another one")
        loaded = optuna.load_study(
            study_name=study["name"], storage=JournalStorage(JournalFileBackend(study["path"]))
        )  # fmt: skip
        numbers = {trial.number: trial._trial_id for trial in loaded.get_trials(deepcopy=False)}
        self._trial = optuna.Trial(loaded, numbers[study["number"]])

    def after_val_epoch(self, runner: RunnerProtocol, metrics: dict[str, float] | None = None) -> None:
        """Report the metric, and end training if the run is to be pruned."""
        if self._trial is None or self.is_left_out(runner, self.monitor):
            return
        value = pick_metric(metrics or {}, self.monitor)
        if value is None:
            return
        # By iteration: Optuna compares trials at equal steps, and epochs of trials may differ in length.
        self._trial.report(value, runner.iter)
        if self._trial.should_prune():
            # The run ends in the ordinary way, with a last checkpoint and reports; an exception would look like a
            # failure.
            runner.train_loop.stop_training = True
            runner.logger.info(f"Training stops early: {self.monitor} is {value:.4g}, worse than in most other runs.")
            write_bytes(self._record, encode({**decode(self._record.read_text()), "pruned": True}).encode())
