"""Training loops: by epochs, and by iterations.

One iteration, in order (`TrainLoop.run_iters` and `run_iter`):

* source: `BatchStream.take`, which reads `device_prefetch` batches ahead;
* check and put: `BatchCheck` and `put_arrays`, which the stream calls for each batch;
* hooks: `before_train_iter`;
* step: `Runner.train_step`, which calls `TrainPrograms.run_step`;
* hooks and metrics: `after_train_iter`, with metrics that stay on the device.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

from jengine.config.annotations import Ascending, Count, Duration, Index, Range
from jengine.config.errors import ConfigError
from jengine.config.registry import LOOPS
from jengine.data.batch_check import Batch, BatchCheck
from jengine.data.batch_stream import BatchStream
from jengine.data.host_entries import put_arrays
from jengine.hooks.hook_list import KINDS
from jengine.hooks.runner_protocol import Loader, RunnerProtocol
from jengine.logging.loss_watch import LossWatch, NonFiniteLossError
from jengine.optim.wrapper import OptimWrapper
from jengine.parallel.interrupts import WaitedLoader
from jengine.runner.eval_loops import EvalLoop, mark_inconsistent
from jengine.train.micro_batches import count_micro_batches
from jengine.train.phases import batches_per_iteration, count_iterations
from jengine.train.state import MAX_STEP

PyTree = Any
# the hooks that are called for each step of a chunk: before it runs, and after it
_AHEAD = ("hyperparams",)
_BEHIND = ("metrics",)
Length = Annotated[int, Range(ge=1, le=MAX_STEP)]  # the device counts in 32 bits
Intervals = Annotated[Sequence[tuple[Index, Count]], Ascending()]  # (milestone, interval)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a training loop in `train_cfg`, besides its length.

    Attributes:
      val_begin: first epoch (or iteration) after which a validation may run; 0 also validates
        before training.
      val_interval: epochs (or iterations) between validations.
      dynamic_intervals: `(milestone, interval)` pairs with ascending milestones; the interval holds
        from the milestone on.
      phases: with several optimizers, the order and number of updates in one iteration: `[('disc',
        2), ('gen', 1)]`, or dicts with the fields of `PhaseSettings`.
      on_recompile: 'warn' or 'raise' if arguments with another structure or shape recompile a step;
        None for the environment variable `JENGINE_ON_RECOMPILE`, 'warn' by default.
      steps_per_call: iterations in a chunk, one call of the compiled step. If a hook acts between
        them, at the end of an epoch and before a validation, iterations run one by one. Parameters,
        logs and checkpoints are the same.
      on_nonfinite: 'stop' ends training if a loss is not finite, when it is fetched for a log line,
        a checkpoint or the end; 'warn' logs a warning; 'ignore' does neither. Steps that a loss
        scale or a hook dropped do not count.
      max_time: end training this long after the call of `train`, '23:50:00' or '12h', as after
        SIGTERM: the run is saved, and the process ends with exit code 143, with which a scheduler
        should start it again.
      micro_batch: the most examples that a device computes at once: it divides its share of a batch
        into equal parts, and adds up their gradients within the step. An iteration is a batch,
        whatever the number of devices.
      load_best_at_end: True, or a metric of several in `save_best`: after training the state has
        the weights of the best checkpoint, and the averages that hooks keep of them. Counters,
        optimizer and the newest checkpoint are those of the last iteration.
    """

    val_begin: Index = 1
    val_interval: Count = 1
    dynamic_intervals: Intervals | None = None
    phases: Sequence[tuple[str, Count] | Mapping[str, Any]] | None = None
    on_recompile: Literal["warn", "raise"] | None = None
    steps_per_call: Count = 1
    on_nonfinite: Literal["stop", "warn", "ignore"] = "stop"
    max_time: Duration | None = None
    micro_batch: Count | None = None
    load_best_at_end: bool | str = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterSettings(TrainSettings):
    """Settings of a loop over iterations, see `TrainSettings`."""

    val_interval: Count = 1000


