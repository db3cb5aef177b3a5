"""Test that two processes train like one process with as many devices; `make test-all` adds layouts, and three and four."""

import dataclasses
import logging
import pathlib
import re
import shutil

import numpy as np
import pytest

from jengine import checkpoint
from jengine.extras.diagnose.replay import read_dump
from tests.forks import start_module
from tests.parallel import training_cases
from tests.parallel.test_exactness import SAVED
from tests.parallel.test_processes import PATIENCE, address, environment

SHARDED = ["tensor", "data_tensor", "tensor_stream", "data_tensor_stream"]
MORE_SHARDS = [
    ("one_device_each_more", "tensor_stream"),
    ("two_devices_each_more", "tensor"),
    ("two_devices_each_more", "data_tensor"),
    *[("four_processes", case) for case in SHARDED],
]


@dataclasses.dataclass
class Results:
    """Results of several processes."""

    folder: pathlib.Path
    devices: int  # of all
    exit_codes: list[int]
    outputs: list[str]

    def load(self, case):
        """Return the arrays that each process returned."""
        paths = [self.folder / f"{case}_{index}.npz" for index in range(len(self.outputs))]
        for path, output in zip(paths, self.outputs, strict=True):
            assert path.exists(), output
        return [dict(np.load(path)) for path in paths]


