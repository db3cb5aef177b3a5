import os

import jax
import pytest

from jengine.extras.cloud.launchers import detect_launcher, find_settings, launch

SLURM = dict(
    SLURM_JOB_ID="7",
    SLURM_STEP_NODELIST="n1,n2",
    SLURM_NTASKS="2",
    SLURM_PROCID="1",
    SLURM_LOCALID="0",
)
OPEN_MPI = dict(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="1")
ORTE = dict(OMPI_MCA_orte_hnp_uri="1531576320.0;tcp://10.96.0.1:34911")
MPICH = dict(PMI_SIZE="2", PMI_RANK="1")


def test_a_run_without_flags_has_one_process():
    assert find_settings("none", {}) is None
    assert find_settings("none", SLURM) is None  # a job of one process within a SLURM job


def test_flags_alone_describe_a_process():
    assert find_settings("none", {}, "10.0.0.1:1234", 2, 1) == dict(
        coordinator_address="10.0.0.1:1234",
        num_processes=2,
        process_id=1,
        cluster_detection_method="deactivate",
    )


def test_slurm_is_left_to_jax_if_its_variables_are_set():
    assert find_settings("slurm", SLURM) == dict(cluster_detection_method="slurm")
    assert find_settings("slurm", SLURM, coordinator="n1:99") == dict(
        coordinator_address="n1:99", cluster_detection_method="slurm"
    )


def test_open_mpi_provides_all_settings():
    expected = dict(
        num_processes=4, process_id=3, local_device_ids=1, cluster_detection_method="ompi"
    )
    assert find_settings("mpi", {**OPEN_MPI, **ORTE}) == expected


def test_mpich_takes_a_coordinator():
    expected = dict(
        coordinator_address="n1:99",
        num_processes=2,
        process_id=1,
        cluster_detection_method="deactivate",
    )
    assert find_settings("mpi", MPICH, coordinator="n1:99") == expected


def test_auto_and_tpu_leave_everything_to_jax():
    assert (
        find_settings("auto", {}) == find_settings("tpu", {}) == {"cluster_detection_method": None}
    )


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (SLURM, "slurm"),
        ({**SLURM, "SLURM_NTASKS": "1"}, "none"),  # `srun --pty bash`
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"},
            "none",
        ),  # the script of `sbatch`, outside of a task
        (OPEN_MPI, "mpi"),
        (MPICH, "mpi"),
        ({**MPICH, "PMI_SIZE": "1"}, "none"),
        (
            dict(
                TPU_WORKER_HOSTNAMES="h0,h1",
                KUBERNETES_SERVICE_HOST="10.0.0.1",
                JOB_COMPLETION_INDEX="0",
            ),
            "tpu",
        ),
        (dict(TPU_WORKER_HOSTNAMES="h0"), "none"),
        (dict(TPU_WORKER_HOSTNAMES="h0", MEGASCALE_NUM_SLICES="2"), "tpu"),
        (dict(KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX="0"), "kubernetes"),
        (dict(KUBERNETES_SERVICE_HOST="10.0.0.1"), "none"),  # any other pod, such as a notebook's
        ({}, "none"),
    ],
)
def test_the_environment_says_whether_there_are_other_processes(environ, launcher):
    assert detect_launcher(environ) == launcher


@pytest.fixture
def initialized(monkeypatch):
    """The arguments of each call of `jax.distributed.initialize`, which does not connect."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    return calls


def test_jax_is_initialized_with_the_settings(initialized):
    launch()
    assert initialized == []
    launch("none", "127.0.0.1:99", 2, 0, timeout=20)
    assert initialized == [
        dict(
            coordinator_address="127.0.0.1:99", num_processes=2, process_id=0,
            cluster_detection_method="deactivate", initialization_timeout=20, heartbeat_timeout_seconds=30,
            shutdown_timeout_seconds=20,
        )
    ]  # fmt: skip


def test_jax_detects_the_processes_of_slurm(initialized, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    launch("slurm")
    (call,) = initialized
    assert call["cluster_detection_method"] == "slurm"
    assert "coordinator_address" not in call


def test_the_processes_of_slurm_are_connected_without_a_flag_unless_one_says_none(
    initialized, monkeypatch
):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    launch("none")
    assert initialized == []
    launch()
    assert [call["cluster_detection_method"] for call in initialized] == ["slurm"]
    launch(coordinator="127.0.0.1:99", num_processes=2, process_id=0)
    assert initialized[1]["cluster_detection_method"] == "deactivate"


@pytest.mark.parametrize("launcher", ["slurm", "mpi", "none"])
def test_what_jax_misses_is_named_with_the_flags_that_replace_it(run_python, launcher):
    code = (
        "from jengine.extras.cloud.launchers import launch\n"
        f"launch({launcher!r}, num_processes=2, **({{}} if {launcher!r} == 'mpi' else dict(process_id=0)))"
    )
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "OMPI", "PMI"))
    }
    done = run_python(code, env=environ)
    missed = dict(
        slurm="'SLURM_JOB_ID'", mpi="'OMPI_MCA_orte_hnp_uri'", none="coordinator_address should be"
    )[launcher]
    assert (
        f"ConfigError: --launcher {launcher} must find the other processes, got none: JAX has missed {missed}"
        in done.stderr
    )
    assert "give --coordinator HOST:PORT, --num-processes N and --process-id I" in done.stderr
