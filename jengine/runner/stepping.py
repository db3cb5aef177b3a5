"""How a training loop goes through its batches.

Where a step is short the host works for several iterations at once, up to the next at which a hook is due: it asks
hooks once, hands outputs on once, and may have the iterations share one call of the compiled step, or send their inputs
together.
"""

import collections
import contextlib
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.data import prefetch_to_device
from jengine.data.collate import is_flat
from jengine.errors import ConfigError
from jengine.hooks.hook_list import ITERATION_STAGES
from jengine.runner.runner_protocol import TrainLoop
from jengine.runner.training_step import PlannedStep
from jengine.train.window import WindowOutputs

PyTree = Any

_TIMED_AFTER, _TIMED = 3, 10  # 'auto': iterations that are not timed (they compile), and those that are
_UNFIT = (
    "steps_per_call: the step has convolutions, which XLA compiles for a CPU to something ten times slower within a "
    "loop; iterations are run one by one."
)
_AHEAD_SECONDS, _MOST_AHEAD = 0.4, 8  # how far the host of a CPU may run ahead of it, and by how many steps
_LOOKED_AT = 8  # calls whose length is looked at, so that no program is compiled for longer ones than there are
# how much work a call should hold, at most how many iterations, and how much is dispatched before hooks are asked again
_CALL_SECONDS, _MOST_IN_CALL, _TOGETHER_SECONDS, _MOST_TOGETHER = 0.010, 64, 0.050, 128
# what an iteration gains where inputs are sent together, the batch in bytes up to which they are (more is copied for
# longer than it takes to send), and the bytes that are sent at most (more leaves the cache)
_STACKING_SPARES, _SMALL_BATCH, _MOST_SENT = 20e-6, 2**17, 2**21
# the bytes of a state up to which one program serves steps that update and steps that only accumulate: it takes half as
# much again for copies
_SMALL_STATE = 2**28
_FORM = operator.attrgetter("shape", "dtype")  # of a batch's array
_SEARCHES = operator.attrgetter("jax_debug_nans", "jax_debug_infs")


class StepsPerCall:
    """How many iterations the host takes at once, and whether they share a call.

    Args:
      value: how many iterations may share a call: a number, or 'auto' for one chosen from the measured time of a step.

    Raises:
      ConfigError: neither.

    Attributes:
      size: how many are taken at once; None while it is not chosen. It is chosen for 'auto', and for 1, where those
        taken at once are dispatched one by one.
      fused: whether they share a call.
      stacked: where they do not, whether their inputs are sent together all the same; None while that is not known.
      either: for 'auto', whether one program serves both steps that update and steps that only accumulate, so that a
        run has no more than two; None while that is not known.
    """

    def __init__(self, value: int | str) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not (value == "auto" or whole):
            raise ConfigError(f"steps_per_call is a number of iterations, at least 1, or 'auto'; found {value!r}")
        self.size = None if value in ("auto", 1) else int(value)
        self.fused = value != 1
        self.stacked: bool | None = None
        self.either: bool | None = None
        self._spent: list[float] = []

    def note(self, seconds: float) -> float | None:
        """Counts an iteration while the number is not chosen.

        Args:
          seconds: what the run has spent in steps, and waiting for data, so far.

        Returns:
          Seconds an iteration, once enough were timed.
        """
        self._spent.append(seconds)
        if len(self._spent) <= _TIMED_AFTER + _TIMED:
            return None
        return statistics.median(after - before for before, after in itertools.pairwise(self._spent[_TIMED_AFTER:]))

    def choose(self, seconds: float, longest: Callable[[int], int], fuses: bool = True) -> None:
        """Settles on as many iterations as some milliseconds hold, within a limit; on one if that is not two.

        Where 'auto' finds no two to share a call, they are taken as with 1; but not where that is one program more.

        Args:
          seconds: what an iteration takes.
          longest: of a number of iterations, how many of them the hooks leave together.
          fuses: whether they may share a call.
        """
        self.size = self._fitting(seconds, longest) if fuses or not self.fused else 1
        if self.fused and self.size == 1 and not self.either:
            self.fused = False
            self.size = self._fitting(seconds, longest)

    def _fitting(self, seconds: float, longest: Callable[[int], int]) -> int:
        hold, most = (_CALL_SECONDS, _MOST_IN_CALL) if self.fused else (_TOGETHER_SECONDS, _MOST_TOGETHER)
        fitting = int(hold / max(seconds, 1e-9))
        return longest(min(most, fitting)) if fitting >= 2 else 1


