import json
import os
import socket
import subprocess
import sys

import pytest

from jengine.checkpoint.manifest import validate_checkpoint

WORKER = """
import sys
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jengine.checkpoint import Checkpointer, load, restore

process, address, work_dir = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, process)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
value = np.arange(8, dtype=np.float32)

def put(spec):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])

def fail(name):  # in the thread that saves, a collective would run in a different order on each process
    raise AssertionError("a save waits for devices: " + name)

multihost_utils.sync_global_devices = fail
state = {"params": {"split": put(PartitionSpec("data")), "copied": put(PartitionSpec())}, "rng": jax.random.key(1)}
checkpointer = Checkpointer(work_dir)
for number in (1, 2):
    evict = [f"epoch_{number - 1}"]
    path = checkpointer.save(f"{work_dir}/epoch_{number}", state, {"meta": {"iter": number}}, evict=evict)
checkpointer.close()
restored, meta = restore(path, state)
print("shard", restored["params"]["split"].addressable_shards[0].data.tolist(), meta["meta"]["iter"])
if process == 1:  # a single process can read
    print("full", load(path).params["split"].tolist())
"""


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def test_two_processes_write_one_checkpoint_and_read_their_parts_back(tmp_path, address):
    env = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"}
    commands = [[sys.executable, "-c", WORKER, str(process), address, str(tmp_path)] for process in (0, 1)]
    workers = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands
    ]
    try:
        outputs = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    lines = [[line for line in out.splitlines() if line.startswith(("shard", "full"))] for out, _ in outputs]
    assert lines == [
        ["shard [0.0, 1.0, 2.0, 3.0] 2"],
        ["shard [4.0, 5.0, 6.0, 7.0] 2", "full [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]"],
    ], outputs
    assert sorted(os.listdir(tmp_path)) == ["epoch_2", "last_checkpoint"]
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "epoch_2")
    assert_files_are_verified_in_parts(tmp_path / "epoch_2")


def assert_files_are_verified_in_parts(path):
    """Each process has listed the files that it wrote, and verifies a share of these lists."""
    listed = {name: json.loads((path / name).read_text())["files"] for name in ("manifest.0.json", "manifest.1.json")}
    top = json.loads((path / "manifest.json").read_text())["files"]
    assert all(name.startswith("state/ocdbt.process_1/") for name in listed["manifest.1.json"])
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert sorted([*top, *listed["manifest.0.json"], *listed["manifest.1.json"], "manifest.json"]) == sorted(on_disk)
    data = path / next(name for name in listed["manifest.1.json"] if "/d/" in name)
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    problem = f"{data.relative_to(path)} is damaged (its SHA-256 is not that of the manifest)"
    found = [validate_checkpoint(path, checksums=True, share=share) for share in [(0, 1), (0, 2), (1, 2), (4, 5)]]
    assert found == [problem, None, problem, None]
    (path / "manifest.1.json").write_text((path / "manifest.1.json").read_text().replace("1", "2"))
    assert validate_checkpoint(path) == "manifest.1.json is damaged (its SHA-256 is not that of the manifest)"
