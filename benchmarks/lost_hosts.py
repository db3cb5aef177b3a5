"""Measure what a lost host costs a run, with copies on neighbouring disks and with checkpoints.

    python -m benchmarks.lost_hosts [--processes 2,4] [--failures 5] [--seed 0]

Processes train on this machine, each with a directory that stands for the disk of its host. At a
random moment a random process is killed, the others with it, as by a launcher that sees it, and its
directory is removed. Then all are started again. An iteration sleeps for 100 ms, as if a device
computed; the state has about 12 MB. The bucket is an emulator on this machine, with 30 ms for each
request.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import flax.linen as nn
import jax
import numpy as np

from benchmarks.report import table
from jengine import Runner
from jengine.data import ArrayDataset
from jengine.extras.cloud import LocalCheckpointHook
from jengine.hooks import CheckpointHook, Hook
from jengine.model import LinenModel, MeanSquaredError
from jengine.parallel import launch
from tests.object_stores import serve_google_storage
from tests.parallel.test_processes import free_port

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 0.1  # of an iteration
DELAY = 0.03  # seconds of a request to the bucket
CHECKPOINTS = 50  # iterations between two
COPIES = 10
PATIENCE = 300.0  # seconds
ROWS = {
    f"checkpoints on a shared disk every {CHECKPOINTS}": dict(save=CHECKPOINTS),
    f"checkpoints in a bucket every {CHECKPOINTS}": dict(save=CHECKPOINTS, bucket=True),
    f"the same, and copies on the own disk every {COPIES}": dict(
        save=CHECKPOINTS, bucket=True, local=COPIES, neighbours=0
    ),
    "the same, and copies on a neighbour's disk too": dict(
        save=CHECKPOINTS, bucket=True, local=COPIES
    ),
}


class Net(nn.Module):
    """A network with about a million parameters."""

    @nn.compact
    def __call__(self, x, train=False):
        """Return one value for each example."""
        for _ in range(4):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(1)(x)


class Timed(Hook):
    """Hook that adds up how long the next class lets the loop wait after iterations."""

    waited = 0.0  # seconds

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Call the other hook, when the device has computed what came before."""
        jax.block_until_ready(runner.state)
        start = time.perf_counter()
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        type(self).waited += time.perf_counter() - start


class TimedCheckpoint(Timed, CheckpointHook):
    """CheckpointHook whose waits are added up."""


class TimedCopies(Timed, LocalCheckpointHook):
    """LocalCheckpointHook whose waits are added up."""