class Stepper:
    """Goes through the batches of an epoch, or of a whole training, for a loop.

    Args:
      loop: the loop; its counters move, and its runner is called.
      batches: host batches, in their order. Closed with the stepper.
      steps_per_call: how many iterations may share a call; kept by the loop.
      depth: batches that are sent to the device ahead of the one in use, where calls have one iteration.
    """

    def __init__(self, loop: "TrainLoop", batches: Iterable[PyTree], steps_per_call: StepsPerCall, depth: int) -> None:
        self._loop = loop
        self._runner = loop.runner
        self._steps = steps_per_call
        self._put = loop.runner.strategy.put_batch
        self._takes_host_batches = getattr(loop.runner.strategy, "takes_host_batches", False)
        self._depth = depth
        self._host = _Batches(batches)
        self._batch: PyTree = None  # the latest that was drawn
        self._ready: _Batches | None = None  # on their way to the device, where each has a call of its own

    def advance(self, batch_idx: int, limit: int) -> int:
        """Runs the next iteration, or the next few together.

        Args:
          batch_idx: the index of its batch.
          limit: the most iterations that may run.

        Returns:
          How many ran; 0 when there is no batch left.
        """
        if self._steps.size is None:
            return self._timed(batch_idx)
        if self._steps.size > 1 or self._of_either_kind():
            return self._together(batch_idx, limit)
        return self._one(batch_idx, self._on_device())

    def close(self) -> None:
        """Closes the source of the batches."""
        if self._ready is not None:
            self._ready.close()
        self._host.close()

    def _on_device(self) -> "_Batches":
        """The batches, some of them sent ahead."""
        if self._takes_host_batches:
            return self._host
        if self._ready is None:
            self._ready = _Batches(prefetch_to_device(self._host, self._put, self._depth))
        return self._ready

    def _of_either_kind(self) -> bool:
        """Whether single iterations take one program for those that update and those that do not."""
        step, steps = self._runner.step, self._steps
        if not steps.fused or not step.accumulates or step.unfit:
            return False
        if steps.either is None:
            steps.either = sum(leaf.nbytes for leaf in jax.tree.leaves(self._runner.state)) <= _SMALL_STATE
        return steps.either

    def _one(self, batch_idx: int, batches: Iterable[PyTree]) -> int:
        for batch in batches:
            self._loop.run_iter(batch_idx, batch)
            return 1
        return 0

    def _timed(self, batch_idx: int) -> int:
        """One iteration, while it is not known how many should be taken at once."""
        if self._of_either_kind():
            done = self._together(batch_idx, 1)
        else:
            done = self._one(batch_idx, map(self._put, self._host) if self._steps.fused else self._on_device())
        runner = self._runner
        spent = sum(runner.time.seconds.get(part, 0.0) for part in ("step", "input"))
        seconds = self._steps.note(spent) if done else None
        if seconds is not None:
            cutting = runner.hook_list.cutting_each(runner)
            # all processes must take the same number, so it is the first one's
            seconds = runner.processes.exchange("the time of a step", seconds)[0]
            auto, large = self._steps.fused, self._steps.either is False
            self._steps.choose(seconds, self._longest, fuses=not (cutting or large))
            if self._takes_host_batches:  # else each step in flight holds a batch on the device
                runner.in_flight.limit = min(max(int(_AHEAD_SECONDS / max(seconds, 1e-9)), 2), _MOST_AHEAD)
            if auto:
                shared = self._steps.size or 1 if self._steps.fused else 1
                runner.logger.info(_told(shared, seconds, cutting, large))
        return done

    def _longest(self, most: int) -> int:
        """How many of `most` iterations hooks leave together, where they leave most, of the next few."""
        start, longest = self._loop.iter, 1
        for _ in range(_LOOKED_AT):
            end = self._runner.hook_list.window_end(self._runner, start, start + most)
            longest, start = max(longest, end - start), end
        return longest

    def _together(self, batch_idx: int, limit: int) -> int:
        """As many iterations as no hook is due between, in one call or one after the other."""
        runner, loop, fused = self._runner, self._loop, self._steps.fused
        batches = self._host if fused else self._on_device()
        first = next(batches, None)
        if first is None:
            return 0
        stacked = fused or self._pays_to_stack(first)
        start, end = loop.iter, self._begin(batch_idx, first, limit)
        drawn: Iterable[PyTree]
        try:
            if stacked:
                runner.time.switch("input")
                drawn = [first, *batches.alike(first, end - start - 1)]
                runner.time.switch("hooks")
                outputs = self._run_stacked(self._plan(batch_idx, drawn, together=True), start)
            else:
                drawn = self._drawn(first, batches, end - start - 1)
                outputs = runner.take_steps(runner.step.each, self._plan(batch_idx, drawn, together=False))
        except Exception:
            self._tell_before_error(batch_idx, start)
            raise
        if fused and runner.step.unfit:
            self._steps.fused = False
            runner.logger.warning(_UNFIT)
        ran = loop.iter - start + 1
        self._end(batch_idx + ran - 1, self._batch, outputs)
        return ran

    def _run_stacked(self, plan: Iterator[PlannedStep], start: int) -> Mapping[str, jax.Array]:
        """Runs the iterations from `start` on, whose inputs are sent together.

        If the plan of one fails, those before it are done first.
        """
        runner, planned = self._runner, list[PlannedStep]()
        failure: Exception | None = None
        try:
            for step in plan:
                planned.append(step)
        except Exception as error:
            if not planned:
                raise
            failure = error
        if self._steps.fused:
            outputs = runner.take_steps(runner.step.several, planned, self._steps.size or 1)
        else:
            try:
                outputs = runner.take_steps(runner.step.by_rows, planned)
            except Exception:
                if (before := runner.step.before_error) is not None:
                    self._loop.iter = start + before.count
                raise
        if failure is not None:
            if not isinstance(outputs, WindowOutputs):
                outputs = WindowOutputs.of([outputs], [planned[0].rates])
            runner.step.before_error = outputs
            raise failure
        return outputs

    def _pays_to_stack(self, batch: PyTree) -> bool:
        """Whether iterations with a call each should have their inputs sent together.

        That is another program: what it spares in the rest of the run must be more than it takes to compile.
        """
        runner, steps = self._runner, self._steps
        if steps.stacked is None:
            size = sum(leaf.nbytes for leaf in batch.values()) if is_flat(batch) else math.inf
            most = min(steps.size or 1, int(_MOST_SENT / max(size, 1)))
            spared = (runner.max_iters - runner.iter) * _STACKING_SPARES
            pays = size <= _SMALL_BATCH and spared > runner.time.seconds.get("compile", 0.0)
            steps.stacked = pays and runner.step.takes_rows(most)
            if steps.stacked:
                steps.size = most
        # a search for NaNs looks at what goes to the device too, which has rows that hold anything
        return bool(steps.stacked) and not any(_SEARCHES(jax.config))

    def _tell_before_error(self, batch_idx: int, start: int) -> None:
        """Hands on the outputs of the iterations from `start` to the one that has failed: they are of interest then."""
        runner, loop, outputs = self._runner, self._loop, self._runner.step.before_error
        if outputs is not None and outputs.count:
            failed, last = loop.iter, outputs.count - 1
            loop.iter = start + last
            with contextlib.suppress(Exception):  # what has failed before is what is told
                calendar = runner.hook_list.calendar(runner, "after_train_iter")
                calendar.call_last(batch_idx=batch_idx + last, data_batch=self._batch, outputs=outputs)
            loop.iter = failed

    def _begin(self, batch_idx: int, batch: PyTree, limit: int) -> int:
        """Begins the iteration; returns the iteration before which those that are taken together must end."""
        runner, loop = self._runner, self._loop
        runner.time.switch("hooks")
        loop.in_iteration = True
        runner.message_hub.begin(loop.iter)
        runner.call_hook("before_train_iter", batch_idx=batch_idx, data_batch=batch)
        most = min(self._steps.size or 1, max(limit, 1))
        return runner.hook_list.window_end(runner, loop.iter, loop.iter + most)

    def _end(self, batch_idx: int, batch: PyTree, outputs: Mapping[str, jax.Array]) -> None:
        """Ends the iteration that the counters stand at."""
        runner, loop = self._runner, self._loop
        runner.time.switch("hooks")
        runner.call_hook("after_train_iter", batch_idx=batch_idx, data_batch=batch, outputs=outputs)
        loop.iter += 1
        loop.in_iteration = False
        runner.time.switch("input")
        runner.interrupts.check()

    def _drawn(self, first: PyTree, batches: "_Batches", most: int) -> Iterator[PyTree]:
        """The first batch, and at most as many more, each drawn when it is asked for."""
        time = self._runner.time
        yield first
        for _ in range(most):
            time.switch("input")
            batch = batches.following()
            time.switch("hooks")
            if batch is None:
                return
            yield batch

    def _plan(self, batch_idx: int, batches: Iterable[PyTree], together: bool) -> Iterator[PlannedStep]:
        """What the host decides for the iterations that see these batches, with their numbers together or apart.

        The counters stand at the latest of them. This runs once an iteration: it is written to cost little.
        """
        runner, loop, wrapper = self._runner, self._loop, self._runner.optim_wrapper
        before, after = (runner.hook_list.calendar(runner, stage) for stage in ITERATION_STAGES)
        hub, own = runner.message_hub, runner.hyperparams
        begun = False
        for batch in batches:
            if begun:
                if after.acts_ahead:
                    after.call_ahead(batch_idx=batch_idx, data_batch=self._batch)
                loop.iter = hub.iteration = loop.iter + 1
                batch_idx += 1
                if before.acts_ahead:
                    before.call_ahead(batch_idx=batch_idx, data_batch=batch)
            begun, self._batch = True, batch
            updates = wrapper.advance()
            numbers = (wrapper.settings(), dict(own)) if together else {**wrapper.hyperparams, **own}
            yield PlannedStep(batch, updates, numbers, wrapper.get_lr())


