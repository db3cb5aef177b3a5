"""Ends training when a metric no longer improves."""

import math
from typing import Any, Literal

from jengine.annotations import Count, Finite, NonNegative
from jengine.checkpoint import infer_rule, is_better, pick_metric
from jengine.errors import closest
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS

_MIN_DELTA = 0.1  # MMEngine's default, whose documentation says 0.01


@HOOKS.register_module()
class EarlyStoppingHook(Hook):
    """Ends training after `patience` validations in a row without an improvement.

    After each validation, in this order: a score that is not finite ends training; so does one that is beyond
    `stopping_threshold`; one that beats the best by `min_delta` or more is the new best; any other counts as one
    without improvement. Best score and count are saved in checkpoints, so that a resumed run stops where an
    uninterrupted one does.

    Args:
      monitor: the metric.
      rule: 'greater' or 'less', which value of it is better; inferred from its name by default.
      min_delta: the least improvement that counts, in the unit of the metric; 0.1 by default, with a warning: for a
        metric between 0 and 1 that is far too much.
      strict: a validation without the metric is an error; by default a warning.
      check_finite: end training when the metric is infinite or not a number.
      patience: validations without improvement after which training ends.
      stopping_threshold: a score; a strictly better one ends training at once.

    Raises:
      ValueError: an unknown rule, or none that can be told from the metric's name. TypeError: a number that is none.
    """

    priority = "LOWEST"

    def __init__(
        self,
        monitor: str,
        rule: Literal["greater", "less"] | None = None,
        min_delta: NonNegative | None = None,
        strict: bool = False,
        check_finite: bool = True,
        patience: Count = 5,
        stopping_threshold: Finite | None = None,
    ) -> None:
        self.monitor = monitor
        self.rule = infer_rule(monitor) if rule is None else rule
        self.min_delta = _MIN_DELTA if min_delta is None else min_delta
        self.strict = strict
        self.check_finite = check_finite
        self.patience = patience
        self.stopping_threshold = stopping_threshold
        self.best_score: float | None = None
        self.wait_count = 0
        self._says_min_delta = min_delta is not None
        self._training = False

    def monitored_metrics(self) -> list[tuple[str, str]]:
        """Return the monitored metric."""
        return [("monitor", self.monitor)]

    def before_run(self, runner: Runner) -> None:
        """Checks that the training loop can be stopped.

        Raises:
          AssertionError: it has no `stop_training`.
        """
        loop = runner.train_loop
        if loop is not None and not hasattr(loop, "stop_training"):
            raise AssertionError(
                f"EarlyStoppingHook: {type(loop).__name__} has no attribute `stop_training`; a train loop ends when it "
                "is True"
            )

    def before_train(self, runner: Runner) -> None:
        """Warns if the least improvement was left to its default."""
        self._training = True
        if not self._says_min_delta:
            runner.logger.warning(
                f"EarlyStoppingHook: min_delta is not given: only improvements of {self.monitor!r} by at least "
                f"{_MIN_DELTA} count; for a metric between 0 and 1 give a smaller one"
            )

    def after_train(self, runner: Runner) -> None:
        """Validations outside training count no more."""
        self._training = False

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Looks at the metric and ends training if it is time.

        Raises:
          RuntimeError: `strict`, and the metric is not among those of the validation.
        """
        if not self._training:
            return
        metrics = metrics or {}
        if self.monitor not in metrics:
            message = (
                f"EarlyStoppingHook: the validation gave no metric {self.monitor!r}{closest(self.monitor, metrics)}"
            )
            if self.strict:
                raise RuntimeError(message)
            runner.logger.warning(message)
            return
        score = pick_metric(metrics, self.monitor)
        reason = None if score is None else self._judge(score)
        if reason is not None:
            runner.train_loop.stop_training = True
            runner.logger.info(f"Training stops early: {self.monitor} {reason}.")

    def _judge(self, score: float) -> str | None:
        """Takes in a score; why training ends, or None if it goes on."""
        best = "none" if self.best_score is None else f"{self.best_score:.4g}"
        if self.check_finite and not math.isfinite(score):
            return f"is {score}, the best was {best}"
        if self.stopping_threshold is not None and is_better(self.rule, score, self.stopping_threshold):
            self.best_score = score
            return f"is {score:.4g}, beyond the threshold {self.stopping_threshold:.4g}"
        if self._improves(score):
            self.best_score = score
            self.wait_count = 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return f"did not improve in the last {self.wait_count} validations, the best was {best}"

    def _improves(self, score: float) -> bool:
        """Whether `score` reaches the best one and `min_delta`; a score that is not a number improves nothing."""
        if self.best_score is None or math.isnan(score):
            return not math.isnan(score)
        needed = self.best_score + (self.min_delta if self.rule == "greater" else -self.min_delta)
        return score == needed or is_better(self.rule, score, needed)

    def state_dict(self) -> dict[str, Any]:
        """The best score and the count of validations without improvement."""
        return {"best_score": self.best_score, "wait_count": self.wait_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.best_score = state_dict["best_score"]
        self.wait_count = state_dict["wait_count"]