class Progress(Hook):
    """Write when training begins and each iteration ends: time, iterations, and seconds waited."""

    priority = "LOWEST"

    def __init__(self, path, timed):
        self.path = path
        self.timed = timed

    def before_train(self, runner):
        """Note from where training continues."""
        self.file = open(self.path, "a")  # noqa: SIM115 - until the process is killed
        self._write("begin", runner.iter)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        """Wait as for a device."""
        time.sleep(SECONDS)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Note the iteration."""
        self._write("iter", runner.iter + 1)

    def _write(self, what, iteration):
        self.file.write(json.dumps([what, time.time(), iteration, self.timed.waited]) + "\n")
        self.file.flush()


def train(work_dir, progress, index, count, address, save, local, neighbours):
    """Train as one process until it is killed."""
    launch("none", address, count, index, timeout=120, heartbeat_timeout=60)
    x = np.random.default_rng(0).standard_normal((256, 64), np.float32)
    data = ArrayDataset(dict(x=x, target=x.sum(axis=1, keepdims=True)))
    hooks = [TimedCopies("$JENGINE_BENCH_DISK", local, neighbours)] if local else []
    if index == 0:
        hooks.append(Progress(progress, TimedCopies if local else TimedCheckpoint))
    Runner(
        LinenModel(Net(), MeanSquaredError(), inputs="x"),
        work_dir,
        train_dataloader=dict(batch_size=16 // count, dataset=data),
        train_cfg=dict(by_epoch=False, max_iters=1_000_000),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=1e-3)),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=10),
            checkpoint=TimedCheckpoint(interval=save, by_epoch=False, max_keep_ckpts=2),
        ),
        custom_hooks=hooks,
        parallel=dict(type="Pjit", mesh=dict(data=1, fsdp=count), fsdp_min_size=1),
        resume=True,
    ).train()


def start(directory, work_dir, count, options):
    """Start the processes of a run."""
    address = f"127.0.0.1:{free_port()}"
    flags = "--xla_force_host_platform_device_count=1"
    jobs = []
    for index in range(count):
        env = {
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
            "JENGINE_BENCH_DISK": str(directory / f"disk_{index}"),
            "JENGINE_LEASE_SECONDS": "2",
            "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        given = [work_dir, str(directory / "progress"), index, count, address, options]
        command = [sys.executable, "-m", "benchmarks.lost_hosts", "--worker", json.dumps(given)]
        with open(directory / f"{index}.out", "a") as out:
            jobs.append(
                subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
            )
    return jobs


def read_progress(directory):
    """Return the lines that process 0 has written, by session."""
    sessions = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in (directory / "progress").read_text().splitlines():
            what, *values = json.loads(line)
            if what == "begin":
                sessions.append([])
            sessions[-1].append(values)
    return sessions


def wait_until(directory, jobs, session, iteration):
    """Wait until a session has completed an iteration; return its lines."""
    begin = time.monotonic()
    while True:
        sessions = read_progress(directory)
        if len(sessions) > session and sessions[session][-1][1] >= iteration:
            return sessions[session]
        if time.monotonic() - begin > PATIENCE or any(job.poll() is not None for job in jobs):
            raise RuntimeError((directory / "0.out").read_text()[-3000:])
        time.sleep(0.02)


def measure(directory, work_dir, count, failures, rng, save, local=0, neighbours=1):
    """Return the row of the table for a run with these settings."""
    directory.mkdir(parents=True)
    done = 0
    killed = 0.0
    lost, restarts, again, waits = [], [], [], []
    for session in range(failures + 1):
        jobs = start(
            directory, work_dir, count, dict(save=save, local=local, neighbours=neighbours)
        )
        try:
            lines = wait_until(directory, jobs, session, done)
            if session:
                (began, first, _), (caught_up, _, _) = (
                    lines[0],
                    next(line for line in lines if line[1] >= done),
                )
                lost.append(done - first)
                restarts.append(began - killed)
                again.append(caught_up - began)
            if session < failures:
                goal = done + 2 * save + rng.randrange(save)
                lines = wait_until(directory, jobs, session, goal)
                time.sleep(rng.uniform(0, SECONDS))
                victim = rng.randrange(count)
        finally:
            killed = time.time()
            for job in jobs:
                job.kill()
                job.wait()
        lines = read_progress(directory)[session]
        done = lines[-1][1]
        interval = local or save
        # without the first one, for which programs are compiled and modules imported
        later = [line for line in lines if line[1] >= lines[0][1] + 1.5 * interval]
        saves = later[-1][1] // interval - later[0][1] // interval if later else 0
        if saves:
            waits.append((later[-1][2] - later[0][2]) / saves)
        shutil.rmtree(directory / f"disk_{victim}", ignore_errors=True)
    resumed = re.findall(r"Resumed from \S*disk_0/", (directory / "0.out").read_text())
    return [
        f"{statistics.mean(lost):.0f} ({min(lost)} to {max(lost)})",
        f"{statistics.mean(again):.1f}",
        f"{statistics.mean(restarts):.1f}",
        f"{1000 * statistics.mean(waits):.0f}" if waits else "",
        str(len(resumed)),
    ]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--failures", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        *given, options = json.loads(args.worker)
        train(*given, **options)
        return
    rows = [["", "processes", "iterations lost", "s again", "s to start", "ms a save", "from disk"]]
    with tempfile.TemporaryDirectory() as root, serve_google_storage() as store:
        store.delay = DELAY
        for count in map(int, args.processes.split(",")):
            for number, (name, settings) in enumerate(ROWS.items()):
                directory = pathlib.Path(root) / f"{count}_{number}"
                options = dict(settings)
                in_bucket = options.pop("bucket", False)
                work_dir = f"{store.make_bucket()}/run" if in_bucket else str(directory / "run")
                found = measure(
                    directory, work_dir, count, args.failures, random.Random(args.seed), **options
                )
                rows.append([name, str(count), *found])
                print(*rows[-1], sep=" | ", flush=True)
    print(table(rows[0], rows[1:]))


if __name__ == "__main__":
    main()
