"""Checkpoint policy: when to save, under which name, and which checkpoints to keep."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.checkpoint.commit import INCOMING, OUTGOING
from jengine.checkpoint.retention import keep_regular
from jengine.config.annotations import Count, CountOrNever, Duration, Index
from jengine.config.duration import parse_duration
from jengine.config.errors import ArgumentError, ConfigError, config_path
from jengine.config.plugins import load_provided
from jengine.config.registry import HOOKS
from jengine.config.scores import Rule, infer_rule, keep_best, pick_metric
from jengine.config.storage import apply_backend_args, plain_name, storage_path
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.hooks.save_schedule import TimedSaves

# bytes of a template; with a number, a metric and an ending a disk has names of at most 255
_LONGEST = 180


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Regular checkpoints at an interval, and best ones when a validation improves.

    Checkpoints are written in the background during training. An old checkpoint is removed when the
    one that replaces it is complete, and only if the new parameters are finite: while they are not,
    the newest checkpoint replaces only others that are not finite. Best checkpoints contain the
    full state, so that training can continue from them, and do not count towards `max_keep_ckpts`;
    a new best does not write an additional regular checkpoint.

    Args:
      interval: epochs or iterations between two regular checkpoints; -1 for none but the last. Or a
        time: '15m', '90s', '2h' or '00:15:00'.
      by_epoch: whether `interval`, `save_begin` and the names count epochs (else iterations). With
        an interval in time and with `save_policy` they count iterations.
      save_optimizer: False omits the optimizer state: a resumed run starts with fresh moments.
      save_param_scheduler: False omits the schedulers: a resumed run starts the schedules from
        scratch.
      out_dir: directory or URL of checkpoints, in a folder named like the work dir; by default the
        work dir itself.
      max_keep_ckpts: number of regular checkpoints to keep; -1 for all.
      save_last: also save at the end of training, including early stops, regardless of the
        interval.
      save_best: the metric whose best value is saved in a separate checkpoint,
        `best_<metric>_epoch_4`, or a list of metrics; 'auto' for the first metric of the first
        validation.
      rule: 'greater' or 'less', which value is better; one for each metric in a list. By default
        inferred from the metric name.
      greater_keys: metric names, or whole words in them, for which the greater value is better,
        beside those known.
      less_keys: metric names, or whole words in them, for which the lesser value is better.
      file_client_args, backend_args: storage of `out_dir` in MMEngine's terms, see
        `apply_backend_args`.
      filename_tmpl: name of a regular checkpoint with one `{}` for the number; `epoch_{}` or
        `iter_{}` by default.
      published_keys: after training, write copies of the last and the best checkpoints that contain
        only these keys (see `jengine.checkpoint.publish`).
      save_begin: the first epoch or iteration to save, counted from 1; the interval counts from
        there.
      keep_period: keep regular checkpoints at multiples of this many epochs or iterations
        permanently, in addition to the `max_keep_ckpts` newest; -1 for none.
      keep_best: number of best checkpoints per metric; every validation that ranks among them is
        saved.
      checksums: whether to store the SHA-256 of each file, which a resume compares; it takes about
        a second per gigabyte, in the background when saving. You should set False for very large
        checkpoints.
      save_policy: instead of `interval`, one of Orbax's policies, asked after each iteration:
        `orbax.checkpoint.checkpoint_managers.SpecificStepsPolicy([10, 100, 1000])`.
      preservation_policy: instead of `max_keep_ckpts` and `keep_period`, one of Orbax's policies:
        `BestN`, `EveryNSeconds`, `AnyPreservationPolicy`, ... The newest checkpoint is kept in any
        case. Its steps are iterations, and its metrics those of the validation after them.

    Examples:
      >>> CheckpointHook(interval=2, save_best="accuracy/top1").monitored_metrics()
      [('save_best', 'accuracy/top1', 'greater')]
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        interval: CountOrNever | Duration = -1,
        by_epoch: bool = True,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        out_dir: str | os.PathLike[str] | None = None,
        max_keep_ckpts: CountOrNever = -1,
        save_last: bool = True,
        save_best: str | Sequence[str] | None = None,
        rule: Rule | Sequence[Rule] | None = None,
        greater_keys: str | Sequence[str] | None = None,
        less_keys: str | Sequence[str] | None = None,
        file_client_args: Mapping[str, Any] | None = None,
        filename_tmpl: str | None = None,
        backend_args: Mapping[str, Any] | None = None,
        published_keys: str | Sequence[str] | None = None,
        save_begin: Index = 0,
        keep_period: CountOrNever = -1,
        keep_best: Count = 1,
        checksums: bool = True,
        save_policy: Any = None,
        preservation_policy: Any = None,
    ) -> None:
        if keep_period != -1 and max_keep_ckpts == -1:
            raise ValueError(
                "CheckpointHook: keep_period needs a positive max_keep_ckpts; -1 keeps all"
            )
        duration = interval if isinstance(interval, str) else None
        replaced = (
            (save_policy, "interval", interval, -1),
            (save_policy or duration, "save_begin", save_begin, 0),
            (save_policy or duration, "keep_period", keep_period, -1),
            (preservation_policy, "max_keep_ckpts", max_keep_ckpts, -1),
        )
        for other, name, value, default in replaced:
            if other is not None and value != default:
                raise ConfigError(
                    f"CheckpointHook: {name} must be left out with {other!r}, got {value!r}; "
                    "AnySavePolicy([...]) and AnyPreservationPolicy([...]) combine Orbax's policies"
                )
        if keep_best != 1 and not save_best:
            raise ValueError("CheckpointHook: keep_best needs save_best")
        given_dir = "" if out_dir is None else os.fspath(out_dir)
        out_dir = apply_backend_args(
            "CheckpointHook.out_dir", given_dir, backend_args, file_client_args
        )
        out_dir = out_dir or None
        if out_dir is not None:
            storage_path("CheckpointHook.out_dir", out_dir)  # refuses what cannot be written
        # A start removes what has the endings of checkpoints being written or removed
        if filename_tmpl is not None and (
            filename_tmpl.count("{}") != 1
            or plain_name(filename_tmpl) != filename_tmpl
            or len(filename_tmpl.encode()) > _LONGEST
            or filename_tmpl.endswith((INCOMING, OUTGOING))
        ):
            raise ConfigError(
                f"CheckpointHook: filename_tmpl must be a file name with one {{}} for the number, "
                f"like 'epoch_{{}}', without characters of patterns (* ? [ ]) and the endings "
                f"{INCOMING} and {OUTGOING}, of at most {_LONGEST} bytes, got {filename_tmpl!r}"
            )
        self._policies: Any = None  # `OrbaxPolicies` of an extra
        if save_policy is not None or preservation_policy is not None:
            kind = load_provided("save_policies", "OrbaxPolicies")
            self._policies = kind(save_policy, preservation_policy)
        # when to save, unless that is a number of epochs or iterations
        self._schedule = None if save_policy is None else self._policies
        if isinstance(interval, str):
            self._schedule = TimedSaves(parse_duration(interval))
            interval = -1
        self.interval = interval
        self.by_epoch = by_epoch and self._schedule is None
        self.every = -1 if self.by_epoch else None  # else as `next_step` says
        self.save_optimizer = save_optimizer
        self.save_param_scheduler = save_param_scheduler
        self.out_dir = out_dir
        self.max_keep_ckpts = max_keep_ckpts
        self.save_last = save_last
        self.filename_tmpl = filename_tmpl
        self.published_keys = _as_tuple(published_keys)
        self.save_begin = save_begin
        self.keep_period = keep_period
        self.keep_best = keep_best
        self.checksums = checksums
        self.preservation_policy = preservation_policy
        self._greater_keys = _as_tuple(greater_keys)
        self._less_keys = _as_tuple(less_keys)
        self._auto_rule: str | None = None
        self.saves_best = bool(save_best)
        self._rules = self._read_rules(_as_tuple(save_best), _as_tuple(rule))

        self._directory = ""
        self._training = False
        self._saved_iter = 0  # iteration of the newest regular checkpoint, or of the start
        self._epoch_end_iter = -1  # iteration at which the last complete epoch ended
        self._kept: list[int] = []
        # the newest of `_kept`, if it is known not to be finite
        self._not_finite: int | None = None
        self._last: str | None = None
        # saved within an epoch, to be removed after the next regular one
        self._interrupted: list[str] = []
        # metric -> 'score' and 'name' of each kept one, best first
        self._best: dict[str, list[dict[str, Any]]] = {}
        self._evicting: list[str] = []  # checkpoints to remove when the pending save is complete
        self._waiting: set[str] = set()  # kept until somebody else has evaluated them

    def list_directories(self, work_dir: str) -> list[str]:
        """Return the directory below `out_dir`, if set."""
        if self.out_dir is None:
            return []
        return [os.path.join(self.out_dir, os.path.basename(os.path.normpath(work_dir)))]

    @property
    def file_names(self) -> set[tuple[str, str]]:
        """The checkpoint names, as directory and template.

        No other hook may write or remove these.
        """
        directory = (
            ""
            if self.out_dir is None
            else str(storage_path("CheckpointHook.out_dir", self.out_dir))
        )
        regular = self.filename_tmpl or ("epoch_{}" if self.by_epoch else "iter_{}")
        return {(directory, regular), *((directory, f"best_{metric}") for metric in self._rules)}

    def monitored_metrics(self) -> list[tuple[str, str, str]]:
        """Return the metrics of `save_best`."""
        return [("save_best", metric, rule) for metric, rule in self._rules.items()]

    def check_auto(self, first_metric: str) -> None:
        """Raise UnknownDirectionError if 'auto' will choose a metric whose direction is not
        known.
        """
        if self._auto_rule == "infer":
            infer_rule(first_metric, self._greater_keys, self._less_keys)

    # --- Regular checkpoints. ---

    def before_train(self, runner: RunnerProtocol) -> None:
        """Resolve the directory, check the states to save, and remove surplus checkpoints after
        a resume.
        """
        self._directory = next(iter(self.list_directories(runner.work_dir)), str(runner.work_dir))
        self._training = True
        self._saved_iter = runner.iter
        if self._schedule is not None:
            self._schedule.start(runner, runner.iter)
        self.remove_surplus(runner)
        regular = self.regular_names
        surplus = []
        for best in self._best.values():
            names = [entry["name"] for entry in best[self.keep_best :]]
            surplus += [name for name in names if name not in regular]
            del best[self.keep_best :]
        # with those that a killed run left
        runner.checkpointer.evict(self._directory, [*self._evicting, *surplus])
        self._evicting = []
        self._update_hub(runner)
        runner.logger.info(f"Checkpoints will be saved to {self._directory}.")

    def remove_surplus(self, runner: RunnerProtocol) -> None:
        """Remove the regular checkpoints that are not to be kept: the config may keep fewer now."""
        kept, surplus = self._split_surplus(runner, self._kept)
        # else maybe only older checkpoints are finite
        if surplus and _is_finite(runner.state.params):
            self._kept = kept
            runner.checkpointer.evict(self._directory, surplus)

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Save the epoch if it is due."""
        self._epoch_end_iter = runner.iter
        is_last = self.save_last and self.is_last_train_epoch(runner)
        if self.by_epoch and (
            is_last or self.every_n_epochs(runner, self.interval, self.save_begin)
        ):
            self._save_regular(
                runner, runner.epoch + 1, epoch=runner.epoch + 1, iteration=runner.iter
            )

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Save the iteration if it is due."""
        is_last = self.save_last and self.is_last_train_iter(runner)
        if self._schedule is None:
            is_due = self.every_n_train_iters(runner, self.interval, self.save_begin)
        else:  # asked at the last iteration too: all processes must be
            is_due = self._schedule.is_due(runner, runner.iter)
        if is_last or is_due:
            self._save_regular(
                runner, runner.iter + 1, epoch=runner.epoch, iteration=runner.iter + 1
            )

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next step after which to save."""
        # A chunk must end at the last iteration, which is saved even if the interval does not reach
        # it.
        last = runner.max_iters - 1 if self.save_last else -1
        if self._schedule is None:
            due = self.next_multiple(self.interval, step, self.save_begin)
        else:
            due = self._schedule.next_step(runner, step)
        return min(due, last if last >= step else math.inf)

    def after_train(self, runner: RunnerProtocol) -> None:
        """Save if training ended early after unsaved iterations, and publish."""
        if self.save_last:
            self._save_unsaved(runner)
        self._training = False
        if self.published_keys:
            self._publish(runner)

    def _save_unsaved(self, runner: RunnerProtocol) -> None:
        if runner.iter <= self._saved_iter:
            return
        if not self.by_epoch or runner.iter == self._epoch_end_iter:
            number = runner.epoch if self.by_epoch else runner.iter
            self._save_regular(runner, number, epoch=runner.epoch, iteration=runner.iter)
        else:  # in the middle of an epoch: the name of a complete epoch would be wrong
            self._flush_log(runner)
            self._last = f"iter_{runner.iter}"
            evict = self._release_interrupted()
            self._interrupted.append(self._last)
            self._write(runner, self._last, epoch=runner.epoch, iteration=runner.iter, evict=evict)
            runner.logger.info(f"Saving checkpoint at {runner.iter} iterations")

    on_interrupt = _save_unsaved  # after a signal or an error, between two iterations

    def _flush_log(self, runner: RunnerProtocol) -> None:
        with runner.stopwatch.part("step"):  # a save waits for the device anyway
            runner.log_writer.flush()  # for log lines in order

    def _save_regular(
        self, runner: RunnerProtocol, number: int, *, epoch: int, iteration: int
    ) -> None:
        self._flush_log(runner)
        # one that is saved again is the newest
        numbers = [*(kept for kept in self._kept if kept != number), number]
        if self._policies is not None:
            self._policies.add(number, iteration)
        self._kept, surplus = self._split_surplus(runner, numbers)
        self._last = self._name(number)
        if surplus:
            bad = self._not_finite
            self._not_finite = None
            if not _is_finite(runner.state.params):
                # Any of the others may be the last finite one, except the one that was not when it
                # was saved.
                self._kept = [kept for kept in numbers if kept != bad or kept == number]
                surplus = [self._name(kept) for kept in numbers if kept not in self._kept]
                self._not_finite = number
                runner.logger.warning(
                    f"{self._last} has parameters that are not finite: earlier checkpoints are kept"
                )
        self._saved_iter = iteration
        if self._schedule is not None:
            self._schedule.start(runner, iteration)
        if self._policies is not None:
            self._policies.forget_all_but(self._kept)
        evict = [*surplus, *self._release_interrupted()]
        self._write(runner, self._last, epoch=epoch, iteration=iteration, evict=evict)
        # Now that it has begun: after a loss that is not finite nothing is saved.
        unit = "epoch" if self.by_epoch else "iteration"
        runner.logger.info(
            f"Saving checkpoint at {number} {unit}s",  # MMEngine's words, for the log file
            extra={"on_terminal": f"Saving checkpoint at {unit} {number}"},
        )

    def _split_surplus(
        self, runner: RunnerProtocol, numbers: list[int]
    ) -> tuple[list[int], list[str]]:
        """Return the numbers to keep, and the names of the other regular checkpoints."""
        kept = list(self._keep_regular(numbers))
        if self.preservation_policy is not None:
            kept = self._policies.select_kept(numbers, runner.processes)
        held = self._list_held()
        kept = [number for number in numbers if number in kept or self._name(number) in held]
        return kept, [self._name(number) for number in numbers if number not in kept]

    def _list_held(self) -> set[str]:
        """Return the names that the rules for regular checkpoints do not remove."""
        best = {entry["name"] for entries in self._best.values() for entry in entries}
        return best | self._waiting

    def _release_interrupted(self) -> list[str]:
        """Return the checkpoints within epochs that can be removed, and forget them."""
        held = self._list_held()
        released = [name for name in self._interrupted if name not in held]
        self._interrupted = [name for name in self._interrupted if name in held]
        return released

    def _keep_regular(self, numbers: list[int]) -> dict[int, str]:
        """Return the reason for keeping each regular checkpoint by number, without surplus ones."""
        if self.preservation_policy is not None:
            return dict.fromkeys(numbers, f"kept by {type(self.preservation_policy).__name__}")
        unit = "epochs" if self.by_epoch else "iterations"
        return keep_regular(numbers, latest=self.max_keep_ckpts, every=self.keep_period, unit=unit)

    # --- Best checkpoints. ---

    def after_val_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Save a best checkpoint for each metric that has improved; do nothing outside training."""
        if self._training and metrics and self._policies is not None:
            self._policies.add_metrics(runner.iter, metrics)
        if not self._training or not (self._rules or self._auto_rule):
            return
        if not metrics:
            runner.logger.warning(
                "the validation returned no metrics: cannot select a best checkpoint"
            )
            return
        for key, rule in self.choose_rules(metrics).items():
            score = None if self.is_left_out(runner, key) else pick_metric(metrics, key)
            if score is None or math.isnan(score):  # NaN has no rank
                continue
            # the first of equals is better
            scores = [*(entry["score"] for entry in self._best.get(key, [])), score]
            ranking = keep_best(scores, count=self.keep_best, rule=rule)
            if len(scores) - 1 in ranking:
                self._save_best(runner, key, score, ranking)

    def _save_best(
        self, runner: RunnerProtocol, key: str, score: float, ranking: list[int]
    ) -> None:
        """Save a best checkpoint and keep `ranking`, best first.

        The last of all entries is the new one.
        """
        by_epoch = self.by_epoch and runner.train_loop.by_epoch
        number = runner.epoch if by_epoch else runner.iter
        # metrics may be 'accuracy/top1'
        name = plain_name(f"best_{key}_{self._name(number, by_epoch)}")
        entries = [*self._best.get(key, []), {"score": score, "name": name}]
        new = len(entries) - 1
        kept = [entries[i] for i in ranking if i == new or entries[i]["name"] != name]
        kept_names = {entry["name"] for entry in kept}
        evict = [entry["name"] for entry in entries if entry["name"] not in kept_names]
        if evict and not _is_finite(runner.state.params):
            runner.logger.warning(
                f"{name} is not saved: its parameters are not finite, and it would replace {evict}"
            )
            return
        self._best[key] = kept
        self._write(
            runner, name, epoch=runner.epoch, iteration=runner.iter, evict=evict, latest=False
        )
        for old in evict:
            runner.logger.info(f"The previous best checkpoint {self._path(old)} is removed")
        unit = "epoch" if by_epoch else "iter"
        place = ranking.index(new) + 1
        rank = "The best checkpoint" if place == 1 else f"Checkpoint number {place} of the best"
        reached = f"{rank} with {score:0.4f} {key} at"
        runner.logger.info(
            f"{reached} {number} {unit} is saved to {name}.",
            extra={"on_terminal": f"{reached} {unit} {number} is saved to {name}."},
        )

    def _read_rules(self, keys: tuple[str, ...], rules: tuple[str, ...]) -> dict[str, str]:
        """Return the rules by metric that are known before the first validation."""
        if len(set(keys)) != len(keys):
            raise ArgumentError(
                f"CheckpointHook: save_best must have different metrics, got {list(keys)}"
            )
        # 'auto' takes the first metric of the first validation, which is not known yet.
        if "auto" in keys and len(keys) > 1:
            raise ArgumentError(
                f"CheckpointHook: save_best must have 'auto' alone or metrics, got {list(keys)}"
            )
        if keys and len(rules) not in (0, 1, len(keys)):
            raise ValueError(
                f"CheckpointHook: rule must have one entry, or one for each of the {len(keys)} "
                f"metrics of save_best, got {len(rules)}"
            )
        if keys == ("auto",):
            self._auto_rule = rules[0] if rules else "infer"
            return {}
        if len(rules) == len(keys):
            return dict(zip(keys, rules, strict=True))
        with config_path("save_best"):
            return {
                key: rules[0] if rules else infer_rule(key, self._greater_keys, self._less_keys)
                for key in keys
            }

    def choose_rules(self, metrics: Iterable[str]) -> dict[str, str]:
        """Return the rule by metric of `save_best`; 'auto' takes the first of `metrics`."""
        if self._auto_rule and (first := next(iter(metrics), None)) is not None:
            self._resolve_auto(first)
        return self._rules

    @property
    def regular_names(self) -> list[str]:
        """The names of the checkpoints that are there besides the best ones."""
        return [*map(self._name, self._kept), *self._interrupted]

    def take_ranking(
        self, best: Mapping[str, Sequence[Mapping[str, Any]]], waiting: Iterable[str]
    ) -> None:
        """Take over the ranking of the regular checkpoints by processes that evaluate them.

        Args:
          best: `score` and `name` of those to keep by metric, the best first.
          waiting: names that are kept because they are not evaluated yet.
        """
        rules = self.choose_rules(best)
        self._best |= {key: [dict(x) for x in best[key]] for key in rules if key in best}
        self._waiting = set(waiting)

    def _resolve_auto(self, key: str) -> None:
        rule = self._auto_rule
        self._auto_rule = None
        if rule is None or rule == "infer":
            rule = infer_rule(key, self._greater_keys, self._less_keys)
        self._rules = {key: rule}

    # --- Regular and best checkpoints. ---

    def _write(
        self,
        runner: RunnerProtocol,
        name: str,
        *,
        epoch: int,
        iteration: int,
        evict: list[str],
        latest: bool = True,
    ) -> None:
        # Pending removals are part of the saved state: if the run is killed before them, a resumed
        # run removes them.
        self._evicting = evict
        self._update_hub(runner)  # before the save, which contains the hub
        runner.save_checkpoint(
            out_dir=self._directory,
            filename=name,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta={"epoch": epoch, "iter": iteration},
            by_epoch=self.by_epoch,
            evict=evict,
            checksums=self.checksums,
            latest=latest,
        )
        self._evicting = []

    def _update_hub(self, runner: RunnerProtocol) -> None:
        """Record checkpoint paths and best scores in the message hub."""
        hub = runner.message_hub
        if self._last is not None:
            hub.update_info("last_ckpt", self._path(self._last))
        if self.max_keep_ckpts > 0:
            hub.update_info("keep_ckpt_ids", list(self._kept))
        for key, best in self._best.items():
            suffix = f"_{key}" if len(self._rules) > 1 else ""
            hub.update_info(f"best_score{suffix}", best[0]["score"])
            hub.update_info(f"best_ckpt{suffix}", self._path(best[0]["name"]))

    def before_save_checkpoint(self, runner: RunnerProtocol, checkpoint: dict[str, Any]) -> None:
        """Store the hub's paths of checkpoints as names: those in a copy of the directory are
        the copy's.
        """
        info = checkpoint["message_hub"]["runtime_info"]
        paths = {self._path(best[0]["name"]) for best in self._best.values()}
        paths |= {self._path(self._last)} if self._last is not None else set()
        for key, value in info.items():
            if isinstance(value, str) and value in paths:
                info[key] = os.path.basename(value)

    def _publish(self, runner: RunnerProtocol) -> None:
        publish = load_provided("jengine.checkpoint", "publish")
        runner.checkpointer.wait()  # the newest may still be in the making
        names = [self._last] if self.save_last and self._last else []
        names += [best[0]["name"] for best in self._best.values()]
        for name in dict.fromkeys(names):  # the last one may be the best too
            if jax.process_index() == 0 and storage_path("path", self._path(name)).is_dir():
                path, removed = publish(self._path(name), self.published_keys)
                runner.logger.info(f"Published {path} without the keys {', '.join(removed)}.")

    def _name(self, number: int, by_epoch: bool | None = None) -> str:
        by_epoch = self.by_epoch if by_epoch is None else by_epoch
        return (self.filename_tmpl or ("epoch_{}" if by_epoch else "iter_{}")).format(number)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the existing checkpoints, the best scores and, for information, the reason for
        keeping each.
        """
        return {
            "kept": list(self._kept),
            "not_finite": self._not_finite,
            "last": self._last,
            "best": {key: [dict(entry) for entry in best] for key, best in self._best.items()},
            # Removals that a kill may interrupt: the resumed run finishes them.
            "evicting": list(self._evicting),
            "interrupted": list(self._interrupted),
            "reasons": self._explain_all(),
            "history": [] if self._policies is None else self._policies.state_list(),
        }

    def _explain_all(self) -> dict[str, str]:
        """Return the reason for keeping each checkpoint, by name."""
        # Later entries replace earlier ones: the best checkpoint is called that even if it is also
        # the last.
        reasons = dict.fromkeys(self._waiting, "waits for its evaluation")
        reasons |= {} if self._last is None else {self._last: "where training ended"}
        reasons |= {self._name(number): "later parameters are not finite" for number in self._kept}
        reasons |= {
            self._name(number): why for number, why in self._keep_regular(self._kept).items()
        }
        for key, best in self._best.items():
            for rank, entry in enumerate(best):
                place = "best" if rank == 0 else f"number {rank + 1}"
                reasons[entry["name"]] = f"{place} by {key} ({entry['score']:.4f})"
        return reasons

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of `state_dict` in a resumed run."""
        self._kept = [int(number) for number in state_dict["kept"]]
        # which checkpoints of earlier versions lack
        self._not_finite = state_dict.get("not_finite")
        self._last = state_dict["last"]
        self._best = {
            key: [dict(entry) for entry in best] for key, best in state_dict["best"].items()
        }
        self._evicting = list(state_dict["evicting"])
        self._interrupted = list(state_dict.get("interrupted", ()))
        if self._policies is not None:
            self._policies.load_state_list(state_dict.get("history", ()))
        if self._auto_rule and self._best:  # 'auto' keeps its first metric
            self._resolve_auto(next(iter(self._best)))


@jax.jit
def _is_finite(params: Any) -> jax.Array:
    """Return whether all parameters are finite, bool[].

    The caller transfers nothing else from the device.
    """
    floats = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return (
        jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()
        if floats
        else jnp.ones((), bool)
    )


def _as_tuple(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())
