"""What two processes train, one after the other in one start, is what one process trains with as many devices."""

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jengine import checkpoint
from jengine.train.replay import read_dump
from tests.distributed import parts
from tests.distributed.test_processes import PATIENCE, address, environment

ROOT = pathlib.Path(__file__).parent.parent.parent


@dataclasses.dataclass
class Done:
    """What two processes have left."""

    folder: pathlib.Path
    devices: int  # of both
    codes: list[int]
    outputs: list[str]

    def found(self, part):
        """What each of them returned."""
        for index in (0, 1):
            assert (self.folder / f"{part}_{index}.npz").exists(), self.outputs[index]
        return [dict(np.load(self.folder / f"{part}_{index}.npz")) for index in (0, 1)]


def run_parts(folder, names, devices):
    env, where, jobs = environment(devices), address(), []
    try:
        for index in (0, 1):
            command = [sys.executable, "-m", "tests.distributed.parts", str(folder), ",".join(names), where, str(index)]
            with open(folder / f"{index}.out", "w") as out:
                jobs.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT))
        codes = [job.wait(2 * PATIENCE) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return Done(folder, 2 * devices, codes, [(folder / f"{index}.out").read_text() for index in (0, 1)])


@pytest.fixture(scope="module")
def one_each(tmp_path_factory):
    """All parts by two processes with a device each; the last one ends with an error."""
    return run_parts(tmp_path_factory.mktemp("one"), ["replicas", "sharded", "guarded", "swav", "odc", "ending"], 1)


@pytest.fixture(scope="module")
def two_each(tmp_path_factory):
    """The parts that depend on how devices and processes go together, with two devices each."""
    done = run_parts(tmp_path_factory.mktemp("two"), ["replicas", "sharded"], 2)
    assert done.codes == [0, 0], done.outputs
    return done


@pytest.fixture(params=["one_each", "two_each"])
def done(request):
    return request.getfixturevalue(request.param)


def assert_all_close(found, expected, names):
    assert names
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_replicas_train_alike_with_their_own_statistics(done, tmp_path):
    first, second = done.found("replicas")
    expected = parts.replicas(tmp_path, done.devices)
    within, after = "within an epoch", "after an epoch"
    common = [name for name in expected if name not in (within, after)]
    assert "loss" in common  # that of the validation, with the averages
    for found in (first, second):
        assert_all_close(found, expected, common)
    for when in (within, after):
        np.testing.assert_allclose(np.concatenate([first[when], second[when]]), expected[when], rtol=1e-5, atol=1e-6)
    assert np.abs(first[within][0] - second[within][0]).max() > 1e-3  # each has seen its own rows
    np.testing.assert_allclose(first[after][0], second[after][-1], rtol=1e-6)  # and then the mean


def test_one_process_goes_on_where_the_replicas_of_two_were(done, tmp_path):
    first, _ = done.found("replicas")
    shutil.copytree(done.folder / "replicas" / "epoch_1", tmp_path / "run" / "epoch_1")
    found = parts.replicas(tmp_path / "run", done.devices, resume=True)
    assert_all_close(found, first, [name for name in found if name.startswith(("params", "average"))])


def test_each_process_writes_its_shards_and_one_reads_them_all(done, tmp_path):
    first, second = done.found("sharded")
    path = done.folder / "sharded" / "epoch_2"
    assert {found.name for found in path.rglob("ocdbt.process_*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    whole = checkpoint.load(path).params["up"]["kernel"]
    np.testing.assert_array_equal(np.isnan(first["up"]), ~np.isnan(second["up"]))  # none has what the other has
    np.testing.assert_array_equal(np.where(np.isnan(first["up"]), second["up"], first["up"]), whole)
    np.testing.assert_allclose(whole, parts.sharded(tmp_path, done.devices)["up"], rtol=1e-5, atol=1e-6)


def test_a_nan_in_the_rows_of_one_drops_the_step_on_both(one_each, tmp_path):
    expected = parts.guarded(tmp_path, 2)
    assert expected["dropped"] == 2  # once an epoch
    for found in one_each.found("guarded"):
        assert_all_close(found, expected, list(expected))


def test_after_too_many_in_a_row_both_end_with_the_same_error_and_one_dump(one_each):
    assert one_each.codes == [1, 1], one_each.outputs
    errors = [re.findall("^FloatingPointError: .*", output, re.MULTILINE) for output in one_each.outputs]
    assert len(errors[0]) == 1, one_each.outputs[0]
    assert errors[0] == errors[1]
    assert "the steps of iterations 1 to 2 were dropped: the loss is not finite" in errors[0][0]
    (path,) = (one_each.folder / "ending").glob("*.dump")
    dump = read_dump(path)
    assert (
        np.isnan(dump["batch"]["x"]).any(axis=1).tolist() == [False] * 8 + [True] + [False] * 7
    )  # the first that process 1 reads
    assert dump["state"].step == 2


def test_the_queue_of_swav_holds_the_rows_of_both(one_each, tmp_path):
    expected = parts.swav(tmp_path, 2)
    assert np.abs(expected["queue"]).max(axis=-1).min() > 0  # full
    for found in one_each.found("swav"):
        assert_all_close(found, expected, ["queue"])


def test_the_memory_of_odc_is_the_same_on_both(one_each, tmp_path):
    expected = parts.odc(tmp_path, 2)
    assert len(np.unique(expected["labels"])) == 3
    for found in one_each.found("odc"):
        np.testing.assert_array_equal(found["labels"], expected["labels"])
        assert_all_close(found, expected, list(expected))
