"""Check that the config that a run leaves in its work dir describes the run."""

import json
import pathlib
import re

import pytest

from jengine import Runner, load_config, load_model
from jengine.checkpoint import find_checkpoint, read_meta
from jengine.config import resolve
from jengine.config.dump import find_unwritten
from jengine.description import flatten_description
from jengine.errors import ConfigError


def find_runs(directory):
    """Return the work dirs below `directory`."""
    return [
        path.parent for path in sorted(pathlib.Path(directory).rglob("config.py")) if path.parent.name != "vis_data"
    ]


def check_runs_again(work_dir):
    """Check that the config builds the same run, and the model of its checkpoint; or that the log names what it lacks.

    Args:
      work_dir: of a run in this process, whose modules are importable.
    """
    cfg = resolve(load_config(work_dir / "config.py"))
    lines = [line for path in sorted(work_dir.glob("*/*.log")) for line in path.read_text().splitlines()]
    problems = [line for line in lines if "cannot be run again" in line]
    missing = list(find_unwritten(cfg))
    if missing:
        for path, _ in missing[:4]:
            assert f"`{path}`" in problems[-1], (path, problems[-1])
        assert re.search("write |: move it|another file has this name", problems[-1])
        with pytest.raises(ConfigError, match="which the run that wrote it had in memory only"):
            Runner.from_cfg(cfg)
        if has_checkpoint(work_dir) and any(path.startswith("model") for path, _ in missing):
            with pytest.raises(ConfigError, match="the config must have `model"):
                load_model(work_dir, trust=True)
        return
    assert all(".from_cfg(load_config(...))" in line for line in problems)
    runner = Runner.from_cfg({**cfg, "work_dir": f"{work_dir}_again"})
    if has_checkpoint(work_dir):
        saved = read_meta(find_checkpoint(work_dir))["fingerprint"]["settings"]
        assert flatten_description(json.loads(json.dumps(runner.settings))) == flatten_description(saved)
        load_model(work_dir, trust=True)


def has_checkpoint(work_dir):
    return (work_dir / "last_checkpoint").exists()
