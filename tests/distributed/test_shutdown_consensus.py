"""Test exchanges and consensus, with threads as processes and a dict as the store of the coordination service."""

import concurrent.futures
import pathlib
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.distributed import gather
from jengine.distributed.failures import FailureDetector, ProcessError
from jengine.distributed.gather import all_gather_objects
from jengine.distributed.processes import (
    Processes,
    ProcessMismatchError,
    SingleProcess,
    assert_equal_across_processes,
    first_difference,
)
from jengine.distributed.shutdown_consensus import ShutdownConsensus


class DictStore:
    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_delete(self, key):
        with self.changed:
            self.values.pop(key, None)

    def key_value_dir_get(self, key):
        with self.changed:
            return [item for item in self.values.items() if item[0].startswith(f"{key}/")]

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


@pytest.fixture
def run():
    """Call a function for each process, in threads, and return the results or exceptions."""
    detectors = []

    def call(function, count=3, arrived=None, timeout=30.0):
        store = DictStore()
        processes = []
        for index in range(count) if arrived is None else arrived:
            detector = FailureDetector(store, index, count, poll=0.002, grace=30.0, answer_time=30.0)
            detectors.append(detector)
            detector.start()
            processes.append(Processes(store, index, count, timeout, detector))
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(function, process) for process in processes]
            return [future.exception() or future.result() for future in futures]

    yield call
    for detector in detectors:
        detector.stop_thread()


def test_all_gather_returns_the_values_of_all_processes(run):
    def work(processes):
        return [processes.all_gather("numbers", [processes.index, round_]) for round_ in range(4)]

    expected = [[[process, round_] for process in range(3)] for round_ in range(4)]
    assert run(work) == [expected] * 3


def test_lists_of_any_size_are_gathered_in_the_order_of_processes(run, monkeypatch):
    monkeypatch.setattr(gather, "_CHUNK_SIZE", 16)
    found = run(lambda processes: all_gather_objects([(processes.index, "x" * 9 * processes.index)], "M", processes))
    assert found == [[(0, ""), (1, "x" * 9), (2, "x" * 18)]] * 3
    assert all_gather_objects([1, 2], "M", SingleProcess()) == [1, 2]


