"""Launchers: connection to the other processes in a run, before any device is used."""

import os
import re
from collections.abc import Mapping
from typing import Any

import jax

from jengine.config.errors import ConfigError, closest, require_extra
from jengine.logging.watchdog import Wait
from jengine.parallel.processes import get_processes

_PATIENCE = 10.0  # seconds
LAUNCHERS = ("none", "auto", "slurm", "mpi", "kubernetes", "tpu")

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
# Open MPI; MPICH, Intel MPI and others with PMI: number of processes, index of this one, index on
# the host.
_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
_METHODS = {"none": "deactivate", "slurm": "slurm", "kubernetes": "k8s"}  # names of JAX


def launch(
    launcher: str | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
    heartbeat_timeout: int = 30,
) -> None:
    """Connect this process to the others with `jax.distributed.initialize`, unless it is the only
    one.

    Call it first: it is too late once JAX has used a device.

    Args:
      launcher: what started the processes, one of `LAUNCHERS`. 'none' is a single process, unless
        the next three arguments are given; 'auto' and 'tpu' leave the detection to JAX. None for
        `detect_launcher`, or for 'none' if one of the next three arguments is given.
      coordinator: `host:port` for process 0, if the launcher does not provide it.
      num_processes: number of processes, if the launcher does not provide it.
      process_id: this process's index, from 0, if the launcher does not provide it.
      timeout: seconds to wait for the others to connect.
      heartbeat_timeout: seconds without a heartbeat after which JAX counts a process as gone, and
        ends the others.

    Raises:
      ConfigError: an unknown launcher, or settings or an environment in which JAX misses something.
      RuntimeError: a device has been used, or the processes are already connected.
    """
    if launcher is None:
        is_given = (coordinator, num_processes, process_id) != (None, None, None)
        launcher = "none" if is_given else detect_launcher(os.environ)
    settings = find_settings(launcher, os.environ, coordinator, num_processes, process_id)
    if settings is None:
        return
    # JAX's error after the timeout has no names
    at = " at {coordinator_address}".format(**settings) if "coordinator_address" in settings else ""
    try:
        with Wait(f"the other processes{at}, at most {timeout:g} s", _PATIENCE):
            jax.distributed.initialize(
                **settings,
                initialization_timeout=int(timeout),
                heartbeat_timeout_seconds=heartbeat_timeout,
                shutdown_timeout_seconds=int(timeout),
            )
    except (KeyError, ValueError) as error:  # of JAX: a variable, or a setting
        found = f"{error} in the environment" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"--launcher {launcher} must find the other processes, got none: JAX has missed "
            f"{found}; give --coordinator HOST:PORT, --num-processes N and --process-id I"
        ) from error
    get_processes()  # watch for failures of the others from now on


def detect_launcher(environ: Mapping[str, str]) -> str:
    """Return the launcher that has started this process with others; 'none' if it is alone.

    Only what the environment says is used. A TPU VM without Kubernetes says nothing: pass 'tpu'
    there.

    >>> detect_launcher({"PMI_SIZE": "8", "PMI_RANK": "2"})
    'mpi'
    """
    if all(name in environ for name in _SLURM) and int(environ["SLURM_NTASKS"]) > 1:
        return "slurm"
    if any(
        size in environ and rank in environ and int(environ[size]) > 1 for size, rank, *_ in _MPI
    ):
        return "mpi"
    if (
        "," in environ.get("TPU_WORKER_HOSTNAMES", "")
        or int(environ.get("MEGASCALE_NUM_SLICES", "1")) > 1
    ):
        return "tpu"
    # a pod of an indexed job
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return "kubernetes"
    return "none"


def find_settings(
    launcher: str,
    environ: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> dict[str, Any] | None:
    """Return the arguments with which `jax.distributed.initialize` finds the other processes; None
    without others.

    JAX detects those that are left out. Arguments override the launcher's values; they and the
    errors are as for `launch`; `environ` has the environment variables.

    >>> find_settings("none", {}, "host:1234", num_processes=2, process_id=0)["process_id"]
    0
    """
    if launcher not in LAUNCHERS:
        raise ConfigError(
            f"--launcher must be one of {LAUNCHERS}, got {launcher!r}{closest(launcher, LAUNCHERS)}"
        )
    if coordinator is not None and not re.fullmatch(r".+:[0-9]+", coordinator):
        raise ConfigError(f"--coordinator must be HOST:PORT of process 0, got {coordinator!r}")
    settings = {
        "coordinator_address": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    given: dict[str, Any] = {name: x for name, x in settings.items() if x is not None}
    method = _METHODS.get(launcher)
    if launcher == "none" and not given:
        return None
    if launcher == "kubernetes":
        with require_extra("kubernetes", "the pods of an indexed job require kubernetes"):
            import kubernetes  # noqa: F401
    if launcher == "mpi":
        # JAX reads the host of process 0 from Open MPI's environment
        method = "ompi" if coordinator is None else "deactivate"
        names = ("num_processes", "process_id", "local_device_ids")
        variables = next((found for found in _MPI if found[0] in environ), ())
        found = {
            name: int(environ[variable])
            for name, variable in zip(names, variables, strict=False)
            if variable in environ
        }
        given = {**found, **given}
    return {**given, "cluster_detection_method": method}
