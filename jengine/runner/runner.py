"""Provide the Runner: from a config to a trained model."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jengine.annotations import checked
from jengine.checkpoint import Checkpointer, WorkDirLock
from jengine.config import check_keys, dump_config, resolve, write_config
from jengine.data import build_dataloader
from jengine.distributed import ShutdownConsensus, assert_equal_across_processes, get_processes
from jengine.errors import ConfigError, config_path
from jengine.hooks import Hook, Priority
from jengine.hooks.runner_protocol import MaybeNone
from jengine.logging import AsyncWriter, MessageHub, PhaseTimer, build_logger, level_number
from jengine.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from jengine.runner import build, bundle, check, report
from jengine.runner.compilation_cache import use_compilation_cache
from jengine.runner.hyperparams import Hyperparams
from jengine.runner.interrupts import Interrupts, abort_all_on_error, broadcast_identity
from jengine.runner.programs import TrainPrograms
from jengine.runner.workdir import LoadFrom, identify, set_aside
from jengine.sharding import DispatchLimiter
from jengine.train import TrainState, create_train_state
from jengine.train.scanned_step import ChunkMetrics

PyTree = Any


@functools.partial(checked, owner="")
class Runner:
    """Train, validate and test a model, with hooks around one compiled step.

    Everything can be given built or as a config (`dict(type=..., ...)`); the arguments are MMEngine's. Bad arguments
    raise here, before anything is compiled; objects that depend on the data are built by `train`, `val` and `test`.

    Args:
      model: a `Model`, or a config of one.
      work_dir: directory of checkpoints and logs.
      train_dataloader, val_dataloader, test_dataloader: config of a loader, a loader, or any sized iterable of batches.
      train_cfg: `dict(by_epoch=True, max_epochs=...)`, `dict(by_epoch=False, max_iters=...)` or a loop by `type`, with
        `val_begin`, `val_interval`, `dynamic_intervals` and `steps_per_call`.
      val_cfg, test_cfg: `dict()` or a loop by `type`.
      optim_wrapper: an `OptimWrapper`, a config of one, or an optax gradient transformation.
      param_scheduler: a scheduler config, an optax schedule (a function from the iteration to the learning rate), or a
        list of them, applied in order.
      val_evaluator, test_evaluator: metrics: a config, a list of them, or an `Evaluator`.
      default_hooks: changes to the six default hooks, by name; None removes one.
      custom_hooks: further hooks: a list, or one.
      load_from: a checkpoint whose weights training (or a test) starts from: its path, or a dict of `path`,
        `rename=[(old, new), ...]`, `strict` (False skips what does not fit, with a warning) and `raw`.
      resume: True continues from the newest checkpoint of `work_dir`, if there is one; a path from that checkpoint.
      parallel: the strategy: the devices, and how they are used.
      precision: the dtype that the network computes in, or a dict of `Precision`'s fields.
      log_processor: format of log lines.
      visualizer: destination of scalars and images; JSON lines by default.
      randomness: `dict(seed=int)`; a seed of None is drawn, and kept in the checkpoints.
      auto_scale_lr: `dict(enable=True, base_batch_size=...)` scales learning rates by the batch size.
      experiment_name: name of the run in its logs.
      cfg: the config of the run; written to the work dir and kept in checkpoints.
      log_level: lowest level in the terminal and the log file, by the names of `logging`.
      param_scheduler_on_resume: source of the schedules after a resume where they differ: 'checkpoint' continues,
        'config' sets every value to that of the config's schedules at this iteration.

    Attributes:
      state: the `TrainState`; None before the first call of `train`, `val` or `test`. Each step donates it.
      train_loop, val_loop, test_loop: the loops; None before `train`, `val` or `test` builds them.
      optim_wrapper, param_schedulers: built with the training loop.
      programs: the compiled programs of training; None before `train`.
      hyperparams: scalars that hooks pass to the step besides those of the optimizer; set a key before training begins,
        change its value at any time: nothing is traced again.

    Raises:
      ConfigError, TypeError, ValueError, KeyError: see the message; its note gives the path in the config.
    """

    def __init__(
        self,
        model: Any,
        work_dir: str | os.PathLike[str],
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        test_dataloader: Any = None,
        train_cfg: Any = None,
        val_cfg: Any = None,
        test_cfg: Any = None,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        val_evaluator: Any = None,
        test_evaluator: Any = None,
        default_hooks: Mapping[str, Any] | None = None,
        custom_hooks: Any = None,
        load_from: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        resume: bool | str | os.PathLike[str] = False,
        parallel: Any = None,
        precision: Any = None,
        log_processor: Any = None,
        visualizer: Any = None,
        randomness: Mapping[str, int | None] | None = None,
        auto_scale_lr: Any = None,
        experiment_name: str | None = None,
        cfg: Any = None,
        log_level: int | str = "INFO",
        param_scheduler_on_resume: Literal["checkpoint", "config"] = "checkpoint",
    ) -> None:
        sections = dict(
            train_dataloader=train_dataloader, train_cfg=train_cfg, optim_wrapper=optim_wrapper,
            val_dataloader=val_dataloader, val_cfg=val_cfg, val_evaluator=val_evaluator,
            test_dataloader=test_dataloader, test_cfg=test_cfg, test_evaluator=test_evaluator,
            param_scheduler=param_scheduler, auto_scale_lr=auto_scale_lr,
        )  # fmt: skip
        self._sections, schedulers = check.check_sections(sections)
        with config_path("log_level"):
            level = level_number(log_level)
        if auto_scale_lr is not None:
            build.read_auto_scale_lr(auto_scale_lr)
        self.param_scheduler_on_resume = param_scheduler_on_resume
        self.cfg = resolve(cfg) if cfg is not None else {}
        self.cfg_text = dump_config(self.cfg) if cfg is not None else ""

        self.processes = get_processes()
        assert_equal_across_processes(
            self.processes, {"work_dir": os.fspath(work_dir), "jax": jax.__version__, "config": self.cfg}
        )
        identity = broadcast_identity(
            identify(work_dir, load_from, resume, randomness, experiment_name), self.processes
        )
        self.work_dir, self.log_dir, self.timestamp = identity.work_dir, identity.log_dir, identity.timestamp
        self.experiment_name, self.seed = identity.experiment_name, identity.seed
        self._load_from, self._resume_from = identity.load_from, identity.resume_from

        use_compilation_cache()
        self.phase_timer = PhaseTimer()
        self.interrupts = Interrupts(ShutdownConsensus(self.processes))
        self._lock = WorkDirLock(self.work_dir)
        self.strategy = build.build_strategy(parallel)
        self.dispatch_limiter = DispatchLimiter(self.strategy.max_in_flight)
        self.model = build.build_model(model, precision)
        self.hook_list = build.build_hooks(default_hooks, custom_hooks)
        check.check_names(self.hooks, schedulers, self._sections)
        self.log_processor = build.build_log_processor(log_processor, by_epoch=check.counts_epochs(train_cfg))

        self._open_logs(level, visualizer)

        self.state: TrainState | MaybeNone = None
        self.train_loop: Any = None
        self.val_loop: Any = None
        self.test_loop: Any = None
        self.optim_wrapper: Any = None
        self.param_schedulers: Any = None
        self.programs: TrainPrograms | MaybeNone = None
        self.hyperparams = Hyperparams()
        self.validations: list[tuple[int, int, dict[str, float]]] = []
        self._loaders: dict[str, Any] = {}
        self.checkpointer = Checkpointer(self.work_dir)
        self._loaded = False
        self._first_iter = 0
        self._failure = ""  # the point at which training stopped with an error

    def _open_logs(self, level: int, visualizer: Any) -> None:
        self.visualizer = build.build_visualizer(visualizer, self.log_dir)
        os.makedirs(self.log_dir, exist_ok=True)
        self.logger = build_logger(log_file=os.path.join(self.log_dir, f"{self.timestamp}.log"), level=level)
        self.log_writer = AsyncWriter()
        self.message_hub = MessageHub.new_instance(self.experiment_name)
        self.message_hub.before_read = self.log_writer.flush
        if self.cfg and self.is_main_process:
            write_config(self.cfg, os.path.join(self.work_dir, "config.py"))
            self.visualizer.add_config(self.cfg_text)

    @classmethod
    def from_cfg(cls, cfg: Any) -> "Runner":
        """Return a Runner from a config whose keys are the arguments of the constructor.

        The key `vars` is reserved for the user: its values are kept with the config and otherwise ignored.

        Raises:
          ConfigError: an unknown key, or `model` or `work_dir` is missing.
        """
        import inspect

        plain = resolve(cfg)
        known = [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "cfg")]
        check_keys(plain, [*known, "vars"], hint="keep variables of your own under `vars`")
        for name in ("model", "work_dir"):
            if plain.get(name) is None:
                raise ConfigError(f"the config needs the key {name!r}")
        return cls(**{name: value for name, value in plain.items() if name != "vars"}, cfg=plain)

    # --- Called by users. ---

    def train(self) -> TrainState:
        """Train to the end and return the final state.

        Raises:
          RuntimeError: the Runner was made without the sections of a training, or an earlier call stopped within an
            iteration, so that counters, state and hooks disagree.
        """
        if not self.is_training_configured:
            raise RuntimeError("there is nothing to train: set train_dataloader, train_cfg and optim_wrapper")
        if not self._is_consistent():
            raise RuntimeError(
                f"training cannot continue: it stopped {self._failure}, and counters, state and hooks disagree; "
                "start from a checkpoint: Runner(..., resume=True)"
            )
        self.phase_timer.start("setup")
        self.prepare_training()
        try:
            with abort_all_on_error(self.processes, self.interrupts):
                self._train()
        finally:
            self._close()
            self._lock.release()
        assert self.state is not None
        return self.state

    def val(self) -> dict[str, float]:
        """Validate once and return the metrics.

        Raises:
          RuntimeError: the Runner was made without the sections of a validation.
        """
        return self._evaluate("val")

    def test(self) -> dict[str, float]:
        """Test once and return the metrics; after `train` on the trained state, else on `load_from`.

        Raises:
          RuntimeError: the Runner was made without the sections of a test.
        """
        return self._evaluate("test")

    def register_hook(self, hook: Hook | dict[str, Any], priority: int | str | Priority | None = None) -> None:
        """Add a hook, given as an instance or a config; `priority` overrides that of the config and of the class."""
        self.hook_list.register(hook, priority)

    def call_hook(self, stage: str, **arguments: Any) -> None:
        """Call every hook that defines `stage`, in priority order; your own loop may define its own stages."""
        self.hook_list.call(self, stage, arguments)

    def get_hooks_info(self) -> str:
        """Return a listing of the hooks of each stage, in order."""
        return self.hook_list.describe()

    # --- Called by hooks and loops. ---

    def train_step(self, batch: PyTree) -> dict[str, jax.Array]:
        """Run one training step on a batch that is on its device; return the metrics, which stay there."""
        is_update = self.optim_wrapper.start_step(self.iter)
        self.state, metrics = self.programs.run_step(self.state, batch, self.step_hyperparams(), is_update)
        return metrics

    def train_chunk(
        self, batches: Sequence[PyTree], hyperparams: Sequence[Mapping[str, Any]], is_update: Sequence[bool]
    ) -> ChunkMetrics:
        """Run a training step for each host batch in one call; see `TrainPrograms.run_chunk`."""
        self.state, metrics = self.programs.run_chunk(self.state, batches, hyperparams, is_update)
        return metrics

    def step_hyperparams(self) -> dict[str, Any]:
        """Return all hyperparameters of the step: the optimizer's and those that hooks set."""
        return {**self.optim_wrapper.hyperparams, **self.hyperparams}

    def eval_variables(self) -> dict[str, tuple[PyTree, PyTree]]:
        """Return the variables to evaluate: suffix of the metric names -> `(params, model_state)`."""
        assert self.state is not None
        variables = {"": (self.state.params, self.state.model_state)}
        for hook in self.hook_list:
            variables = hook.eval_variables(self, variables)
        return variables

    def record_validation(self, metrics: dict[str, float]) -> None:
        """Record the metrics of a validation for the table at the end of the run."""
        self.validations.append((self.epoch, self.iter, metrics))

    def save_checkpoint(
        self,
        out_dir: str | None = None,
        filename: str = "checkpoint",
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        by_epoch: bool = True,
        **options: Any,
    ) -> str:
        """Write a checkpoint in the background and return its path.

        Args:
          out_dir: its directory, the work dir by default.
          filename: its name.
          save_optimizer: with the optimizer's state and hyperparameters.
          save_param_scheduler: with the schedulers.
          meta: entries that precede the Runner's own (`epoch`, `iter`, …).
          by_epoch: whether the checkpoint counts as one of an epoch border.
          **options: for `Checkpointer.save`.
        """
        before = self.phase_timer.enter("checkpoint")
        packed = bundle.collect_checkpoint(
            self, save_optimizer=save_optimizer, save_param_scheduler=save_param_scheduler, meta=meta
        )
        packed["meta"]["by_epoch"] = by_epoch
        self.call_hook("before_save_checkpoint", checkpoint=packed)
        path = os.path.join(out_dir or self.work_dir, filename)
        state = packed.pop("state")
        self.checkpointer.save(path, state, packed, **options)
        self.phase_timer.enter(before)
        return path

    @property
    def hooks(self) -> list[Hook]:
        """The hooks in the order in which they run."""
        return list(self.hook_list)

    @property
    def iter(self) -> int:
        """Training iterations done."""
        return 0 if self.train_loop is None else self.train_loop.iter

    @property
    def epoch(self) -> int:
        """Training epochs done; 0 throughout in an iteration loop."""
        return 0 if self.train_loop is None else self.train_loop.epoch

    @property
    def max_iters(self) -> int:
        """Training iterations of the whole run."""
        return 0 if self.train_loop is None else self.train_loop.max_iters

    @property
    def max_epochs(self) -> int:
        """Training epochs of the whole run; 1 in an iteration loop."""
        return 0 if self.train_loop is None else self.train_loop.max_epochs

    @property
    def train_dataloader(self) -> Any:
        """The loader of the training data, built at its first use."""
        return self._loader("train")

    @property
    def val_dataloader(self) -> Any:
        """The loader of the validation data, built at its first use."""
        return self._loader("val")

    @property
    def test_dataloader(self) -> Any:
        """The loader of the test data, built at its first use."""
        return self._loader("test")

    @property
    def iters_this_session(self) -> int:
        """Training iterations since `train` was called, without those of the run that it resumed."""
        return self.iter - self._first_iter

    @property
    def is_training_configured(self) -> bool:
        """True if the sections of a training were given."""
        return self._sections["train_cfg"] is not None

    @property
    def is_main_process(self) -> bool:
        """True if this process writes the logs."""
        return jax.process_index() == 0

    # --- Steps of a run. ---

    def build_optimizer(self) -> Any:
        """Return the optimizer wrapper, built for the model's parameters; only their shapes are computed."""
        if self.optim_wrapper is None:
            given = self._sections["optim_wrapper"]
            if isinstance(given, OptimWrapper | OptimWrapperDict):
                self.optim_wrapper = given
            else:
                params, _ = self._init_model.eval_shape(np.int64(self.seed), self._example_batch("train"))
                self.optim_wrapper = build_optim_wrapper(params, given, module_types=self.model.module_types)
            build.map_over(self.strategy.axis_name, self.optim_wrapper)
        return self.optim_wrapper

    def _train(self) -> None:
        """Run the training itself, after the setup and before the cleanup."""
        self._lock.acquire()
        self.call_hook("before_run")
        self._load_or_resume()
        self.optim_wrapper.initialize_count_status(self.train_loop.iter, self.train_loop.max_iters)
        self.programs = self.build_programs()
        self.logger.info(report.introduction(self, self._group_table))
        self._warn_of_single_steps()
        self._first_iter = self.train_loop.iter
        with self.interrupts:
            try:
                self.train_loop.run()
            except BaseException as error:
                self._failure = f"at iteration {self.iter} with {type(error).__name__}: {error}"
                if not any("at iteration" in note for note in getattr(error, "__notes__", ())):
                    error.add_note(f"in training, at iteration {self.iter} (epoch {self.epoch})")
                self._save_what_is_done()
                self.call_hook("on_failure")
                raise
        report.conclude(self)
        self.call_hook("after_run")

    def build_programs(self) -> TrainPrograms:
        """Return the programs of the training loop for the devices of this run; each is compiled at its first call."""
        loop = self.train_loop
        return TrainPrograms(
            self.model, self.optim_wrapper, self.hooks, self.strategy, self.dispatch_limiter, self.phase_timer,
            phases=loop.phases, on_recompile=loop.on_recompile,
        )  # fmt: skip

    def _warn_of_single_steps(self) -> None:
        hooks = self.hook_list.prevent_chunks(self)
        if self.train_loop.steps_per_call > 1 and hooks:
            names = ", ".join(type(hook).__name__ for hook in hooks)
            self.logger.warning(
                f"steps_per_call={self.train_loop.steps_per_call} has no effect: {names} may act at each step; "
                "iterations run one by one. To allow chunks, define `next_step`, `runs_ahead` or `after_train_chunk`."
            )

    def _is_consistent(self) -> bool:
        """Return whether counters, state and hooks agree, so that training can continue or be saved."""
        if self.train_loop is None or self.state is None:
            return True
        usable = self.train_loop.is_consistent and not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        return usable and (not isinstance(self.state.step, jax.Array) or int(self.state.step) == self.train_loop.iter)

    def prepare_training(self, abstract: bool = False) -> None:
        """Build everything that depends on the data: loops, optimizer, schedulers, and the state.

        Args:
          abstract: build only the structure of the state: its leaves are `jax.ShapeDtypeStruct`s.
        """
        loader = self.train_dataloader
        if self.train_loop is None:
            self.train_loop = build.build_train_loop(self, self._sections["train_cfg"], loader)
        wrapper = self.build_optimizer()
        if self.param_schedulers is None:
            batch_size = (getattr(loader, "batch_size", None) or 1) * self.processes.count
            factor = build.scale_lr(wrapper, self._sections["auto_scale_lr"], batch_size)
            if factor != 1.0:
                self.logger.info(f"Learning rates are scaled by {factor:g}, for a batch size of {batch_size}.")
            self._group_table = report.group_table(wrapper)  # before a warm-up changes the hyperparameters
            for warning in build.warnings_of(wrapper, self.model.module_types):
                self.logger.warning(warning)
            self.param_schedulers = build.build_schedulers(self.train_loop, self._sections["param_scheduler"], wrapper)
        if self._sections["val_cfg"] is not None:
            self._eval_loop("val")
        if self.state is None or self.state.opt_state is None:
            self._init_state("train", abstract)

    def _init_state(self, mode: str, abstract: bool = False) -> None:
        """Create the state on the device; without an optimizer state when nothing is trained."""
        wrapper: Any = self.optim_wrapper if mode == "train" else build.NoOptimizer()
        hooks = self.hooks if mode == "train" else ()

        def make(seed: jax.Array, batch: PyTree) -> TrainState:
            params, model_state = self._init_model(seed, batch)
            return create_train_state(params, model_state, wrapper, hooks, rng=_key(seed, 1))

        args = np.int64(self.seed), self._example_batch(mode)
        init = self.strategy.compile_init(make, *args, model=self.model)
        self.state = init.eval_shape(*args) if abstract else init(*args)
        self._loaded = False

    @functools.cached_property
    def _init_model(self) -> Any:
        """Return `(seed, batch) -> (params, model_state)`, traced once for the shapes and for the state.

        The key is created inside: outside, its operations would be separate programs, which take a while to compile.
        """
        return jax.jit(lambda seed, batch: self.model.init(_key(seed, 0), batch))

    def _example_batch(self, mode: str) -> PyTree:
        """Return the first batch, as an example of the structure and shapes."""
        loader = self._loader(mode)
        for batch in loader:
            loader.set_epoch(0)
            return batch
        raise ConfigError(f"{mode}_dataloader has no batch")

    def _load_or_resume(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        if self._resume_from is not None and self.train_loop is not None:
            bundle.resume(self, self._resume_from)
        elif self._load_from is not None:
            bundle.load_weights(self, self._load_from)
        elif self._resume_from is not None:  # nothing is trained: only the weights are resumed
            bundle.load_weights(self, LoadFrom(self._resume_from))
        if self.train_loop is not None and self._resume_from is None and self.is_main_process:
            moved = set_aside(self.work_dir)
            if moved is not None:
                self.logger.warning(f"{self.work_dir} held checkpoints of an earlier run; they are now in {moved}.")

    def _evaluate(self, mode: str) -> dict[str, float]:
        if self._sections[f"{mode}_cfg"] is None:
            raise RuntimeError(f"there is nothing to run: set {mode}_dataloader, {mode}_cfg and {mode}_evaluator")
        if self.state is None:
            self._init_state(mode)
        loop = self._eval_loop(mode)
        self.call_hook("before_run")
        self._load_or_resume()
        try:
            with abort_all_on_error(self.processes, self.interrupts):
                metrics = loop.run()
                self.call_hook("after_run")
        finally:
            self._close()
        return metrics

    def _eval_loop(self, mode: str) -> Any:
        name = f"{mode}_loop"
        if getattr(self, name) is None:
            cfg, evaluator = self._sections[f"{mode}_cfg"], self._sections[f"{mode}_evaluator"]
            setattr(self, name, build.build_eval_loop(self, mode, cfg, self._loader(mode), evaluator))
        return getattr(self, name)

    def _loader(self, mode: str) -> Any:
        name = f"{mode}_dataloader"
        if mode not in self._loaders and self._sections[name] is not None:
            with config_path(name):
                self._loaders[mode] = build_dataloader(
                    self._sections[name],
                    train=mode == "train",
                    seed=self.seed,
                    process_index=self.processes.index,
                    process_count=self.processes.count,
                )
            assert_equal_across_processes(self.processes, {name: {"batches": len(self._loaders[mode])}})
        return self._loaders.get(mode)

    def _save_what_is_done(self) -> None:
        """Save the completed iterations after an error or a signal, if counters, state and hooks agree.

        They disagree after an error within an iteration; then nothing is saved. With several processes it is saved only
        if all end here, since they save together.
        """
        together = self.processes.count == 1 or self.interrupts.agreed
        try:
            self.log_writer.flush()
        except Exception as error:  # a log that cannot be written must not keep the state from being saved
            self.logger.error(f"The log could not be written: {type(error).__name__}: {error}")
        try:
            if together and self._is_consistent():
                self.call_hook("on_interrupt")
            else:
                self.logger.error(f"Training ended within iteration {self.iter}, which is not saved.")
        except Exception as error:  # it must not hide the reason why training ended
            self.logger.error(f"The completed iterations could not be saved: {type(error).__name__}: {error}")

    def _close(self) -> None:
        """Finish background work, also when the run failed."""
        with self.phase_timer.phase("checkpoint"):
            if not self.processes.failing:
                self.checkpointer.wait()
        self.log_writer.close()
        self.visualizer.close()


def _key(seed: Any, purpose: int) -> jax.Array:
    """Return the key for the model's parameters (0) or for the steps (1)."""
    return jax.random.fold_in(jax.random.key(seed), purpose)
