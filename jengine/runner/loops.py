"""The loops: by epochs, by iterations, and over the data of a validation or a test."""

import bisect
import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from jengine.data import prefetch_to_device
from jengine.model import CastModel, Precision
from jengine.parallel import gather_lists, local_rows
from jengine.registry import LOOPS
from jengine.runner.runner_protocol import Runner
from jengine.runner.stepping import Stepper, StepsPerCall
from jengine.train import COMPILES, TraceOnce, build_eval_step, check_retrace

PyTree = Any


class TrainLoop:
    """What both training loops share: counting, one iteration, and when a validation is due.

    Args:
      runner: whose model is trained.
      dataloader: sized; iterating it gives host batches.
      val_begin: first epoch (or iteration) after which a validation may run; 0 validates before training too.
      val_interval: epochs (or iterations) between validations.
      dynamic_intervals: `(milestone, interval)` pairs; from a milestone on its interval takes the place of
        `val_interval`.
      phases: with several optimizers, which act in one iteration, in order, and how often: `[('disc', 2), ('gen', 1)]`.
      steps_per_call: iterations that may share one call of the compiled step, or 'auto' for a number chosen from the
        measured time of a step. A call ends where a hook is due, and parameters, logs and checkpoints are the same.
      retrace: 'warn' or 'raise', where arguments of another form make a compiled step compile again; None is what the
        environment variable `JENGINE_RETRACE` says, 'warn' by default.

    Attributes:
      by_epoch: whether the loop counts in epochs.
      stop_training: set it to end training at the next occasion.
      iter: training iterations done. epoch: epochs done; 0 throughout in an iteration loop.
      in_iteration: whether an iteration is under way, so that state and counters need not agree.
    """

    by_epoch: bool
    max_epochs: int
    max_iters: int

    def __init__(
        self,
        runner: "Runner",
        dataloader: Any,
        val_begin: int,
        val_interval: int,
        dynamic_intervals: Sequence[tuple[int, int]] | None,
        phases: Sequence[tuple[str, int]] | None,
        retrace: str | None,
        steps_per_call: int | str,
    ) -> None:
        for name, value, least in (("val_begin", val_begin, 0), ("val_interval", val_interval, 1)):
            _check_count(type(self).__name__, name, value, least)
        self.runner = runner
        self.dataloader = dataloader
        self.val_begin = val_begin
        self.phases = phases
        self.retrace = check_retrace(retrace)
        self.steps_per_call = StepsPerCall(steps_per_call)
        self.stop_training = False
        self.in_iteration = False
        self.iter = 0
        self.epoch = 0
        milestones = sorted(dynamic_intervals or [])
        self._milestones = [0, *(milestone for milestone, _ in milestones)]
        self._intervals = [val_interval, *(interval for _, interval in milestones)]

    def run(self) -> None:
        """Trains to the end."""
        raise NotImplementedError(f"{type(self).__name__} must define `run()`")

    def run_iter(self, batch_idx: int, batch: PyTree) -> None:
        """One iteration. Its order is fixed: hooks see the state before the step, then the step, then its outputs."""
        runner = self.runner
        runner.time.switch("hooks")
        self.in_iteration = True
        runner.message_hub.begin(self.iter)
        runner.call_hook("before_train_iter", batch_idx=batch_idx, data_batch=batch)
        outputs = runner.train_step(batch)
        runner.time.switch("hooks")
        runner.call_hook("after_train_iter", batch_idx=batch_idx, data_batch=batch, outputs=outputs)
        self.iter += 1
        self.in_iteration = False
        runner.time.switch("input")
        runner.interrupts.check()

    def _validate_if_due(self, count: int, end: int) -> None:
        """Validates when `count`, the epochs or iterations done, asks for it."""
        interval = self._interval(count + 1)
        due = count >= max(self.val_begin, 1) and (count % interval == 0 or count == end)
        validates = self.runner.val_loop is not None and due
        if validates:
            self.runner.val_loop.run()
        if validates or self.by_epoch:  # not after each iteration: all processes wait for each other here
            self.stop_training = any(self.runner.processes.exchange("the end of an epoch", self.stop_training))

    def _interval(self, coming: int) -> int:
        """The validation interval in force when the epoch or iteration number `coming` comes next."""
        return self._intervals[bisect.bisect(self._milestones, coming) - 1]

    def _stepper(self, batches: Iterable[PyTree]) -> Stepper:
        return Stepper(self, batches, self.steps_per_call, _depth(self.dataloader))

    def _validate_before_first(self, count: int, end: int, *, at_border: bool) -> None:
        """Validates before the first iteration: at the start with `val_begin=0`; after a resume, what is still due.

        A checkpoint is written before the validation of the same moment, which therefore has to follow.
        """
        if self.iter > 0 and at_border:
            self._validate_if_due(count, end)
        elif self.iter == 0 and self.val_begin == 0 and self.runner.val_loop is not None:
            self.runner.val_loop.run()


