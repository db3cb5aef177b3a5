"""Early end of training, when a metric no longer improves."""

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jengine.config.annotations import Finite, Index, NonNegative
from jengine.config.errors import ArgumentError, closest, config_path
from jengine.config.registry import HOOKS
from jengine.config.scores import infer_rule, is_better, pick_metric
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol

_MIN_DELTA = 0.1  # MMEngine's default, although its documentation gives 0.01


@HOOKS.register_module()
class EarlyStoppingHook(Hook):
    """End of training after `patience` validations in a row without an improvement.

    After each validation, the first rule that fits applies: a score that is not finite ends
    training; a score beyond `stopping_threshold` ends training; a score that beats the best by more
    than `min_delta` becomes the best; any other score, also an equal one, counts as no improvement.
    Checkpoints contain the best score and the count, so that a resumed run stops at the same epoch
    as an uninterrupted one.

    Args:
      monitor: the metric.
      rule: 'greater' or 'less', which value is better; by default inferred from the metric name.
      min_delta: an improvement must be larger than this, in the metric unit; 0.1 by default, with a
        warning, since that is far too much for a metric between 0 and 1.
      strict: raise if a validation does not return the metric; by default warn.
      check_finite: end training when the metric is infinite or NaN.
      patience: number of validations without improvement after which training ends; 0 ends it at
        the first, as 1.
      stopping_threshold: end training at once when the score is strictly better than this.

    Examples:
      >>> EarlyStoppingHook(monitor="accuracy/top1", min_delta=0.001, patience=3).rule
      'greater'
    """

    priority = "LOWEST"

    def __init__(
        self,
        monitor: str,
        rule: Literal["greater", "less"] | None = None,
        min_delta: NonNegative | None = None,
        strict: bool = False,
        check_finite: bool = True,
        patience: Index = 5,
        stopping_threshold: Finite | None = None,
    ) -> None:
        self.monitor = monitor
        with config_path("monitor"):
            self.rule = infer_rule(monitor) if rule is None else rule
        self.min_delta = _MIN_DELTA if min_delta is None else min_delta
        self.strict = strict
        self.check_finite = check_finite
        self.patience = patience
        self.stopping_threshold = stopping_threshold
        self.best_score: float | None = None
        self.wait_count = 0
        self._is_min_delta_given = min_delta is not None
        self._training = False

    def monitored_metrics(self) -> list[tuple[str, str, str]]:
        """Return the monitored metric."""
        return [("monitor", self.monitor, self.rule)]

    def before_run(self, runner: RunnerProtocol) -> None:
        """Check that the training loop can be stopped.

        ArgumentError if it has no `stop_training`.
        """
        loop = runner.train_loop
        if loop is not None and not hasattr(loop, "stop_training"):
            raise ArgumentError(
                "EarlyStoppingHook: the training loop must have the attribute `stop_training`, "
                f"and end when it is True, got {type(loop).__name__} without it"
            )

    def before_train(self, runner: RunnerProtocol) -> None:
        """Warn if `min_delta` has its default."""
        self._training = True
        if not self._is_min_delta_given:
            runner.logger.warning(
                "EarlyStoppingHook: min_delta is not given: only improvements of "
                f"{self.monitor!r} by more than "
                f"{_MIN_DELTA} count; for a metric between 0 and 1 give a smaller one"
            )

    def after_train(self, runner: RunnerProtocol) -> None:
        """Ignore validations outside training from now on."""
        self._training = False

    def after_val_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Compare the metric with the best one, and end training if it is due."""
        # that evaluation may run more rarely
        if not self._training or self.is_left_out(runner, self.monitor):
            return
        metrics = metrics or {}
        if self.monitor not in metrics:
            message = (
                "EarlyStoppingHook: monitor must be a metric of the validation, got "
                f"{self.monitor!r}{closest(self.monitor, metrics)}"
            )
            if self.strict:
                raise RuntimeError(message)
            runner.logger.warning(message)
            return
        score = pick_metric(metrics, self.monitor)
        if score is not None and (reason := self._add_score(score)) is not None:
            runner.train_loop.stop_training = True
            runner.logger.info(f"Training stops early: {self.monitor} {reason}.")

    def find_end(self, validations: Iterable[Mapping[str, float]]) -> str | None:
        """Return why training ends after these validations from its start, or None.

        Args:
          validations: the metrics of each, in order.

        Raises:
          KeyError: one does not have `monitor`.
        """
        hook = copy.copy(self)
        hook.load_state_dict({"best_score": None, "wait_count": 0})
        for metrics in validations:
            score = pick_metric(metrics, self.monitor)
            if score is not None and (reason := hook._add_score(score)) is not None:
                return f"{self.monitor} {reason}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and the number of validations without improvement."""
        return {"best_score": self.best_score, "wait_count": self.wait_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        self.best_score = state_dict["best_score"]
        self.wait_count = state_dict["wait_count"]

    def _add_score(self, score: float) -> str | None:
        """Record a score; return the reason to end training, or None to continue."""
        best = "none" if self.best_score is None else f"{self.best_score:.4g}"
        if self.check_finite and not math.isfinite(score):
            return f"is {score}, the best was {best}"
        if self.stopping_threshold is not None and is_better(
            self.rule, score, self.stopping_threshold
        ):
            self.best_score = score
            return f"is {score:.4g}, beyond the threshold {self.stopping_threshold:.4g}"
        if is_better(self.rule, score, self.best_score, self.min_delta):
            self.best_score = score
            self.wait_count = 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return f"did not improve in the last {self.wait_count} validations, the best was {best}"
