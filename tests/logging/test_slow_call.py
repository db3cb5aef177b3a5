import logging
import re
import threading

import pytest

from jengine.logging.slow_call import report_if_slow


class Lines(logging.Handler):
    """Collect log lines, and set an event at each of them."""

    def __init__(self):
        super().__init__()
        self.texts, self.arrived = [], threading.Event()

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.arrived.set()


@pytest.fixture
def lines():
    handler = Lines()
    handler.logger = logging.Logger("slow")
    handler.logger.addHandler(handler)
    return handler


def test_a_quick_call_is_not_reported(lines):
    with report_if_slow("compiling the step", logger=lines.logger):
        pass
    assert lines.texts == []


def test_a_slow_call_is_reported_once_with_its_seconds(lines):
    with report_if_slow("compiling the step", after=0.0, logger=lines.logger):
        assert lines.arrived.wait(10)
    assert lines.texts[0] == "Compiling the step takes more than 0 s."
    assert re.fullmatch(r"Compiling the step took \d+ s\.", lines.texts[1])
    assert len(lines.texts) == 2


def test_an_error_of_the_call_is_raised_without_the_time_that_it_took(lines):
    def fail():
        with report_if_slow("compiling the step", after=0.0, logger=lines.logger):
            assert lines.arrived.wait(10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(lines.texts) == 1
