"""Check that the config that a run leaves in its work dir describes the run."""

import json
import os
import pathlib
import re
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jengine import Runner, load_config, load_model
from jengine.checkpoint import find_checkpoint, load, read_meta
from jengine.cli import main
from jengine.config import resolve
from jengine.config.dump import find_unwritten
from jengine.config.errors import ConfigError


class Again(NamedTuple):
    """What the config of a run can do.

    Attributes:
      lacks: paths of values that a config cannot have.
      trains: whether it trains again to the same parameters; else `why` not.
      exports: whether the model predicts, so that it is exported.
    """

    lacks: frozenset[str] = frozenset()
    trains: bool = True
    exports: bool = True
    why: str = ""


EVERYTHING = Again()
NO_PREDICTIONS = Again(exports=False)
_HOST_DATA = Again(trains=False, exports=False, why="its data read the parameters of `runner`, a name of the page")
FOREIGN = {"runs/graphs", "qlora"}  # where jraph and qwix are installed
# The runs of each page with code, by work dir; a page that leaves other ones than these fails its test. In the others
# a loop by hand, parts of configs, or Runners that do not run.
PAGES: dict[str, dict[str, Again]] = {
    "README.md": {"work_dirs/sine": EVERYTHING},
    "batches.md": {
        "runs/boxes": NO_PREDICTIONS,
        "runs/graphs": NO_PREDICTIONS,
        "runs/tokens": NO_PREDICTIONS,
    },
    "checkpoints.md": {},
    "coming_from.md": {"work_dirs/noisy": NO_PREDICTIONS, "work_dirs/task": EVERYTHING},
    "config.md": {},
    "data.md": {"runs/hard": _HOST_DATA._replace(exports=True)},
    "devices.md": {},
    "ema.md": {"work_dirs/lookahead": Again(lacks=frozenset({"optim_wrapper"}), trains=False), "work_dirs/schedule_free": EVERYTHING},
    "equinox.md": {
        "work_dirs/equinox": EVERYTHING,
        "work_dirs/equinox_head": EVERYTHING,
        "work_dirs/equinox_state": EVERYTHING,
        "work_dirs/equinox_step": EVERYTHING,
    },
    "distillation.md": dict.fromkeys(["teacher", "student", "features", "warmup", "close"], EVERYTHING),
    "evaluation.md": {},
    "house.md": {},
    "finetuning.md": {
        **dict.fromkeys(["adapted", "lora", "network", "pretrained", "qlora"], EVERYTHING),
        "head": NO_PREDICTIONS,
    },
    "hooks.md": {"work_dirs/chunks": NO_PREDICTIONS},
    "how_do_i.md": {
        "work_dirs/clipped": EVERYTHING,
        "work_dirs/logged": NO_PREDICTIONS,
    },
    "imix.md": {"work_dirs/imix": EVERYTHING},
    "language.md": dict.fromkeys([f"work_dirs/{name}" for name in ("generator", "instruct", "packed")], EVERYTHING),
    "logging.md": {},
    "model.md": {},
    "more_hooks.md": {},
    "notebooks.md": {"work_dirs/digits_cnn": EVERYTHING},
    "optim.md": {},
    "optim_tutorial.md": {},
    "own_loop.md": {"work_dirs/own_loop_in_a_runner": Again(trains=False, why="its loop, which halves the rate, is code of the page")},
    "own_step.md": {
        "work_dirs/author": NO_PREDICTIONS,
        "work_dirs/five": NO_PREDICTIONS,
        "work_dirs/private": EVERYTHING,
        "work_dirs/sam": EVERYTHING,
    },
    "predict.md": {"work_dirs/digits_cnn": EVERYTHING},
    "pretrained.md": {},
    "rl.md": {
        "runs/agent": _HOST_DATA,
        "work_dirs/delayed": NO_PREDICTIONS,
        "work_dirs/points": NO_PREDICTIONS,
        "work_dirs/replicas": NO_PREDICTIONS,
    },
    "runner.md": {"work_dirs/digits": EVERYTHING},
    "scale.md": {},
    "schedules.md": {},
    "segmentation.md": {},
    "selfsup.md": {"work_dirs/dense": NO_PREDICTIONS},
    "speed.md": {"speed": EVERYTHING},
    "start.md": {},
    "storage.md": {},
    "sweeps.md": {},
    "visualization.md": {},
}


