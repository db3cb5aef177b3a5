"""Runner: trains, validates and tests a model from a config."""

import contextlib
import functools
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax

from jengine.checkpoint.checkpointer import Checkpointer
from jengine.checkpoint.identity import agree_on_identity
from jengine.checkpoint.start_from import default_resume_command
from jengine.config.annotations import checked
from jengine.config.containers import resolve
from jengine.config.errors import ConfigError
from jengine.config.explain import explained
from jengine.config.frames import boundary
from jengine.config.plugins import load_provided
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook
from jengine.hooks.hook_list import HookList
from jengine.hooks.priority import Priority
from jengine.hooks.run import Run
from jengine.hooks.run_record import GroupTable
from jengine.hooks.runner_protocol import Progress
from jengine.logging.async_writer import AsyncWriter
from jengine.logging.message_hub import MessageHub
from jengine.logging.processor import LogProcessor
from jengine.logging.stopwatch import Stopwatch
from jengine.logging.visualizer import Visualizer
from jengine.model.precision import build_model
from jengine.model.roles import parameter_roles
from jengine.optim.schedules.scheduler import Schedulers
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_builder import build_optim_wrapper
from jengine.optim.wrapper_dict import AnyWrapper, wrappers_by_name
from jengine.parallel.flat_state import flatten_state
from jengine.parallel.processes import ProcessGroup, get_processes
from jengine.runner import bundle, components, config_checks, lifecycle
from jengine.runner.dataloaders import DataLoaders
from jengine.runner.eval_loops import EvalLoop
from jengine.runner.loops import TrainLoop
from jengine.runner.resume_check import check_resume
from jengine.train.hyperparams import Hyperparams
from jengine.train.initial_state import StateInitializer
from jengine.train.programs import TrainPrograms
from jengine.train.recompilation import use_compilation_cache
from jengine.train.scanned_step import ChunkMetrics
from jengine.train.state import TrainState

if TYPE_CHECKING:
    from jengine.runner import sections

PyTree = Any
# typed as in the stages that use it; only code that may run earlier compares with None
_LATER: Any = None


def _of(path: str, doc: str) -> Any:
    """Return an attribute of the Runner that is read from one of its parts, such as `run.seed`.

    As fast as an attribute: without a Python call.
    """
    return property(operator.attrgetter(path), doc=doc)


class _NotStarted:
    """Progress of a run without a training loop."""

    iter = 0
    epoch = 0
    max_iters: int | float = 0
    max_epochs = 0