def run_cases(folder, names, devices, count=2):
    env, coordinator, processes = environment(devices), address(), []
    try:
        for index in range(count):
            arguments = [folder, ",".join(names), coordinator, count, index]
            output = folder / f"{index}.out"
            processes.append(start_module("tests.parallel.training_cases", *arguments, output=output, env=env))
        exit_codes = [process.wait(2 * PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = [(folder / f"{index}.out").read_text() for index in range(count)]
    return Results(folder, count * devices, exit_codes, outputs)


@pytest.fixture(scope="module")
def one_device_each(tmp_path_factory):
    """Results of two processes with one device each; the last case ends with an error."""
    names = "nothing dist replicas sharded tensor guarded stream whole undivided watched failing"
    return run_cases(tmp_path_factory.mktemp("one"), names.split(), 1)


@pytest.fixture(scope="module")
def one_device_each_more(tmp_path_factory):
    """Results of further cases, by two processes with one device each."""
    return run_cases(tmp_path_factory.mktemp("one_more"), ["tensor_stream", "swav", "odc", "ordered", "overflow"], 1)


def train_alone(path, loss, **changes):
    return training_cases.train_exact(path, None, loss, **changes)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Results of one process with one device with every feature at once, by loss, and its work dir for the second."""
    folder = tmp_path_factory.mktemp("alone")
    return {loss: train_alone(folder / loss, loss) for loss in ("masked", "weighted")}, folder / "weighted"


@pytest.fixture(scope="module")
def two_devices_each(one_process, tmp_path_factory):
    """Results of cases that depend on the layout, with two devices each.

    `exact_resumed` continues the run of one process, within a window; the last case ends with an error.
    """
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(one_process[1] / f"iter_{SAVED}", folder / "saved")
    return run_cases(folder, ["exact_replicas", "exact_resumed", "data_tensor_stream", "ordered", "nonfinite"], 2)


@pytest.fixture(scope="module")
def two_devices_each_more(tmp_path_factory):
    """Results of the other cases that depend on the layout, with two devices each."""
    return run_cases(tmp_path_factory.mktemp("two_more"), ["replicas", "sharded", "tensor", "data_tensor", "exact_sharded"], 2)


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    """Results of the cases with `tensor`, by four processes with one device each."""
    results = run_cases(tmp_path_factory.mktemp("four"), SHARDED, 1, count=4)
    assert results.exit_codes == [0] * 4, results.outputs
    return results


@pytest.fixture(params=["one_device_each", pytest.param("two_devices_each_more", marks=pytest.mark.many_processes)])
def results(request):
    return request.getfixturevalue(request.param)


def assert_all_close(found, expected, names):
    assert names
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_values_of_any_size_and_type_arrive_as_they_are_and_differences_are_named(one_device_each):
    for found in one_device_each.load("nothing"):
        assert found["lengths"].tolist() == [0, 2**21]
        assert found["dtype"].tolist() == ["bfloat16", "ndarray", "float32"]
        assert found["bytes"].tolist() == [0]
        assert found["numbers"].tolist() == [[0, 2.0**80], [1, 2.0**80]]
        assert "<lambda>" in str(found["unsendable"])
        assert "got 'numbers 0' on process 0 and 'numbers 1' on process 1" in str(found["order"])
        assert str(found["mismatch"]).startswith(
            "ProcessMismatchError: `lr[1]` must be the same on all processes, got 0.10000000149011612 on process 0 and "
            "1.100000023841858 on process 1"
        )
        assert str(found["configs"]).startswith(
            "ProcessMismatchError: `config.optim_wrapper.lr` must be the same on all processes, got 0.1 on process 0 and "
            "0.5 on process 1"
        )


def test_functions_of_mmengine_exchange_objects_and_arrays(one_device_each):
    first, second = one_device_each.load("dist")
    assert [found["info"].tolist() for found in (first, second)] == [[0, 2, 1, 1], [1, 2, 0, 1]]
    for found in (first, second):
        assert found["gathered"].tolist() == ["0", "1"]
        assert found["broadcast"] == "[1, {'name': 'process 1'}]"
        assert found["sum"].tolist() == [3.0, 3.0]
        assert found["max"] == 1
        assert found["stacked"].tolist() == [[0, 1], [1, 2]]
        assert found["from_1"].tolist() == [1]
        assert found["seed"] == first["seed"]
    assert [str(found["gathered_at_1"]) for found in (first, second)] == ["None", "[0, 1]"]
    assert [str(found["collected"]) for found in (first, second)] == ["['00', '10', '01', '11', '02']", "None"]
    assert [str(found["master"]) for found in (first, second)] == ["called", "None"]


def test_replicas_train_alike_with_separate_statistics(results, tmp_path):
    first, second = results.load("replicas")
    expected = training_cases.train_replicas(tmp_path, results.devices)
    within, after = "within an epoch", "after an epoch"
    common = [name for name in expected if name not in (within, after)]
    assert "loss" in common  # of the validation, with the averages
    assert expected["predictions of arrays"].shape == (13, 4)
    np.testing.assert_allclose(expected["predictions of a dataset"], expected["predictions of arrays"], rtol=1e-6)
    for found in (first, second):
        assert_all_close(found, expected, common)
    for when in (within, after):
        np.testing.assert_allclose(np.concatenate([first[when], second[when]]), expected[when], rtol=1e-5, atol=1e-6)
    assert np.abs(first[within][0] - second[within][0]).max() > 1e-3  # each has seen its own examples
    np.testing.assert_allclose(first[after][0], second[after][-1], rtol=1e-6)  # and the mean after the epoch


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Results of one device for the cases with `tensor`, by whether the data are a stream."""
    folder = tmp_path_factory.mktemp("one_device")
    return {stream: training_cases.train_on_mesh(folder / str(stream), stream=stream) for stream in (False, True)}


def assert_equal(found, expected, names):
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


def split_batches(found):
    return np.split(found["seen"], found["bounds"][:-1])


@pytest.fixture(
    params=[
        ("one_device_each", "tensor"),
        ("two_devices_each", "data_tensor_stream"),
        *[pytest.param(shards, marks=pytest.mark.many_processes) for shards in MORE_SHARDS],
    ],
    ids="-".join,
)
def sharded(request):
    """Results of several processes, and the case: `two_devices_each` has fsdp=2 or data=2 besides tensor=2."""
    layout, case = request.param
    return request.getfixturevalue(layout), case


def test_data_shards_train_validate_and_predict_like_one_device(sharded, one_device):
    shards, case = sharded
    expected = one_device[case.endswith("stream")]
    assert expected["examples"] == 13
    processes = shards.load(case)
    for found in processes:
        assert_equal(found, expected, expected.keys() - {"shard", "seen", "bounds"})
    # each process has seen the rows of its shard, and all shards together every example of each batch once
    batches = {int(found["shard"]): split_batches(found) for found in processes}
    for found in processes:
        for rows, other in zip(split_batches(found), batches[int(found["shard"])], strict=True):
            np.testing.assert_array_equal(rows, other)
    for rows, *parts in zip(split_batches(expected), *batches.values(), strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), rows)
    log = next((shards.folder / case).rglob("*.log")).read_text()
    readers = f"; each {len(processes) // len(batches)} processes read the same" * (len(processes) > len(batches))
    assert re.search(f"^train data: .* of {8 // len(batches)} per process, 8 in all{readers}$", log, re.M), log


@pytest.mark.parametrize(
    "sharded",
    [
        ("one_device_each", "tensor"),
        pytest.param(("one_device_each_more", "tensor_stream"), marks=pytest.mark.many_processes),
        pytest.param(("two_devices_each_more", "data_tensor"), marks=pytest.mark.many_processes),
        pytest.param(("four_processes", "tensor"), marks=pytest.mark.many_processes),
    ],
    ids="-".join,
    indirect=True,
)
def test_one_process_resumes_data_shards_within_a_window(sharded, one_device, tmp_path):
    shards, case = sharded
    shards.load(case)
    found = training_cases.train_on_mesh(
        tmp_path, stream=case.endswith("stream"), resume=shards.folder / case / "iter_3"
    )
    expected = one_device[case.endswith("stream")]
    assert_equal(found, expected, expected.keys() - {"seen", "bounds"})
    assert len(found["bounds"]) == len(expected["bounds"]) - 3


def test_one_process_resumes_the_replicas_of_two(results, tmp_path):
    first, _ = results.load("replicas")
    shutil.copytree(results.folder / "replicas" / "epoch_1", tmp_path / "run" / "epoch_1")
    found = training_cases.train_replicas(tmp_path / "run", results.devices, resume=True)
    assert_all_close(found, first, [name for name in found if name.startswith(("params", "average"))])


def test_each_process_writes_its_shards_and_one_reads_them_all(results, tmp_path):
    first, second = results.load("sharded")
    path = results.folder / "sharded" / "epoch_2"
    assert {found.name for found in path.rglob("ocdbt.process_*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    kernel = checkpoint.load(path).params["up"]["kernel"]
    np.testing.assert_array_equal(np.isnan(first["up"]), ~np.isnan(second["up"]))  # disjoint shards
    np.testing.assert_array_equal(np.where(np.isnan(first["up"]), second["up"], first["up"]), kernel)
    np.testing.assert_allclose(
        kernel, training_cases.train_sharded(tmp_path, results.devices)["up"], rtol=1e-5, atol=1e-6
    )


def test_a_nan_on_one_process_drops_the_step_on_both(one_device_each, tmp_path):
    expected = training_cases.train_guarded(tmp_path, 2)
    assert expected["dropped"] == 2  # once an epoch
    for found in one_device_each.load("guarded"):
        assert_all_close(found, expected, list(expected))


def test_too_many_nans_in_a_row_end_both_with_the_same_error_and_one_dump(one_device_each):
    assert one_device_each.exit_codes == [1, 1], one_device_each.outputs
    errors = [re.findall("^FloatingPointError: .*", output, re.MULTILINE) for output in one_device_each.outputs]
    (error,) = {line for found in errors for line in found}  # the slower one may be ended while it prints its own
    assert "the steps of iterations 1 to 2 were dropped: the loss is not finite" in error
    (path,) = (one_device_each.folder / "failing").glob("*.dump")
    dump = read_dump(path)
    first_of_process_1 = [False] * 8 + [True] + [False] * 7
    assert np.isnan(dump["batch"]["x"]).any(axis=1).tolist() == first_of_process_1
    assert dump["state"].step == 2


def test_a_loss_that_is_not_finite_stops_both_at_the_same_iteration_with_the_same_error(two_devices_each):
    outputs = two_devices_each.outputs
    assert two_devices_each.exit_codes == [1, 1], outputs
    for output in outputs:  # its own error, or that of the other, which has been faster
        assert "NonFiniteLossError: the loss of iteration 2, counted from 0, is nan" in output
        assert "in LoggerHook" not in output  # at its next line; no hook is blamed
    assert set(re.findall("^stopped at .*", "".join(outputs), re.MULTILINE)) == {"stopped at 3"}


def test_processes_share_the_examples_of_a_stream_and_resume_at_their_positions(one_device_each, tmp_path):
    expected = training_cases.train_stream(tmp_path, 2)
    parts = one_device_each.load("stream")
    for found in parts:
        assert_all_close(found, expected, [name for name in expected if name.startswith("params")])
    both = np.sort(np.concatenate([found["seen"] for found in parts], axis=1))
    batches = np.sort(training_cases.X[:, 0].reshape(-1, training_cases.BATCH))  # four in a pass
    np.testing.assert_array_equal(both, batches[[0, 1, 2, 3, 0, 1]])


@pytest.mark.parametrize(
    "layout", ["two_devices_each", pytest.param("one_device_each_more", marks=pytest.mark.many_processes)]
)
def test_metrics_on_the_host_get_examples_in_the_order_of_the_dataset_on_process_0(layout, request, tmp_path):
    shards = request.getfixturevalue(layout)
    expected = training_cases.train_ordered(tmp_path, shards.devices)
    parts = shards.load("ordered")
    for kind in ("Pjit", "DataParallel"):
        for found in (expected, *parts):
            np.testing.assert_array_equal(found[f"{kind} own/order"], 2 * np.arange(21))
            np.testing.assert_array_equal(found[f"{kind} dumped"], 2 * np.arange(21))
            np.testing.assert_array_equal(found[f"{kind} texts"], np.arange(21))
            assert found[f"{kind} own/process"] == 0
        assert parts[0][f"{kind} own/drawn"] == parts[1][f"{kind} own/drawn"]


def test_batches_that_are_the_same_on_both_are_named_unless_all_examples_are_equal(one_device_each):
    for part in one_device_each.load("undivided"):
        [warning] = part["warnings"].tolist()
        assert warning.startswith(
            "train_dataloader yields the same first batch on processes 0, 1, whose devices hold different rows: each "
            "example is probably read 2 times"
        )


def test_a_window_that_has_overflowed_continues_with_another_strategy(tmp_path):
    assert training_cases.train_overflow(tmp_path, 2)["iterations"] == 8


@pytest.mark.many_processes
def test_a_window_that_has_overflowed_on_two_continues_with_another_strategy(one_device_each_more, tmp_path):
    expected = training_cases.train_overflow(tmp_path, 2)
    for part in one_device_each_more.load("overflow"):
        assert part["iterations"] == 8
        assert_equal(part, expected, [name for name in expected if name.startswith("params")])


def test_batches_without_an_axis_of_examples_are_read_whole_by_both(one_device_each, tmp_path):
    expected = training_cases.train_whole(tmp_path, 2)
    assert expected["batches"] == 6
    for part in one_device_each.load("whole"):
        assert part.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(part[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_slowest_process_is_named_and_a_profile_requested_from_one_is_taken_by_both(one_device_each):
    first, second = one_device_each.load("watched")
    # exchanges after 1, 3, 7, 8 (where the profile ends) and 10 of 12 iterations: lines after 4, 8 and 12
    found = [re.search(r"slowest: (process \d) on .* \((\S+) s of data and hooks", line) for line in first["slowest"]]
    assert [match[1] for match in found] == ["process 1"] * 3
    assert all(float(match[2]) >= 0.05 for match in found)  # what the hook sleeps
    assert (
        first["profiled"].tolist() == second["profiled"].tolist() == ["Profiling 5 iterations from 3 on, as requested."]
    )
    assert (first["traces"], second["traces"]) == (1, 1)  # each in the directory of its process: the host is the same


def test_one_process_starts_the_pass_again_in_a_stream_that_two_have_read(one_device_each, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jengine"):
        runner = training_cases.make_runner(
            tmp_path,
            train_dataloader=dict(batch_size=training_cases.BATCH, dataset=training_cases.yield_examples),
            train_cfg=dict(max_epochs=2, epoch_length=3),
            resume=one_device_each.folder / "stream" / "iter_2",
        )
        runner.train()
    (line,) = [record.message for record in caplog.records if "The data differ" in record.message]
    assert "data shards: 1 (2 in the checkpoint): 32 examples of pass 1 over the data are repeated" in line
    assert runner.iter == 6


@pytest.mark.many_processes
def test_the_queue_of_swav_holds_the_features_of_both(one_device_each_more, tmp_path):
    expected = training_cases.train_swav(tmp_path, 2)
    assert np.abs(expected["queue"]).max(axis=-1).min() > 0  # full
    for found in one_device_each_more.load("swav"):
        assert_all_close(found, expected, ["queue"])


@pytest.mark.many_processes
def test_the_memory_of_odc_is_the_same_on_both(one_device_each_more, tmp_path):
    expected = training_cases.train_odc(tmp_path, 2)
    assert len(np.unique(expected["labels"])) == 3
    for found in one_device_each_more.load("odc"):
        np.testing.assert_array_equal(found["labels"], expected["labels"])
        assert_all_close(found, expected, list(expected))


EXACT = {"exact_replicas": "masked", "exact_sharded": "weighted", "exact_resumed": "weighted"}  # and their losses


@pytest.fixture(scope="module")
def four_exact(two_devices_each_more, tmp_path_factory):
    """Results of four processes; the last case resumes from two, within a window."""
    return resume_with(4, two_devices_each_more, tmp_path_factory.mktemp("four_exact"))


@pytest.fixture(scope="module")
def three_exact(two_devices_each_more, tmp_path_factory):
    """Results of three processes; the last case resumes from two, within a window."""
    return resume_with(3, two_devices_each_more, tmp_path_factory.mktemp("three_exact"))


@pytest.fixture(scope="module")
def three_after_four(four_exact, tmp_path_factory):
    """Results of three processes; the last case resumes from four, within a window."""
    return resume_with(3, four_exact, tmp_path_factory.mktemp("three_after_four"))


MANY = ("three_exact", "four_exact", "three_after_four")


def resume_with(count, source, folder):
    shutil.copytree(source.folder / "exact_sharded" / f"iter_{SAVED}", folder / "saved")
    return run_cases(folder, list(EXACT), 1, count=count)


def assert_exact(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2.4e-7, err_msg=name)  # 4 in the last place near 1


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        ("two_devices_each", "exact_replicas"),
        ("two_devices_each", "exact_resumed"),
        pytest.param("two_devices_each_more", "exact_sharded", marks=pytest.mark.many_processes),
        *[pytest.param(layout, case, marks=pytest.mark.many_processes) for layout in MANY for case in EXACT],
    ],
)
def test_processes_have_the_parameters_of_one_with_every_feature_at_once(request, one_process, layout, case):
    for found in request.getfixturevalue(layout).load(case):
        assert_exact(found, one_process[0][EXACT[case]])


@pytest.mark.parametrize(
    "layout", ["two_devices_each", *[pytest.param(layout, marks=pytest.mark.many_processes) for layout in MANY]]
)
def test_one_process_resumes_the_replicas_of_several_within_a_window(request, one_process, tmp_path, layout):
    exact = request.getfixturevalue(layout)
    exact.load("exact_replicas")
    found = train_alone(tmp_path, "masked", resume=exact.folder / "exact_replicas" / f"iter_{SAVED}")
    assert_exact(found, one_process[0]["masked"])
