"""Scores of checkpoints in the log directory of a run, and the verdict about all of them.

    work_dir/TIMESTAMP/
      evaluations/epoch_1/scores.json   the metrics of a checkpoint, or that it was gone
      evaluations/epoch_1/run.lock      while a process evaluates it: the lock of a work dir
      verdict.json                      the best checkpoints, and whether training should end

Each file is replaced as a whole. The verdict follows from the scores alone, so that any process can
write it. Whoever does then looks for scores that arrived meanwhile.
"""

import contextlib
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from jengine.config.json_codec import decode_object, encode
from jengine.config.scores import keep_best, pick_metric
from jengine.config.storage import (
    is_url,
    list_directory,
    read_many,
    remove_files,
    sync,
    write_bytes,
)
from jengine.config.work_dir import EVALUATIONS, SCORES, VERDICT
from jengine.hooks.checkpoint import CheckpointHook
from jengine.hooks.hook import Hook


class Score(NamedTuple):
    """Metrics of a checkpoint.

    Attributes:
      checkpoint: its name.
      seal: identifies its content: another one with this name has another.
      iter, epoch: its progress.
      mode: 'val' or 'test'.
      metrics: numbers by name.
      gone: whether it was removed before it was evaluated; then there are no metrics.
    """

    checkpoint: str
    seal: str
    iter: int
    epoch: int
    mode: str
    metrics: dict[str, float]
    gone: bool = False


class Verdict(NamedTuple):
    """Result of all evaluations of a run.

    Attributes:
      best: `score` and `name` of the best checkpoints by metric of `save_best`, the best first.
      stop: why training should end, or None.
      done: the names of the checkpoints that need no evaluation any more.
    """

    best: dict[str, list[dict[str, Any]]]
    stop: str | None
    done: list[str]


def read_scores(log_dir: PurePath, names: Iterable[str] | None = None) -> list[Score]:
    """Return the scores of a run by iteration, of all checkpoints or of those with these names."""
    folder = log_dir / EVALUATIONS
    names = list_directory(folder) if names is None else names
    found = read_many(folder / name / SCORES for name in names)
    scores = []
    for content in found.values():
        with contextlib.suppress(ValueError, TypeError):  # lost by a power failure: none
            scores.append(Score(**decode_object(content)))
    return sorted(scores, key=lambda score: score.iter)


def write_score(log_dir: PurePath, score: Score) -> None:
    """Write the score of a checkpoint."""
    path = log_dir / EVALUATIONS / score.checkpoint / SCORES
    if not is_url(path):
        os.makedirs(path.parent, exist_ok=True)
    write_bytes(path, encode(score._asdict()).encode())


def read_verdict(log_dir: PurePath) -> Verdict | None:
    """Return the verdict of a run; None if there is none, or a damaged one."""
    for content in read_many([log_dir / VERDICT]).values():
        with contextlib.suppress(ValueError, TypeError):
            return Verdict(**decode_object(content))
    return None


def write_verdict(log_dir: PurePath, hooks: Sequence[Hook], known: Iterable[int]) -> Verdict:
    """Write the verdict of a run, and return it.

    Args:
      log_dir: of the run.
      hooks: those of the run: its `CheckpointHook` and hooks with a method `find_end`.
      known: the iterations of the checkpoints that are there.
    """
    scores = read_scores(log_dir)
    while True:
        verdict = judge(hooks, scores, known)
        _replace(log_dir / VERDICT, encode(verdict._asdict(), indent=1).encode())
        # another process may have written a score after this read, and its verdict before this one
        newer = read_scores(log_dir)
        if newer == scores:
            return verdict
        scores = newer


def judge(hooks: Sequence[Hook], scores: Sequence[Score], known: Iterable[int]) -> Verdict:
    """Return the verdict; arguments as in `write_verdict`."""
    evaluated = [score for score in scores if not score.gone]
    best = {}
    for hook in hooks:
        if isinstance(hook, CheckpointHook) and evaluated:
            for metric, rule in hook.choose_rules(evaluated[0].metrics).items():
                values = [pick_metric(score.metrics, metric) for score in evaluated]
                best[metric] = [
                    {"score": values[i], "name": evaluated[i].checkpoint}
                    for i in keep_best(values, count=hook.keep_best, rule=rule)
                ]
    # a checkpoint that is still evaluated may have the improvement
    missing = min(set(known).difference(score.iter for score in scores), default=None)
    series = [score.metrics for score in evaluated if missing is None or score.iter < missing]
    ends = (hook.find_end(series) for hook in hooks if hasattr(hook, "find_end"))
    stop = next(filter(None, ends), None)
    return Verdict(best, stop, [score.checkpoint for score in scores])


def forget_later(log_dir: PurePath, iteration: int) -> None:
    """Remove the scores of checkpoints after an iteration, from which the run continues."""
    later = [score.checkpoint for score in read_scores(log_dir) if score.iter > iteration]
    remove_files(log_dir / EVALUATIONS / name / SCORES for name in later)


def _replace(path: PurePath, content: bytes) -> None:
    """Replace a file that several processes write."""
    if is_url(path):
        write_bytes(path, content)
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "wb") as file:
        file.write(content)
    sync(temporary)
    os.replace(temporary, path)
