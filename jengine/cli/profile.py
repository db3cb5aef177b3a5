"""Request for a profile of a run that trains."""

import argparse
import json
import shlex
from collections.abc import Sequence

from jengine.errors import ConfigError
from jengine.hooks.run_watch import PERIOD, PROFILE_REQUEST
from jengine.storage import storage_path


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write the request, which the run reads at one of its next iterations."""
    work_dir = storage_path("WORK_DIR", args.work_dir)
    if not work_dir.is_dir():
        raise FileNotFoundError(f"WORK_DIR must be the directory of a run, got {args.work_dir}")
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {args.steps}")
    # A file, and not a signal: the run may be on another machine, in a container or in a bucket.
    (work_dir / PROFILE_REQUEST).write_text(json.dumps({"steps": args.steps}))
    log, seconds = shlex.quote(f"{args.work_dir}/*/*.log"), round(2 * PERIOD)
    print(f"A run in {args.work_dir} starts the profile within about {seconds} s, and names its directory in {log}.")
