"""Hook of a run whose checkpoints are evaluated by other processes."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.config.storage import storage_path
from jengine.data.batch_check import Batch
from jengine.extras.followers.scores import (
    Score,
    Verdict,
    forget_later,
    read_scores,
    read_verdict,
    write_verdict,
)
from jengine.hooks.checkpoint import CheckpointHook
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.run_record import update_record
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.optim.schedules.scheduler import flatten_schedulers

_POLL = 0.5  # seconds
_MANY = 10  # checkpoints
_LOG = "follower.log"


class _News(NamedTuple):
    scores: list[Score]
    verdict: Verdict | None


@HOOKS.register_module()
class FollowHook(Hook):
    """Hook that acts on what followers find out about the checkpoints of this run.

    Before each save it reads the verdict: the best checkpoints, which the `CheckpointHook` then
    keeps as it keeps those that are not evaluated, and whether training ends. New scores go into
    the log and its backends, with the iteration of their checkpoint, and to hooks with a method
    `take_score(runner, iteration, metrics)`.

    `FollowedValLoop` adds this hook.

    Args:
      follow: see there.
    """

    priority = "LOW"  # before the save of the same iteration

    def __init__(self, follow: Literal[True, "elsewhere"] | Mapping[str, str] = True) -> None:
        self.follow = follow
        self._taken: list[str] = []  # checkpoints whose scores are in the log
        self._process: subprocess.Popen[bytes] | None = None
        self._has_warned = False

    def before_train(self, runner: RunnerProtocol) -> None:
        """Refuse what would wait for validations here, and start a follower."""
        _check_others(runner)
        runner.logger.info(
            "Followers validate the checkpoints of this run: train_cfg.val_interval has no effect."
        )
        if runner.is_main_process:
            log_dir = _find_log_dir(runner)
            forget_later(log_dir, runner.iter)
            if read_verdict(log_dir) is not None:  # by the settings of this session
                done = [score.iter for score in read_scores(log_dir)]
                write_verdict(log_dir, runner.hooks, done)
        self._take(runner)
        if runner.is_main_process and self.follow != "elsewhere":
            self._process = _start_follower(runner, self.follow)

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Read the verdict: there may be a save."""
        self._take(runner)

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Read the verdict before a save."""
        self._take(runner)

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next step after which a `CheckpointHook` saves."""
        hooks = [hook for hook in _checkpoint_hooks(runner) if hook.every != -1]
        return min((hook.next_step(runner, step) for hook in hooks), default=math.inf)

    def after_train(self, runner: RunnerProtocol) -> None:
        """Wait until the follower that this process has started has evaluated all checkpoints.

        With several processes it goes on alone.
        """
        runner.checkpointer.wait()
        if self._process is not None and runner.processes.count == 1:
            names = {name for hook in _checkpoint_hooks(runner) for name in hook.regular_names}
            with runner.stopwatch.part("validation"):
                while not names <= self._find_done(runner) and self._process.poll() is None:
                    time.sleep(_POLL)
        self._take(runner)
        for hook in _checkpoint_hooks(runner):
            hook.remove_surplus(runner)  # what waited

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints whose scores are in the log."""
        return {"taken": list(self._taken)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        self._taken = list(state_dict["taken"])

    def _find_done(self, runner: RunnerProtocol) -> set[str]:
        verdict = read_verdict(_find_log_dir(runner))
        return set() if verdict is None else set(verdict.done)

    def _take(self, runner: RunnerProtocol) -> None:
        """Take over the verdict and new scores, on all processes what the first one reads."""
        news = None
        if runner.is_main_process:
            log_dir = _find_log_dir(runner)
            verdict = read_verdict(log_dir)
            is_new = verdict is not None and set(verdict.done) != set(self._taken)
            news = _News(read_scores(log_dir) if is_new else [], verdict)
        scores, verdict = runner.processes.broadcast("the verdict of followers", news)
        for score in scores:
            if score.checkpoint not in self._taken:
                self._taken.append(score.checkpoint)
                _log_score(runner, score)
        hooks = _checkpoint_hooks(runner)
        done = set() if verdict is None else set(verdict.done)
        waiting = [n for hook in hooks for n in hook.regular_names if n not in done]
        for hook in hooks:
            hook.take_ranking({} if verdict is None else verdict.best, waiting)
        if verdict is not None and verdict.stop and not runner.train_loop.stop_training:
            runner.train_loop.stop_training = True
            runner.logger.info(f"Training stops early: {verdict.stop}.")
        if len(waiting) >= _MANY and not self._has_warned:
            self._has_warned = True
            runner.logger.warning(
                f"{len(waiting)} checkpoints wait for a follower, and are kept until then: run "
                f"jengine test CONFIG {runner.work_dir} --follow, perhaps several times"
            )
        if self._process is not None and self._process.poll():
            path = os.path.join(runner.log_dir, _LOG)
            runner.logger.warning(f"The follower ended with an error, see {path}.")
            self._process = None


def _checkpoint_hooks(runner: RunnerProtocol) -> list[CheckpointHook]:
    return [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]


def _find_log_dir(runner: RunnerProtocol) -> Any:
    """Return where followers see the log directory."""
    return storage_path("work_dir", runner.work_dir) / runner.timestamp


def _check_others(runner: RunnerProtocol) -> None:
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook) or hasattr(hook, "find_end"):
            continue  # the verdict is about these
        if hasattr(hook, "take_score"):
            continue
        for argument, metric, _ in hook.monitored_metrics():
            raise ConfigError(
                f"`val_cfg.follow` must be left out with {type(hook).__name__}({argument}="
                f"{metric!r}), which waits for validations in this process"
            )
    for scheduler in flatten_schedulers(runner.param_schedulers):
        if (metric := getattr(scheduler.settings, "monitor", None)) is not None:
            raise ConfigError(
                "`val_cfg.follow` must be left out with a schedule that follows a metric, got "
                f"{metric!r}"
            )


def _log_score(runner: RunnerProtocol, score: Score) -> None:
    place = f"{score.checkpoint} (iteration {score.iter})"
    if score.gone:
        runner.logger.warning(f"{place} was gone before a follower evaluated it.")
        return
    texts = ", ".join(f"{name}: {value:.4f}" for name, value in score.metrics.items())
    runner.logger.info(f"Validation of {place}: {texts}")
    for hook in runner.hooks:
        if hasattr(hook, "take_score"):
            hook.take_score(runner, score.iter, score.metrics)
    runner.run.validations.append((score.epoch, score.iter, score.metrics))
    update_record(runner)
    if runner.is_main_process:
        runner.log_writer.flush()  # lines of training come first
        scalars = {**score.metrics, "epoch": score.epoch, "iter": score.iter, "mode": score.mode}
        runner.visualizer.add_scalars(scalars, step=score.iter)


def _start_follower(
    runner: RunnerProtocol, follow: Literal[True] | Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    described = runner.run.described
    if described.problems or not described.cfg_text:
        problems = "; ".join(described.problems) or "there is no config"
        raise ConfigError(
            "`val_cfg.follow` must be 'elsewhere' for a run whose config.py does not describe it, "
            f"got {follow!r}: {problems}"
        )
    config = os.path.join(runner.local_dir, "config.py")
    command = [sys.executable, "-m", "jengine", "test", config, runner.work_dir, "--follow", "1"]
    environment = {
        **os.environ,
        # a second process could not use the accelerators of this one
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        **({} if follow is True else follow),
    }
    path = os.path.join(runner.log_dir, _LOG)
    runner.logger.info(f"A follower writes to {path}.")
    with open(path, "ab") as file:
        return subprocess.Popen(
            [*command, "--launcher", "none"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,  # Ctrl-C ends the training, and the follower after it
        )
