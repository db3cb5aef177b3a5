"""Command `jengine test --follow`: evaluate the checkpoints of a run as they appear."""

import argparse
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import jax

from jengine.checkpoint.identity import TIMESTAMP
from jengine.checkpoint.layout import (
    INCOMING,
    find_manifests,
    list_locations,
    read_current_run,
    read_meta,
)
from jengine.checkpoint.lock import is_locked, make_lock
from jengine.checkpoint.lock_holder import WorkDirLockedError
from jengine.checkpoint.manifest import MANIFEST, read_manifest
from jengine.checkpoint.start_from import LoadFrom
from jengine.cli.commands import load, temporary_runner
from jengine.config.annotations import is_host_number
from jengine.config.errors import ConfigError
from jengine.config.storage import StorageError, read_bytes, storage_path
from jengine.config.work_dir import EVALUATIONS
from jengine.extras.followers.followed_loop import is_followed, read_follow
from jengine.extras.followers.scores import Score, read_scores, write_score, write_verdict
from jengine.hooks.checkpoint import CheckpointHook


class _Checkpoint(NamedTuple):
    path: PurePath
    iteration: int
    seal: str


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Evaluate each checkpoint of the work dir, until the run has ended and all are evaluated."""
    if args.best is not None:
        raise ConfigError("--follow must be given without --best: it evaluates each checkpoint")
    if args.follow <= 0:
        raise ConfigError(f"--follow must have a positive number of seconds, got {args.follow:g}")
    if jax.process_count() > 1:
        raise ConfigError(
            f"--follow must have one process, got {jax.process_count()}; start it several times"
        )
    cfg, _ = read_follow(load(args, overrides))
    root = storage_path("WORK_DIR", args.checkpoint)
    if not is_followed(cfg) and cfg.get("test_cfg") is None:
        raise ConfigError(
            "--follow must have `val_cfg=dict(follow=...)` or the sections of a test in the "
            "config, got neither"
        )
    is_announced = False
    while True:
        is_training = is_locked(root)  # before the search, which then finds the last checkpoint
        run_id = read_current_run(root)
        checkpoints = [] if run_id is None else _list_checkpoints(list_locations(root), run_id)
        if checkpoints:
            break
        if run_id is not None and not is_training:
            raise FileNotFoundError(f"{root} must have a checkpoint of its run, got none")
        if not is_announced:
            print(f"Waiting for the first checkpoint in {root}.", flush=True)
            is_announced = True
        time.sleep(args.follow)
    with temporary_runner(_prepare(cfg, checkpoints[0].path)) as runner:
        _Follower(runner, root, "val" if is_followed(cfg) else "test").follow(args.follow)


class _Follower:
    """Process that evaluates the checkpoints of the run in `root`."""

    def __init__(self, runner: Any, root: PurePath, mode: str) -> None:
        self._runner = runner
        self._root = root
        self._mode = mode
        hooks = (hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
        others = (path for hook in hooks for path in hook.list_directories(str(root)))
        self._others = [storage_path("CheckpointHook.out_dir", path) for path in others]
        self._log_dirs: dict[str, PurePath] = {}  # by identifier of a run

    def follow(self, seconds: float) -> None:
        """Evaluate until the run has ended, and look for a checkpoint every so often."""
        judged = None  # the identifier of a run
        announced = None
        while True:
            is_training = is_locked(self._root)
            run_id = read_current_run(self._root)
            directories = [*list_locations(self._root), *self._others]
            checkpoints = _list_checkpoints(directories, run_id)
            if not checkpoints:  # all removed, or a new run
                if not is_training:
                    return
                time.sleep(seconds)
                continue
            log_dir = self._find_log_dir(run_id, checkpoints[-1])
            seals = self._read_seals(log_dir, checkpoints)
            pending = [checkpoint for checkpoint in checkpoints if checkpoint.seal not in seals]
            # one at a time, so that the verdict is known before the next
            is_busy = any(self._evaluate(log_dir, checkpoint) for checkpoint in pending)
            if self._mode == "val" and (is_busy or judged != run_id):
                known = [checkpoint.iteration for checkpoint in checkpoints]
                verdict = write_verdict(log_dir, self._runner.hooks, known)
                judged = run_id
                if verdict.stop and verdict.stop != announced:
                    announced = verdict.stop
                    print(f"Training should stop early: {verdict.stop}.", flush=True)
            if not pending and not is_training:
                return
            if not is_busy:
                time.sleep(seconds)

    def _read_seals(self, log_dir: PurePath, checkpoints: Sequence[_Checkpoint]) -> set[str]:
        """Return the seals of those checkpoints that were evaluated."""
        scores = read_scores(log_dir, [checkpoint.path.name for checkpoint in checkpoints])
        return {score.seal for score in scores if score.mode == self._mode}

    def _find_log_dir(self, run_id: str | None, checkpoint: _Checkpoint) -> PurePath:
        key = str(run_id)
        if key not in self._log_dirs:
            name = str(read_meta(checkpoint.path)["meta"].get("timestamp"))
            if not TIMESTAMP.fullmatch(name):  # it names a directory, and a checkpoint is data
                raise ConfigError(
                    f"`meta.timestamp` of {checkpoint.path} must be a time, got {name!r}"
                )
            self._log_dirs[key] = self._root / name
        return self._log_dirs[key]

    def _evaluate(self, log_dir: PurePath, checkpoint: _Checkpoint) -> bool:
        """Evaluate a checkpoint, and return whether another process had not claimed it."""
        path, iteration, seal = checkpoint
        folder = log_dir / EVALUATIONS / path.name
        # a lease makes whoever wants it wait for its holder
        if is_locked(folder):
            return False
        claim = make_lock(folder)
        try:
            claim.acquire()
        except WorkDirLockedError:
            return False
        try:
            if seal in self._read_seals(log_dir, [checkpoint]):
                return True  # evaluated since the search
            try:
                epoch = read_meta(path)["meta"]["epoch"]
                metrics = self._measure(str(path))
                gone = False
            except (OSError, ValueError, StorageError):
                if _read_seal(path) == seal:
                    raise
                epoch = 0
                metrics = {}
                gone = True
            score = Score(path.name, seal, iteration, epoch, self._mode, metrics, gone)
            write_score(log_dir, score)
        finally:
            claim.release()
        texts = [f"{name}: {value:.4f}" for name, value in metrics.items()]
        text = "was gone before it was evaluated" if gone else ", ".join(texts)
        print(f"{path.name} (iteration {iteration}): {text}", flush=True)
        return True

    def _measure(self, path: str) -> dict[str, float]:
        runner = self._runner
        runner.load_from = LoadFrom(path)
        runner.is_loaded = False
        metrics = runner.val() if self._mode == "val" else runner.test()
        return {name: float(value) for name, value in metrics.items() if is_host_number(value)}


def _prepare(cfg: Mapping[str, Any], checkpoint: PurePath) -> dict[str, Any]:
    """Return the config of a Runner that evaluates as the run would, and writes no logs."""
    seed = read_meta(checkpoint)["meta"]["seed"]  # of models that sample
    return {
        **cfg,
        "load_from": None,
        "randomness": {**(cfg.get("randomness") or {}), "seed": seed},
        "visualizer": {"type": "Visualizer", "vis_backends": []},
        "default_hooks": {**(cfg.get("default_hooks") or {}), "logger": None},
    }


def _list_checkpoints(directories: Sequence[PurePath], run_id: str | None) -> list[_Checkpoint]:
    """Return the checkpoints of a run by iteration: the regular ones, and others of iterations
    without one.
    """
    found: dict[str, tuple[PurePath, int, bool]] = {}  # by name, as scores are
    for directory in dict.fromkeys(directories):
        for path, manifest in find_manifests(directory).items():
            if manifest is not None and manifest.run == run_id and manifest.iteration is not None:
                found[path.name] = path, manifest.iteration, manifest.is_latest
    covered = {iteration for _, iteration, is_regular in found.values() if is_regular}
    checkpoints = []
    for path, iteration, is_regular in sorted(found.values(), key=lambda entry: entry[1]):
        if is_regular or iteration not in covered:
            covered.add(iteration)
            if (seal := _read_seal(path)) is not None:  # else removed meanwhile
                checkpoints.append(_Checkpoint(path, iteration, seal))
    return checkpoints


def _read_seal(path: PurePath) -> str | None:
    """Return what identifies the content of a checkpoint; None if it is gone."""
    if path.suffix == INCOMING or read_manifest(path) is None:
        return None
    try:
        return hashlib.sha256(read_bytes(path / MANIFEST)).hexdigest()[:16]
    except OSError:
        return None
