"""Validates at a period, writes the results down, and keeps the best checkpoint."""

import math
import os
from collections.abc import Sequence
from typing import Any, TextIO

import jax

from jengine.annotations import Count
from jengine.checkpoint import infer_rule
from jengine.contrib.imix.checkpoint import CheckPointHook
from jengine.contrib.imix.hook_base import HookBase
from jengine.contrib.imix.json_lines import open_lines, write_line
from jengine.errors import ConfigError, UnknownNameError, closest
from jengine.registry import HOOKS

BEST = "best_result"


@HOOKS.register_module()
class EvaluateHook(HookBase):
    """Runs the validation at the end of each epoch, and every so many iterations.

    Each result goes to TensorBoard, if the run writes it, and is a line of `eval_json_file` with `iter` and, in a
    training by epochs, `epoch`, both counted from 0. The best result's checkpoint is `best_result` in the work dir, a
    whole one. Results are compared by their metrics in order, the first that differs decides; a metric whose name says
    so (`loss`) is better when it is less.

    The run needs a validation, and its train loop must not validate by itself (`val_begin` after the end): `from_imix`
    takes care of both.

    Args:
      eval_iter_period: iterations between two validations, counted anew in each epoch; None for none within epochs. It
        must divide the `iter_period` of a CheckPointHook, else that takes its place, with a warning.
      is_run_eval: whether anything is validated at all.
      eval_json_file: the file of results; in the work dir unless it is an absolute path.
      metrics: what a result is reduced to, written down and compared: names of metrics, or what they end with after a
        `/`; None for all. `from_imix` reduces results on VisDial to `ndcg`.

    Raises:
      ValueError: a period below 1. KeyError: from the hook, a validation does not give one of the `metrics`.
    """

    def __init__(
        self,
        eval_iter_period: Count | None = None,
        is_run_eval: bool = True,
        eval_json_file: str | os.PathLike[str] = "eval_result.json",
        metrics: Sequence[str] | None = None,
    ) -> None:
        self.eval_iter_period = eval_iter_period
        self.is_run_eval = is_run_eval
        self.eval_json_file = eval_json_file
        self.metrics = metrics
        self._best: dict[str, float] = {}
        self._file: TextIO | None = None

    def before_train(self) -> None:
        """Opens the file of results, and fits the period to that of the checkpoints.

        Raises:
          ConfigError: there is no validation to run.
        """
        trainer = self.trainer
        if not self.is_run_eval:
            return
        if trainer.val_loop is None:
            raise ConfigError("EvaluateHook needs a validation: give val_dataloader, val_cfg and val_evaluator")
        saving = self._saving()
        period = None if saving is None else saving.iter_period
        if self.eval_iter_period and period and period % self.eval_iter_period:
            trainer.logger.warning(
                f"EvaluateHook: eval_iter_period={self.eval_iter_period} does not divide the iter_period={period} of "
                "the checkpoints, which is taken instead"
            )
            self.eval_iter_period = period
        # A checkpoint is written before the validation of the same moment, which a resumed run therefore does again.
        if jax.process_index() == 0:
            self._file = open_lines(os.path.join(trainer.work_dir, self.eval_json_file), "iter", trainer.iter - 1)
        if trainer.iter > 0 and self._is_due(trainer.iter):
            self._evaluate(epoch=trainer.epoch, done=trainer.iter)

    def after_train_iter(self) -> None:
        """Validates when the iteration is due; the last one of an epoch is left to the epoch."""
        trainer = self.trainer
        ends_epoch = trainer.train_loop.by_epoch and self.end_of_epoch(trainer.train_loop.dataloader, self.inner_iter)
        if not ends_epoch and self._is_due(trainer.iter + 1):
            self._evaluate(epoch=trainer.epoch, done=trainer.iter + 1)

    def after_train_epoch(self) -> None:
        """Validates at the end of each epoch."""
        self._evaluate(epoch=self.trainer.epoch + 1, done=self.trainer.iter)

    def _is_due(self, done: int) -> bool:
        """Whether a result belongs to the moment after `done` iterations."""
        trainer, period = self.trainer, self.eval_iter_period
        if trainer.train_loop.by_epoch:
            inner = done % len(trainer.train_loop.dataloader)
            return inner == 0 or (period is not None and inner % period == 0)
        return done == trainer.max_iters or (period is not None and done % period == 0)

    def after_train(self) -> None:
        """Says what was best; also after an error."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._best:
            result = ", ".join(f"{name}: {value:.4f}" for name, value in self._best.items())
            self.trainer.logger.info(f"The best result ({result}) is saved to {BEST}.")

    def _evaluate(self, *, epoch: int, done: int) -> None:
        """Validates; `epoch` epochs and `done` iterations are done."""
        if not self.is_run_eval:
            return
        trainer = self.trainer
        metrics = self._reduced(trainer.val_loop.run())
        for buffer in self.log_buffers():
            buffer.put_result(metrics, done - 1)
        if self._file is not None:
            saving = self._saving()
            row: dict[str, Any] = {"iter": done - 1, "max_iter": trainer.max_iters}
            if trainer.train_loop.by_epoch:
                row |= {"epoch": (done - 1) // len(trainer.train_loop.dataloader), "max_epoch": trainer.max_epochs}
            write_line(self._file, {**row, **metrics, "model_name": saving and saving.name_at(done)})
        if metrics and (not self._best or is_better(metrics, self._best)):
            self._best = metrics
            meta = {"epoch": epoch, "iter": done}
            trainer.save_checkpoint(filename=BEST, meta=meta, latest=False)

    def _reduced(self, found: dict[str, Any]) -> dict[str, float]:
        """The numbers of a result that count."""
        numbers = {name: float(value) for name, value in found.items() if _is_number(value)}
        if self.metrics is None:
            return numbers
        reduced = {name: v for name, v in numbers.items() if {name, name.rsplit("/", 1)[-1]} & set(self.metrics)}
        for metric in self.metrics:
            if not any(metric in (name, name.rsplit("/", 1)[-1]) for name in reduced):
                raise UnknownNameError(f"EvaluateHook: the validation gives no {metric!r}{closest(metric, numbers)}")
        return reduced

    def _saving(self) -> CheckPointHook | None:
        return next((hook for hook in self.trainer.hooks if isinstance(hook, CheckPointHook)), None)

    def state_dict(self) -> dict[str, Any]:
        """The best result."""
        return {"best": dict(self._best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._best = dict(state_dict["best"])


def is_better(metrics: dict[str, float], best: dict[str, float]) -> bool:
    """Whether a result beats the best: the first metric that differs decides. A NaN beats nothing."""
    for name, value in metrics.items():
        other = best.get(name, math.nan)
        if math.isnan(value) or value == other:
            if math.isnan(value) and not math.isnan(other):
                return False
            continue
        return math.isnan(other) or (value < other if _less_is_better(name) else value > other)
    return False


def _less_is_better(name: str) -> bool:
    try:
        return infer_rule(name) == "less"
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