def _told(size: int, seconds: float, cutting: list[Any], large: bool) -> str:
    """What the log says of the choice."""
    reason = f"for a step of {seconds * 1e3:.3g} ms"
    if cutting:
        names = ", ".join(type(hook).__name__ for hook in cutting)
        reason = f"since {names} acts at each iteration (`Hook.next_due` can say when)"
    elif large:
        reason = "since accumulating and updating in one program would take half the state's memory again"
    return f"steps_per_call='auto': {size}, {reason}."


class _Batches:
    """An iterator that can look at a batch and leave it, and keep an error for later."""

    def __init__(self, batches: Iterable[PyTree]) -> None:
        self._source = iter(batches)
        self._left: collections.deque[PyTree] = collections.deque()
        self._failure: Exception | None = None

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> PyTree:
        if self._left:
            return self._left.popleft()
        if self._failure is not None:
            raise self._failure
        return next(self._source)

    def following(self) -> PyTree | None:
        """The next batch; None at the end, and where the source fails: what came before is to be done first."""
        try:
            return next(self, None)
        except Exception as error:
            self._failure = error
            return None

    def alike(self, first: PyTree, most: int) -> list[PyTree]:
        """The next batches, at most so many, while they have the form of `first`; otherwise as `following`."""
        drawn = [first]
        try:
            drawn.extend(itertools.islice(self if self._left else self._source, most))
        except Exception as error:  # those before it were drawn
            self._failure = error
        count = _leading_alike(drawn)
        self._left.extendleft(reversed(drawn[count:]))
        return drawn[1:count]

    def close(self) -> None:
        """Closes the source."""
        if hasattr(self._source, "close"):
            self._source.close()


def _leading_alike(batches: Sequence[PyTree]) -> int:
    """How many of the batches, from the first on, can be stacked."""
    if set(map(type, batches)) == {dict} and len(set(map(tuple, batches))) == 1:  # the usual batches, all at once
        columns = [[batch[name] for batch in batches] for name in batches[0]]
        if all(set(map(type, column)) == {np.ndarray} for column in columns):
            forms = [list(map(_FORM, column)) for column in columns]
            if all(of_one.count(of_one[0]) == len(batches) for of_one in forms):
                return len(batches)
    form = _form(batches[0])
    return next((i for i, batch in enumerate(batches) if _form(batch) != form), len(batches))


def _form(batch: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, [(np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]
