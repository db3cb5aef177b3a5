"""Evaluation loops: validation and test."""

import contextlib
import functools
import itertools
from typing import Any

import jax

from jengine.annotations import Count
from jengine.data import (
    BatchCheck,
    BatchForm,
    DataLoader,
    IterableLoader,
    prefetch_to_device,
    put_arrays,
    select_arrays,
)
from jengine.distributed import all_gather_objects, process_local_batch
from jengine.errors import ConfigError
from jengine.evaluation import Evaluator
from jengine.model import CastModel, Precision
from jengine.model.labels import LabelChecks
from jengine.registry import LOOPS
from jengine.runner.end_report import wait_for_device
from jengine.runner.failures import mark_inconsistent, step_failed
from jengine.runner.interrupts import WaitedLoader, iterate
from jengine.runner.programs import report_first_compile
from jengine.runner.runner_protocol import RunnerInternals
from jengine.train import RecompilationGuard, build_eval_step, compilation_counter
from jengine.train.out_of_memory import explain_out_of_memory

PyTree = Any


class EvalLoop:
    """Evaluation loop over a validation or test set, with metrics accumulated on the device.

    Args:
      runner: provides the model.
      dataloader: yields host batches, with the last one padded.
      evaluator: the metrics.
      fp16: predict in float16.
      epoch_length: number of batches to evaluate on, for a stream that does not end; None for all.
    """

    mode: str

    def __init__(
        self,
        runner: RunnerInternals,
        dataloader: Any,
        evaluator: Any,
        fp16: bool = False,
        epoch_length: Count | None = None,
    ) -> None:
        self.runner = runner
        self.dataloader: DataLoader | IterableLoader = dataloader
        self._epoch_length = epoch_length
        self._counted: int | None = None  # batches in the last evaluation
        self._phase = "validation" if self.mode == "val" else self.mode
        self._check_batch = BatchCheck(f"{self.mode}_dataloader")
        if self.epoch_length is None and runner.processes.count > 1:
            raise ConfigError(
                f"`{self.mode}_cfg.epoch_length` must be given for data without a length and several processes, "
                "got none"
            )
        self.evaluator: Evaluator = evaluator
        if (meta := dataloader.metainfo) is not None:
            evaluator.dataset_meta = meta
        self._fp16 = fp16
        self.predict_with(runner.model)

    @property
    def epoch_length(self) -> int | None:
        """Number of batches to evaluate on; None if it is unknown before the first evaluation."""
        lengths = [length for length in (self._epoch_length, self.dataloader.length) if length is not None]
        return min(lengths, default=self._counted)

    def predict_with(self, model: Any) -> None:
        """Evaluate this model from now on, with the run's parameters."""
        self._model = model
        strategy = self.runner.strategy
        model = strategy.adapt_for_eval(CastModel(model, Precision(compute="float16")) if self._fp16 else model)
        self._label_checks = LabelChecks()
        self._traced = RecompilationGuard(
            self._label_checks.watch(build_eval_step(model, self.evaluator.update), argument=3),
            ("params", "model_state", "metrics", "batch"),
            name=f"the step of the {self._phase}",
            on_recompile=None if self.runner.train_loop is None else self.runner.train_loop.on_recompile,
        )
        self._step: Any = strategy.compile_eval_step(self._traced)

    def trace(self, params: PyTree, model_state: PyTree, metrics: PyTree, batch: PyTree) -> jax.stages.Traced:
        """Trace the evaluation step, without compiling it, for arrays or `jax.ShapeDtypeStruct`s with shardings."""
        traced = self._step.trace(params, model_state, metrics, batch)
        learned = jax.eval_shape(self.evaluator.init)
        if jax.tree.map(_shape, learned) != jax.tree.map(_shape, metrics):
            self.predict_with(self._model)  # the batch has shown the shapes of a metric's state: start over
            traced = self._step.trace(params, model_state, learned, batch)
        return traced

    def check(self, batch: PyTree, params: PyTree, model_state: PyTree) -> None:
        """Trace the evaluation for a host batch, such that what does not fit is an error before the run has files."""
        self._label_checks.add(batch)
        metrics = jax.eval_shape(self.evaluator.init)
        self.trace(params, model_state, metrics, self.runner.strategy.put_batch(batch))

    def run(self) -> dict[str, float]:
        """Evaluate once and return the metrics by name."""
        runner, mode, metrics = self.runner, self.mode, dict[str, float]()
        wait_for_device(runner)
        try:
            with runner.phase_timer.phase(self._phase):
                runner.call_hook(f"before_{mode}")
                runner.call_hook(f"before_{mode}_epoch")
                for suffix, (params, model_state) in runner.eval_variables().items():
                    values = self._evaluate(params, model_state)
                    metrics.update({f"{name}{suffix}": value for name, value in values.items()})
                with mark_inconsistent(runner.train_loop):  # schedulers that follow a metric step here
                    runner.call_hook(f"after_{mode}_epoch", metrics=metrics)
                    runner.call_hook(f"after_{mode}")
                return metrics
        except Exception as error:
            if not step_failed(runner):
                explain_out_of_memory(error, self._traced.name, self._step, self._traced.shapes)
            raise

    def _evaluate(self, params: PyTree, model_state: PyTree) -> dict[str, float]:
        runner, mode, loader = self.runner, self.mode, self.dataloader
        sums = runner.strategy.put_replicated(self.evaluator.init())
        loader.set_epoch(0)  # the same order in each evaluation
        put = functools.partial(put_arrays, put=runner.strategy.put_batch)
        with contextlib.closing(prefetch_to_device(loader, put, loader.device_prefetch, self._check)) as batches:
            data = WaitedLoader(f"{mode}_dataloader", loader)
            ready = iterate(itertools.islice(batches, self._epoch_length), data, runner.interrupts)
            for batch_idx, batch in enumerate(ready):
                self._counted = batch_idx + 1
                runner.call_hook(f"before_{mode}_iter", batch_idx=batch_idx, data_batch=batch)
                runner.dispatch_limiter.wait()
                sums, predictions = self._call(params, model_state, sums, select_arrays(batch))  # on the device
                runner.dispatch_limiter.add(jax.tree.leaves(predictions)[0])
                self._process_host(predictions, batch)
                runner.call_hook(f"after_{mode}_iter", batch_idx=batch_idx, data_batch=batch, outputs=predictions)
                runner.interrupts.check()
        self._label_checks.stop()  # the next evaluation has the same data
        return self.evaluator.evaluate(sums, self._gather_results)

    def _check(self, batch: PyTree) -> BatchForm:
        self._label_checks.add(batch)
        return self._check_batch(batch)

    def _call(self, *args: PyTree) -> Any:
        """Run the evaluation step and record compile time."""
        timer, compiled = self.runner.phase_timer, compilation_counter.count
        before = timer.enter(self._phase)
        if self._traced.shapes is None:
            self.trace(*args)  # the call below uses this trace
            args = (*args[:2], self.runner.strategy.put_replicated(self.evaluator.init()), args[3])  # see `trace`
            self.runner.files.open()
        try:
            with report_first_compile(self._traced):
                outputs = self._step(*args)
        except jax.errors.JaxRuntimeError:
            self._traced.record_shapes(*args)
            raise
        if compilation_counter.count != compiled:
            timer.relabel("compile")
            self._traced.check_shardings(*args)
        timer.enter(before)
        return outputs

    def _process_host(self, predictions: PyTree, batch: PyTree) -> None:
        """Pass this process's examples to the metrics on the host, if there are any."""
        if self.evaluator.host_metrics:
            if self.runner.processes.count > 1:
                predictions, batch = process_local_batch((predictions, batch), batch)
            self.evaluator.process_host(predictions, batch)

    def _gather_results(self, values: list[Any], name: str) -> list[Any]:
        # Only the first of the processes that read the same examples contributes
        processes = self.runner.processes
        is_first = self.runner.strategy.data_shard.readers[0] == processes.index
        return all_gather_objects(values if is_first else [], name, processes)


def _shape(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], Any]:
    return leaf.shape, leaf.dtype


@LOOPS.register_module()
class ValLoop(EvalLoop):
    """Validation loop: see `EvalLoop`."""

    mode = "val"

    def run(self) -> dict[str, float]:
        """Validate once and record the metrics for the validation table at the end."""
        metrics = super().run()
        self.runner.record_validation(metrics)
        return metrics


@LOOPS.register_module()
class TestLoop(EvalLoop):
    """Test loop: see `EvalLoop`."""

    mode = "test"
    __test__ = False  # not one of pytest's classes
