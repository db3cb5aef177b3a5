"""Start a run of a sweep in a process of several threads; the run counts the signals that it gets until its parent has ended."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time


def count_signals(directory):
    """Count SIGTERM in a run of a sweep, and write the number once half a second has passed without another."""
    from jengine.extras.sweeps.launchers import end_with_sweep

    times = []
    signal.signal(signal.SIGTERM, lambda *_: times.append(time.monotonic()))
    end_with_sweep()
    (directory / "ready").touch()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (times and time.monotonic() - times[-1] > 0.5):
        time.sleep(0.01)
    (directory / "count.new").write_text(str(len(times)))
    (directory / "count.new").rename(directory / "count")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        count_signals(pathlib.Path(sys.argv[2]))
    else:
        command = [sys.executable, __file__, "run", sys.argv[1]]
        environment = {**os.environ, "JENGINE_SWEEP_PID": str(os.getpid())}
        for _ in range(8):
            threading.Thread(target=time.sleep, args=[60], daemon=True).start()
        starter = threading.Thread(target=subprocess.Popen, args=[command], kwargs=dict(env=environment))
        starter.start()
        time.sleep(60)
