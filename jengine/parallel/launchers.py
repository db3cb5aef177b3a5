"""Launchers: connection to the other processes in a run, before any device is used."""

import importlib.util
import logging
import math
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
_METHODS = {"slurm": "slurm", "kubernetes": "k8s"}
_REQUIRED = {
    "slurm": (_SLURM, "start with srun, one task per process"),
    "kubernetes": (("KUBERNETES_SERVICE_HOST",), "start inside a pod"),
}
logger = logging.getLogger("jengine")


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
      ConfigError: an unknown launcher, incomplete settings, or an environment that does not belong
        to the launcher.
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
    except ValueError as error:
        if "should be defined" not in str(error) and "must be defined" not in str(error):
            raise
        raise ConfigError(
            f"--launcher {launcher}: JAX cannot detect the other processes from the environment; "
            "give --coordinator HOST:PORT, --num-processes N and --process-id I"
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
        if importlib.util.find_spec("kubernetes") is not None:
            return "kubernetes"
        logger.warning(
            "This pod belongs to an indexed job, and trains alone: to connect the pods, install "
            "kubernetes (pip "
            "install 'jengine[kubernetes]'). --launcher none trains alone without this warning."
        )
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
    if num_processes is not None and num_processes < 1:
        raise ConfigError(f"--num-processes must be at least 1, got {num_processes}")
    most = math.inf if num_processes is None else num_processes - 1
    if process_id is not None and not 0 <= process_id <= most:
        raise ConfigError(f"--process-id must be 0 to {most}, got {process_id}")
    flags = {
        "--coordinator": ("coordinator_address", coordinator),
        "--num-processes": ("num_processes", num_processes),
        "--process-id": ("process_id", process_id),
    }
    given: dict[str, Any] = {name: value for name, value in flags.values() if value is not None}
    if launcher == "none":
        if not given:
            return None
        if missing := [flag for flag, (name, _) in flags.items() if name not in given]:
            raise ConfigError(
                f"--launcher none: several processes also require {', '.join(missing)}"
            )
        return {**given, "cluster_detection_method": "deactivate"}
    if launcher == "mpi":
        return _mpi_settings(environ, given)
    required, advice = _REQUIRED.get(launcher, ((), ""))
    if missing := [name for name in required if name not in environ]:
        raise ConfigError(
            f"--launcher {launcher}: the environment must have {', '.join(missing)}; {advice}"
        )
    if launcher == "kubernetes":
        with require_extra("kubernetes", "the launcher requires kubernetes"):
            import kubernetes  # noqa: F401
    if launcher in _METHODS:
        given["cluster_detection_method"] = _METHODS[launcher]
    return given


def _mpi_settings(environ: Mapping[str, str], given: dict[str, Any]) -> dict[str, Any]:
    variables = next((names for names in _MPI if names[0] in environ and names[1] in environ), None)
    if variables is None:
        raise ConfigError(
            f"--launcher mpi: the environment must have {_MPI[0][0]} or {_MPI[1][0]}; start with "
            "mpirun or mpiexec"
        )
    # JAX reads the host of process 0 from Open MPI's environment
    method = "deactivate" if "coordinator_address" in given else "ompi"
    if method == "ompi" and "OMPI_MCA_orte_hnp_uri" not in environ:
        raise ConfigError(
            "--launcher mpi: this MPI does not provide the host of process 0; give --coordinator "
            "HOST:PORT with a port that is free on that host"
        )
    names = ("num_processes", "process_id", "local_device_ids")
    found: dict[str, Any] = {
        name: int(environ[key])
        for name, key in zip(names, variables, strict=True)
        if key in environ
    }
    if "local_device_ids" in found:
        found["local_device_ids"] = [found["local_device_ids"]]
    return {**found, **given, "cluster_detection_method": method}