@LOOPS.register_module()
class EpochBasedTrainLoop(TrainLoop):
    """Trains for a number of epochs. Arguments as in `TrainLoop`, counted in epochs.

    Args:
      max_epochs: epochs to train for.
    """

    by_epoch = True

    def __init__(
        self,
        runner: "Runner",
        dataloader: Any,
        max_epochs: int,
        val_begin: int = 1,
        val_interval: int = 1,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
        phases: Sequence[tuple[str, int]] | None = None,
        retrace: str | None = None,
        steps_per_call: int | str = 1,
    ) -> None:
        _check_count("EpochBasedTrainLoop", "max_epochs", max_epochs, 1)
        super().__init__(
            runner, dataloader, val_begin, val_interval, dynamic_intervals, phases, retrace, steps_per_call
        )
        self.max_epochs = int(max_epochs)
        self.max_iters = self.max_epochs * len(dataloader)

    def run(self) -> None:
        """Trains to the end, with a validation after each epoch that asks for one."""
        self.runner.call_hook("before_train")
        at_border = self.iter == self.epoch * len(self.dataloader)
        self._validate_before_first(self.epoch, self.max_epochs, at_border=at_border)
        while self.epoch < self.max_epochs and not self.stop_training:
            self._run_epoch()
            self._validate_if_due(self.epoch, self.max_epochs)
        self.runner.call_hook("after_train")

    def _run_epoch(self) -> None:
        runner, loader = self.runner, self.dataloader
        runner.call_hook("before_train_epoch")
        start = self.iter - self.epoch * len(loader)
        if start:  # resumed within the epoch
            loader.set_epoch(loader.epoch, start)
        with contextlib.closing(self._stepper(loader)) as stepper:
            runner.time.switch("input")
            batch_idx = start
            while done := stepper.advance(batch_idx, len(loader) - batch_idx):
                batch_idx += done
        runner.time.switch("hooks")
        runner.call_hook("after_train_epoch")
        self.epoch += 1


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """Trains for a number of iterations, over the data again and again. Arguments as in `TrainLoop`, in iterations.

    Args:
      max_iters: iterations to train for.
    """

    by_epoch = False
    max_epochs = 1

    def __init__(
        self,
        runner: "Runner",
        dataloader: Any,
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
        phases: Sequence[tuple[str, int]] | None = None,
        retrace: str | None = None,
        steps_per_call: int | str = 1,
    ) -> None:
        _check_count("IterBasedTrainLoop", "max_iters", max_iters, 1)
        super().__init__(
            runner, dataloader, val_begin, val_interval, dynamic_intervals, phases, retrace, steps_per_call
        )
        self.max_iters = int(max_iters)

    def run(self) -> None:
        """Trains to the end, with a validation after each iteration that asks for one."""
        runner = self.runner
        runner.call_hook("before_train")
        self._validate_before_first(self.iter, self.max_iters, at_border=True)
        runner.call_hook("before_train_epoch")
        with contextlib.closing(self._stepper(self._endless())) as stepper:
            while self.iter < self.max_iters and not self.stop_training:
                stepper.advance(self.iter, self._until_validation() - self.iter)
                self._validate_if_due(self.iter, self.max_iters)
        runner.call_hook("after_train_epoch")
        runner.call_hook("after_train")

    def _until_validation(self) -> int:
        """The number of iterations done after which something may come between two of them."""
        if self.runner.val_loop is None:
            return self.max_iters
        interval = self._interval(self.iter + 1)
        borders = [self.max_iters, *(milestone - 1 for milestone in self._milestones)]
        return min([(self.iter // interval + 1) * interval, *(border for border in borders if border > self.iter)])

    def _endless(self) -> Iterator[PyTree]:
        """The data from the current iteration on: pass after pass, each in its own order."""
        epoch, start = divmod(self.iter, len(self.dataloader))
        while True:
            self.dataloader.set_epoch(epoch, start)
            yield from self.dataloader
            epoch, start = epoch + 1, 0


class EvalLoop:
    """One pass over the data of a validation or a test, with the sums of the metrics kept on the device.

    Args:
      runner: whose model is evaluated.
      dataloader: sized; iterating it gives host batches, the last of them padded.
      evaluator: the metrics.
      fp16: predict in float16.
    """

    mode: str

    def __init__(self, runner: "Runner", dataloader: Any, evaluator: Any, fp16: bool = False) -> None:
        self.runner = runner
        self.dataloader = dataloader
        self.evaluator = evaluator
        if (meta := getattr(dataloader, "metainfo", None)) is not None:
            evaluator.dataset_meta = meta
        self._fp16 = fp16
        self.predict_with(runner.model)

    def predict_with(self, model: Any) -> None:
        """Evaluates this model from now on, with the parameters of the run."""
        strategy = self.runner.strategy
        model = strategy.adapt_for_eval(CastModel(model, Precision(compute="float16")) if self._fp16 else model)
        self._traced = TraceOnce(
            build_eval_step(model, self.evaluator.update),
            ("params", "model_state", "metrics", "batch"),
            name=f"the step of the {self._part}",
            retrace=getattr(self.runner.train_loop, "retrace", None),
        )
        self._step = strategy.compile_eval_step(self._traced)

    def run(self) -> dict[str, float]:
        """Evaluates once and returns the metrics by name."""
        with self.runner.time.part(self._part):
            return self._run()

    @property
    def _part(self) -> str:
        return "validation" if self.mode == "val" else self.mode

    def _run(self) -> dict[str, float]:
        runner, mode = self.runner, self.mode
        runner.call_hook(f"before_{mode}")
        runner.call_hook(f"before_{mode}_epoch")
        metrics: dict[str, float] = {}
        for suffix, (params, model_state) in runner.eval_variables().items():
            found = self._evaluate(params, model_state)
            metrics.update({f"{name}{suffix}": value for name, value in found.items()})
        runner.call_hook(f"after_{mode}_epoch", metrics=metrics)
        runner.call_hook(f"after_{mode}")
        return metrics

    def _evaluate(self, params: PyTree, model_state: PyTree) -> dict[str, float]:
        runner, mode = self.runner, self.mode
        # placed as the step leaves them, or its second call would compile again
        sums = jax.device_put(self.evaluator.init(), getattr(runner.strategy, "device", None))
        with contextlib.closing(
            prefetch_to_device(self.dataloader, runner.strategy.put_batch, _depth(self.dataloader))
        ) as batches:
            for batch_idx, batch in enumerate(batches):
                runner.call_hook(f"before_{mode}_iter", batch_idx=batch_idx, data_batch=batch)
                runner.in_flight.wait()
                sums, predictions = self._call(params, model_state, sums, batch)
                runner.in_flight.add(predictions)
                self._process_host(predictions, batch)
                runner.call_hook(f"after_{mode}_iter", batch_idx=batch_idx, data_batch=batch, outputs=predictions)
                runner.interrupts.check()
        return self.evaluator.evaluate(sums, functools.partial(gather_lists, processes=runner.processes))

    def _call(self, *args: PyTree) -> Any:
        """The step; that it compiled something is told to the account of time and to the watch on its forms."""
        time, compiles = self.runner.time, COMPILES.count
        before = time.switch(self._part)
        found = self._step(*args)
        if COMPILES.count != compiles:
            time.was("compile")
            self._traced.look(*args)
        time.switch(before)
        return found

    def _process_host(self, predictions: PyTree, batch: PyTree) -> None:
        """Hands the rows that this process read to the metrics on the host, if there are any."""
        if self.evaluator.host_metrics:
            if self.runner.processes.count > 1:
                predictions, batch = local_rows((predictions, batch), batch)
            self.evaluator.process_host(predictions, batch)


@LOOPS.register_module()
class ValLoop(EvalLoop):
    """Validation: see `EvalLoop`."""

    mode = "val"

    def run(self) -> dict[str, float]:
        """Validates once; the metrics are kept for the run's validation table."""
        metrics = super().run()
        self.runner.note_validation(metrics)
        return metrics


@LOOPS.register_module()
class TestLoop(EvalLoop):
    """Test: see `EvalLoop`."""

    mode = "test"
    __test__ = False  # not one of pytest's classes


def _depth(loader: Any) -> int:
    """How many batches go to the device ahead."""
    return getattr(loader, "device_prefetch", 2)


def _check_count(owner: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise TypeError(f"{owner}: {name} is an integer, found {value!r}")
    if value < least:
        raise ValueError(f"{owner}: {name} is at least {least}, found {value}")
