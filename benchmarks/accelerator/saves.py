"""Save and restore a state of Adam on the accelerator, compared with a copy of its arrays to the
host.
"""

import pathlib
import tempfile
import time

from benchmarks.accelerator.rows import record, record_close
from benchmarks.accelerator.size import is_tiny
from benchmarks.checkpoint import run_restore, run_saves


def main():
    """Record the seconds of each phase, and the ratio of a save to a copy."""
    tiny = is_tiny()
    parameters, rounds = (200_000, 1) if tiny else (100_000_000, 4)
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        seconds = run_saves(parameters, pathlib.Path(directory), rounds)
        for name, value in seconds.items():
            record(f"{name}, s", value)
        ratio = seconds["save, blocked"] / seconds["copy to host"]
        record_close("blocked by a save / copy to the host", ratio, float("inf") if tiny else 1.25)
        slower = seconds["save and step"] - seconds["save, blocked"] - seconds["step"]
        record("slowdown of the step during an asynchronous save, s", max(slower, 0.0))
        record(
            "restore onto the device, s",
            run_restore(parameters, pathlib.Path(directory), 0)["restore"],
        )
        record("all, s", time.perf_counter() - start)


if __name__ == "__main__":
    main()
