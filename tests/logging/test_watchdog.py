import logging
import subprocess
import sys
import threading
import time

import pytest

from jengine.logging import console
from jengine.logging.watchdog import Wait


@pytest.fixture
def lines():
    class Lines(logging.Handler):
        def __init__(self):
            super().__init__()
            self.records, self.arrived = [], threading.Event()

        def emit(self, record):
            self.records.append((record.levelname, record.getMessage()))
            if record.levelname == "DEBUG":
                self.arrived.set()

    handler, logger = Lines(), console.current_logger()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_a_wait_that_takes_long_is_logged_once_with_the_stacks_of_all_threads(lines):
    start = time.monotonic()
    with Wait("the disk", 0.05):
        assert lines.arrived.wait(10)
        assert time.monotonic() - start >= 0.05
        threading.Event().wait(0.2)
    first, (level, stacks) = lines.records
    assert first == ("WARNING", "The run has waited 0 s for the disk.")
    assert level == "DEBUG"
    assert "test_a_wait_that_takes_long" in stacks


def test_a_wait_for_something_without_a_name_is_logged_and_later_ones_are_too(lines):
    class Dataset:
        def __str__(self):
            raise RuntimeError("no position yet")

    for what, words in ((Dataset(), "Dataset, whose place is unknown: RuntimeError('no position yet')"), ("the disk", "the disk")):
        lines.arrived.clear()
        with Wait(what, 0.05):
            assert lines.arrived.wait(10)
        assert words in lines.records[-2][1]


def test_a_short_wait_and_a_time_between_two_waits_are_not_logged(lines):
    wait = Wait("the disk", 0.2)
    for _ in range(3):
        with wait:
            pass
        assert not lines.arrived.wait(0.15)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [("ValueError('mine')", 1, "ValueError: mine"), ("SystemExit(143)", 143, ""), ("SystemExit('a message')", 1, ""),
     ("SystemExit()", 0, ""), ("KeyboardInterrupt()", 130, ""),
     ("__import__('urllib.error').error.HTTPError('u', 404, 'm', {}, None)", 1, "HTTP Error 404")],
)
def test_a_failed_process_ends_with_its_error_although_it_waits_forever(run_python, error, code, text):
    program = (
        "import threading; from jengine.logging.watchdog import Wait\n"
        f"with Wait('the disk', 0.05, {error}): threading.Event().wait()"
    )
    done = run_python(program)
    assert done.returncode == code
    assert text in done.stderr


# Threads that native code starts, as TensorStore does, which call Python; the stacks are read meanwhile.
NATIVE_THREADS = """
import ctypes, time
from jengine.logging.watchdog import all_stacks
libc = ctypes.CDLL(None)
calls = []
call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(calls.append)
thread = ctypes.c_ulong()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for _ in range(20):
        libc.pthread_create(ctypes.byref(thread), None, call, None)
        libc.pthread_detach(thread)
    assert "Thread MainThread (most recent call first):" in all_stacks()
assert len(calls) > 1000
"""


@pytest.mark.skipif(sys.platform != "linux", reason="starts threads by libc")
def test_stacks_are_read_while_native_code_starts_threads():
    subprocess.run([sys.executable, "-c", NATIVE_THREADS], check=True)
