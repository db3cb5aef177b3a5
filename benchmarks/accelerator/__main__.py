"""Check and measure jengine on an accelerator, the most important parts first.

    python -m benchmarks.accelerator [--minutes 8] [--json FILE] [--parts card engine ...] [--tiny]

Each part runs in a process of its own with a time limit, and appends its rows to FILE (JSON lines)
as soon as it knows them, so that a run that is cut short keeps what it has. Parts that only compare
values run at the same time, those that measure time alone. The table at the end has all rows. The
exit code is 1 if a check failed or a part did not end. On a CPU, or with --tiny, sizes are tiny:
this tries every line of the suite before an accelerator is at hand, and its timings say nothing.
"""

import argparse
import contextlib
import datetime
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import NamedTuple

from benchmarks.accelerator import rows
from benchmarks.report import table, versions
from benchmarks.results import replace_section

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
SUCCESS = "exit code 0"
MIN_SECONDS = 5  # with less a part is not started


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
    "files": Part("test files run on the accelerator", 0.3, False),
    "engine": Part("time per step and memory, compared with loops by hand", 0.3, True),
    "language": Part(
        "configs/lm.py:124m: tokens per second, utilization, plan and memory", 0.45, True
    ),
    "saves": Part("how long a save blocks the loop, and a restore", 0.12, True),
    "images": Part("images from files: idle time of the device", 0.1, True),
    "formats": Part("attention's kernels, optimizers and products in few bits", 0.45, True),
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
        record_end(name, ending, time.monotonic() - start)


def record_end(name: str, ending: str, seconds: float) -> None:
    """Record how a part ended, and after how many seconds."""
    row = dict(part=name, check="the part's end", value=f"{ending} after {seconds:.0f} s")
    rows.append({**row, "wanted": SUCCESS, "passed": ending == SUCCESS})


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def describe_device() -> tuple[str, str]:
    """Return the backend and the kind of the device, found in another process: this one holds no
    device.
    """
    code = (
        "import jax; d = jax.devices(); print(jax.default_backend(), len(d), d[0].device_kind, "
        "sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"JAX does not start here:\n{done.stderr}")
    backend, count, kind = done.stdout.strip().splitlines()[-1].split("|")
    return backend, f"{count} x {kind}"


def explain_missing() -> str:
    """Return what is missing for JAX to use an accelerator here."""
    plugins = [
        name for name in ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu") if find_spec(name)
    ]
    if not plugins:
        return (
            "JAX has no plugin for an accelerator: pip install 'jengine[cuda13]' (or cuda12, tpu)"
        )
    if not shutil.which("nvidia-smi"):
        return (
            f"{', '.join(plugins)} is installed, but there is no NVIDIA driver (no nvidia-smi) "
            "and no TPU"
        )
    return (
        f"{', '.join(plugins)} and nvidia-smi are there, but JAX uses the CPU; JAX_PLATFORMS is "
        + (os.environ.get("JAX_PLATFORMS") or "not set")
    )


def summarize(found: list[dict]) -> str:
    """Return the table of all rows, part by part, although some parts run at the same time."""
    order = ["device", *PARTS]
    marks = {None: "", True: "ok", False: "FAILED"}
    cells = []
    for row in sorted(found, key=lambda row: order.index(row["part"])):
        value = rows.format_value(row["value"])
        cells.append(
            [
                row["part"],
                cut(row["check"], 90),
                cut(value, 60),
                row["wanted"],
                marks[row["passed"]],
            ]
        )
    return table(["part", "check", "value", "wanted", ""], cells)


def cut(text: str, length: int) -> str:
    """Return a text in one line of at most `length` characters, even if it has no spaces."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def store(path: str) -> None:
    """Write the rows of a file as the section of their device in RESULTS.md."""
    found = rows.read(path)
    facts = {row["check"]: row["value"] for row in found if row["part"] == "device"}
    date = datetime.date.fromtimestamp(found[0]["time"])
    shown = [row for row in found if row["part"] != "device"]
    body = f"{date}; {facts['versions']}.\n\n```\n{summarize(shown)}\n```"
    document = RESULTS.read_text()
    RESULTS.write_text(replace_section(document, f"Accelerator: {facts['device']}", body))


def run_parts(names: list[str], minutes: float, tiny: bool) -> None:
    """Run the parts: those that are not timed together, then each of the others alone."""
    start = time.monotonic()
    total = 60 * minutes
    groups = [[name for name in names if not PARTS[name].is_timed]]
    groups += [[name] for name in names if PARTS[name].is_timed]
    for group in groups:
        left = total - (time.monotonic() - start)
        if left >= MIN_SECONDS:
            run_together(group, left, total, tiny)
            continue
        for name in group:
            record_end(name, "not started", 0.0)


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8, help="time for all parts (default: 8)")
    parser.add_argument("--json", metavar="FILE", help="file of JSON lines to write the rows to")
    text = ", ".join(PARTS)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=text
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as on a CPU")
    text = "end at once, with what is missing, where JAX finds no accelerator"
    parser.add_argument("--need-accelerator", action="store_true", help=text)
    text = "only write the rows of a file of an earlier run into benchmarks/RESULTS.md"
    parser.add_argument("--store", metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.store:
        store(args.store)
        return 0
    backend, device = describe_device()
    if args.need_accelerator and backend == "cpu":
        print(explain_missing(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.abspath(args.json or os.path.join(directory, "rows"))
        pathlib.Path(path).write_text("")
        os.environ[rows.FILE] = path
        for check, value in (
            ("backend", backend),
            ("device", device),
            ("versions", describe_versions()),
        ):
            rows.append(dict(part="device", check=check, value=value, wanted="", passed=None))
        run_parts(args.parts, args.minutes, args.tiny or backend == "cpu")
        found = rows.read(path)
    print(f"\n{summarize(found)}")
    failed = sum(row["passed"] is False for row in found)
    print(f"{device}: {sum(row['passed'] is True for row in found)} checks passed, {failed} failed")
    return int(failed > 0)


def describe_versions() -> str:
    """Return the versions of the packages that matter."""
    return versions("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


if __name__ == "__main__":
    sys.exit(main())
