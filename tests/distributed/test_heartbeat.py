import pytest

from jengine.distributed.failures import FailureDetector, ProcessError
from jengine.distributed.heartbeat import Heartbeat
from tests.distributed.test_shutdown_consensus import DictStore


def create_heartbeats(count=3):
    store = DictStore()
    return [Heartbeat(store, index, count, timeout=10.0) for index in range(count)]


def test_no_process_is_dead_while_all_send_heartbeats():
    heartbeats = create_heartbeats()
    for now in range(100):
        assert not any(heartbeat.beat(now) for heartbeat in heartbeats)


def test_a_process_without_heartbeats_is_dead_for_the_one_that_watches_it():
    heartbeats = create_heartbeats()
    for now in range(21):
        assert not any(heartbeat.beat(now) for heartbeat in heartbeats)
    dead = {now: [heartbeat.beat(now) for heartbeat in (heartbeats[0], heartbeats[2])] for now in range(21, 40)}
    assert heartbeats[0].watched == 1
    assert min(now for now, (first, _) in dead.items() if first) == 32  # the last heartbeat is read at 21
    assert not any(second for _, second in dead.values())  # process 2 watches process 0


def test_a_process_that_has_not_started_or_has_stopped_is_not_dead():
    first, second, _ = create_heartbeats()
    for now in range(50):
        assert not first.beat(now)
    for now in range(50, 60):
        first.beat(now), second.beat(now)
    second.stop()
    for now in range(60, 100):
        assert not first.beat(now)


def test_all_processes_report_the_dead_one():
    store = DictStore()
    first, second, third = (FailureDetector(store, index, 3, heartbeat_timeout=10.0) for index in range(3))
    for now in range(20):
        for detector in (first, second, third):
            detector._read_store(now)
    for now in range(20, 40):
        for detector in (first, third):
            detector._read_store(now)
    for detector in (first, third):
        with pytest.raises(ProcessError, match=r"process 1 \(pid .*\) is gone: no heartbeat for 10 s") as raised:
            detector.raise_failure()
        assert raised.value.processes == [1]
