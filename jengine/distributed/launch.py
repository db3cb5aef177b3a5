"""Makes this process one of several: finds the others the way its launcher tells it, before any device is used."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jengine.distributed.coordinator_proxy import Link
from jengine.distributed.processes import get_processes
from jengine.distributed.rendezvous import meet
from jengine.errors import ConfigError, closest

LAUNCHERS = ("none", "auto", "slurm", "mpi", "kubernetes", "tpu")

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
# Open MPI; MPICH, Intel MPI and others with PMI; total, own number, number on the host.
_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
_METHODS = {"slurm": "slurm", "kubernetes": "k8s"}
_HEARTBEAT = 200  # seconds; JAX ends a run without an explanation, and is to be later than those who have one


@dataclasses.dataclass(frozen=True)
class Settings:
    """How this process finds the others. What is None, JAX finds out by `method`.

    Attributes:
      coordinator: `host:port` of process 0.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      local_device_ids: the devices of the host that are this process's; None for all.
      method: JAX's name for the way to find out; 'deactivate' where all is known, None to try every one.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: Sequence[int] | None = None
    method: str | None = None


def launch(
    launcher: str = "none",
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> None:
    """Connects this process with the others of its run, unless it runs alone.

    Call it first: once JAX has used a device it is too late.

    Args:
      launcher: what started the processes, one of `LAUNCHERS`. 'none' is a run of one process, unless the next three
        are given.
      coordinator: `host:port` of process 0, where the launcher does not tell it.
      num_processes: how many processes there are, where the launcher does not tell it.
      process_id: which one this is, from 0, where the launcher does not tell it.
      timeout: seconds to wait for the others to connect.

    Raises:
      ConfigError: an unknown launcher, settings that are incomplete, an environment that is not the launcher's, or
        processes that were told different things.
      ProcessError: processes that did not come in time; the message names them.
      RuntimeError: a device has been used, or the processes are connected already.
    """
    settings = find_settings(launcher, os.environ, coordinator, num_processes, process_id)
    if settings is None:
        return
    coordinator, num_processes, process_id, local_device_ids = _complete(settings, launcher, timeout)
    meet(coordinator, num_processes, process_id, timeout)
    link = Link(coordinator) if process_id else None  # process 0 has the service in itself
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator if link is None else link.address,
            num_processes=num_processes,
            process_id=process_id,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout),
            heartbeat_timeout_seconds=min(_HEARTBEAT, int(timeout)),
            shutdown_timeout_seconds=int(timeout),
        )
    except BaseException:
        if link is not None:
            link.close()
        raise
    processes = get_processes()
    if link is not None and processes.failure_detector is not None:
        link.watch(processes.failure_detector.lose_service)


def _complete(settings: Settings, launcher: str, timeout: float) -> tuple[str, int, int, Sequence[int] | None]:
    """The settings with what JAX finds out: all but the method."""
    known = settings.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    found = (known, settings.num_processes, settings.process_id, settings.local_device_ids)
    if settings.method != "deactivate":
        # JAX does so itself, but tells nobody the address, which meeting and link need.
        from jax._src.clusters import ClusterEnv

        found = ClusterEnv.auto_detect_unset_distributed_params(*found, settings.method, int(timeout))
    coordinator, num_processes, process_id, local_device_ids = found
    if coordinator is None or num_processes is None or process_id is None:
        raise ConfigError(
            f"--launcher {launcher}: JAX cannot tell from the environment how to find the other processes; "
            "give --coordinator HOST:PORT, --num-processes N and --process-id I"
        )
    return coordinator, num_processes, process_id, local_device_ids


def find_settings(
    launcher: str,
    environ: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Settings | None:
    """How to find the other processes; None for a run of one. What is given goes before what the launcher tells.

    Args:
      launcher: as for `launch`.
      environ: the environment variables.
      coordinator: as for `launch`.
      num_processes: as for `launch`.
      process_id: as for `launch`.

    Raises:
      ConfigError: as for `launch`.
    """
    if launcher not in LAUNCHERS:
        raise ConfigError(f"no launcher is called {launcher!r}{closest(launcher, LAUNCHERS)}")
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    _check(given)
    if launcher == "none":
        missing = [_flag(name) for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return None
        if missing:
            raise ConfigError(f"several processes without a launcher need {', '.join(missing)} too")
        return Settings(coordinator, num_processes, process_id, method="deactivate")
    if launcher == "slurm":
        absent = [name for name in _SLURM if name not in environ]
        if absent:
            raise ConfigError(
                f"--launcher slurm: the environment has no {', '.join(absent)}; start with srun, one task per process"
            )
    if launcher == "mpi":
        return _mpi_settings(environ, given)
    if launcher == "kubernetes":
        _check_kubernetes(environ)
    return Settings(coordinator, num_processes, process_id, method=_METHODS.get(launcher))


def _mpi_settings(environ: Mapping[str, str], given: dict[str, Any]) -> Settings:
    found = next((names for names in _MPI if names[0] in environ and names[1] in environ), None)
    if found is None:
        raise ConfigError(
            f"--launcher mpi: the environment has neither {_MPI[0][0]} nor {_MPI[1][0]}; start with mpirun or mpiexec"
        )
    total, own, local = found
    method = "deactivate"
    if given["coordinator"] is None:
        if "OMPI_MCA_orte_hnp_uri" not in environ:
            raise ConfigError(
                "--launcher mpi: this MPI does not tell where process 0 runs; give --coordinator HOST:PORT with a port "
                "that is free on the host of process 0"
            )
        method = "ompi"
    return Settings(
        coordinator=given["coordinator"],
        num_processes=int(environ[total]) if given["num_processes"] is None else given["num_processes"],
        process_id=int(environ[own]) if given["process_id"] is None else given["process_id"],
        local_device_ids=[int(environ[local])] if local in environ else None,
        method=method,
    )


def _check_kubernetes(environ: Mapping[str, str]) -> None:
    if "KUBERNETES_SERVICE_HOST" not in environ:
        raise ConfigError("--launcher kubernetes: the environment has no KUBERNETES_SERVICE_HOST: this is no pod")
    try:
        import kubernetes  # noqa: F401
    except ImportError as error:
        raise ImportError("--launcher kubernetes needs the client: pip install 'jengine[kubernetes]'") from error


def _check(given: Mapping[str, Any]) -> None:
    """Holds that what is given makes sense by itself."""
    coordinator, num_processes, process_id = given.values()
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--coordinator is HOST:PORT of process 0, found {coordinator!r}")
    if num_processes is not None and num_processes < 1:
        raise ConfigError(f"--num-processes is at least 1, found {num_processes}")
    if process_id is not None and (process_id < 0 or (num_processes is not None and process_id >= num_processes)):
        most = "" if num_processes is None else f" to {num_processes - 1}"
        raise ConfigError(f"--process-id counts from 0{most}, found {process_id}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
