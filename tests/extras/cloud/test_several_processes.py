import collections
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

from jengine.checkpoint.manifest import validate_checkpoint
from jengine.config.errors import ConfigError, read_seconds

WORKER = """
import contextlib
import os
import pathlib
import sys
import time
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jengine.checkpoint import Checkpointer, find_checkpoint, load, restore
from jengine.extras.cloud.shared_reads import plan_reads
from jengine.checkpoint.progress import StalledError, report_progress, wait_for_processes
from jengine.parallel import get_processes
from jengine.checkpoint.identity import agree_on_identity

process, address, work_dir, url = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, process)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
value = np.arange(8, dtype=np.float32)

def put(spec):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])

sync = multihost_utils.sync_global_devices

def fail(name):  # in the thread that saves, a collective would run in a different order on each process
    raise AssertionError("a save waits for devices: " + name)

multihost_utils.sync_global_devices = fail
state = {"params": {"split": put(PartitionSpec("data")), "copied": put(PartitionSpec())}, "rng": jax.random.key(1)}
checkpointer = Checkpointer(work_dir)
for number in (1, 2, 3):
    evict = [f"epoch_{number - 2}"]
    path = checkpointer.save(f"{work_dir}/epoch_{number}", state, {"meta": {"iter": number}}, evict=evict)
checkpointer.close()
restored, meta = restore(path, state)
print("shard", restored["params"]["split"].addressable_shards[0].data.tolist(), meta["meta"]["iter"])
if process == 1:  # a single process can read
    print("full", load(path).params["split"].tolist())

sync("saved")
damaged = pathlib.Path(path)
if process == 1:
    data = next(damaged.glob("state/ocdbt.process_1/d/*"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
sync("damaged")
processes = get_processes()
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
identity = agree_on_identity(processes, {}, work_dir, resume=True)
print("resumes", identity.resume_from)
print("opened", *(path.partition("epoch_3/")[2] for path in opened if "epoch_3/" in path))
try:
    find_checkpoint(damaged, checksums=True, processes=processes)
except ValueError as error:
    print("refused", error)

def make(spec):  # arrays that several processes need, of all kinds
    bits = np.random.default_rng(0).integers(0, 256, 2**12, np.uint8)  # also nan, inf and -0.0
    arrays = {name: bits.view(name) for name in ("float32", "float16", jax.numpy.bfloat16.dtype, "int8", "complex64")}
    arrays |= {"bool": bits > 99, "float8": bits.view(jax.numpy.float8_e4m3fn.dtype), "scalar": np.float32(-0.0)}
    arrays |= {"matrix": bits.view("float32").reshape(2, -1), "odd": np.full((3, 1), -0.0, "f")}
    arrays |= {f"large_{i}": np.arange(2**20, dtype="f") for i in (1, 2)}  # Orbax reads small gaps between arrays as well
    mesh = jax.make_mesh((2, 1), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    def put(x):
        split = spec if x.ndim and x.shape[0] % 2 == 0 else PartitionSpec()
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, split), lambda index: x[index])
    return {"params": {str(name): put(x) for name, x in arrays.items()}}

def as_bytes(tree):
    return [(x.sharding, [s.data.tobytes() for s in x.addressable_shards]) for x in jax.tree.leaves(tree)]

with contextlib.closing(Checkpointer(url)) as checkpointer:
    for spec in (PartitionSpec(), PartitionSpec("data")):
        name = "split" if spec else "copied"
        path = checkpointer.save(f"{url}/{name}", make(spec), {"meta": {"iter": 1}})
        checkpointer.wait()
        for other in (PartitionSpec(), PartitionSpec(("data", "other"))):
            equal = as_bytes(restore(path, make(other))[0]) == as_bytes(make(other))
            print(f"{name}_as_{'split' if other else 'copied'}", equal)
    large = jax.ShapeDtypeStruct((2**18, 2), np.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    plans = plan_reads(dict.fromkeys("abcd", large), {})
    print("reads", sum(bool(plan.source.addressable_devices) for plan in plans.values()))
    print("size", sum(x.nbytes for x in jax.tree.leaves(make(PartitionSpec()))))

start = time.monotonic()
if process == 1:  # works for longer than the others wait without any progress: it hashes, then it writes
    while time.monotonic() - start < 3:
        report_progress()
    written = pathlib.Path(work_dir, "state", "ocdbt.process_1", "d")
    written.mkdir(parents=True)
    with open(written / "data", "wb", buffering=0) as file:
        while time.monotonic() - start < 6:
            file.write(b"x")
wait_for_processes("test", pathlib.Path(work_dir, "state"))
print("waited", time.monotonic() - start > 5)
if process == 0:
    try:
        wait_for_processes("test")
    except StalledError as error:
        print("stalled", error)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, google_storage):
    """The work dir of the two processes, and the lines that each has printed, by their first word."""
    work_dir, url = tmp_path_factory.mktemp("run"), google_storage.make_bucket()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    env = {**os.environ, "XLA_FLAGS": flags, "JENGINE_STALL_TIMEOUT": "1"}
    commands = [
        [sys.executable, "-c", WORKER, str(process), address, str(work_dir), url]
        for process in (0, 1)
    ]
    workers = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    try:
        outputs = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    lines = [
        dict(line.partition(" ")[::2] for line in out.splitlines() if " " in line)
        for out, _ in outputs
    ]
    bucket = url.removeprefix("gs://")
    lines[0]["read"] = sum(
        size for path, size in google_storage.sent if f"/{bucket}/" in path and "/d/" in path
    )
    return work_dir, lines, [error for _, error in outputs]


def test_two_processes_write_one_checkpoint_and_read_their_parts_back(finished):
    work_dir, lines, _ = finished
    assert [line["shard"] for line in lines] == ["[0.0, 1.0, 2.0, 3.0] 3", "[4.0, 5.0, 6.0, 7.0] 3"]
    assert lines[1]["full"] == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]"
    assert {"epoch_2", "epoch_3", "last_checkpoint"} <= set(os.listdir(work_dir))
    assert "epoch_1" not in os.listdir(work_dir)
    assert (work_dir / "last_checkpoint").read_text() == "epoch_3"


def test_arrays_in_a_bucket_are_read_once_by_all_processes_together_and_stay_bit_equal(finished):
    first, second = finished[1]
    for line in (first, second):
        for name in ("copied_as_copied", "copied_as_split", "split_as_copied", "split_as_split"):
            assert line[name] == "True", name
        assert line["reads"] == "2"  # of four large ones
    restores, size = 4, int(first["size"])
    assert (
        restores * size <= first["read"] < 1.05 * restores * size
    )  # both read the index and some of the small ones


def list_files(path):
    """Return the files that the manifest and its parts list, the parts included."""
    names = list(json.loads((path / "manifest.json").read_text())["files"])
    parts = [name for name in names if name.startswith("manifest.")]
    return names + [
        name for part in parts for name in json.loads((path / part).read_text())["files"]
    ]


def test_each_process_lists_the_files_that_it_wrote(finished):
    path = finished[0] / "epoch_2"
    own = json.loads((path / "manifest.1.json").read_text())["files"]
    assert own
    assert all(name.startswith("state/ocdbt.process_1/") for name in own)
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert sorted([*list_files(path), "manifest.json"]) == sorted(on_disk)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_processes_reads_each_file_once_in_equal_shares(finished, monkeypatch, count):
    path = finished[0] / "epoch_2"
    opened, stated = [], []
    find_stat, open_path = os.stat, pathlib.Path.open
    monkeypatch.setattr(
        os,
        "stat",
        lambda name, **options: (stated.append(str(name)), find_stat(name, **options))[1],
    )
    monkeypatch.setattr(
        pathlib.Path,
        "open",
        lambda path, *args, **kw: (opened.append(path), open_path(path, *args, **kw))[1],
    )
    files, most = list_files(path), 0
    opened.clear()
    for index in range(count):
        stated.clear()
        assert validate_checkpoint(path, checksums=True, share=(index, count)) is None
        most = max(most, len({name for name in stated if "/state/" in name}))
    reads = collections.Counter(str(file.relative_to(path)) for file in opened)
    data = [name for name in files if name.startswith("state/")]
    assert {name: reads[name] for name in data} == dict.fromkeys(data, 1)
    assert (
        most <= len(data) // count + 4
    )  # a share of the common files, of those of a part, and one more of each


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_damaged_file_is_found_by_the_process_that_has_it_in_its_share(finished, tmp_path, count):
    path = shutil.copytree(finished[0] / "epoch_2", tmp_path / "epoch_2")
    for name in (
        "meta.json",
        "state/_METADATA",
        next(name for name in list_files(path) if "process_1/d/" in name),
    ):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] + b"?")
        problem = f"{name} is damaged (its checksum is not that of the manifest)"
        found = [
            validate_checkpoint(path, checksums=True, share=(index, count))
            for index in range(count)
        ]
        assert {reason for reason in found if reason is not None and "damaged" in reason} == {
            problem
        }
        (path / name).write_bytes(content)
    (path / "manifest.1.json").write_text((path / "manifest.1.json").read_text().replace("1", "2"))
    assert (
        validate_checkpoint(path)
        == "manifest.1.json is damaged (its checksum is not that of the manifest)"
    )


def test_a_file_that_one_process_finds_damaged_is_named_on_all_and_all_resume_from_the_checkpoint_before(
    finished,
):
    work_dir, lines, errors = finished
    for line, error in zip(lines, errors, strict=True):
        assert line["resumes"] == str(work_dir / "epoch_2")
        assert f"skipped checkpoint {work_dir / 'epoch_3'}: state/ocdbt.process_1/d/" in error
        assert (
            f"checkpoint {work_dir / 'epoch_3'} is corrupt: state/ocdbt.process_1/d/"
            in line["refused"]
        )
        assert " is damaged (" in line["refused"]
    opened = [set(line["opened"].split()) for line in lines]
    assert not {name for name in opened[0] & opened[1] if name.startswith("state/")}


def test_a_wait_lasts_as_long_as_another_process_reads_or_writes_and_names_one_that_stands_still(
    finished,
):
    first, second = finished[1]
    assert first["waited"] == second["waited"] == "True"
    assert first["stalled"] == (
        "process 1 made no progress for 1 s (JENGINE_STALL_TIMEOUT), and others wait for it (test)"
    )


@pytest.mark.parametrize("text", ["soon", "0", "inf", "nan"])
def test_an_illegal_time_in_an_environment_variable_is_refused(monkeypatch, text):
    monkeypatch.setenv("JENGINE_STALL_TIMEOUT", text)
    message = f"JENGINE_STALL_TIMEOUT must be a number of seconds, at least 1, got '{text}'"
    with pytest.raises(ConfigError, match=message):
        read_seconds("JENGINE_STALL_TIMEOUT", 600, least=1)
