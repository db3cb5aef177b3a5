"""Train on images that are decoded while the device computes, and record how long it waits for
them.
"""

import os
import tempfile

from benchmarks import png_files
from benchmarks.accelerator import trace
from benchmarks.accelerator.rows import record
from benchmarks.accelerator.size import is_tiny
from benchmarks.images import train


def main():
    """Train with threads and with worker processes."""
    tiny = is_tiny()
    iters, files = (6, 128) if tiny else (60, 2000)
    count = 2 if tiny else max(2, (os.cpu_count() or 2) - 2)
    with tempfile.TemporaryDirectory() as directory:
        paths = png_files.write_files(directory, files)
        for kind in ("threads", "workers"):
            record_waits(kind, count, paths, f"{directory}/{kind}", iters)


def record_waits(kind, count, paths, work_dir, iters):
    """Train once under the profiler, and record the shares of the input and of the idle device."""
    seconds = {}

    def run(_):
        seconds.update(train(paths, work_dir, iters, **{f"num_{kind}": count}))

    events = trace.record_trace(run, iters)
    steady = sum(value for phase, value in seconds.items() if phase not in ("setup", "compile"))
    record(f"{count} {kind}: images/s", iters * png_files.BATCH_SIZE / steady)
    record(f"{count} {kind}: share of time waiting for input", seconds.get("input", 0.0) / steady)
    record(f"{count} {kind}: share of time with an idle device", trace.idle_share(events))


if __name__ == "__main__":
    main()
