"""`jengine stacks`: ask a run that trains, or hangs, for the stacks of its threads."""

import argparse
import contextlib
import json
import time
import uuid
from collections.abc import Sequence

from jengine.config.errors import ConfigError
from jengine.config.storage import StorageError, read_bytes, remove_files, storage_path
from jengine.extras.diagnose.progress_watch import STACKS_REQUEST, answer_name
from jengine.logging.console import escape_control


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Request the stacks, wait for them and print them.

    Raises:
      ConfigError: no run has answered.
    """
    work_dir = storage_path("WORK_DIR", args.work_dir)
    if not work_dir.is_dir():
        raise FileNotFoundError(f"WORK_DIR must be the directory of a run, got {args.work_dir}")
    name = uuid.uuid4().hex
    request = work_dir / STACKS_REQUEST
    answer = work_dir / answer_name(name)
    request.write_text(json.dumps({"name": name}))
    end = time.monotonic() + args.timeout
    while time.monotonic() < end:
        with contextlib.suppress(OSError, StorageError):
            text = read_bytes(answer).decode(errors="replace")
            remove_files([answer])
            print(escape_control(text))
            return
        time.sleep(0.2)
    with contextlib.suppress(OSError, StorageError):
        remove_files([request])
    raise ConfigError(
        f"WORK_DIR must have a run that trains, got no answer from {args.work_dir} within "
        f"{args.timeout:g} s"
    )
