"""Test `jengine train` under each launcher, with scripts that set the variables of the real launcher."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jengine import checkpoint
from jengine.cli import main
from tests.cli.test_cli import CONFIG
from tests.parallel.test_processes import PATIENCE, address, environment, free_port

ROOT = pathlib.Path(__file__).parents[3]

ENTRY = "import sys; from jengine.cli import main; sys.exit(main())"
HALF_BATCH = ["--config.train_dataloader.batch_size=4", "--config.val_dataloader.batch_size=4"]

# JAX computes the port from the job id: one of the last 4096.
SRUN = """
def variables(task, tasks, port):
    return dict(
        SLURM_JOB_ID=port - 61440, SLURM_STEP_NODELIST="127.0.0.1,127.0.0.2", SLURM_STEP_NUM_NODES=1,
        SLURM_NTASKS=tasks, SLURM_PROCID=task, SLURM_LOCALID=task,
    )
"""
MPIRUN = """
def variables(task, tasks, port):
    return dict(
        OMPI_MCA_orte_hnp_uri=f"{(port - 61440) * 4096}.0;tcp://127.0.0.1,10.0.0.1:34911",
        OMPI_COMM_WORLD_SIZE=tasks, OMPI_COMM_WORLD_RANK=task, OMPI_COMM_WORLD_LOCAL_RANK=task,
    )
"""
MPIEXEC = """
def variables(task, tasks, port):
    return dict(PMI_SIZE=tasks, PMI_RANK=task)
"""
MANUAL = """
def variables(task, tasks, port):
    return {}
"""
START = """
import os, subprocess, sys
port, tasks, *command = sys.argv[1:]
processes = []
for task in range(int(tasks)):
    environ = {name: str(value) for name, value in variables(task, tasks, int(port)).items()}
    arguments = [argument.replace("TASK", str(task)) for argument in command]
    processes.append(subprocess.Popen(arguments, env={**os.environ, **environ}))
sys.exit(max(abs(process.wait()) for process in processes))
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "line.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def start(tmp_path, config):
    """Train with two processes that a script starts, and return their output."""
    launchers = []

    def run(script, *options):
        path = tmp_path / "launcher.py"
        path.write_text(script + START)
        command = [
            sys.executable,
            "-c",
            ENTRY,
            "train",
            config,
            "--work-dir",
            str(tmp_path / "run"),
            *options,
            *HALF_BATCH,
        ]
        launcher = subprocess.Popen(
            [sys.executable, str(path), str(free_port(61440, 65536)), "2", *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(1), cwd=ROOT,
        )  # fmt: skip
        launchers.append(launcher)
        output, _ = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 0, output
        return output

    yield run
    for launcher in launchers:
        launcher.kill()


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (SRUN, ["--launcher", "slurm"]),
        pytest.param(MPIRUN, ["--launcher", "mpi"], marks=pytest.mark.many_processes),
        pytest.param(MPIEXEC, ["--launcher", "mpi", "--coordinator", "ADDRESS"], marks=pytest.mark.many_processes),
        pytest.param(
            MANUAL, ["--coordinator", "ADDRESS", "--num-processes", "2", "--process-id", "TASK"],
            marks=pytest.mark.many_processes,
        ),
    ],
    ids=["srun", "mpirun", "mpiexec", "manual"],
)
def test_processes_of_a_launcher_train_like_one_process(script, options, start, config, tmp_path):
    start(script, *(address() if option == "ADDRESS" else option for option in options))
    assert main(["train", config, "--work-dir", str(tmp_path / "one")]) == 0
    found, expected = (checkpoint.load(tmp_path / name).params for name in ("run", "one"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert len(list((tmp_path / "run").glob("*/*.log"))) == 1