def test_gathered_values_arrive_with_their_types_and_bits(run):
    arrays = [
        np.array([[1.5, -np.inf]], ">f4"),
        np.zeros((0, 3), np.int64),
        np.array(True),
        np.arange(3, dtype=jnp.bfloat16),
        np.array(["a", "bcd"]),
        np.array(["2020-01-01"], "datetime64[D]"),
    ]
    plain = [None, True, 7, 2**80, "\u00e9", b"\x00\xff", (1, [2.5, float("-inf")]), {"a": {3: (), (1, 2): []}}]
    (found, _) = run(lambda processes: all_gather_objects([*plain, *arrays, np.float32(0.1)], "M", processes), count=2)
    own = found[: len(found) // 2]
    assert own[: len(plain)] == plain
    assert [type(value) for value in own] == [type(value) for value in [*plain, *arrays, np.float32(0.1)]]
    for got, array in zip(own[len(plain) :], arrays, strict=False):
        assert got.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(got, array)
    own[len(plain)] += 1  # arrays can be changed, as those of the process itself
    assert own[-1] == np.float32(0.1)


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        ({"boxes": [1, {2}]}, "Recall: results[1]['boxes'][1]", "set"),
        (np.array([None]), "Recall: results[1]", "an array of object"),
        ((1, DictStore), "Recall: results[1][1]", "type"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named_with_its_metric(run, value, where, kind):
    errors = run(lambda processes: all_gather_objects([0, value], "Recall", processes), count=2)
    for error in errors:
        assert isinstance(error, TypeError)
        assert str(error).startswith(f"{where} must be None, a bool, a number,")
        assert str(error).endswith(f"got {kind}")


def test_all_gather_names_the_missing_processes(run):
    (error,) = run(lambda processes: processes.all_gather("the start", 1), count=3, arrived=[1], timeout=0.05)
    assert isinstance(error, ProcessError)
    assert error.processes == [0, 2]
    assert str(error) == "process 0, process 2 did not reach 'the start' within 0.05 s; 1 of 3 processes did"


def test_a_failure_ends_the_wait_of_the_others_with_its_message(run):
    def work(processes):
        if processes.index == 1:
            processes.fail(KeyError("colour"))
            return "failed"
        return processes.all_gather("the start", 1)

    first, second, third = run(work)
    assert second == "failed"
    for error in (first, third):
        assert isinstance(error, ProcessError)
        assert error.processes == [1]
        assert "process 1 (pid " in str(error)
        assert str(error).endswith("failed: KeyError: 'colour'")


def test_a_broken_collective_is_explained_by_a_missing_process():
    store = DictStore()
    detector = FailureDetector(store, 0, 2, poll=0.002, answer_time=0.05)
    detector.start()
    processes = Processes(store, 0, 2, failure_detector=detector)
    error = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    with pytest.raises(ProcessError, match="process 1 is gone: no answer for 0.05 s") as raised:
        processes.fail(error)
    assert raised.value.__cause__ is error
    detector.stop_thread()


def test_the_first_to_detect_a_missing_process_determines_the_error_of_all():
    error = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    store, raised = DictStore(), {}
    detectors = {index: FailureDetector(store, index, 3, poll=0.002, grace=30.0, answer_time=0.1) for index in (0, 1)}
    for detector in detectors.values():
        detector.start()
    for index in (1, 0):  # process 1 has ended when the collective of process 0 breaks
        with pytest.raises(ProcessError, match=r"^process 2 is gone: no answer for 0.1 s$") as raised[index]:
            detectors[index].diagnose(error)
        detectors[index].stop_thread()
    assert [raised[index].value.processes for index in (0, 1)] == [[2], [2]]


def test_a_process_that_others_count_as_gone_ends_with_that_reason():
    store = DictStore()
    first, second = (FailureDetector(store, index, 2, poll=0.002, grace=30.0, answer_time=0.05) for index in (0, 1))
    first.start()
    with pytest.raises(ProcessError):  # the second does not answer: its thread has not started
        first.diagnose(RuntimeError("UNAVAILABLE: closed"))
    first.stop_thread()
    with pytest.raises(
        ProcessError, match=r"^process 0 \(pid .*\) has ended the run: process 1 \(pid .*\) is gone: no an"
    ):
        second.diagnose(RuntimeError("UNAVAILABLE: closed"))


def test_a_runtime_error_is_kept_if_all_processes_answer(run):
    def work(processes):
        if processes.index == 0:
            processes.fail(RuntimeError("INTERNAL: out of luck"))  # would raise if another process were the cause
        return "kept"

    assert run(work, count=2) == ["kept", "kept"]


def pass_points(consensus, requested_at, count, pause=0.001):
    """Pass points like a loop until all end; return the point and the request, or None if they do not end."""
    clock = threading.Event()
    for point in range(1, count + 1):
        request = consensus.check(15 if requested_at is not None and point >= requested_at else None)
        if request is not None:
            return point, request
        clock.wait(pause)
    return None


@pytest.mark.parametrize("requested_at", [[5, None, None], [5, 40, 3], [None, 1, None]])
def test_all_end_at_the_same_point_despite_different_requests_and_speeds(run, requested_at):
    def work(processes):
        with ShutdownConsensus(processes) as consensus:
            return pass_points(consensus, requested_at[processes.index], 3000, pause=0.001 * (1 + processes.index))

    found = run(work)
    assert len(set(found)) == 1, found
    point, request = found[0]
    assert min(at for at in requested_at if at) <= point
    assert request == 15


def test_a_request_after_the_last_point_is_ignored(run):
    def work(processes):
        with ShutdownConsensus(processes) as consensus:
            for point in range(3):
                assert consensus.check(2 if processes.index == 0 and point == 2 else None) is None
        return "done"

    assert run(work) == ["done"] * 3


def test_a_second_consensus_is_independent_of_the_first(run):
    def work(processes):
        ends = []
        for requested_at in (3, None):
            with ShutdownConsensus(processes) as consensus:
                ends.append(pass_points(consensus, requested_at, 1000 if requested_at else 20))
        return ends

    found = run(work, count=2)
    assert found[0] == found[1]
    assert found[0][0] is not None
    assert found[0][1] is None


def test_a_single_process_ends_at_once():
    with ShutdownConsensus(SingleProcess()) as consensus:
        assert consensus.check(None) is None
        assert consensus.check(15) == 15
    assert SingleProcess().all_gather("anything", 3) == [3]


def test_different_configs_are_an_error_on_every_process_with_the_first_difference(run):
    def start(processes):
        lr = 0.2 if processes.index == 2 else 0.1
        assert_equal_across_processes(
            processes, {"config": {"optim_wrapper": {"optimizer": {"lr": lr}}, "hooks": [1, {"type": dict}]}}
        )

    for error in run(start):
        assert isinstance(error, ProcessMismatchError)
        assert str(error).startswith(
            "`config.optim_wrapper.optimizer.lr` must be the same on all processes, got 0.1 on process 0 and 0.2 on "
            "process 2"
        )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.float32(0.1), np.float32(0.2)),
        (np.float32(0.1), np.float64(np.float32(0.1))),
        (np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500)),
        (jnp.ones(3), jnp.zeros(3)),
        (np.dtype("int8"), np.dtype("int16")),
        (pathlib.Path("a"), pathlib.Path("b")),
        (1 + 1j, 1 - 1j),
        ({1, 2}, {1, 3}),
        (lambda x: x + 1, lambda x: x + 2),
    ],
)
def test_values_are_compared_and_not_only_their_types(run, first, second):
    def start(processes):
        value = second if processes.index == 1 else first
        assert_equal_across_processes(processes, {"config": {"model": [value]}})

    for error in run(start, count=2):
        assert isinstance(error, ProcessMismatchError)
        assert str(error).startswith("`config.model[0]")


def test_equal_configs_with_objects_and_nan_pass(run):
    def start(processes):
        return (
            assert_equal_across_processes(
                processes, {"hook": object(), "call": print, "nan": float("nan"), "steps": (1, 2)}
            )
            or "same"
        )

    assert run(start, count=2) == ["same", "same"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, ("a[1]", "2", "3")),
        ({"a": [1, 2]}, {"a": [1]}, ("a", "[1, 2]", "[1]")),
        ({"a": 1}, {"a": 1, "b": {"c": 2}}, ("b", "nothing", "{'c': 2}")),
        ({"a": None, "b": 1}, {"b": 1}, ("a", "None", "nothing")),
        ({"a": 1}, {"a": 1}, None),
    ],
)
def test_first_difference(one, other, expected):
    assert first_difference(one, other) == expected
