"""`jengine train --debug` and `--overfit N`: a short run that shows whether the long one can
work.
"""

import argparse
import itertools
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.cli.commands import build_runner, format_bytes, load, temporary_runner
from jengine.cli.train import train
from jengine.config.errors import ConfigError
from jengine.config.plugins import load_provided, provided
from jengine.data.collate import stack_batches
from jengine.data.host_entries import select_arrays
from jengine.extras.diagnose.silent_faults import SilentFaults
from jengine.extras.diagnose.unreached import describe_unreached
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.console import write_line
from jengine.logging.tables import format_table
from jengine.runner.config_checks import is_epoch_based, train_loop_config
from jengine.runner.runner import Runner
from jengine.train.phases import batches_per_iteration

_STEPS = 3
_BATCHES = 3  # of the validation and of the test
_CHECKPOINT = "debug"


class DebugHook(Hook):
    """End of training after few steps, once everything that the whole run would do later was
    done once.
    """

    priority = "HIGHEST"  # its `after_train` comes before the others'

    def __init__(self) -> None:
        self._stop = _STEPS
        self.report: list[str] = []
        self.faults: list[str] = []

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the last step, so that a chunk fits before it."""
        return self._stop - 1 if step < self._stop else math.inf

    def before_train(self, runner: Any) -> None:
        """Compile the step and report its memory before it can fail on the device."""
        self._stop = runner.iter + max(_STEPS, runner.train_loop.steps_per_call)
        self._silent = SilentFaults(runner)
        self.report += [*describe_memory(runner), *describe_unreached(runner)]
        write_line("\n".join(self.report))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Stop after the last step."""
        runner.train_loop.stop_training = runner.iter + 1 >= self._stop

    def after_train(self, runner: Any) -> None:
        """Do what comes at the end of an epoch, validate, and save a checkpoint."""
        loop = runner.train_loop
        if runner.iter < runner.max_iters and not (loop.by_epoch and loop.iter == loop.epoch_start):
            runner.call_hook("after_train_epoch")
        self.faults = self._silent.describe()
        if runner.val_loop is not None and not runner.validations:
            runner.val_loop.run()
        runner.save_checkpoint(filename=_CHECKPOINT)