def find_runs(directory):
    """Return the work dirs below `directory`."""
    return [
        path.parent for path in sorted(pathlib.Path(directory).rglob("config.py")) if path.parent.name != "vis_data"
    ]


def check_runs_of_page(page, directory, is_whole=True):
    """Check the runs that a page, or some blocks of it, left in `directory`; see `check_run`."""
    found = {work_dir.relative_to(directory).as_posix(): work_dir for work_dir in find_runs(directory)}
    assert set(found) <= set(PAGES[page])
    assert not is_whole or set(PAGES[page]) - set(found) <= FOREIGN
    for name, work_dir in found.items():
        check_run(work_dir, PAGES[page][name])


def check_run(work_dir, again=EVERYTHING):
    """Check a run as `check_runs_again`; with JENGINE_TRAIN_AGAIN it is also trained and exported."""
    check_runs_again(work_dir, again)
    if "JENGINE_TRAIN_AGAIN" in os.environ and not again.lacks:
        train_again(work_dir, again)


def check_runs_again(work_dir, again=EVERYTHING):
    """Check that the config builds the same run, and the model of its checkpoint; or that the log names what it lacks.

    Args:
      work_dir: of a run in this process, whose modules are importable.
      again: what the config can do.
    """
    cfg = resolve(load_config(work_dir / "config.py"))
    lines = [line for path in sorted(work_dir.glob("*/*.log")) for line in path.read_text().splitlines()]
    problems = [line for line in lines if "cannot be run again" in line]
    missing = [path for path, _ in find_unwritten(cfg)]
    assert set(missing) == again.lacks
    if missing:
        for path in missing[:4]:
            assert f"`{path}`" in problems[-1], (path, problems[-1])
        assert re.search("write |: move it|another file has this name", problems[-1])
        with pytest.raises(ConfigError, match="which the run that wrote it had in memory only"):
            Runner.from_cfg(cfg)
        if has_checkpoint(work_dir) and any(path.startswith("model") for path in missing):
            with pytest.raises(ConfigError, match="the config must have `model"):
                load_model(work_dir, trust=True)
        return
    runner = runner_class(problems).from_cfg({**cfg, "work_dir": f"{work_dir}_again"})
    if has_checkpoint(work_dir):
        saved = read_meta(find_checkpoint(work_dir))["fingerprint"]["settings"]
        assert json.loads(json.dumps(runner.run.described.settings)) == saved
        load_model(work_dir, trust=True)


def train_again(work_dir, again=EVERYTHING):
    """Check that the config trains to the same parameters, and that a checkpoint with a model is exported."""
    if not has_checkpoint(work_dir):
        return
    problems = [line for path in work_dir.glob("*/*.log") for line in path.read_text().splitlines()]
    cfg = resolve(load_config(work_dir / "config.py"))
    if again.trains:
        seed = read_meta(find_checkpoint(work_dir))["meta"]["seed"]
        runner = runner_class(problems).from_cfg(
            {**cfg, "work_dir": f"{work_dir}_again", "randomness": dict(seed=seed)}
        )
        runner.train()
        first, second = (load(find_checkpoint(path)).params for path in (work_dir, f"{work_dir}_again"))
        jax.tree.map(np.testing.assert_array_equal, second, first)
    command = ["ckpt", "export", str(work_dir), "--jax-export", f"{work_dir}.bin", "--trust", "--platforms", "cpu"]
    assert (main([*command, "--batch-size", "2"]) == 0) is again.exports


def runner_class(lines):
    """Return the class that a run asks for in its log: Runner, or a subclass in one of the pages."""
    named = [match[1] for line in lines if (match := re.search(r"use (\w+)\.from_cfg\(load_config", line))]
    pages = [module for name, module in sys.modules.items() if name.startswith("docs.")]
    return next((vars(page)[named[0]] for page in pages if named and named[0] in vars(page)), Runner)


def has_checkpoint(work_dir):
    return (work_dir / "last_checkpoint").exists()