@boundary
@functools.partial(checked, owner="")
class Runner:
    """Runner that trains, validates and tests a model, with hooks around one compiled step.

    Each argument is an object or a config (`dict(type=..., ...)`), with MMEngine's names. Invalid
    arguments raise here, with the path in the config; `train`, `val` and `test` build what depends
    on the data.

    >>> from jengine.model.functional import FunctionalModel
    >>> model = FunctionalModel(
    ...     lambda rng: {"w": 0.0}, lambda params, batch: (params["w"] - batch) ** 2
    ... )
    >>> runner = Runner(
    ...     model,
    ...     "work_dirs/mean",
    ...     train_dataloader=[jax.numpy.ones(4)],
    ...     train_cfg=dict(max_epochs=9),
    ...     optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    ...     log_level="WARNING",
    ... )
    >>> runner.train().params  # doctest: +SKIP
    {'w': Array(0.86578226, dtype=float32)}

    Args:
      model: a `Model`, or a config for one.
      work_dir: directory or URL (`gs://`, `s3://`) for checkpoints and logs.
      train_dataloader, val_dataloader, test_dataloader: a loader config, or an iterable over
        batches; for evaluations also several by name, or a list of loaders.
      train_cfg: `dict(by_epoch=True, max_epochs=...)`, `dict(by_epoch=False, max_iters=...)` or a
        loop by `type`, with `val_begin`, `val_interval`, `dynamic_intervals` and `steps_per_call`.
      val_cfg, test_cfg: `dict()` or a loop by `type`; with several evaluations also settings by
        name: `EvalSettings`.
      optim_wrapper: an `OptimWrapper`, a config for one, or an optax gradient transformation.
      param_scheduler: a scheduler config, an optax schedule (a function from the iteration to the
        learning rate), or a list of them, applied in order.
      val_evaluator, test_evaluator: metrics: a config, a list of them, or an `Evaluator`; with
        several evaluations for all of them, or by name.
      default_hooks: changes to the six default hooks, by name; None removes one.
      custom_hooks: further hooks: a list, or one.
      load_from: the initial weights: a path to a checkpoint, or a dict with the fields of
        `LoadFrom`; the extra for other weights adds files, arrays in memory and rules.
      resume: a path continues from that checkpoint. True continues from `load_from` if that is a
        checkpoint's path, else from the newest one in `work_dir` if there is one; with 'must',
        nothing to resume is an error. 'exact' is True, and anything that differs from the
        checkpoint is an error.
      parallel: the strategy, which places arrays on devices.
      precision: the dtype in which the network computes, or a dict of `Precision`'s fields.
      log_processor: formats log lines.
      visualizer: writes scalars and images, by default as JSON lines and PNG files.
      randomness: `dict(seed=int)`; with None the seed is drawn, and saved in checkpoints.
      auto_scale_lr: `dict(enable=True, base_batch_size=...)` scales learning rates by the batch
        size.
      experiment_name, cfg: name in the logs; and the config for the work dir and checkpoints, by
        default one of these.
      log_level: lowest level in the terminal and the log file, as in `logging`.
      check: whether each step checks all that it computes, and the hooks of an iteration
        may not wait for the device; slow, and one step at a time. See `StepChecks` of the extra
        `diagnose`.
      inspect: paths of values inside the step, whose statistics are recorded; `InspectHook` has
        more settings.

    Attributes:
      state: the `TrainState`; None before the first call of `train`, `val` or `test`. Each step
        donates it.
      train_loop, val_loop, test_loop, optim_wrapper, param_schedulers, programs: None until
        `train`, ... build them.
      resume_command: returns how an interrupted run can continue, with the arguments of
        `default_resume_command`.
      load_from, resume_from: the weights or the checkpoint with which the run begins.
      is_loaded: whether the state is from there.
      hyperparams: scalars that hooks pass to the step. Add a key before training; its value may
        change at any time.
      constants: arrays on the devices that the step also reads in `hyperparams`, such as the
        variables of a frozen model, by name: an input of the compiled step, neither donated nor
        saved. Set them in `before_train`.
    """

    train_loop: TrainLoop = _LATER
    val_loop: EvalLoop = _LATER
    test_loop: EvalLoop = _LATER
    optim_wrapper: AnyWrapper = _LATER
    param_schedulers: Schedulers = _LATER
    programs: TrainPrograms = _LATER
    _state = flatten_state(None)  # see `state`
    _progress: Progress = _NotStarted()
    _group_table: GroupTable
    _first_iter = 0
    is_loaded = False

    # --- Parts under the names that MMEngine's Runner has, and for hooks ---

    iter: int = _of("_progress.iter", "Completed training iterations.")
    epoch: int = _of("_progress.epoch", "Completed epochs; 0 throughout in an iteration loop.")
    max_iters: int | float = _of(
        "_progress.max_iters", "Training iterations in the whole run; `math.inf` if unknown."
    )
    max_epochs: int = _of(
        "_progress.max_epochs", "Epochs in the whole run; 1 in an iteration loop."
    )
    train_dataloader: Any = _of("_loaders.train", "Loader for the training data.")
    val_dataloader: Any = _of("_loaders.val", "Loader for the validation data; several by name.")
    test_dataloader: Any = _of("_loaders.test", "Loader for the test data; several by name.")
    cfg: dict[str, Any] = _of("run.cfg", "The config; without one, the arguments as a config.")
    work_dir: str = _of("run.work_dir", "Directory or URL of checkpoints and logs.")
    local_dir: str = _of("run.local_dir", "Directory for small files: the work dir, or a copy.")
    log_dir: str = _of("run.log_dir", "Directory of the log files, in `local_dir`.")
    timestamp: str = _of("run.timestamp", "Start time, which names the log files.")
    experiment_name: str = _of("run.experiment_name", "Name in the logs.")
    seed: int = _of("run.seed", "The seed, drawn or from the config or checkpoint.")
    processes: ProcessGroup = _of("run.processes", "The processes that train together.")
    rank: int = _of("run.processes.index", "Index of this process.")
    world_size: int = _of("run.processes.count", "Processes, each perhaps with several devices.")
    distributed: bool = _of("run.distributed", "Whether there are several processes.")
    is_main_process: bool = _of("run.is_main_process", "Whether this process writes the logs.")
    strategy: Any = _of("run.strategy", "The strategy, which places arrays on devices.")
    logger: logging.Logger = _of("run.logger", "Logger for the terminal and the log file.")
    log_writer: AsyncWriter = _of("run.log_writer", "Background thread that writes the logs.")
    log_processor: LogProcessor = _of("run.log_processor", "Formatter of log lines.")
    message_hub: MessageHub = _of("run.message_hub", "Record of scalars and other information.")
    visualizer: Visualizer = _of("run.visualizer", "Writer of scalars and images.")
    stopwatch: Stopwatch = _of("run.stopwatch", "Timer for the phases of the run.")
    checkpointer: Checkpointer = _of("run.checkpointer", "Background writer of checkpoints.")
    validations: list[tuple[int, int, dict[str, float]]] = _of(
        "run.validations", "Epoch, iteration and metrics of each validation."
    )
    is_training_configured: bool = _of("run.trains", "Whether there are sections for training.")
    get_hooks_info: Any = _of("hook_list.describe", "Return the hooks in each stage, as text.")
    register_default_hooks: Any = _of(
        "hook_list.register_defaults",
        "Replace, add or, with None, remove default hooks by name.",
    )
    register_custom_hooks: Any = _of(
        "hook_list.register_all", "Add hooks or hook configs: a list, or one."
    )

    def __init__(
        self,
        model: Any,
        work_dir: str | os.PathLike[str],
        train_dataloader: "sections.LoaderSection" = None,
        val_dataloader: "sections.LoaderSection" = None,
        test_dataloader: "sections.LoaderSection" = None,
        train_cfg: "sections.TrainSection" = None,
        val_cfg: "sections.EvalSection" = None,
        test_cfg: "sections.EvalSection" = None,
        optim_wrapper: "sections.OptimizerSection" = None,
        param_scheduler: Any = None,
        val_evaluator: Any = None,
        test_evaluator: Any = None,
        default_hooks: "sections.HooksByName" = None,
        custom_hooks: "sections.Hooks" = None,
        load_from: Any = None,
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
        check: bool = False,
        inspect: Sequence[str] | None = None,
    ) -> None:
        # before any other local
        arguments = {name: value for name, value in locals().items() if name != "self"}
        # What was asked for: a mistake is refused before anything is built
        self._sections = config_checks.read_sections(arguments)
        # Who the run is, and where it starts
        processes = get_processes()
        identity = agree_on_identity(
            processes,
            resolve(cfg) if cfg is not None and processes.count > 1 else {},
            work_dir,
            load_from=load_from,
            resume=resume,
            randomness=randomness,
            experiment_name=experiment_name,
        )
        self.load_from = identity.load_from
        self.resume_from = identity.resume_from
        self.resume_command: Callable[..., str] = functools.partial(
            default_resume_command, load_from
        )
        # What computes
        use_compilation_cache()  # before the first compilation
        strategy = components.build_strategy(parallel)
        self.checks = load_provided("step_checks", "StepChecks")(strategy) if check else None
        self.model = build_model(model, precision)
        self.hyperparams = Hyperparams()
        self.constants: dict[str, PyTree] = {}
        # Who acts
        visualizer = components.build_visualizer(visualizer, identity.log_dir)
        self.hook_list = HookList()
        if self.checks is not None:
            self.hook_list.wrap_stage = self.checks.wrap_stage
        self.register_hooks(default_hooks, custom_hooks)
        self.register_custom_hooks(list(strategy.hooks))
        if inspect is not None:
            self.register_hook(dict(type="InspectHook", paths=inspect))
        config_checks.check_hooks(self.hooks, [], self._sections)
        # What all parts share
        self.run: Run = components.build_run(
            identity,
            arguments,
            Runner,
            "" if type(self) is Runner else type(self).__name__,
            processes,
            strategy,
            visualizer,
            self.hooks,
        )
        for hook in self.hooks:
            self.model = hook.wrap_model(self.model)
        # What depends on the data: `train`, `val` and `test` build the rest
        self._loaders = DataLoaders(self._sections, self.run)
        self._initializer = StateInitializer(self.model, strategy, identity.seed, lambda: self.cfg)

    @classmethod
    @boundary
    def from_cfg(cls, cfg: Any) -> Self:
        """Return a Runner from a config whose keys are the constructor's arguments.

        The key `vars` is the user's.

        Raises:
          ConfigError: unknown or missing keys. MissingPackageError: the config requires an optional
            package.
        """
        plain, dropped = config_checks.read_top_level(resolve(cfg), cls.__init__)
        with explained(cfg=plain):
            runner = cls(
                **{name: value for name, value in plain.items() if name != "vars"}, cfg=plain
            )
        if dropped:
            runner.logger.info(dropped)
            runner.run.notes.append(dropped)
        return runner

    # --- Training ---

    @boundary
    def train(self) -> TrainState:
        """Train to the end and return the final state.

        RuntimeError if an earlier call stopped within an iteration.
        """
        with self.training() as loop:
            loop.run()
        return self.state

    @contextlib.contextmanager
    def training(self) -> Iterator[Any]:
        """Begin or resume training, for a loop of your own inside, and end it.

        The loop calls the stages from `before_train` to `after_train`.

        Yields:
          The training loop of `train_cfg`, with the progress and parts such as `run_epoch`.
        """
        if not self.is_training_configured:
            raise RuntimeError(
                "there is nothing to train: set train_dataloader, train_cfg and optim_wrapper"
            )
        if not lifecycle.is_consistent(self):
            raise RuntimeError(
                f"training cannot continue: it stopped with an error at iteration {self.iter}, and "
                "counters, state and hooks disagree; start from a checkpoint: Runner(..., "
                "resume=True)"
            )
        self.run.stopwatch.start("setup")
        self.run.evaluated.clear()
        with lifecycle.opened(self, trains=True):
            self.prepare_training()
            self.call_hook("before_run")
            self.load_or_resume()
            self._first_iter = self.iter
            self.train_loop.seconds = 0.0
            # a resume may be within a window
            self.optim_wrapper.initialize_count_status(self.iter, self.max_iters)
            self.programs = self.build_programs()  # hooks may have been added since an earlier call
            # an error before the step is traced is probably about the first batch
            first = self._loaders.note_example(
                "train_dataloader",
                ends=lambda: self.iters_this_session > 0 or bool(self.programs.called()),
            )
            with lifecycle.session(self, self._group_table), first:
                yield self.train_loop
            settings = getattr(self.train_loop, "settings", None)  # a loop of the user has none
            if settings is not None and settings.load_best_at_end:
                bundle.load_best(self, settings.load_best_at_end)
            self.call_hook("after_run")

    def prepare_training(self, abstract: bool = False) -> None:
        """Build everything that depends on the data: loops, optimizer, schedulers, and the state.

        With `abstract` the state's leaves are only `jax.ShapeDtypeStruct`s.
        """
        if self.train_loop is None:
            self.train_loop = self._progress = components.build_train_loop(
                self, self._sections["train_cfg"], self.train_dataloader
            )
            if self.checks is not None:
                self.checks.prepare_loop(self.train_loop)
        wrapper = self.build_optimizer()
        if self.param_schedulers is None:
            table, schedulers = components.build_schedulers(
                self.run, self.train_loop, self._sections, wrapper
            )
            config_checks.check_hooks(self.hooks, schedulers, self._sections)
            self._group_table = table
            self.param_schedulers = schedulers
            if self.resume_from is not None:
                check_resume(self.run, self.train_loop, self.resume_from)
        if self._sections["val_cfg"] is not None:
            self._eval_loop("val")  # which `init_state` checks
        # without `opt_state`: only evaluated so far
        if self.state is None or self.state.opt_state is None:
            with self._loaders.example("train_dataloader") as batch:
                self.init_state(batch, wrapper, self.hooks, abstract)

    def build_optimizer(self) -> Any:
        """Return the optimizer wrapper, built for the parameters' shapes."""
        if self.optim_wrapper is None:
            optim_wrapper = self._sections["optim_wrapper"]
            if not isinstance(optim_wrapper, OptimWrapper):
                with self._loaders.example("train_dataloader") as batch:
                    params, model_state = self._initializer.shapes(batch)
                    shapes = jax.eval_shape(lambda: batch)  # without the arrays, which would stay
                    find_roles = functools.partial(
                        parameter_roles,
                        self.model,
                        params,
                        batch=shapes,
                        model_state=model_state,
                    )
                    optim_wrapper = build_optim_wrapper(
                        params,
                        optim_wrapper,
                        module_types=self.model.module_types,
                        roles=find_roles,
                        base=lambda base: load_provided("optimizer_parts", "build_base")(
                            self.run.arguments, base, shapes
                        ),
                    )
            self.optim_wrapper = optim_wrapper
            for wrapper in wrappers_by_name(optim_wrapper).values():
                # it averages over the replicas
                wrapper.axis_name = self.strategy.axis_name or wrapper.axis_name
        return self.optim_wrapper

    def init_state(
        self,
        batch: Batch,
        wrapper: AnyWrapper | None = None,
        hooks: Sequence[Hook] = (),
        abstract: bool = False,
    ) -> None:
        """Create the state, once the shapes are known to fit checkpoints and evaluations.

        See `StateInitializer`.
        """
        traced, init = self._initializer.trace(batch, wrapper, hooks)
        shapes = traced.out_info
        config_checks.check_state(self.hooks if wrapper is not None else (), shapes)
        if isinstance(self.val_loop, EvalLoop) and wrapper is not None and not abstract:
            self.val_loop.check(self._loaders.example, shapes.params, shapes.model_state)
        self.state = shapes if abstract else init()
        self.is_loaded = False

    def load_or_resume(self) -> None:
        """Load the weights of `load_from` or continue from `resume_from`, unless that is done."""
        if not self.is_loaded:
            self.is_loaded = True
            bundle.load_or_resume(self, self.load_from, self.resume_from)

    def build_programs(self) -> TrainPrograms:
        """Return the training programs for this run's devices.

        Each is compiled at the first call.
        """
        loop = self.train_loop
        programs = TrainPrograms(
            self.model,
            self.optim_wrapper,
            self.hooks,
            self.run.strategy,
            self.run.limiter,
            self.run.stopwatch,
            loop.settings.phases,
            loop.on_recompile,
            batch_rules=self.train_dataloader.batch_rules,
            micro_batches=loop.micro_batches,
            hyperparams=self.hyperparams,
            refuse_changes=self.run.resume_is_exact,
            checks=self.checks,
            constants=self.constants,
        )
        programs.hashes.update(self.run.saved_hashes)
        return programs

    # --- Evaluation and prediction ---

    @boundary
    def val(self) -> dict[str, float]:
        """Validate once and return the metrics.

        Raise ConfigError without the sections for validation.
        """
        return self._evaluate("val")

    @boundary
    def test(self) -> dict[str, float]:
        """Test the trained state, or `load_from`, once and return the metrics.

        Raise ConfigError without a test.
        """
        return self._evaluate("test")

    def _evaluate(self, mode: str) -> dict[str, float]:
        if self._sections[f"{mode}_cfg"] is None:
            names = [f"`{mode}_{part}`" for part in ("dataloader", "cfg", "evaluator")]
            hint = "; to test on the validation's data set them to those of `val_`"
            raise ConfigError(
                f"the config must have {names[0]}, {names[1]} and {names[2]}, got none of them"
                f"{hint if mode == 'test' else ''}"
            )
        with lifecycle.opened(self, trains=False):
            if self.state is None:
                with self._loaders.example(self._loaders.first_path(mode)) as batch:
                    self.init_state(batch)
            loop = self._eval_loop(mode)
            self.call_hook("before_run")
            self.load_or_resume()
            metrics = loop.run()
            self.call_hook("after_run")
        return metrics

    def _eval_loop(self, mode: str) -> EvalLoop:
        """Return the validation or test loop, built at the first use."""
        name = f"{mode}_loop"
        if getattr(self, name) is None:
            setattr(
                self,
                name,
                components.build_eval_loop(self, mode, self._sections, self._loaders.get_all(mode)),
            )
        return getattr(self, name)

    def module(self, train: bool = False) -> Any:
        """Return a copy of the Flax module with the weights that evaluation uses.

        Further training neither changes nor donates them. What differs between replicas is
        averaged.

        Args:
          train: whether the module is in training or in inference mode.

        Returns:
          For an `NnxModel` the `nnx.Module`; for a `LinenModel` the bound module, whose `unbind()`
          returns `(module, variables)`.

        Raises:
          TypeError: the model is not made from a Flax module.
        """
        return load_provided("predict", "make_module")(self, train)

    @boundary
    def predict(self, data: Any, batch_size: int | None = None, seed: int | None = None) -> PyTree:
        """Return the predictions for all examples of `data`, in order, as NumPy arrays.

        Weights as in a validation. An extra computes them.

        Args:
          data: arrays (one, or a dict or tuple), a map-style dataset or its config, a loader or its
            config, or any iterable over batches, such as a list. A dict with the key `dataset` or
            `type` is a config. Data with `batch_axis=None` have a list with the predictions for
            each batch.
          batch_size: examples per batch on this process, for arrays and datasets; 128 by default.
          seed: another seed than the run's, for other samples of a model that samples.
        """
        return load_provided("predict", "predict")(self, data, batch_size, seed)

    def close(self) -> None:
        """Finish background work, also after an error."""
        lifecycle.close(self.run)

    # --- Hooks ---

    def register_hook(
        self, hook: Hook | dict[str, Any], priority: int | str | Priority | None = None
    ) -> None:
        """Add a hook, an instance or a config.

        `priority` overrides the config's and the class's.
        """
        self.hook_list.register(hook, priority)

    def register_hooks(
        self, default_hooks: Mapping[str, Any] | None = None, custom_hooks: Any = None
    ) -> None:
        """Change the default hooks and add custom ones, as the constructor does."""
        self.register_default_hooks(default_hooks)
        self.register_custom_hooks(custom_hooks)

    def call_hook(self, stage: str, **arguments: Any) -> None:
        """Call every hook that defines `stage`, in priority order.

        Your own loop may define other stages.
        """
        self.hook_list.call(stage, self, **arguments)

    # --- Steps and checkpoints, called by loops and hooks ---

    def train_step(self, batch: Batch) -> dict[str, jax.Array]:
        """Run one training step on a batch on the device, and return the metrics, which stay
        there.
        """
        iteration = self.train_loop.iter
        is_update = self.optim_wrapper.start_step(iteration)
        hyperparams = {**self.optim_wrapper.hyperparams, **self.hyperparams}
        self._state, metrics, weight = self.programs.run_step(
            self._state, batch, hyperparams, is_update, iteration
        )
        if weight is not None:
            self.message_hub.update_weight(weight, self.programs.are_by_example(metrics))
        return metrics

    def train_chunk(
        self,
        batches: Sequence[PyTree],
        hyperparams: Sequence[Mapping[str, Any]],
        is_update: Sequence[bool],
    ) -> ChunkMetrics:
        """Run a training step for each host batch in one call; see `TrainPrograms.run_chunk`."""
        # the hooks have been called for the last one
        first = self.train_loop.iter + 1 - len(batches)
        self._state, metrics, weights = self.programs.run_chunk(
            self._state, batches, hyperparams, is_update, first
        )
        if weights is not None:
            self.message_hub.update_weight(weights, self.programs.are_by_example(metrics.values))
        return metrics

    def step_hyperparams(self) -> dict[str, Any]:
        """Return all hyperparameters: the optimizer's and those that hooks set, with constants."""
        return {**self.optim_wrapper.hyperparams, **self.hyperparams, **self.constants}

    def take_hyperparams(self) -> None:
        """Set in the optimizers what hooks have set in `hyperparams` under the name of one of
        theirs.

        With several optimizers it is, for instance, `generator.learning_rate`.
        """
        for optimizer, wrapper in wrappers_by_name(self.optim_wrapper).items():
            for name in wrapper.grouped.hyperparams():
                full = f"{optimizer}.{name}" if optimizer else name
                if full in self.hyperparams:
                    wrapper.set_hyperparam(name, float(self.hyperparams.pop(full)))

    def set_lr(self, lr: float, optimizer: str = "") -> None:
        """Set the learning rate from the next step on, as `param_groups[i]['lr'] = lr` does for one
        group.

        Groups keep their multipliers. A schedule goes on from the new rate, and checkpoints keep
        it: see `ScheduleChain`.

        Args:
          lr: the rate of the optimizer itself.
          optimizer: the name of one of several optimizers.
        """
        find_wrapper(self.optim_wrapper, optimizer).set_lr(lr)

    def reset_optimizer(
        self, groups: Sequence[int | str] | None = None, optimizer: str = ""
    ) -> None:
        """Start the optimizer anew between two iterations: zero moments and step count, where they
        are.

        Schedules go on, and the training step does not compile again. The extra `optimizers`
        does it, see `reset_state` there.

        Args:
          groups: the parameter groups that start anew, by index or `group_name`; None for all.
          optimizer: the name of one of several optimizers.
        """
        load_provided("optimizer_parts", "reset_optimizer")(self, groups, optimizer)

    def __repr__(self) -> str:
        return (
            f"Runner({type(self.model).__name__}, iteration {self.iter:,} of {self.max_iters:,}, "
            f"{self.work_dir!r})"
        )

    def eval_variables(self) -> dict[str, tuple[PyTree, PyTree]]:
        """Return the variables to evaluate: suffix of the metric names -> `(params,
        model_state)`.
        """
        variables = {"": (self.state.params, self.state.model_state)}
        for hook in self.hook_list:
            # each sees what earlier hooks have replaced
            variables = hook.eval_variables(self, variables)
        return variables

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
          out_dir, filename: the directory, by default the work dir, and the name in it.
          save_optimizer, save_param_scheduler: save the optimizer state and hyperparameters, and
            the schedulers.
          meta: entries that override the Runner's own (`epoch`, `iter`, …).
          by_epoch: whether the checkpoint marks the end of an epoch.
          **options: arguments for `Checkpointer.save`; `checkpointer` replaces the run's own.
        """
        options |= dict(save_optimizer=save_optimizer, save_param_scheduler=save_param_scheduler)
        path = os.path.join(out_dir or self.work_dir, filename)
        with self.stopwatch.part("checkpoint"):
            bundle.save(self, path, meta={**(meta or {}), "by_epoch": by_epoch}, **options)
        return path

    @property
    def state(self) -> TrainState:
        """The `TrainState`; None before the first call of `train`, `val` or `test`.

        Each step donates it.
        """
        if self.train_loop is not None:
            # data may read it, but not ahead
            self._loaders.check_state_access(self.train_loop)
        return self._state.unflatten()

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = flatten_state(state)

    @property
    def hooks(self) -> list[Hook]:
        """The hooks in the order in which they run."""
        return list(self.hook_list)

    @property
    def iters_this_session(self) -> int:
        """Training iterations since `train` was called, without those before a resume."""
        return self.iter - self._first_iter


def find_wrapper(optim_wrapper: AnyWrapper, optimizer: str) -> OptimWrapper:
    """Return one of several optimizers, or the only one, called ''."""
    wrappers = wrappers_by_name(optim_wrapper)
    if optimizer not in wrappers:
        raise ConfigError(f"`optimizer` must be one of {sorted(wrappers)}, got {optimizer!r}")
    return wrappers[optimizer]
