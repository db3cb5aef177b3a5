"""Periodic validation: the results go to a file, and the best checkpoint is kept."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from jengine.config import scores
from jengine.config.annotations import Count, is_host_number
from jengine.config.errors import ConfigError, UnknownNameError, closest
from jengine.config.plugins import load_provided
from jengine.config.registry import HOOKS
from jengine.extras.imix.checkpoint import CheckPointHook
from jengine.extras.imix.hook_base import HookBase
from jengine.extras.imix.writers import JsonLines

BEST = "best_result"
BEST_MODEL = "model_best"


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class EvaluateHook(HookBase):
    """Hook that validates at the end of each epoch and every `eval_iter_period` iterations.

    Each result is written to TensorBoard, if the run uses it, and to a line in `eval_json_file`
    with `iter` and, when training by epochs, `epoch`, both counted from 0. The best result is saved
    as the full checkpoint `best_result` in the work dir; after training, `model_best` is a copy
    with the weights alone. Results are compared by the first metric that differs; for metrics such
    as `loss`, less is better.

    The run must have a validation, and its train loop must not validate by itself (`val_begin`
    after the end); `from_imix` sets both.

    >>> EvaluateHook(eval_iter_period=500, metrics=["ndcg"]).is_run_eval
    True

    Args:
      eval_iter_period: iterations between two validations, counted from the start of each epoch;
        None to validate only at the end of epochs. If it does not divide the CheckPointHook's
        `iter_period`, that period is used, with a warning.
      is_run_eval: whether to validate.
      eval_json_file: results file; relative to the work dir.
      metrics: the metrics to write and compare: their names, or what follows the last `/` in their
        names; None for all. `from_imix` selects `ndcg` for VisDial.
    """

    eval_iter_period: Count | None = None
    is_run_eval: bool = True
    eval_json_file: str | os.PathLike[str] = "eval_result.json"
    metrics: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._best: dict[str, float] = {}
        self._file: JsonLines | None = None

    def before_train(self) -> None:
        """Open the results file, and adapt the period to that of the checkpoints."""
        trainer = self.trainer
        if not self.is_run_eval:
            return
        if trainer.val_loop is None:
            raise ConfigError(
                "EvaluateHook must have val_dataloader, val_cfg and val_evaluator, got no "
                "validation"
            )
        checkpoint_hook = self._find_checkpoint_hook()
        period = None if checkpoint_hook is None else checkpoint_hook.iter_period
        if self.eval_iter_period and period and period % self.eval_iter_period:
            trainer.logger.warning(
                f"EvaluateHook: eval_iter_period={self.eval_iter_period} does not divide the "
                f"iter_period={period} of the checkpoints, which is used instead"
            )
            self.eval_iter_period = period
        # A checkpoint is saved before the validation at the same iteration, so a resumed run
        # repeats that validation.
        if jax.process_index() == 0:
            self._file = JsonLines(
                os.path.join(trainer.local_dir, self.eval_json_file), "iter", trainer.iter - 1
            )
        if trainer.iter > 0 and self._is_due(trainer.iter):
            self._evaluate(epoch=trainer.epoch, iteration=trainer.iter)

    def after_train_iter(self) -> None:
        """Validate if it is due.

        `after_train_epoch` validates after the last iteration of an epoch.
        """
        trainer = self.trainer
        ends_epoch = trainer.train_loop.by_epoch and self.end_of_epoch(
            trainer.train_loop.dataloader, self.inner_iter
        )
        # the epoch's end follows in `after_train_epoch`
        if not ends_epoch and self._is_due(trainer.iter + 1):
            self._evaluate(epoch=trainer.epoch, iteration=trainer.iter + 1)

    def after_train_epoch(self) -> None:
        """Validate at the end of each epoch."""
        self._evaluate(epoch=self.trainer.epoch + 1, iteration=self.trainer.iter)

    def _is_due(self, iteration: int) -> bool:
        trainer = self.trainer
        period = self.eval_iter_period
        if trainer.train_loop.by_epoch:
            inner = iteration - trainer.train_loop.epoch_start
            return inner in (0, trainer.train_loop.epoch_length) or (
                period is not None and inner % period == 0
            )
        return iteration == trainer.max_iters or (period is not None and iteration % period == 0)

    def after_train(self) -> None:
        """Log the best result and copy its weights, also after an error."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._best:
            result = ", ".join(f"{name}: {value:.4f}" for name, value in self._best.items())
            # `publish` copies what an asynchronous save may still write
            self.trainer.checkpointer.wait()
            path = os.path.join(self.trainer.work_dir, BEST)
            if jax.process_index() == 0 and os.path.isdir(path):
                publish = load_provided("jengine.checkpoint", "publish")
                publish(path, ("state_dict", "meta"), BEST_MODEL)
            self.trainer.logger.info(
                f"The best result ({result}) is saved to {BEST}, its weights to {BEST_MODEL}."
            )

    def _evaluate(self, *, epoch: int, iteration: int) -> None:
        if not self.is_run_eval:
            return
        trainer = self.trainer
        metrics = select_metrics(trainer.val_loop.run(), self.metrics)
        for buffer in self.log_buffers():
            buffer.put_result(metrics, iteration - 1)
        if self._file is not None:
            checkpoint_hook = self._find_checkpoint_hook()
            line: dict[str, Any] = {"iter": iteration - 1, "max_iter": trainer.max_iters}
            if trainer.train_loop.by_epoch:
                epoch_index = trainer.epoch - (iteration == trainer.train_loop.epoch_start)
                line |= {"epoch": epoch_index, "max_epoch": trainer.max_epochs}
            model_name = None if checkpoint_hook is None else checkpoint_hook.name_at(iteration)
            self._file.write({**line, **metrics, "model_name": model_name})
        if is_better(metrics, self._best):
            self._best = metrics
            meta = {"epoch": epoch, "iter": iteration}
            trainer.save_checkpoint(filename=BEST, meta=meta, latest=False)  # not to resume from

    def _find_checkpoint_hook(self) -> CheckPointHook | None:
        return next((hook for hook in self.trainer.hooks if isinstance(hook, CheckPointHook)), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the best result."""
        return {"best": dict(self._best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._best = dict(state_dict["best"])


def select_metrics(result: dict[str, Any], names: Sequence[str] | None) -> dict[str, float]:
    """Return the numbers in a validation result that `names` selects.

    See the `metrics` of EvaluateHook.

    >>> select_metrics({"vqa/accuracy": 0.5, "loss": 2, "note": "text"}, ["accuracy"])
    {'vqa/accuracy': 0.5}
    """
    numbers = {name: float(value) for name, value in result.items() if is_host_number(value)}
    if names is None:
        return numbers
    # With or without the prefix of the dataset, which iMIX's configs do not write.
    selected = {
        name: value
        for name, value in numbers.items()
        if {name, name.rsplit("/", 1)[-1]} & set(names)
    }
    for metric in names:
        if not any(metric in (name, name.rsplit("/", 1)[-1]) for name in selected):
            raise UnknownNameError(
                "EvaluateHook: `metrics` must be metrics of the validation, got "
                f"{metric!r}{closest(metric, numbers)}"
            )
    return selected


def is_better(metrics: dict[str, float], best: dict[str, float]) -> bool:
    """Return whether a result is better than the best, by the first metric that differs.

    A NaN is never better.

    >>> is_better({"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.5, "loss": 2.0})
    True
    """
    for name, value in metrics.items():
        other = best.get(name, math.nan)
        rule = "greater"
        with contextlib.suppress(ValueError):  # a name without a known rule: more is better
            rule = scores.infer_rule(name)
        if scores.is_better(rule, value, None if math.isnan(other) else other):
            return True
        if value != other and not math.isnan(other):  # worse, or not a number
            return False
    return False