class TrainLoop:
    """Base class for training loops: the iterations, and when to validate.

    Subclasses define the end.

    Args:
      runner: provides the step, the hooks and the logs.
      dataloader: yields host batches.
      settings: the settings.

    Attributes:
      settings: the settings.
      by_epoch: whether the loop counts in epochs.
      steps_per_call: iterations in a chunk.
      on_recompile: 'warn' or 'raise', or None for the environment's.
      micro_batches: parts of a device's share of a batch.
      repeats_data: whether epochs are parts of one stream over the data, not passes.
      batches_per_iteration: batches of the loader in an iteration; a tuple of them, if there are
        several.
      stop_training: set it to True to end training after the current iteration or chunk. An epoch
        that this cuts short does not end: without `after_train_epoch` and a validation, and a
        resumed run continues it.
      iter: completed training iterations, from which every other count is derived. During the
        stages and the step of an iteration it is the index of that iteration.
      epoch: completed epochs; 0 throughout in an iteration loop.
      epoch_start: `iter` at the start of the current epoch.
      position: the position in the data after the completed iterations, from the loader's
        `state_dict`; None before the first iteration.
      batch: the batch of the current iteration, on the device, or the last one in a chunk; None
        between iterations.
      seconds: the time of the training iterations in this session.
      steps_left: the steps of the current chunk, which has run, after the one that hooks see.
      is_consistent: False while counters, state and hooks disagree: from the first to the last
        stage of an iteration, and in the stages at the end of an epoch and of a validation.
    """

    by_epoch: bool = True
    repeats_data: bool = False
    max_epochs: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.by_epoch and hasattr(cls, "run_epoch"):
            raise TypeError(
                f"`{cls.__name__}.run_epoch` must be in an epoch-based loop: only these call it"
            )

    def __init__(self, runner: RunnerProtocol, dataloader: Loader, settings: TrainSettings) -> None:
        self.runner = runner
        self.dataloader = dataloader
        self.settings = settings
        self.batches_per_iteration = batches_per_iteration(settings.phases)
        self.on_recompile = settings.on_recompile
        self.steps_per_call = settings.steps_per_call
        if settings.max_time is not None and not runner.processes.agree_on_signals:
            raise ConfigError(
                "`train_cfg.max_time` must be None for several processes without JAX's preemption "
                f"service, by which they end together, got {settings.max_time!r}; do not set "
                "JAX_ENABLE_PREEMPTION_SERVICE=0"
            )
        self.micro_batches = self._count_micro_batches(settings.micro_batch)
        self._batches: BatchStream | None = None  # over all passes, of loops that repeat the data
        # sees what log lines fetch
        runner.message_hub.losses = None if settings.on_nonfinite == "ignore" else LossWatch()
        self.stop_training = False
        self.is_consistent = True
        self.iter = self.epoch = self.epoch_start = 0
        self.position: Any = None
        self.batch: Batch = None
        self.seconds = 0.0
        self.steps_left = 0
        self._last_time = 0.0
        self._waited = WaitedLoader("train_dataloader", dataloader)
        self._check_batch = BatchCheck("train_dataloader", dataloader.batch_axis)
        strategy = runner.strategy
        put = functools.partial(strategy.put_batch, rules=dataloader.batch_rules)
        self._put = None if strategy.takes_host_batches else functools.partial(put_arrays, put=put)
        self._takes_host_batches = True  # not sent to the device ahead of time
        # searched with `bisect`
        dynamic = settings.dynamic_intervals or ()
        self._milestones = [0, *(milestone for milestone, _ in dynamic)]
        self._intervals = [settings.val_interval, *(interval for _, interval in dynamic)]

    @functools.cached_property
    def _changing(self) -> dict[str, Callable[[int], int]]:
        """Return what changes with the iteration besides the hyperparameters, by the name in the
        log.
        """
        loader = self.dataloader
        wrapper = self.runner.optim_wrapper
        counts = wrapper.counts if isinstance(wrapper, OptimWrapper) else None
        found = dict(
            batch_size=loader.batch_sizes,
            example_length=loader.example_lengths,
            accumulative_counts=counts,
        )
        return {
            name: values.at
            for name, values in found.items()
            if values is not None and values.milestones
        }

    def _count_micro_batches(self, micro_batch: int | None) -> int:
        """Return the parts of a device's share of a batch, the same for all batch sizes of the
        run.
        """
        multiple = self.runner.strategy.batch_multiple
        sizes: list[Any] = [self.dataloader.batch_size]  # of this process
        if (scheduled := self.dataloader.batch_sizes) is not None:
            sizes = list(scheduled.values)
            if illegal := [size for size in sizes if size % multiple]:
                raise ConfigError(
                    f"`train_dataloader.batch_size` must be multiples of {multiple} devices, got "
                    f"{illegal}"
                )
        counts = {
            count_micro_batches(None if s is None else max(s // multiple, 1), micro_batch)
            for s in sizes
        }
        if len(counts) > 1:
            raise ConfigError(
                "`train_cfg.micro_batch` must be None for batch sizes that change, got "
                f"{micro_batch}"
            )
        return counts.pop()

    @property
    def epoch_length(self) -> int | None:
        """Iterations in an epoch, or in a pass over the data; None if unknown."""
        return self.dataloader.length

    @property
    def val_interval(self) -> int:
        """Epochs (or iterations) between validations now."""
        return self._intervals[
            bisect.bisect(self._milestones, (self.epoch if self.by_epoch else self.iter) + 1) - 1
        ]

    @property
    def max_iters(self) -> int | float:
        """Training iterations in the whole run; `math.inf` if unknown."""
        raise NotImplementedError(f"{type(self).__name__} must define `max_iters`")

    def run(self) -> None:
        """Train to the end."""
        raise NotImplementedError(f"{type(self).__name__} must define `run()`")

    # --- Iterations ---

    def run_iters(self, batches: BatchStream, batch_idx: int, stop: int | float) -> int:
        """Train up to iteration `stop`, or until the batches end or a hook sets `stop_training`.

        Args:
          batches: host batches, or batches on the device from `_stream`.
          batch_idx: index of the next batch.
          stop: number of completed iterations at which to return.

        Returns:
          The number of iterations that ran.
        """
        start = self.iter
        interrupts = self.runner.run.interrupts
        self.runner.stopwatch.enter("hooks")
        self._last_time = self.runner.stopwatch.since  # a validation is no part of an iteration
        while self.iter < stop and not self.stop_training:
            taken = self._take(batches, 1 if self.steps_per_call == 1 else self._chunk_size(stop))
            self.position = batches.position  # hooks save it with the iteration that follows
            if not taken:
                break
            # fewer run one by one: another length compiles another scan
            if len(taken) == self.steps_per_call > 1:
                self.run_chunk(batch_idx + self.iter - start, taken)
                interrupts.check()  # state, counters and hooks agree only here
                continue
            for batch, self.position in zip(taken, batches.positions, strict=True):
                if self._takes_host_batches and self._put is not None:
                    batch = self._put(batch)
                self.run_iter(batch_idx + self.iter - start, batch)
                interrupts.check()
                if self.stop_training:  # the remaining batches are taken again after a resume
                    break
        return self.iter - start

    def run_repeated(self, batch_idx: int, stop: int) -> int:
        """Train up to iteration `stop` on passes over the data, like `run_iters`.

        Where the batch size or the length of examples changes, the data continue at the same
        example.
        """
        start = self.iter
        if self.position is None:  # no checkpoint has it
            self.dataloader.set_epoch(0)
            self.position = self.dataloader.state_dict()
        while self.iter < stop and not self.stop_training:
            if self.dataloader.set_step(self.iter):
                self.close()
                self.runner.programs.expect_shapes()
            # reads ahead across epochs
            self._batches = self._batches or self._stream(self._repeat_data())
            change = self.dataloader.next_change(self.iter)
            if self.run_iters(self._batches, batch_idx + self.iter - start, min(stop, change)) == 0:
                break
        return self.iter - start

    def close(self) -> None:
        """Close the data, if epochs are not passes; training continues at the same position."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _chunk_size(self, stop: int | float) -> int:
        """Return the number of iterations for the next call: 1 if a hook acts within the chunk."""
        size = self.steps_per_call
        return (
            size
            if self.iter + size <= stop and self.runner.hook_list.allows_chunk(self.runner, size)
            else 1
        )

    def _take(self, batches: BatchStream, size: int) -> list[PyTree]:
        """Take at most `size` batches with one structure.

        A signal received meanwhile ends training at once.
        """
        runner = self.runner
        runner.stopwatch.enter("input")
        try:
            runner.run.interrupts.start_waiting(self._waited)
            taken = batches.take(size)
        except Exception as error:
            at = self.position or {"epoch": 0, "position": 0}
            error.add_note(
                f"in train_dataloader ({self.dataloader.kind}), batch {at['position'] + 1} of "
                f"pass {at['epoch'] + 1}"
            )
            raise
        finally:
            runner.run.interrupts.wait.since = None
        runner.stopwatch.enter("hooks")
        return taken

    def _stream(self, source: Iterable[PyTree]) -> BatchStream:
        """Return the batches from `source`.

        For single steps they are sent to the device ahead of time.
        """
        loader = self.dataloader
        source = source if self.batches_per_iteration == 1 else self._group(source)
        self._takes_host_batches = self.steps_per_call > 1
        if self._takes_host_batches:  # a chunk is stacked on the host
            return BatchStream(source, self._check_batch, position=loader.state_dict)
        return BatchStream(
            source, self._check_batch, self._put, loader.device_prefetch, loader.state_dict
        )

    def _group(self, source: Iterable[PyTree]) -> Iterator[PyTree]:
        """Yield the batches of each iteration."""
        batches = iter(source)  # closed with this generator, which `zip` would keep open
        while (
            len(group := tuple(itertools.islice(batches, self.batches_per_iteration)))
            == self.batches_per_iteration
        ):
            yield group

    def _repeat_data(self) -> Iterator[PyTree]:
        """Yield the batches in one pass over the data after another, from the current position
        on.
        """
        loader = self.dataloader
        loader.load_state_dict(self.position)
        while True:
            start = loader.state_dict()
            batch = None
            for batch in loader:
                yield batch
            if batch is None and not start["position"]:
                self._raise_no_batches(start["epoch"])
            loader.load_state_dict(loader.state_dict())  # starts the next pass

    def run_iter(self, batch_idx: int, batch: Batch) -> None:
        """Run one iteration: the hooks before the step, the step, and the hooks after it, which
        get the metrics.
        """
        runner = self.runner
        hooks = runner.hook_list
        data_time = runner.stopwatch.since - self._last_time
        self.is_consistent = False
        self.batch = batch
        arguments = {"batch_idx": batch_idx, "data_batch": batch}
        runner.message_hub.start_iteration(self.iter, self.epoch_start)
        hooks.call("before_train_iter", runner, **arguments)
        rates = self._read_rates()
        metrics = runner.train_step(batch)  # dispatched: the host does not wait for them
        runner.message_hub.record(metrics, rates, data_time, self._measure_steps())
        hooks.call("after_train_iter", runner, **arguments, outputs=metrics)
        self.iter += 1  # after the hooks, which see the index of the iteration
        self.is_consistent = True
        self.batch = None

    def run_chunk(self, batch_idx: int, batches: Sequence[PyTree]) -> None:
        """Run an iteration for each batch in one call.

        Hooks that set hyperparameters are called for all steps before it, and hooks that read
        metrics after it.
        """
        runner = self.runner
        hooks = runner.hook_list
        hub = runner.message_hub
        first = self.iter
        last = len(batches) - 1
        data_time = runner.stopwatch.since - self._last_time
        self.is_consistent = False
        self.batch = batches[-1]
        arguments = [
            {"batch_idx": batch_idx + i, "data_batch": batch} for i, batch in enumerate(batches)
        ]
        inputs = []
        for i in range(len(batches)):
            self.iter = first + i
            hub.start_iteration(self.iter, self.epoch_start)
            hooks.call("before_train_iter", runner, _AHEAD if i else KINDS, **arguments[i])
            rates = self._read_rates()
            is_update = runner.optim_wrapper.start_step(self.iter)
            # as a single step would read them now
            inputs.append((rates, runner.step_hyperparams(), is_update))
            if i < last:
                hooks.call("after_train_iter", runner, _AHEAD, **arguments[i])
        rates, hyperparams, is_update = zip(*inputs, strict=True)
        chunk = runner.train_chunk(batches, hyperparams, is_update)
        # Steps within one call have no times of their own
        data_time /= len(batches)
        seconds = self._measure_steps() / len(batches)
        for i in range(len(batches)):
            self.iter = hub.iteration = first + i
            self.steps_left = last - i
            hub.record(chunk.values, rates[i], data_time, seconds, i, chunk.reports)
            kinds = _BEHIND if i < last else KINDS
            hooks.call("after_train_iter", runner, kinds, **arguments[i], outputs=chunk.at(i))
        self.iter += 1
        self.is_consistent = True
        self.batch = None

    def _read_rates(self) -> dict[str, float]:
        """Return the learning rates of the step that follows, once all hooks have set them, and
        other numbers that change with the iteration.

        For each name in `get_lr` it is the rate of the first parameter group.
        """
        runner = self.runner
        if runner.hyperparams:
            runner.take_hyperparams()
        rates = {}  # no comprehension, which is a call in Python 3.11
        for name, values in runner.optim_wrapper.get_lr().items():
            rates[name] = values[0]
        for name, get in self._changing.items():
            rates[name] = float(get(self.iter))
        return rates

    def _measure_steps(self) -> float:
        """Return the seconds since the last steps were dispatched."""
        stopwatch = self.runner.stopwatch
        limiter = self.runner.run.limiter
        if limiter.blocks:
            limiter.drain()
        stopwatch.enter("hooks")
        elapsed = stopwatch.since - self._last_time
        self._last_time = stopwatch.since
        self.seconds += elapsed
        return elapsed

    @property
    def remaining_seconds(self) -> float | None:
        """Estimated time after the current iteration, from the mean time in this session.

        None if the end is unknown.
        """
        if not math.isfinite(self.max_iters):
            return None
        mean = self.seconds / (self.runner.iters_this_session + 1)
        return mean * (self.max_iters - self.iter - 1)

    # --- Checks and validations ---

    def check(self) -> None:
        """Check at a log line that fetched losses are finite.

        Raises:
          NonFiniteLossError: a loss is not finite. WorkDirLockedError: another run has taken over.
        """
        self.runner.run.directories.check_locks()
        check_losses(self.runner, at_line=True)

    def _validate_if_due(self, count: int, end: int) -> None:
        """Validate if it is due after `count` epochs or iterations."""
        check_losses(self.runner)  # before a validation that would be wasted
        intervals = self._get_intervals(count + 1)
        due = [
            name for name, interval in intervals.items() if count % interval == 0 or count == end
        ]
        due = due if count >= max(self.settings.val_begin, 1) else []  # 0 means before training
        if due:
            self.runner.val_loop.run(*([] if len(due) == len(intervals) else [due]))
        if due or self.by_epoch:  # not after each iteration: all processes wait for each other here
            self.stop_training = any(
                self.runner.processes.all_gather("the end of an epoch", self.stop_training)
            )

    def _get_intervals(self, number: int) -> dict[str, int]:
        """Return the interval of each validation at epoch or iteration number `number`, counted
        from 1, by name.
        """
        loop = self.runner.val_loop
        interval = self._intervals[bisect.bisect(self._milestones, number) - 1]
        if not isinstance(loop, EvalLoop):
            return {} if loop is None else {"": interval}
        return {
            name: evaluation.settings.interval or interval
            for name, evaluation in loop.evaluations.items()
        }

    def _validate_before_first(self, count: int, end: int, *, at_boundary: bool) -> None:
        """Validate at the start with `val_begin=0`, or if a resumed run is due to validate."""
        runner = self.runner
        begin = self.settings.val_begin
        if runner.val_loop is not None and begin > end:
            unit = "epochs" if self.by_epoch else "iterations"
            runner.logger.warning(
                f"The training loop never validates: train_cfg.val_begin={begin} is beyond its "
                f"{end} {unit}."
            )
        # saved after it was validated
        validations = runner.run.validations
        if validations and validations[-1][:2] == (self.epoch, self.iter):
            return
        # a checkpoint is written before the validation after the same iteration
        if self.iter > 0 and at_boundary:
            self._validate_if_due(count, end)
        elif self.iter == 0 and begin == 0 and runner.val_loop is not None:
            runner.val_loop.run()

    def _raise_no_batches(self, epoch: int) -> NoReturn:
        reason = (
            "its iterator is exhausted: give an iterable that starts a new pass"
            if epoch
            else "it is empty"
        )
        raise ConfigError(
            f"train_dataloader yielded no batch in pass {epoch + 1} over the data: {reason}"
        )


@LOOPS.register_module()
class EpochBasedTrainLoop(TrainLoop):
    """Training loop over a number of epochs.

    Args:
      max_epochs: epochs to train for.
      epoch_length: iterations in an epoch, which may be more or less than a pass over the data;
        None for one pass, or, if an iteration takes several batches, for the iterations that are
        whole in a pass.
      **settings: `TrainSettings`, counted in epochs.
    """

    by_epoch = True

    def __init__(
        self,
        runner: RunnerProtocol,
        dataloader: Loader,
        max_epochs: Length,
        epoch_length: Count | None = None,
        **settings: Annotated[Any, TrainSettings],
    ) -> None:
        super().__init__(runner, dataloader, TrainSettings(**settings))
        self.max_epochs = max_epochs
        # batches that are left over begin the next epoch
        if epoch_length is None and self.batches_per_iteration > 1:
            epoch_length = count_iterations(self.dataloader.length, self.batches_per_iteration)
        self._epoch_length = epoch_length
        self.repeats_data = epoch_length is not None
        if epoch_length is None and math.isfinite(dataloader.next_change(0)):
            raise ConfigError(
                "`train_cfg.epoch_length` must be given for a batch size or a length of examples "
                "that changes, because "
                "the iterations of a pass over the data then change too, got none"
            )
        if self.epoch_length is None and runner.processes.count > 1:
            raise ConfigError(
                "`train_cfg.epoch_length` must be given for data without a length and several "
                "processes, got none"
            )

    @property
    def epoch_length(self) -> int | None:
        """Iterations in an epoch; None if unknown."""
        return self._epoch_length or self.dataloader.length

    @property
    def max_iters(self) -> int | float:
        """Training iterations in the whole run; `math.inf` if unknown."""
        if self.epoch_length is None:
            return math.inf
        # a resume may change the length
        return self.epoch_start + (self.max_epochs - self.epoch) * self.epoch_length

    def run(self) -> None:
        """Train to the end, and validate after each epoch at which it is due."""
        self.runner.call_hook("before_train")
        self.runner.programs.follow_model()
        self._validate_before_first(
            self.epoch, self.max_epochs, at_boundary=self.iter == self.epoch_start
        )
        with contextlib.closing(self):  # also after an error: readers have threads
            while self.epoch < self.max_epochs and not self.stop_training:
                epoch = self.epoch
                self.run_epoch()
                if self.epoch > epoch:
                    self._validate_if_due(self.epoch, self.max_epochs)
        self.runner.call_hook("after_train")

    def run_epoch(self) -> None:
        """Run one epoch, or what is left after a resume, without validation.

        If a hook stops training within the epoch, it does not end: a resumed run continues it.
        """
        runner = self.runner
        start = self.iter - self.epoch_start
        runner.call_hook("before_train_epoch")
        if self._epoch_length is not None:
            num_iters = self.run_repeated(start, self.epoch_start + self._epoch_length)
        else:
            num_iters = self._run_pass(start)
        if self.stop_training and start + num_iters < (self.epoch_length or math.inf):
            runner.logger.info(
                f"Training stops within epoch {self.epoch + 1}, which a resumed run continues."
            )
            return
        if start + num_iters == 0:
            self._raise_no_batches(self.epoch)
        if self.epoch_length is None:
            runner.logger.info(
                f"Epoch {self.epoch + 1} had {start + num_iters} iterations: one pass over the "
                "data."
            )
        with mark_inconsistent(self):
            runner.call_hook("after_train_epoch")
            self.epoch = self.epoch + 1
            self.epoch_start = self.iter

    def _run_pass(self, start: int) -> int:
        """Train on what is left in the current pass over the data.

        Return the number of iterations.
        """
        loader = self.dataloader
        if self.position is not None and (start or "state" in self.position):  # resumed
            loader.load_state_dict(self.position)
        elif start:
            loader.set_epoch(loader.epoch, start)
        stop = math.inf if loader.length is None else self.epoch_start + loader.length
        with contextlib.closing(self._stream(loader)) as batches:
            return self.run_iters(batches, start, stop)


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """Training loop over a number of iterations.

    Args:
      max_iters: iterations to train for.
      **settings: `IterSettings`, counted in iterations.
    """

    by_epoch = False
    max_epochs = 1

    def __init__(
        self,
        runner: RunnerProtocol,
        dataloader: Loader,
        max_iters: Length,
        **settings: Annotated[Any, IterSettings],
    ) -> None:
        super().__init__(runner, dataloader, IterSettings(**settings))
        self._max_iters = max_iters

    @property
    def max_iters(self) -> int:
        """Training iterations in the whole run."""
        return self._max_iters

    def run(self) -> None:
        """Train to the end, and validate after each iteration at which it is due."""
        runner = self.runner
        runner.call_hook("before_train")
        runner.programs.follow_model()
        self._validate_before_first(self.iter, self.max_iters, at_boundary=True)
        runner.call_hook("before_train_epoch")
        with contextlib.closing(self):
            while self.iter < self.max_iters and not self.stop_training:
                self.run_repeated(self.iter, self._next_stop())
                # `_next_stop` has chosen this iteration
                self._validate_if_due(self.iter, self.max_iters)
        # otherwise the only epoch is not complete: a resumed run continues it
        if self.iter >= self.max_iters:
            runner.call_hook("after_train_epoch")
        runner.call_hook("after_train")

    def _next_stop(self) -> int:
        """Return the iteration count at which the next validation may run, or training ends."""
        intervals = self._get_intervals(self.iter + 1).values()
        if not intervals:
            return self.max_iters
        stops = [self.max_iters, *(milestone - 1 for milestone in self._milestones)]
        stops += [(self.iter // interval + 1) * interval for interval in intervals]
        return min(stop for stop in stops if stop > self.iter)


# --- What loops and checkpoints share ---


def check_losses(runner: RunnerProtocol, *, at_line: bool = False, at_end: bool = False) -> None:
    """Check the losses that were fetched since the last call, as `train_cfg.on_nonfinite` requires.

    Args:
      runner: outside training nothing is checked.
      at_line: at a log line, where several processes check only up to the previous line, so that
        all stop at the same iteration; elsewhere they fetch all losses.
      at_end: training has ended: fetch all losses that are left.

    Raises:
      NonFiniteLossError: a loss is not finite in a step that no loss scale and no hook has dropped.
    """
    loop = runner.train_loop
    hub = runner.message_hub
    if not isinstance(loop, TrainLoop) or hub.losses is None:
        return
    has_peers = runner.run.processes.count > 1
    last: float = math.inf
    if at_line and has_peers:
        runner.log_writer.flush()
        last = hub.last_snapshot  # the same line on all processes
    elif at_end or has_peers:
        hub.flush()
    wrapper = runner.optim_wrapper
    has_scale = getattr(wrapper, "loss_scale", None) is not None
    # At the end too: a resumed run finishes the window, and the loss scale drops it then.
    found = hub.losses.pop(last, waits=has_scale and wrapper.accumulates)
    if found is None:
        return
    iteration, value = found
    message = f"the loss of iteration {iteration}, counted from 0, is {value}"
    if loop.settings.on_nonfinite == "warn":
        hub.losses = None
        runner.logger.warning(f"{message.capitalize()}; training continues.")
        return
    error = NonFiniteLossError(f"{message} (noticed at iteration {loop.iter})")
    error.iteration = iteration
    raise error
