import io
import logging
import re
import threading

import pytest
from rich.console import Console
from rich.progress import Progress

from jengine.logging import console
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


@pytest.fixture
def tty(monkeypatch):
    """Replace the terminal with a TTY that sets an event when the spinner is drawn."""

    class Out(io.StringIO):
        def __init__(self):
            super().__init__()
            self.drawn = threading.Event()

        def write(self, text):
            if "compiling" in text:
                self.drawn.set()
            return super().write(text)

    out = Out()
    monkeypatch.setattr(console, "terminal", Console(file=out, force_terminal=True, width=60))
    return out


def test_a_quick_call_is_not_reported(lines, tty):
    with report_if_slow("compiling the step", logger=lines.logger):
        pass
    assert lines.texts == []
    assert tty.getvalue() == ""


def test_a_slow_call_is_reported_once_with_its_seconds(lines):
    with report_if_slow("compiling the step", after=0.0, logger=lines.logger):
        assert lines.arrived.wait(10)
    assert lines.texts[0] == "Compiling the step takes more than 0 s."
    assert re.fullmatch(r"Compiling the step took \d+ s\.", lines.texts[1])
    assert len(lines.texts) == 2


def test_a_terminal_shows_a_spinner_with_the_seconds(lines, tty):
    with report_if_slow("compiling the step", after=0.0, logger=lines.logger):
        assert tty.drawn.wait(10)
    assert re.search(r"compiling the step \S*0:00:0\d", tty.getvalue())


def test_the_spinner_can_be_shown_with_a_progress_bar(lines, tty):
    with Progress(console=console.terminal) as bar:
        bar.add_task("training", total=4)
        with report_if_slow("compiling the step", after=0.0, logger=lines.logger):
            assert tty.drawn.wait(10)
    assert "training" in tty.getvalue()


def test_an_error_of_the_call_is_raised_and_ends_the_spinner(lines, tty):
    def fail():
        with report_if_slow("compiling the step", after=0.0, logger=lines.logger):
            assert tty.drawn.wait(10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(lines.texts) == 1
