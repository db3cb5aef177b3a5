"""Kill the job of `job.py` at random moments and compare its results with those of an uninterrupted run."""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import jax
import numpy as np

from jengine import checkpoint
from tests.crash.job import HEARTBEAT_TIMEOUT
from tests.forks import start_script
from tests.parallel.test_processes import free_port

JOB = pathlib.Path(__file__).parent / "job.py"
TIMEOUT = 120.0  # seconds


def start(work_dir, iterations, count=1, kill_at=None, victim=0, **options):
    """Start the job as `count` processes, of which `victim` kills itself at a file operation if `kill_at` is given."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(work_dir.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"}
    work_dir.parent.mkdir(parents=True, exist_ok=True)
    address, jobs = f"127.0.0.1:{free_port()}", []
    for index in range(count):
        own = dict(options, process=[address, count, index]) if count > 1 else dict(options)
        if kill_at is not None and index == victim:
            own["kill_at"] = kill_at
        own_variables = {"JENGINE_TEST_DISK": str(disk_path(work_dir, index))}
        command, env = [JOB, work_dir, iterations, json.dumps(own)], {**cache, **os.environ, **flags, **own_variables}
        jobs.append(start_script(*command, output=output_path(work_dir, index), env=env))
    return jobs


def disk_path(work_dir, index=0):
    """Return the directory that stands for the local disk of the host of a process."""
    return work_dir.with_suffix(f".disk_{index}")


def output_path(work_dir, index=0):
    return work_dir.with_suffix(f".{index}.out")


def read_outputs(work_dir):
    return "\n".join(path.read_text()[-3000:] for path in work_dir.parent.glob(f"{work_dir.name}.*.out"))


def wait(work_dir, jobs):
    """Return the exit codes of all processes."""
    codes = []
    with contextlib.suppress(subprocess.TimeoutExpired):
        codes = [job.wait(TIMEOUT) for job in jobs]
    for job in jobs:
        job.kill()
    assert codes, read_outputs(work_dir)
    return codes


def read_log(work_dir):
    """Return the logged values without the times.

    A job that was killed before its first checkpoint starts from scratch with a new log: only the newest log counts.
    """
    newest = max(work_dir.glob("*/vis_data/scalars.json"), default=None)
    return without_times(json.loads(line) for line in newest.open()) if newest else []


def read_text_log(text):
    """Return the lines with losses of a log, without times; those that were trained again only once.

    Each line with an iteration must follow the one before, or the checkpoint from which the run was resumed.
    """
    lines = {}
    for line in text.splitlines():
        if match := re.search(r"Resumed from .*, iteration (\d+)\.$", line):
            lines = {iteration: text for iteration, text in lines.items() if iteration <= int(match[1])}
            assert max(lines) == int(match[1]), f"the log has no line of iteration {match[1]} before {line}"
        elif match := re.search(r"Iter\(train\) +\[ *(\d+)/", line):
            assert int(match[1]) == max(lines, default=0) + 1, f"the line before is of {max(lines, default=0)}: {line}"
            line = re.sub(r"^.*? - |eta: \S+|(data_)?time: \S+|memory: \S+|slowest: [^)]*\)", "", line)
            lines[int(match[1])] = " ".join(line.split())  # only a slow iteration has more than the others
    return lines


def without_times(lines):
    lines = [line for line in lines if "seconds/setup" not in line]  # the report of times at the end of the run
    return [{name: value for name, value in line.items() if "time" not in name} for line in lines]


def last_iteration(work_dir):
    return max((line.get("iter", 0) for line in read_log(work_dir)), default=0)


def finish(work_dir, iterations, **options):
    """Run the job to its end; return the number of its file operations."""
    codes = wait(work_dir, start(work_dir, iterations, **options))
    assert not any(codes), read_outputs(work_dir)
    return count_operations(work_dir)


def interrupt(work_dir, iterations, signum, rng, victim=None, **options):
    """Start the job and send a process of it a signal after a random number of iterations and a random pause.

    Args:
      work_dir, iterations, signum, **options: as for `start` and `run`.
      rng: random numbers.
      victim: the process; None for a random one.

    Returns:
      Whether the signal interrupted it before its end.
    """
    before = last_iteration(work_dir)
    goal, pause = rng.randint(1, max(1, (iterations - before) // 2)), rng.uniform(0.0, 0.08)
    victim = rng.randrange(options.get("count", 1)) if victim is None else victim
    jobs, start_time = start(work_dir, iterations, **options), time.monotonic()
    first_size = None
    while jobs[victim].poll() is None:
        size = sum(path.stat().st_size for path in work_dir.glob("*/vis_data/scalars.json"))
        first_size = size if first_size is None else first_size
        logged = last_iteration(work_dir) if size != first_size else before
        if logged >= before + goal:
            time.sleep(pause)
            jobs[victim].send_signal(signum)
            break
        assert time.monotonic() - start_time < TIMEOUT, read_outputs(work_dir)
        time.sleep(0.002)
    if signum == signal.SIGKILL:
        return wait_for_victim(work_dir, jobs, victim)
    codes = wait(work_dir, jobs)
    assert set(codes) <= {0, 143}, f"exit codes {codes}: {read_outputs(work_dir)}"
    return any(codes)


def wait_for_victim(work_dir, jobs, victim):
    """Wait for a process that is killed, and for the others, which JAX then ends within the heartbeat timeout.

    Returns:
      Whether it was killed before its end.
    """
    jobs[victim].wait(TIMEOUT)
    killed = time.monotonic()
    codes = wait(work_dir, jobs)
    code = codes.pop(victim)
    assert code in (0, -signal.SIGKILL), f"exit code {code}: {read_outputs(work_dir)}"
    assert set(codes) <= {0, -signal.SIGABRT}, f"exit codes {codes}: {read_outputs(work_dir)}"
    assert time.monotonic() - killed < HEARTBEAT_TIMEOUT + 10, read_outputs(work_dir)
    return code != 0


def assert_equal_results(work_dir, reference_dir):
    """Compare the last checkpoints and the logs of two runs, bit for bit."""
    actual, expected = checkpoint.load(work_dir), checkpoint.load(reference_dir)
    assert actual.meta["meta"]["iter"] == expected.meta["meta"]["iter"]
    jax.tree.map(np.testing.assert_array_equal, actual.state, expected.state)
    assert actual.meta["hooks"]["CheckpointHook"] == expected.meta["hooks"]["CheckpointHook"]
    assert read_log(work_dir) == read_log(reference_dir)


def run(directory, kills, seed, signum=signal.SIGKILL, iterations=40, **options):
    """Interrupt a run `kills` times, let it finish, and compare it with an uninterrupted one.

    Args:
      directory: of the work dirs.
      kills: number of signals.
      seed: of the moments of the signals.
      signum: the signal.
      iterations: length of the run.
      **options: of the job. The uninterrupted run only has their number of processes, `count`, since the others do not
        change its results.

    Returns:
      How many of the signals interrupted it before its end.
    """
    rng, directory, count = random.Random(seed), pathlib.Path(directory), options.get("count", 1)
    work_dir = directory / f"interrupted_{signum}_{seed}_of_{count}"
    reference_dir = make_reference(directory, iterations, count)
    interruptions = sum(interrupt(work_dir, iterations, signum, rng, **options) for _ in range(kills))
    finish(work_dir, iterations, **options)
    assert_equal_results(work_dir, reference_dir)
    return interruptions


def run_killed_at(directory, operation, iterations=12, count=1, victim=0):
    """Kill a run at one of the file operations of a process, let it finish, and compare it with an uninterrupted one.

    Returns:
      Whether the run was killed: the process has at least `operation` file operations.
    """
    directory = pathlib.Path(directory)
    work_dir = directory / f"killed_at_{operation}_of_{victim}_of_{count}"
    reference_dir = make_reference(directory, iterations, count)
    jobs = start(work_dir, iterations, count=count, kill_at=operation, victim=victim)
    is_killed = wait_for_victim(work_dir, jobs, victim)
    finish(work_dir, iterations, count=count)
    assert_equal_results(work_dir, reference_dir)
    names = (".incoming", ".outgoing", ".new")
    leftovers = [str(path) for path in work_dir.rglob("*") if path.parent.suffix in names or path.suffix == ".new"]
    assert not leftovers, leftovers
    return is_killed


def run_with_processes(directory, seed, count, in_save):
    """Kill a random one of several processes, let all resume and finish, and compare them with an uninterrupted run.

    Args:
      directory: of the work dirs.
      seed: of the process and the moment.
      count: number of processes.
      in_save: whether the process is killed at one of its operations on the files of checkpoints.

    Returns:
      Whether it was killed before its end.
    """
    directory, rng = pathlib.Path(directory), random.Random(seed)
    if not in_save:
        return run(directory, 1, seed, iterations=12, count=count)
    victim = rng.randrange(count)
    operations = count_operations(make_reference(directory, 12, count), victim)
    return run_killed_at(directory, rng.randint(1, operations), count=count, victim=victim)


def run_with_lost_disks(directory, seed, count, kills=2, iterations=40):
    """Kill a random one of several processes and replace its disk by an empty one, `kills` times; then let the run finish, and
    compare it with an uninterrupted one. It saves no checkpoint before its last.

    Args:
      directory: of the work dirs and the disks.
      seed: of the processes and the moments.
      count: number of processes.
      kills: number of lost disks.
      iterations: length of the run.

    Returns:
      How many kills interrupted it, and how often a process got its copy from another disk.
    """
    directory, rng = pathlib.Path(directory), random.Random(seed)
    work_dir = directory / f"lost_{seed}_of_{count}"
    reference_dir = make_reference(directory, iterations, count)
    options = dict(count=count, save=0, local=3)
    interrupted = 0
    for _ in range(kills):
        victim = rng.randrange(count)
        interrupted += interrupt(work_dir, iterations, signal.SIGKILL, rng, victim, **options)
        shutil.rmtree(disk_path(work_dir, victim), ignore_errors=True)
        assert checkpoint.list_checkpoints(work_dir) == []
    finish(work_dir, iterations, **options)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(work_dir).state, checkpoint.load(reference_dir).state)
    assert read_log(work_dir) == read_log(reference_dir)
    return interrupted, output_path(work_dir).read_text().count(" gets its copy from the disk of process ")


def run_killed_in_copies(directory, seed, count, iterations=12):
    """Kill a random one of several processes at one of its operations on the files of copies on local disks, its own and those
    that it keeps; let the run finish, and compare it with an uninterrupted one. With an odd seed its disk is lost as well.
    """
    directory, rng = pathlib.Path(directory), random.Random(seed)
    reference_dir, work_dir = directory / f"with_copies_of_{count}", directory / f"killed_in_copies_{seed}_of_{count}"
    victim = rng.randrange(count)
    options = dict(count=count, save=0, local=2)
    if not reference_dir.exists():
        finish(reference_dir, iterations, **options)
    jobs = start(work_dir, iterations, kill_at=rng.randint(1, count_operations(reference_dir, victim)), victim=victim, **options)
    wait_for_victim(work_dir, jobs, victim)
    if seed % 2:
        shutil.rmtree(disk_path(work_dir, victim), ignore_errors=True)
    finish(work_dir, iterations, **options)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(work_dir).state, checkpoint.load(reference_dir).state)
    assert read_log(work_dir) == read_log(reference_dir)
    leftovers = [path for index in range(count) for path in disk_path(work_dir, index).rglob("*") if ".incoming" in path.name]
    assert not leftovers, leftovers


def make_reference(directory, iterations, count):
    """Return the work dir of an uninterrupted run."""
    reference_dir = directory / f"reference_{iterations}_of_{count}"
    if not reference_dir.exists():
        finish(reference_dir, iterations, count=count)
    return reference_dir


def count_operations(work_dir, index=0):
    return int(output_path(work_dir, index).read_text().rpartition("file operations:")[2])
