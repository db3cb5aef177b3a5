"""Launchers: where the processes of a sweep run."""

import dataclasses
import logging
import math
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jengine.config.errors import ConfigError, require_extra

_POLL = 0.5  # seconds between two looks of a job at its process
_PARENT = "JENGINE_SWEEP_PID"
_LOGGER = logging.getLogger("jengine")


@dataclasses.dataclass
class Command:
    """Command to run in a job, with its output in a file.

    A scheduler that preempts the job, or ends its time, submits it again: the command continues the
    run.
    """

    arguments: Sequence[str]  # with the program
    output: str  # path
    stop_file: str  # a job on another machine ends the run when this file exists
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # further variables

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process, in a group of its own: Ctrl-C in the terminal reaches only the
        sweep.
        """
        os.makedirs(os.path.dirname(self.output), exist_ok=True)
        with open(self.output, "ab") as file:
            environment = {**os.environ, **self.environment}
            return subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def __call__(self) -> int:
        """Run to the end and return the exit code.

        An interrupt or the stop file lets the run save and end.
        """
        if os.path.exists(self.stop_file):
            return 128 + signal.SIGTERM
        process = self.start()
        try:
            # A file reaches a job wherever it runs; the signals of schedulers may not reach its
            # processes
            while process.poll() is None and not os.path.exists(self.stop_file):
                time.sleep(_POLL)
        finally:
            process.terminate()  # nothing if it has ended
            process.wait()
        return int(process.returncode)

    def checkpoint(self) -> Any:
        """Return what submitit submits again."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class Job(Protocol):
    """Started command."""

    def poll(self) -> int | None:
        """Return the exit code; None while it waits or runs."""

    def stop(self) -> None:
        """Ask the run to save and end."""

    def kill(self) -> None:
        """End the run at once."""


class Launcher(Protocol):
    """Place for jobs.

    Attributes:
      jobs: number of jobs to hand over at once; infinite if the engine has a queue of its own.
    """

    jobs: float

    def start(self, commands: Sequence[Command]) -> Sequence[Job]:
        """Start commands."""


class _LocalJob:
    def __init__(self, process: "subprocess.Popen[bytes]", slot: int) -> None:
        self._process = process
        self.slot = slot

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class LocalLauncher:
    """Processes on this machine.

    On Linux they save and end if the sweep is killed: see `end_with_sweep`.

    Several jobs share the GPUs: each has its own, or a part of the memory of one.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs: float = jobs
        self._environments = share_gpus(jobs, _list_gpus())
        self._running: list[_LocalJob] = []

    def start(self, commands: Sequence[Command]) -> list[_LocalJob]:
        """Start processes, each in a free slot."""
        started = []
        for command in commands:
            self._running = [job for job in self._running if job.poll() is None]
            slot = min(set(range(len(self._environments))) - {job.slot for job in self._running})
            environment = {
                **command.environment,
                **self._environments[slot],
                _PARENT: str(os.getpid()),
            }
            command = dataclasses.replace(command, environment=environment)
            job = _LocalJob(command.start(), slot)
            self._running.append(job)
            started.append(job)
        return started


def end_with_sweep() -> None:
    """In a run of a local sweep, send SIGTERM to this process when the sweep ends, even by SIGKILL.

    Else the run would train on, and hold its work dir and its GPU when the sweep is started again.
    """
    parent = os.environ.pop(_PARENT, None)  # not for processes that this one starts
    if parent is None or sys.platform != "linux":
        return
    # PR_SET_PDEATHSIG would send a signal for each thread of the sweep that ends, and a second one
    # ends the run at once.
    try:
        pidfd = os.pidfd_open(int(parent))
    except OSError as error:  # it ended before, or Linux is older than 5.3
        pidfd = None
        reason = error
    if os.getppid() != int(parent):  # it ended before
        os.kill(os.getpid(), signal.SIGTERM)
    elif pidfd is None:
        _LOGGER.warning(f"This run goes on if its sweep is killed: {reason}.")
    else:
        threading.Thread(target=_end_with, args=[pidfd], name="jengine-sweep", daemon=True).start()


def _end_with(pidfd: int) -> None:
    """Wait until the process of a file descriptor has ended, and end this one."""
    select.select([pidfd], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def share_gpus(jobs: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return environment variables for each of several jobs, so that they do not take the same
    memory.

    >>> share_gpus(2, ["0", "1", "2"])
    [{'CUDA_VISIBLE_DEVICES': '0,2'}, {'CUDA_VISIBLE_DEVICES': '1'}]
    >>> share_gpus(2, ["0"])[1]
    {'CUDA_VISIBLE_DEVICES': '0', 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.45'}
    """
    if jobs == 1 or not gpus:
        return [{} for _ in range(jobs)]
    sharing = math.ceil(jobs / len(gpus))
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / sharing:.2f}"} if sharing > 1 else {}
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot::jobs] or [gpus[slot % len(gpus)]]), **memory}
        for slot in range(jobs)
    ]


