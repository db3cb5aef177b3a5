"""Check and measure jengine on an accelerator, the most important parts first.

    python -m benchmarks.accelerator [--minutes 8] [--json FILE] [--parts card engine ...] [--tiny]

Each part runs in a process of its own with a time limit, and appends its rows to FILE (JSON lines) as soon as it knows
them, so that a run that is cut short keeps what it has. Parts that only compare values run at the same time, those that
measure time alone. The table at the end has all rows. The exit code is 1 if a check failed or a part did not end. On a
CPU, or with --tiny, sizes are tiny: this tries every line of the suite before an accelerator is at hand, and its
timings say nothing.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from benchmarks.accelerator import rows
from benchmarks.report import table

ROOT = pathlib.Path(__file__).parent.parent.parent


class Part(NamedTuple):
    """A module of the suite.

    Attributes:
      title: what it does.
      share: its time limit, as a share of all the time.
      is_timed: whether it measures time, and runs alone.
    """

    title: str
    share: float
    is_timed: bool


PARTS = {
    "card": Part("the features of the card, compared with loops by hand", 0.35, False),
    "configs": Part("configs/digits_cnn.py and digits_vit.py, compared with the CPU", 0.35, False),
    "files": Part("test files run on the accelerator", 0.35, False),
    "engine": Part("time per step, idle time and memory, compared with loops by hand", 0.35, True),
    "language": Part(
        "configs/lm.py:124m: tokens per second, utilization, plan and memory", 0.45, True
    ),
    "saves": Part("how long a save blocks the loop, and a restore", 0.15, True),
    "images": Part("images from files: idle time of the device", 0.15, True),
}


def run_together(names: list[str], seconds: float, total: float, tiny: bool) -> None:
    """Run parts at the same time, each in a process group of its own, and record how each ended.

    Args:
      names: the parts.
      seconds: the time that is left for all of them.
      total: the time of the whole suite, of which a part may use its share.
      tiny: whether sizes are tiny.
    """
    start = time.monotonic()
    started = {}
    for name in names:
        limit = min(seconds, PARTS[name].share * total)
        environment = {
            **os.environ,
            "JENGINE_ACCELERATOR_PART": name,
            "JENGINE_ACCELERATOR_SECONDS": str(limit),
        }
        command = [
            sys.executable,
            "-m",
            f"benchmarks.accelerator.{name}",
            *(["--tiny"] if tiny else []),
        ]
        print(f"--- {name}: {PARTS[name].title}; at most {limit:.0f} s", flush=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        started[name] = process, limit
    for name, (process, limit) in started.items():
        try:
            code = process.wait(max(start + limit - time.monotonic(), 1))
            ending = f"exit code {code}"
        except subprocess.TimeoutExpired:
            ending = "cut at its time limit"
        kill_group(process)
        passed = ending == "exit code 0"
        row = dict(
            part=name, check="the part's end", value=ending, wanted="exit code 0", passed=passed
        )
        rows.append({**row, "seconds": round(time.monotonic() - start, 1)})


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def describe_device() -> tuple[str, str]:
    """Return the backend and the kind of the device, found in another process: this one holds no device."""
    code = "import jax; d = jax.devices(); print(jax.default_backend(), len(d), d[0].device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"JAX does not start here:\n{done.stderr}")
    backend, count, kind = done.stdout.strip().splitlines()[-1].split("|")
    return backend, f"{count} x {kind}"


def summarize(found: list[dict]) -> str:
    """Return the table of all rows."""
    marks = {None: "", True: "ok", False: "FAILED"}
    cells = [
        [r["part"], r["check"], rows.format_value(r["value"]), r["wanted"], marks[r["passed"]]]
        for r in found
    ]
    return table(["part", "check", "value", "wanted", ""], cells)


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8, help="time for all parts (default: 8)")
    parser.add_argument("--json", metavar="FILE", help="file of JSON lines to write the rows to")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as on a CPU")
    args = parser.parse_args(argv)
    start, total = time.monotonic(), 60 * args.minutes
    backend, device = describe_device()
    tiny = args.tiny or backend == "cpu"
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.abspath(args.json or os.path.join(directory, "rows"))
        pathlib.Path(path).write_text("")
        os.environ[rows.FILE] = path
        os.environ["JENGINE_ACCELERATOR_PART"] = "device"
        rows.record("backend", backend)
        rows.record("device", device)
        rows.record("versions", describe_versions())
        groups = [[name for name in args.parts if not PARTS[name].is_timed]]
        groups += [[name] for name in args.parts if PARTS[name].is_timed]
        for names in groups:
            left = total - (time.monotonic() - start)
            if left >= 5:
                run_together(names, left, total, tiny)
                continue
            for name in names:
                row = dict(
                    part=name,
                    check="the part's end",
                    value="not started",
                    wanted="exit code 0",
                    passed=False,
                )
                rows.append(row)
        found = rows.read(path)
    print()
    print(summarize(found))
    failed = [row for row in found if row["passed"] is False]
    print(
        f"{device}: {sum(row['passed'] is True for row in found)} checks passed, {len(failed)} failed"
    )
    return int(bool(failed))


def describe_versions() -> str:
    """Return the versions of the packages that matter."""
    from benchmarks.report import versions

    return versions("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


if __name__ == "__main__":
    sys.exit(main())
