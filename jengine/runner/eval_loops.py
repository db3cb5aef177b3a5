"""Evaluation loops: validation and test, over one dataset or several."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.explain import explain
from jengine.config.plugins import load_each
from jengine.config.registry import LOOPS
from jengine.data.batch_check import Batch, BatchCheck
from jengine.data.batch_stream import prefetch_to_device
from jengine.data.collate import count_examples
from jengine.data.host_entries import put_arrays, select_arrays
from jengine.data.masking import on_whole_batches, whole_batches
from jengine.evaluation.evaluator import Evaluator, EvaluatorState
from jengine.evaluation.sections import EvalSettings, loader_path
from jengine.hooks.run_record import update_record
from jengine.hooks.runner_protocol import Loader, RunnerProtocol, TrainLoopProtocol
from jengine.model.model import Model
from jengine.model.precision import CastModel, Precision
from jengine.parallel.interrupts import WaitedLoader, iterate
from jengine.parallel.local_batch import process_local_batch
from jengine.parallel.processes import all_gather_objects, to_host
from jengine.train.model_attributes import hyperparams_as_attributes, plain_attributes
from jengine.train.programs import report_first_compile
from jengine.train.recompilation import RecompilationGuard, compilation_counter
from jengine.train.step import build_eval_step

PyTree = Any


@contextlib.contextmanager
def mark_inconsistent(loop: TrainLoopProtocol | None) -> Iterator[None]:
    """Mark the counters, state and hooks as inconsistent inside, and permanently after an error."""
    if loop is None:
        yield
        return
    before = loop.is_consistent
    loop.is_consistent = False
    yield
    loop.is_consistent = before


class EvalLoop:
    """Evaluation loop over one or several validation or test sets, with metrics accumulated on the
    device.

    Several evaluations have names, which prefix their results: 'robust/accuracy/top1'. They run one
    after the other between the stages `before_val_epoch` and `after_val_epoch`, which gets the
    results of all; `dataloader`, `evaluator` and `epoch_length` are those of the current one.

    Args:
      runner: provides the model.
      dataloader: yields host batches, with the last one padded; or several dataloaders by name.
      evaluator: the metrics; with several dataloaders, by the same names.
      fp16, epoch_length: see `EvalSettings`.
      evaluations: settings that replace these, by name: fields of `EvalSettings`.

    Attributes:
      evaluations: the evaluations by name; the name of a single one is ''.
    """

    mode: str

    def __init__(
        self,
        runner: RunnerProtocol,
        dataloader: Loader | Mapping[str, Loader],
        evaluator: Evaluator | Mapping[str, Evaluator],
        fp16: bool = False,
        epoch_length: Count | None = None,
        evaluations: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.runner = runner
        self.phase = "validation" if self.mode == "val" else self.mode
        loaders: Mapping[str, Loader] = (
            dataloader if isinstance(dataloader, Mapping) else {"": dataloader}
        )
        evaluators: Mapping[str, Evaluator] = (
            evaluator if isinstance(evaluator, Mapping) else {"": evaluator}
        )
        common = EvalSettings(fp16, epoch_length)
        own = evaluations or {}
        self.evaluations = {
            name: Evaluation(
                self,
                name,
                loader,
                evaluators[name],
                dataclasses.replace(common, **own.get(name, {})),
            )
            for name, loader in loaders.items()
        }
        self._current: Evaluation | None = None  # while it runs
        self._chosen = list(self.evaluations)
        self.predict_with(runner.model)

    @property
    def dataloader(self) -> Loader:
        """The dataloader of the current evaluation, outside one that of the first."""
        return (self._current or next(iter(self.evaluations.values()))).dataloader

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of the current evaluation, outside one that of the first."""
        return (self._current or next(iter(self.evaluations.values()))).evaluator

    @property
    def epoch_length(self) -> int | None:
        """Number of batches in the current evaluation, or in all that ran last.

        None if it is not known yet.
        """
        chosen = (
            [self._current] if self._current else [self.evaluations[name] for name in self._chosen]
        )
        lengths = [
            length for evaluation in chosen if (length := evaluation.epoch_length) is not None
        ]
        return sum(lengths) if len(lengths) == len(chosen) else None

    def predict_with(self, model: Model) -> None:
        """Evaluate this model from now on, with the run's parameters."""
        self._model = model
        self._programs: dict[Any, EvalProgram] = {}
        self._attributes = plain_attributes(self._model)
        for evaluation in self.evaluations.values():
            evaluation.program = None

    def find_program(
        self, evaluation: "Evaluation", batch: Batch, renew: bool = False
    ) -> "EvalProgram":
        """Return the program for an evaluation.

        Those with equal metrics, settings and shapes compile one.

        With `renew` it is a new one, for a metric whose state has other shapes since the trace.
        """
        leaves, structure = jax.tree.flatten(batch)
        evaluator = evaluation.evaluator
        fp16 = evaluation.settings.fp16
        rules = evaluation.dataloader.batch_rules
        key = id(evaluator), fp16, str(rules), structure, tuple(map(_shape, leaves))
        if renew or key not in self._programs:
            runner = self.runner
            model = CastModel(self._model, Precision(compute="float16")) if fp16 else self._model
            step = build_eval_step(
                runner.strategy.adapt_for_eval(model, rules), evaluator.update, runner.seed
            )
            step = hyperparams_as_attributes(model)(step)
            traced = RecompilationGuard(
                on_whole_batches(step, rules is not None),
                ("params", "model_state", "metrics", "batch"),
                name=f"the step of the {self.phase}",
                on_recompile=None if runner.train_loop is None else runner.train_loop.on_recompile,
            )
            compiled = runner.strategy.compile_eval_step(traced)
            if runner.checks is not None:
                compiled = runner.checks.check_evaluation(compiled, self.phase, rules is None, fp16)
            self._programs[key] = EvalProgram(traced, compiled)
        return self._programs[key]

    def check(
        self,
        example: Callable[[str], contextlib.AbstractContextManager[Batch]],
        params: PyTree,
        model_state: PyTree,
    ) -> None:
        """Trace each evaluation for an example, see `DataLoaders.example`."""
        for evaluation in self.evaluations.values():
            with example(evaluation.path) as batch:
                evaluation.check(batch, params, model_state)

    def run(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """Evaluate once and return the metrics by name.

        `names` selects evaluations, by default all of them.
        """
        runner = self.runner
        mode = self.mode
        metrics = dict[str, float]()
        self._chosen = list(self.evaluations if names is None else names)
        self._announce("", [name for name in self.evaluations if name not in self._chosen])
        runner.run.wait_for_device()  # or training steps in flight would count as validation
        try:
            with runner.stopwatch.part(self.phase):
                runner.call_hook(f"before_{mode}")
                runner.call_hook(f"before_{mode}_epoch")
                self._drop_changed()
                for name in self._chosen:
                    metrics.update(self._run_one(self.evaluations[name]))
                # schedulers that follow a metric step here
                with mark_inconsistent(runner.train_loop):
                    runner.call_hook(f"after_{mode}_epoch", metrics=metrics)
                    runner.call_hook(f"after_{mode}")
                return metrics
        except Exception as error:
            explain(error, run=runner, cfg=runner.run.cfg, evaluation=self._current)
            raise
        finally:
            self._current = None
            self._attributes = plain_attributes(self._model)  # with those that a trace has set

    def _drop_changed(self) -> None:
        """Drop the programs if an attribute of the model has changed, to compile them again."""
        if plain_attributes(self._model) != self._attributes:
            self._programs.clear()
            for evaluation in self.evaluations.values():
                evaluation.program = None

    def _run_one(self, evaluation: "Evaluation") -> dict[str, float]:
        self._current = evaluation
        metrics = dict[str, float]()
        prefix = f"{evaluation.name}/" if evaluation.name else ""
        self._announce(evaluation.name)
        # an `EMAHook` may add a second pass
        for suffix, variables in self.runner.eval_variables().items():
            values = evaluation.run(*variables)
            metrics.update({f"{prefix}{name}{suffix}": value for name, value in values.items()})
        self._announce("")
        self._current = None
        return metrics

    def _announce(self, current: str, left_out: Sequence[str] | None = None) -> None:
        """Record the current evaluation, and those that this pass leaves out, for hooks and log
        lines.
        """
        if len(self.evaluations) > 1:
            self.runner.message_hub.update_info("evaluation", current, resumed=False)
            if left_out is not None:
                self.runner.message_hub.update_info("evaluations_left_out", left_out, resumed=False)


class EvalProgram(NamedTuple):
    """Compiled evaluation step, for all evaluations with equal metrics, settings and shapes."""

    traced: RecompilationGuard  # the step, which reports other shapes
    step: Any  # compiled


class Evaluation:
    """One dataset of an evaluation loop, with its metrics.

    Attributes:
      name: prefix of the results; '' for a single evaluation.
      path: the dataloader in the config.
      program: the compiled step; None before the first batch.
    """

    def __init__(
        self,
        loop: EvalLoop,
        name: str,
        dataloader: Loader,
        evaluator: Evaluator,
        settings: EvalSettings,
    ) -> None:
        self.name = name
        self.path = loader_path(loop.mode, name)
        self.dataloader = dataloader
        self.evaluator = evaluator
        self.settings = settings
        self.program: EvalProgram | None = None
        self._loop = loop
        self._runner = loop.runner
        self._check_batch = BatchCheck(self.path, dataloader.batch_axis)
        self._put = functools.partial(self._runner.strategy.put_batch, rules=dataloader.batch_rules)
        self._counted: int | None = None  # batches in the last evaluation
        self._set_meta()
        if self.epoch_length is None and loop.runner.processes.count > 1:
            raise ConfigError(
                f"`{loop.mode}_cfg.epoch_length` must be given for data without a length and "
                "several processes, got none"
            )

    @property
    def epoch_length(self) -> int | None:
        """Number of batches to evaluate on; None if it is unknown before the first evaluation."""
        given = self.settings.epoch_length, self.dataloader.length
        return min((length for length in given if length is not None), default=self._counted)

    def _set_meta(self) -> None:
        if (meta := self.dataloader.metainfo) is not None:
            self.evaluator.dataset_meta = meta

    def trace(
        self, params: PyTree, model_state: PyTree, metrics: PyTree, batch: Batch
    ) -> jax.stages.Traced:
        """Trace the evaluation step, without compiling it, for arrays or `jax.ShapeDtypeStruct`s
        with shardings.
        """
        traced: jax.stages.Traced = self._get_program(batch).step.trace(
            params, model_state, metrics, batch
        )
        learned = jax.eval_shape(self.evaluator.init)
        if jax.tree.map(_shape, learned) != jax.tree.map(_shape, metrics):
            # The batch has shown the shapes of a metric's state: start over
            self.program = self._loop.find_program(self, batch, renew=True)
            traced = self.program.step.trace(params, model_state, learned, batch)
        return traced

    def check(self, batch: Batch, params: PyTree, model_state: PyTree) -> None:
        """Trace the evaluation for a host batch: what does not fit is an error before training."""
        metrics = jax.eval_shape(self.evaluator.init)
        _, predictions = self.trace(params, model_state, metrics, self._put(batch)).out_info
        for check_labels in load_each("label_checks"):
            check_labels(self.evaluator, predictions, [batch])

    def _get_program(self, batch: Batch) -> EvalProgram:
        if self.program is None:
            self.program = self._loop.find_program(self, batch)
        return self.program

    def run(self, params: PyTree, model_state: PyTree) -> dict[str, float]:
        """Evaluate these variables on the data and return the metrics by name."""
        runner = self._runner
        mode = self._loop.mode
        loader = self.dataloader
        self._set_meta()  # the evaluator may have that of another evaluation
        # placed as the step returns them: one program
        sums = runner.strategy.put_replicated(self.evaluator.init())
        loader.set_epoch(0)  # the same order in each evaluation
        put = functools.partial(put_arrays, put=self._put)
        with contextlib.closing(
            prefetch_to_device(loader, put, loader.device_prefetch, self._check_batch)
        ) as batches:
            data = WaitedLoader(self.path, loader)
            limited = itertools.islice(batches, self.settings.epoch_length)
            for batch_idx, batch in enumerate(iterate(limited, data, runner.run.interrupts)):
                self._counted = batch_idx + 1
                runner.call_hook(f"before_{mode}_iter", batch_idx=batch_idx, data_batch=batch)
                runner.run.limiter.wait()
                # on the device
                sums, predictions = self._call(params, model_state, sums, select_arrays(batch))
                # one array tells when the step is done
                runner.run.limiter.add(jax.tree.leaves(predictions)[0])
                self._process_host(predictions, batch, batch_idx)
                runner.call_hook(
                    f"after_{mode}_iter", batch_idx=batch_idx, data_batch=batch, outputs=predictions
                )
                runner.run.interrupts.check()
        results = self._evaluate(sums)
        for check in load_each("result_checks"):
            check(self, results, predictions, self._counted)
        return results

    def _call(self, *args: PyTree) -> Any:
        """Run the evaluation step and record compile time."""
        program = self._get_program(args[-1])
        timer = self._runner.stopwatch
        compiled = compilation_counter.count
        before = timer.enter(self._loop.phase)
        if program.traced.shapes is None:
            self.trace(*args)  # the call below uses this trace
            program = self._get_program(args[-1])
            # see `trace`
            args = (*args[:2], self._runner.strategy.put_replicated(self.evaluator.init()), args[3])
        try:
            # on a CPU the step takes host arrays: a user's guard is about all other transfers
            allowed = jax.transfer_guard_host_to_device("allow")
            with report_first_compile(program.traced), allowed:
                outputs = program.step(*args)
        except jax.errors.JaxRuntimeError:
            program.traced.record_shapes(*args)
            raise
        if compilation_counter.count != compiled:  # also without a trace, for another sharding
            timer.relabel("compile")
            program.traced.record_shapes(*args)
        timer.enter(before)
        return outputs

    def _process_host(self, predictions: PyTree, batch: Batch, batch_idx: int) -> None:
        """Pass this process's examples to the metrics on the host, if there are any."""
        if not self.evaluator.host_metrics:
            return
        positions = None
        shard = self._runner.strategy.data_shard
        is_whole = self.dataloader.batch_axis is None
        if self._runner.processes.count > 1:
            predictions, batch = process_local_batch((predictions, batch), batch)
            if not is_whole:
                # The shards take the examples of the dataset in turn.
                size = count_examples(select_arrays(batch))
                positions = (batch_idx * size + np.arange(size)) * shard.count + shard.index
        with whole_batches(is_whole):
            self.evaluator.process_host(predictions, batch, positions)

    def _evaluate(self, sums: EvaluatorState) -> dict[str, Any]:
        """Return the results that process 0 has computed.

        If each process computed its own, those of a metric with random numbers or times would
        differ, and so would what follows them: the learning rate, the best checkpoint, the end of
        training.
        """
        processes = self._runner.processes
        if processes.count == 1:
            return self.evaluator.evaluate(sums)
        self.evaluator.gather(self._gather_results)
        results = to_host(self.evaluator.evaluate(sums)) if processes.index == 0 else None
        return processes.broadcast(f"the results of {self.path}", results)

    def _gather_results(self, values: list[Any], name: str) -> list[Any]:
        # Only the first of the processes that read the same examples contributes
        processes = self._runner.processes
        readers = (
            self._runner.strategy.data_shard.readers if self.dataloader.batch_axis == 0 else (0,)
        )
        is_first = readers[0] == processes.index
        return all_gather_objects(values if is_first else [], name, processes)


def _shape(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], Any]:
    return leaf.shape, leaf.dtype


@LOOPS.register_module("MultiValLoop")
@LOOPS.register_module()
class ValLoop(EvalLoop):
    """Validation loop: see `EvalLoop`."""

    mode = "val"

    def run(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """Validate once and record the metrics for the validation table at the end."""
        metrics = super().run(names)
        runner = self.runner
        runner.run.validations.append((runner.epoch, runner.iter, metrics))
        update_record(runner)  # a run that is killed leaves this
        return metrics


@LOOPS.register_module("MultiTestLoop")
@LOOPS.register_module()
class TestLoop(EvalLoop):
    """Test loop: see `EvalLoop`."""

    mode = "test"
    __test__ = False  # not one of pytest's classes
