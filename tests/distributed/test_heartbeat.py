import pytest

from jengine.distributed.failures import FailureDetector, ProcessError
from jengine.distributed.heartbeat import Pulse
from tests.distributed.test_shutdown_consensus import DictStore


def ring(count=3):
    store = DictStore()
    return [Pulse(store, index, count, silence=10.0) for index in range(count)]


def test_as_long_as_all_give_signs_nobody_is_gone():
    pulses = ring()
    for now in range(100):
        assert not any(pulse.beat(now) for pulse in pulses)


def test_a_silent_process_is_gone_for_the_one_before_it():
    pulses = ring()
    for now in range(21):
        assert not any(pulse.beat(now) for pulse in pulses)
    found = {now: [pulse.beat(now) for pulse in (pulses[0], pulses[2])] for now in range(21, 40)}
    assert pulses[0].next == 1
    assert min(now for now, (first, _) in found.items() if first) == 32  # the last sign is heard at 21
    assert not any(second for _, second in found.values())  # that one listens to process 0


def test_a_process_that_has_not_begun_or_has_left_is_not_silent():
    first, second, _ = ring()
    for now in range(50):
        assert not first.beat(now)
    for now in range(50, 60):
        first.beat(now), second.beat(now)
    second.stop()
    for now in range(60, 100):
        assert not first.beat(now)


def test_all_are_told_who_is_gone():
    store = DictStore()
    first, second, third = (FailureDetector(store, index, 3, silence=10.0) for index in range(3))
    for now in range(20):
        for detector in (first, second, third):
            detector._look(now)
    for now in range(20, 40):
        for detector in (first, third):
            detector._look(now)
    for detector in (first, third):
        with pytest.raises(ProcessError, match=r"process 1 \(pid .*\) is gone: no sign of life for 10 s") as raised:
            detector.raise_failure()
        assert raised.value.processes == [1]
