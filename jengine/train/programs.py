"""Compiled training programs: update, accumulation, and chunks of both."""

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.config.errors import ConfigError
from jengine.data.collate import stack_batches
from jengine.data.host_entries import select_arrays
from jengine.data.masking import on_whole_batches
from jengine.logging.slow_call import report_if_slow
from jengine.logging.stopwatch import Stopwatch
from jengine.model.model import Model
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict
from jengine.parallel.flat_state import FlatState, StepProgram, flatten_state
from jengine.parallel.placement import Rules
from jengine.parallel.strategy import DispatchLimiter, Strategy
from jengine.train.hyperparams import HyperparamsRaveler, SentHyperparams, repeat_last
from jengine.train.model_attributes import list_models, optimizer_names
from jengine.train.phases import PhaseConfig
from jengine.train.recompilation import RecompilationGuard, compilation_counter
from jengine.train.scanned_step import ChunkMetrics, build_scanned_step
from jengine.train.state import TrainState
from jengine.train.step import WEIGHT, TrainStep, build_train_step, with_flat_metrics

PyTree = Any

logger = logging.getLogger("jengine")
_NOTHING = contextlib.nullcontext()
_NEEDS_CHECK = (
    "a `checkify.check` in the training step is only possible with `jengine train --check` or "
    "`Runner(check=True)`; `checkify.debug_check` does nothing in other runs"
)