def _list_gpus() -> list[str]:
    """Return the NVIDIA GPUs that runs may use, without starting JAX."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None or os.environ.get("JAX_PLATFORMS", "cuda") in (
        "cpu",
        "tpu",
    ):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


class _SubmititJob:
    def __init__(self, job: Any, command: Command) -> None:
        self._job = job
        self._command = command

    def poll(self) -> int | None:
        if not self._job.done():
            return None
        error = self._job.exception()
        return int(self._job.result()) if error is None else 1

    def stop(self) -> None:
        pathlib.Path(self._command.stop_file).touch()
        if self._job.state in ("PENDING", "UNKNOWN"):
            self.kill()

    def kill(self) -> None:
        self._job.cancel(check=False)


class SubmititLauncher:
    """Jobs of SLURM, as one array, or of another cluster of submitit.

    Args:
      jobs: number of jobs in the array that run at the same time.
      directory: for submitit's files; on a file system that the nodes share.
      options: `cluster` ('slurm', 'local' or 'debug'; by default SLURM if there is one), and
        parameters of submitit's executor, such as `slurm_partition`, `timeout_min` and
        `gpus_per_node`.
    """

    def __init__(self, jobs: int, directory: pathlib.Path, options: Mapping[str, Any]) -> None:
        with require_extra("slurm", "`--launcher submitit` requires submitit"):
            import submitit
        parameters = dict(options)
        cluster = parameters.pop("cluster", None)
        self._executor = submitit.AutoExecutor(folder=directory, cluster=cluster)
        if self._executor.cluster == "slurm":
            parameters = {"slurm_array_parallelism": jobs, **parameters}
        try:
            self._executor.update_parameters(**{"name": "jengine-sweep", **parameters})
        except (NameError, TypeError, ValueError) as error:
            raise ConfigError(
                f"`--launcher-option` must be a parameter of submitit: {error}"
            ) from error
        # Its other executors have no queue
        self.jobs: float = math.inf if self._executor.cluster == "slurm" else jobs

    def start(self, commands: Sequence[Command]) -> list[_SubmititJob]:
        """Submit an array."""
        with self._executor.batch():
            jobs = [self._executor.submit(command) for command in commands]
        return [_SubmititJob(job, command) for job, command in zip(jobs, commands, strict=True)]


class _RayJob:
    def __init__(self, ray: types.ModuleType, reference: Any, command: Command) -> None:
        self._ray = ray
        self._reference = reference
        self._command = command

    def poll(self) -> int | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._reference))
        except self._ray.exceptions.RayError:
            return 1

    def stop(self) -> None:
        pathlib.Path(self._command.stop_file).touch()
        self._ray.cancel(self._reference)  # if it waits

    def kill(self) -> None:
        self._ray.cancel(self._reference, force=True)


class RayLauncher:
    """Tasks of Ray, in the cluster of `RAY_ADDRESS` or of this machine.

    Args:
      options: of the tasks, such as `num_cpus` and `num_gpus`; `address` of the cluster.
    """

    jobs: float = math.inf  # Ray has a queue

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "`--launcher ray` requires Ray: pip install 'ray[default]'"
            ) from error
        self._ray = ray
        options = dict(options)
        address = options.pop("address", None)
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
        self._run = ray.remote(_run_command).options(max_retries=0, **options)

    def start(self, commands: Sequence[Command]) -> list[_RayJob]:
        """Submit tasks."""
        return [_RayJob(self._ray, self._run.remote(command), command) for command in commands]


def _run_command(command: Command) -> int:
    return command()


LAUNCHERS = ("local", "submitit", "ray")


def build_launcher(
    name: str, jobs: int, directory: pathlib.Path, options: Mapping[str, Any]
) -> Launcher:
    """Return a launcher by name.

    Raises:
      ConfigError: an unknown name, options that it does not have, or a package that is missing.
    """
    if jobs < 1:
        raise ConfigError(f"`jobs` must be at least 1, got {jobs}")
    if name == "submitit":
        return SubmititLauncher(jobs, directory / "submitit", options)
    if name == "ray":
        return RayLauncher(options)
    if name != "local":
        raise ConfigError(f"`launcher` must be one of {', '.join(LAUNCHERS)}, got {name!r}")
    if options:
        raise ConfigError(
            f"the local launcher has no options, got {', '.join(options)}; did you mean another "
            "launcher?"
        )
    return LocalLauncher(jobs)
