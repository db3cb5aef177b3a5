"""Early end of a run that is worse than the other runs of a search."""

import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from jengine.config.errors import ConfigError
from jengine.config.json_codec import decode_object, encode
from jengine.config.registry import HOOKS
from jengine.config.scores import infer_rule, pick_metric
from jengine.config.storage import read_bytes, write_bytes
from jengine.extras.report.run_files import TRIAL
from jengine.extras.sweeps.study import named_errors, open_journal
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol


@HOOKS.register_module()
class OptunaPruningHook(Hook):
    """Early end of a run by Optuna's pruner, which compares each validation with those of the other
    runs.

    `jengine sweep --search` adds this hook to its runs. The default pruner ends a run whose best
    value so far is below the median of the others at the same iteration, once five runs are
    complete.

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

        self._record = pathlib.Path(runner.work_dir, TRIAL)
        study = (
            decode_object(read_bytes(self._record)).get("study") if self._record.exists() else None
        )
        if study is None:
            raise ConfigError(
                "OptunaPruningHook: the run must be one of `jengine sweep --search`, got another "
                "one"
            )
        storage = open_journal(study["path"])
        with named_errors(study["path"]):
            loaded = optuna.load_study(study_name=study["name"], storage=storage)
            numbers = {trial.number: trial._trial_id for trial in loaded.get_trials(deepcopy=False)}
            self._trial = optuna.Trial(loaded, numbers[study["number"]])

    def after_val_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Report the metric, and end training if the run is to be pruned."""
        if not self.is_left_out(runner, self.monitor):
            self.take_score(runner, runner.iter, metrics or {})

    def take_score(
        self, runner: RunnerProtocol, iteration: int, metrics: Mapping[str, float]
    ) -> None:
        """Do the same for a validation after another iteration, which followers have run."""
        if self._trial is None or (value := pick_metric(metrics, self.monitor)) is None:
            return
        # By iteration: Optuna compares trials at equal steps, and epochs of trials may differ in
        # length.
        try:
            self._trial.report(value, iteration)
            is_pruned = self._trial.should_prune()
        except Exception as error:
            # Of any type, if the study's file is locked, damaged, or on a full disk. A search is
            # not worth a run.
            runner.logger.warning(
                f"Optuna did not compare {self.monitor} at iteration {iteration} with the other "
                f"runs, so training goes on: {type(error).__name__}: {error}"
            )
            return
        if is_pruned:
            # The run ends in the ordinary way, with a last checkpoint and reports; an exception
            # would look like a failure.
            runner.train_loop.stop_training = True
            runner.logger.info(
                f"Training stops early: {self.monitor} is {value:.4g}, worse than in most other "
                "runs."
            )
            write_bytes(
                self._record,
                encode({**decode_object(read_bytes(self._record)), "pruned": True}).encode(),
            )
