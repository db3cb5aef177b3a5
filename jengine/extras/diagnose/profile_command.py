"""`jengine profile`: ask a run that trains for a profile of its next iterations."""

import argparse
import json
import shlex
from collections.abc import Sequence

from jengine.config.errors import ConfigError
from jengine.config.storage import storage_path
from jengine.extras.diagnose.profile_requests import PROFILE_REQUEST
from jengine.hooks.iter_timer import PERIOD


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Request a profile, which the run starts at one of its next iterations."""
    work_dir = storage_path("WORK_DIR", args.work_dir)
    if not work_dir.is_dir():
        raise FileNotFoundError(f"WORK_DIR must be the directory of a run, got {args.work_dir}")
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {args.steps}")
    # A file, and not a signal: the run may be on another machine, in a container or in a bucket.
    (work_dir / PROFILE_REQUEST).write_text(json.dumps({"steps": args.steps}))
    log = shlex.quote(f"{args.work_dir}/*/*.log")
    seconds = round(2 * PERIOD)
    print(
        f"A run in {args.work_dir} starts the profile within about {seconds} s, and names its "
        f"directory in {log}."
    )