class TrainPrograms:
    """Training steps, each compiled at the first call.

    Args:
      model, optim_wrapper, hooks, phases, micro_batches: see `build_train_step`.
      strategy, limiter: compile the steps, and limit how many are in flight.
      timer: attributes call time to 'step' and 'compile'.
      on_recompile: 'warn' or 'raise'; see `RecompilationGuard`.
      batch_rules: see `Strategy.put_batch`.
      hyperparams: those that hooks set, to which numbers are added that hooks assign to attributes
        of the model.
      constants: see `Runner.constants`.
      refuse_changes: raise ConfigError, instead of a warning, if a program is not that of the
        checkpoint.
      checks: makes programs that check all that they compute, of a run with `check=True`.

    Attributes:
      update: the step that updates, `(state, batch, hyperparams) -> (state, metrics)`, pure.
      accumulate: the step that only accumulates gradients.
      chunk: several steps, see `build_scanned_step`.
      compiled: what `Strategy.compile_train_step` returns for 'update', 'accumulate' and 'chunk'.
      hashes: hashes of the traced programs, by program, batch structure, devices and versions; a
        resumed run starts with those in the checkpoint.
      failed: whether a dispatch raised.
    """

    def __init__(
        self,
        model: Model,
        optim_wrapper: OptimWrapper | OptimWrapperDict,
        hooks: Sequence[Any],
        strategy: Strategy,
        limiter: DispatchLimiter,
        timer: Stopwatch,
        phases: Sequence[PhaseConfig] | None = None,
        on_recompile: str | None = None,
        batch_rules: Rules | None = None,
        micro_batches: int = 1,
        hyperparams: MutableMapping[str, Any] | None = None,
        refuse_changes: bool = False,
        checks: Any = None,
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        def compile_step(step: Callable[..., Any], chunked: bool = False) -> Callable[..., Any]:
            step = on_whole_batches(step, batch_rules is not None)
            program = strategy.compile_train_step(step, chunked, batch_rules)
            if checks is None:
                return program
            return checks.check_program(program, step, optim_wrapper, batch_rules is None)

        def build_step(*, update: bool) -> TrainStep:
            return build_train_step(
                model,
                optim_wrapper,
                hooks,
                update=update,
                phases=phases,
                constrain=strategy.constrain,
                gather_tables=strategy.gather_tables,
                micro_batches=micro_batches,
                weighs=True,
            )

        update = build_step(update=True)  # the host knows which one it needs
        accumulate = build_step(update=False)
        self._steps = (update, accumulate) if optim_wrapper.accumulates else (update,)
        chunk = build_scanned_step(*self._steps)

        def guard(step: Callable[..., Any]) -> RecompilationGuard:
            arguments = ("state", "batch", "hyperparams")
            return RecompilationGuard(step, arguments, on_recompile=on_recompile)

        self.update = guard(update)
        self.accumulate = guard(accumulate)
        self.chunk = guard(lambda state, batches, inputs: chunk(state, batches, *inputs))
        self._guards = dict(update=self.update, accumulate=self.accumulate, chunk=self.chunk)
        self.compiled: dict[str, Any] = {
            "update": compile_step(with_flat_metrics(self.update)),
            "accumulate": compile_step(with_flat_metrics(self.accumulate)),
            "chunk": compile_step(self.chunk, chunked=True),
        }
        self.hashes: dict[str, str] = {}
        self.failed = False
        self._model = model
        self._optim_wrapper = optim_wrapper
        self._refuse_changes = refuse_changes
        self._strategy = strategy
        self._batch_rules = batch_rules
        self._limiter = limiter
        self._timer = timer
        self._raveler = HyperparamsRaveler(constants)
        self._sent: SentHyperparams | None = None  # a step on a CPU takes host arrays
        if strategy.platform != "cpu":
            self._sent = SentHyperparams(strategy.put_replicated, self._read_ahead)
        self._hyperparams: MutableMapping[str, Any] = {} if hyperparams is None else hyperparams
        self._intervals = update.intervals  # of phases that act every n-th iteration
        self._last = ""  # the suspect if the device runs out of memory
        self._environment = (
            f"{type(strategy).__name__} {strategy.mesh_description or {}} {strategy.platform} "
            f"jax-{jax.__version__}"
        )
        self._hashed: set[str] = set()  # in this run

    def expect_shapes(self) -> None:
        """Expect batches of another shape, for which the programs compile once."""
        for guard in self._guards.values():
            guard.expect_change()

    def run_step(
        self,
        state: FlatState,
        batch: PyTree,
        hyperparams: Mapping[str, Any],
        is_update: bool,
        iteration: int = 0,
    ) -> tuple[FlatState, dict[str, jax.Array], jax.Array | None]:
        """Dispatch one step, which updates or only accumulates gradients.

        The state is donated. `iteration` is the value of `state.step`, which the host must not wait
        for.

        Returns:
          The pending state, the metrics, and the iteration's weight in a mean, f32[]; None if all
          are equal.
        """
        kind = "update" if is_update else "accumulate"
        inputs = self._raveler.ravel(hyperparams)
        if self._sent is not None:
            inputs = self._sent.get(inputs, state)
        new_state, metrics = self._call(kind, state, select_arrays(batch), inputs)
        if self._sent is not None:
            self._sent.follow(new_state)
        named = dict(zip(metrics.names, metrics.values, strict=True))
        self._limiter.tokens.append(named["loss"])
        for name, every in self._intervals.items():
            if (iteration + 1) % every:
                named.pop(name, None)
        return new_state, named, named.pop(WEIGHT, None)

    def run_chunk(
        self,
        state: FlatState,
        batches: Sequence[PyTree],
        hyperparams: Sequence[Mapping[str, Any]],
        is_update: Sequence[bool],
        iteration: int = 0,
    ) -> tuple[FlatState, ChunkMetrics, jax.Array | None]:
        """Dispatch K steps in one call: `run_step` for K host batches with equal structures, shapes
        and dtypes.

        `iteration` is the index of the first. The weights are f32[K].
        """
        updates = np.asarray(is_update)  # `lax.cond` selects the program of each step
        stacked = self._raveler.stack(hyperparams)
        arrays: Any = stacked.vector, updates
        if self._sent is not None:
            arrays = self._strategy.put_replicated(arrays)
        inputs = dataclasses.replace(stacked, vector=arrays[0]), arrays[1]
        new_state, metrics = self._call("chunk", state, self._put_chunk(batches), inputs)
        self._limiter.tokens.append(metrics.values["loss"])
        reports = dict.fromkeys(metrics.update_only, updates)
        for name, every in self._intervals.items():
            reports[name] = (iteration + 1 + np.arange(len(updates))) % every == 0
        values = {name: value for name, value in metrics.values.items() if name != WEIGHT}
        return new_state, ChunkMetrics(values, reports), metrics.values.get(WEIGHT)

    def are_by_example(self, names: Iterable[str]) -> dict[str, bool]:
        """Return for each metric of a step whether it is the model's, a mean over the examples."""
        return {name: any(name in step.by_example for step in self._steps) for name in names}

    def _read_ahead(self, count: int) -> np.ndarray:
        """Return the hyperparameters of this step and of those that follow, float[k, n], as far as
        the schedules know them.
        """

        def read() -> Mapping[str, Any]:
            return {**self._optim_wrapper.hyperparams, **self._hyperparams}

        chain = getattr(self._optim_wrapper, "schedule_chain", None)
        steps = [read()] if chain is None else chain.read_ahead(count, read)
        return np.asarray(self._raveler.stack(steps).vector)

    def _put_chunk(self, batches: Sequence[PyTree]) -> PyTree:
        # as in all batches of a chunk, which have one form
        if select_arrays(batches[0]) is not batches[0]:
            batches = list(map(select_arrays, batches))
        return self._strategy.put_batch(
            stack_batches(batches), chunked=True, rules=self._batch_rules
        )

    def _call(self, kind: str, state: FlatState, batch: PyTree, inputs: PyTree) -> Any:
        """Call a program; the timer runs for 'step' from now on."""
        guard = self._guards[kind]
        program = self.compiled[kind]
        self._timer.enter("step")  # until the loop enters the next phase
        count = compilation_counter.count
        if len(self._limiter.tokens) >= self._limiter.limit:
            self._limiter.wait()  # bounds the run-ahead
        report = _NOTHING if guard.shapes else report_first_compile(guard)
        self._last = kind
        try:
            # On a CPU the step takes host arrays: a user's guard is about all other transfers. To
            # enter one costs as much as the rest of this method.
            config: Any = jax.config  # whose type lacks this attribute
            has_guard = config.jax_transfer_guard_host_to_device is not None
            allowed = jax.transfer_guard_host_to_device("allow") if has_guard else _NOTHING
            with report, allowed:
                if isinstance(program, StepProgram):
                    result = program.flat(state, batch, inputs)
                else:  # that of a strategy of a user, or one that checks
                    new_state, metrics = program(state.unflatten(), batch, inputs)
                    result = flatten_state(new_state), metrics
        except jax.errors.JaxRuntimeError:
            self.failed = True
            guard.record_shapes(state.unflatten(), batch, inputs)  # for the estimate in the note
            raise
        except ValueError as error:
            if "checkify.check which was not functionalized" in str(error):
                raise ConfigError(_NEEDS_CHECK) from None
            raise
        if compilation_counter.count != count:
            self._timer.relabel("compile")  # the time since `enter`
            guard.record_shapes(state.unflatten(), batch, inputs)
            if self.hashes:  # the run continues another, whose programs may differ
                self.hash_jaxprs()
        return result

    def follow_model(self, *, end: bool = False) -> None:
        """Let numbers that hooks assign to attributes of the model be hyperparameters, until the
        end of training.
        """
        for model in list_models(self._model):
            if end:
                vars(model).pop("_follower", None)
            else:
                vars(model)["_follower"] = weakref.ref(self)

    def assign(self, name: str, value: Any) -> None:
        """Make a number that a hook has assigned to an attribute of the model an input of the
        steps.
        """
        if name in optimizer_names(self._optim_wrapper):
            raise ConfigError(
                f"the attribute `{name}` of the model must have another name to be assigned during "
                f"training, when {name!r} is a hyperparameter of the optimizer, got {value!r}"
            )
        self._hyperparams[name] = value

    def called(self) -> dict[str, tuple[Any, ...]]:
        """Return the last argument shapes of the programs that have been called, by name.

        `compiled[name].trace(*shapes)` is the trace that JAX has kept.
        """
        return {
            kind: guard.shapes for kind, guard in self._guards.items() if guard.shapes is not None
        }

    def hash_jaxprs(self) -> dict[str, str]:
        """Return `hashes` with those of the programs as they were called last.

        Log a warning for one that has changed.
        """
        from jengine.train.jaxpr_hash import hash_jaxpr, hash_shapes

        for kind, shapes in self.called().items():
            key = f"{kind} {hash_shapes(shapes[1])} {self._environment}"
            if key in self._hashed:
                continue
            self._hashed.add(key)
            new = hash_jaxpr(self.compiled[kind].trace(*shapes).jaxpr)
            if self.hashes.get(key, new) != new:
                message = (
                    f"The computation of the training step ({kind}) has changed since the "
                    "checkpoint: "
                    "the model, the loss, the optimizer or a hook computes something else"
                )
                if self._refuse_changes:
                    raise ConfigError(f"{message}, which resume='exact' refuses")
                logger.warning(f"{message}. That of this run is used.")
            self.hashes[key] = new
        return dict(self.hashes)

    def trace(
        self,
        state: TrainState,
        batch: PyTree,
        hyperparams: Mapping[str, Any],
        batches: PyTree = None,
    ) -> dict[str, jax.stages.Traced]:
        """Trace the programs that a run calls, by name, without compiling them.

        State and batch may be `jax.ShapeDtypeStruct`s with shardings; `batches`, real[K, B, ...],
        is for chunks.
        """
        vector = self._raveler.ravel(hyperparams)
        if self._sent is not None:  # as they are sent
            vector = repeat_last(vector, np.asarray(vector.vector)[None])
        programs = {"update": self.compiled["update"].trace(state, batch, vector)}
        if self._optim_wrapper.accumulates:
            programs["accumulate"] = self.compiled["accumulate"].trace(state, batch, vector)
        if batches is not None:
            num_steps = len(jax.tree.leaves(batches)[0])
            inputs = self._raveler.stack([hyperparams] * num_steps), np.ones(num_steps, bool)
            programs["chunk"] = self.compiled["chunk"].trace(state, batches, inputs)
        return programs

    @property
    def last(self) -> tuple[str, Any, Any] | None:
        """Name, compiled function and argument shapes of the last program that was called."""
        if not self._last:
            return None
        guard = self._guards[self._last]
        return f"{guard.name} ({self._last})", self.compiled[self._last], guard.shapes


def report_first_compile(step: RecompilationGuard) -> contextlib.AbstractContextManager[Any]:
    """Report that a step compiles, if the call inside is the first and takes long."""
    return report_if_slow(f"compiling {step.name}") if step.shapes is None else _NOTHING
