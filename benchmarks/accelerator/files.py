"""Run test files on the accelerator with pytest, and record the failures as they come.

python -m benchmarks.accelerator.files [--tiny]
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time

from benchmarks.accelerator import DETERMINISTIC
from benchmarks.accelerator.rows import record
from benchmarks.accelerator.size import is_tiny

FOLDERS = ["tests/train", "tests/optim", "tests/hooks", "tests/parallel", "tests/extras/optimizers"]
FOLDERS += ["tests/extras/networks/test_quantized.py"]
TINY = ["tests/optim/test_clipping.py"]
REPORTS = "JENGINE_ACCELERATOR_REPORTS"
SHOWN = 80  # failures that get a row of their own
DEFAULT_SECONDS = 150.0
# How JAX and jengine say that there are fewer devices than a test asks for.
SEVERAL_DEVICES = re.compile(
    r"devices must be at most|Number of devices \d+ must be|needs \d+ devices|product of the "
    r"sizes must"
)
NO_PACKAGE = re.compile(r"No module named")


def pytest_runtest_logreport(report):
    """Append the outcome of a test to the file of outcomes; pytest calls this, as this module is
    its plugin.
    """
    is_worker = (
        "PYTEST_XDIST_WORKER" in os.environ
    )  # its outcomes are reported in the first process again
    if is_worker or (report.when != "call" and report.outcome == "passed"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    message = "" if report.outcome == "passed" else str(getattr(crash, "message", report.longrepr))
    with open(os.environ[REPORTS], "a") as file:
        file.write(
            json.dumps(dict(test=report.nodeid, outcome=report.outcome, message=message[:300]))
            + "\n"
        )


def main():
    """Run pytest until all tests have run or the time is over, and record how many passed."""
    tiny = is_tiny()
    limit = float(os.environ.get("JENGINE_ACCELERATOR_SECONDS", DEFAULT_SECONDS)) - 10
    processes = 2 if tiny else max(2, min(8, (os.cpu_count() or 2) // 2))
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "outcomes")
        open(path, "w").close()
        environment = {**os.environ, REPORTS: path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])
        )
        # Tests compare runs bit by bit.
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}".strip()
        # Unless it is set, the tests choose the CPU.
        environment["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or (
            "cpu" if tiny else "cuda,cpu"
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            str(processes),
            "-q",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-p", "benchmarks.accelerator.files"]
        command += ["-m", "not full_optimization and not many_processes and not ports"]
        command += TINY if tiny else FOLDERS
        start = time.monotonic()
        with open(os.path.join(directory, "log"), "w+") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
            try:
                code = process.wait(max(limit, 1))
                ending = "all tests" if code in (0, 1) else f"pytest's exit code {code}"
            except subprocess.TimeoutExpired:
                process.kill()
                ending = f"the tests of {limit:.0f} s"
            log.seek(0)
            print(log.read()[-3000:])
        with open(path) as file:
            outcomes = [json.loads(line) for line in file if line.endswith("\n")]
    failed = [each for each in outcomes if each["outcome"] == "failed"]
    several = [each for each in failed if SEVERAL_DEVICES.search(each["message"])]
    packages = [each for each in failed if NO_PACKAGE.search(each["message"])]
    others = [each for each in failed if each not in several and each not in packages]
    passed = sum(each["outcome"] == "passed" for each in outcomes)
    record(f"{ending}, in {time.monotonic() - start:.0f} s: passed", passed, "> 0", passed > 0)
    record("tests of several devices, of which there is one", len(several))
    record("tests of packages that are not there", len(packages))
    record("failed otherwise", len(others), "0", not others)
    for each in others[:SHOWN]:
        record(each["test"], each["message"].replace("\n", " "), "", False)


if __name__ == "__main__":
    main()