def train_debug(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train three steps in a temporary directory, validate, test, save and restore, and print what
    was found.

    Raises:
      ConfigError: the config does not train, or `--resume` without a path. Also every error of the
        whole run's parts.
    """
    if args.resume in (True, "must", "exact"):
        raise ConfigError(
            "--debug must be used with --resume PATH or without, got --resume: its work dir is "
            "empty"
        )
    cfg = load(args, overrides)
    with tempfile.TemporaryDirectory(prefix="jengine_debug_") as work_dir:
        short = shorten(cfg, work_dir, args.resume)
        runner = Runner.from_cfg(short)
        hook = DebugHook()
        runner.register_hook(hook)
        runner.train()
        done = runner.iter
        lines = [f"{done} steps: {_list_scalars(runner, 'loss')}; {_list_scalars(runner, 'lr')}"]
        if runner.validations:
            lines.append(
                f"a validation on at most {_BATCHES} batches: "
                f"{_format_metrics(runner.validations[-1][2])}"
            )
        if short.get("test_cfg") is not None:
            lines.append(f"a test on at most {_BATCHES} batches: {_format_metrics(runner.test())}")
        path = os.path.join(runner.work_dir, _CHECKPOINT)
        size = sum(
            os.path.getsize(os.path.join(at, name))
            for at, _, names in os.walk(path)
            for name in names
        )
        hooks = runner.hooks
        length = runner.max_iters
        del runner  # the device may have no room for two states
        _restore(short, path, done)
        lines.append(
            f"a checkpoint of {format_bytes(size)}: saved, and restored at iteration {done}"
        )
        stages = {stage for each in hooks for stage in each.get_triggered_stages()}
        lines.append(f"{len(hooks) - 1} hooks, in {len(stages)} stages")
    write_line("\n".join(["", "Everything worked:", *(f"  {line}" for line in lines)]))
    if hook.faults:
        print("\n".join(["But look at these first:", *(f"  {line}" for line in hook.faults)]))
    iterations = f"{length:,}" if math.isfinite(length) else "an unknown number of"
    print(f"The whole run has {iterations} iterations. Nothing was left in {cfg['work_dir']}.")
    return 0


def train_overfit(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train on the first batches alone, and print the first and the final loss."""
    changes = overfit(load(args, overrides), args.overfit)
    runner = build_runner(args, overrides, resume=args.resume, **changes)
    code = train(runner, args.argv)
    if code == 0 and runner.is_main_process:
        print(describe_overfit(runner, args.overfit))
    return code


def shorten(cfg: Mapping[str, Any], work_dir: str, resume: str | None = None) -> dict[str, Any]:
    """Return the config of a debug run: in another directory, with short evaluations and without
    remote logs.

    The length of the run stays, and with it every schedule.
    """
    if cfg.get("train_cfg") is None:
        raise ConfigError(
            "`train_cfg` must be given for --debug, got none: there is nothing to train"
        )
    # Everything is tried that could fail after hours: a validation, a save and a restore, with the
    # user's own hooks.
    changes: dict[str, Any] = {"work_dir": work_dir, "resume": resume or False}
    for name in ("val_cfg", "test_cfg"):
        section = cfg.get(name)
        # Limited, not removed: an evaluator that fails should do so now.
        if isinstance(section, Mapping):
            most = section.get("epoch_length") or _BATCHES
            changes[name] = {**section, "epoch_length": min(most, _BATCHES)}
    defaults = dict(cfg.get("default_hooks") or {})
    if defaults.get("logger", {}) is not None:
        defaults["logger"] = {**(defaults.get("logger") or {"type": "LoggerHook"}), "interval": 1}
    # A trial must not write to the bucket that the real run will use.
    changes["default_hooks"] = {name: _without_out_dir(hook) for name, hook in defaults.items()}
    hooks = cfg.get("custom_hooks") or []
    changes["custom_hooks"] = [
        _without_out_dir(hook) for hook in ([hooks] if isinstance(hooks, Mapping) else hooks)
    ]
    visualizer = cfg.get("visualizer")
    if isinstance(visualizer, Mapping) and visualizer.get("vis_backends"):
        # Trackers on servers would show a run of three steps beside the real ones.
        changes["visualizer"] = {**visualizer, "vis_backends": [{"type": "LocalVisBackend"}]}
    return {**cfg, **changes}


def _without_out_dir(hook: Any) -> Any:
    return (
        {key: value for key, value in hook.items() if key != "out_dir"}
        if isinstance(hook, Mapping)
        else hook
    )


def describe_memory(runner: Any) -> list[str]:
    """Return the memory of the training step on a device, as the compiler plans it: a table, and
    whether it fits.
    """
    if "measure_program" not in provided("names"):
        return ["The memory of the step is unknown: it needs the extra `plan`."]
    measure_program = load_provided("names", "measure_program")
    strategy = runner.strategy
    loader = runner.train_dataloader
    steps = runner.train_loop.steps_per_call
    example = select_arrays(loader.example())
    count = runner.train_loop.batches_per_iteration
    taken = example if count == 1 else (example,) * count
    batch = strategy.put_batch(taken, rules=loader.batch_rules)
    batches = None
    if steps > 1:
        batches = strategy.put_batch(
            stack_batches([taken] * steps), chunked=True, rules=loader.batch_rules
        )
    programs = runner.build_programs()
    traced = programs.trace(runner.state, batch, runner.step_hyperparams(), batches)
    rows = []
    total = 0
    for name, program in traced.items():
        used = jax.tree.map(jnp.asarray, batches if name == "chunk" else batch)
        plan = measure_program(program.lower().compile(), {"state": runner.state, "batch": used})
        rows += [[name, kind, format_bytes(size)] for kind, size in plan["memory"].items() if size]
        total = max(total, plan["total_memory"])
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    where = f"of the {device.device_kind}"
    if limit is None:  # a CPU
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        where = "of this machine"
    verdict = (
        f"It fits: {total / limit:.1%}"
        if total <= limit
        else f"It does not fit: {total / limit:.1%}"
    )
    table = format_table(
        ["program", "memory per device", "bytes"], rows, title="Memory of the training step"
    )
    return [table, f"{verdict} of the {format_bytes(limit)} {where}."]


def _restore(cfg: Mapping[str, Any], path: str, iteration: int) -> None:
    """Restore a checkpoint into a new Runner: the one that saved it has everything in place."""
    runner = Runner.from_cfg({**cfg, "resume": path, "load_from": None})
    try:
        runner.prepare_training()
        runner.load_or_resume()
        if runner.iter != iteration:
            raise RuntimeError(
                f"the checkpoint must continue at iteration {iteration}, got {runner.iter}"
            )
    finally:
        runner.close()


def _list_scalars(runner: Any, name: str) -> str:
    """Return the recorded values of a scalar, or of one of several with a prefix."""
    runner.message_hub.flush()
    histories = runner.message_hub.log_scalars
    found = {
        key: each
        for key, each in histories.items()
        if key.startswith("train/") and key.split("/")[-1] == name
    }
    return "; ".join(
        f"{key.removeprefix('train/')} "
        f"{', '.join(f'{value:.4g}' for value in each.data[0][:_STEPS])}"
        for key, each in found.items()
    )


def _format_metrics(metrics: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float | int)
    )


# --- Overfitting ---


class _Batches(list[Any]):
    """Batches in memory, with the form of those of their loader."""

    batch_axis: Any = 0
    batch_rules: Any = None


def overfit(cfg: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the entries of a config that change for a training on its first `count` batches alone.

    An epoch keeps its length, so that schedules stay. The work dir gets the suffix `_overfit`: the
    checkpoints of the real run stay apart.

    Raises:
      ConfigError: `count` is below 1, or there are no training data.
    """
    if count < 1:
        raise ConfigError(f"--overfit must be at least 1, got {count}")
    with temporary_runner(cfg) as runner:
        loader = runner.train_dataloader
        if loader is None:
            raise ConfigError("`train_dataloader` must be given for --overfit, got none")
        # Kept in memory: the same batches each epoch, so that the loss must go to zero if model and
        # loss are right.
        batches = _Batches(itertools.islice(iter(loader), count))
        batches.batch_axis = loader.batch_axis
        batches.batch_rules = loader.batch_rules
        length = loader.length
        loader.close()
    train_cfg = train_loop_config(cfg["train_cfg"])
    if is_epoch_based(train_cfg) and length is not None and train_cfg.get("epoch_length") is None:
        train_cfg["epoch_length"] = length // batches_per_iteration(train_cfg.get("phases"))
    return {
        "train_dataloader": batches,
        "train_cfg": train_cfg,
        "work_dir": f"{cfg['work_dir']}_overfit",
    }


def describe_overfit(runner: Runner, count: int) -> str:
    """Return the first and the final loss of a training on `count` batches."""
    runner.message_hub.flush()
    losses = runner.message_hub.get_scalar("train/loss")
    first = losses.data[0][0]
    final = losses.mean(min(count, losses.updates))
    return (
        f"The loss on {count} batch{'es' * (count > 1)} was {first:.4g} at first and is "
        f"{final:.4g} after {runner.iter:,} iterations; the run is in {runner.work_dir}."
    )
