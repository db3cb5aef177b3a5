"""Test the logger of a run: formats, files, processes, and verbatim output on the terminal."""

import io
import logging
import re

import pytest
from rich.console import Console
from rich.progress import Progress

from jengine.config.errors import ConfigError
from jengine.logging import build_logger, console, current_logger, open_log_file
from jengine.logging.tables import format_table
from tests.refusals import check_refusal


@pytest.fixture(autouse=True)
def remove_loggers(monkeypatch):
    """Remove the loggers that a test builds."""
    monkeypatch.setattr(console, "_loggers", {})
    yield
    for name in console._loggers:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


@pytest.fixture
def tty(monkeypatch):
    """Replace the terminal with a TTY of 40 columns."""
    out = io.StringIO()
    fake = Console(file=out, force_terminal=True, width=40, color_system="standard", highlight=False)
    monkeypatch.setattr(console, "terminal", fake)
    return out


def test_terminal_and_file_formats(tmp_path, capsys):
    path = tmp_path / "new" / "run.log"
    build_logger("engine", str(path)).info("Epoch(train) [1][2/4]")
    assert re.fullmatch(
        r"\d\d/\d\d \d\d:\d\d:\d\d - engine - INFO - Epoch\(train\) \[1\]\[2/4\]\n", capsys.readouterr().out
    )
    assert re.fullmatch(
        r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d - engine - INFO - Epoch\(train\) \[1\]\[2/4\]\n", path.read_text()
    )


def test_control_characters_are_escaped_and_other_characters_kept(tmp_path, capsys):
    logger = build_logger("escaped", str(tmp_path / "run.log"))
    text = "x\x1b[2J\x07\r\x9b\x7f\u202ey\ud800\x00 | größe 損失 🚀 مرحبا\n+---+\n|\ta |"
    escaped = r"x\x1b[2J\x07\r\x9b\x7f\u202ey\ud800\x00 | größe 損失 🚀 مرحبا" + "\n+---+\n|\ta |\n"
    logger.info("%s", text)
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("failed")
    for output in (capsys.readouterr().out, (tmp_path / "run.log").read_text(encoding="utf-8")):
        assert output.count(escaped) == 2
        assert set("\x1b\x07\r\x9b\x7f\u202e\ud800\x00").isdisjoint(output)


def test_pipes_receive_the_line_verbatim(capsys):
    text = "[bold]x[/bold] :smile: [1, 2]\tloss: " + "9" * 500 + "  "
    build_logger("engine").warning(text)
    assert capsys.readouterr().out.endswith(f" - WARNING - {text}\n")


def test_terminals_receive_one_unwrapped_line_without_markup(tty):
    text = "[bold]x[/bold] :smile: " + "9" * 500
    build_logger("engine").info(text)
    assert re.fullmatch(rf"\d\d:\d\d:\d\d {re.escape(text)}\n", tty.getvalue())


def test_terminals_show_errors_in_color(tty):
    build_logger("engine").error("broken")
    assert re.match(r"\d\d:\d\d:\d\d \x1b\[1;31mERROR\x1b\[0m .*broken\n", tty.getvalue())


def test_terminals_continue_scalars_below_and_leave_out_a_rate_that_comes_twice(tty):
    line = "Epoch(train) [1][2/4]  base_lr: 1.0000e-01 lr: 1.0000e-01  eta: 0:00:30  loss: 4.5000"
    build_logger("engine").info(line)
    rows = ["Epoch(train) [1][2/4]", "         lr: 1.0000e-01  eta: 0:00:30", "         loss: 4.5000"]
    assert tty.getvalue()[9:] == "\n".join(rows) + "\n"


def test_terminals_show_tables_with_rules_and_files_as_plain_text(tty, tmp_path):
    path = tmp_path / "run.log"
    table = format_table(["pattern", "n"], [["bias|scale | x", 10], ["größe 損失", None]], title="Groups")
    build_logger("engine", str(path)).info("done\n%s\nend", table)
    assert path.read_text().endswith(f"done\n{table}\nend\n")
    shown = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", tty.getvalue()).splitlines()[1:]]
    assert shown == [
        "Groups",
        "pattern        │  n",
        "───────────────┼───",
        "bias|scale │ x │ 10",
        "größe 損失     │",
        "",
        "end",
    ]
    assert "\x1b[1mpattern" in tty.getvalue()  # bold


def test_errors_have_the_file_the_function_and_the_line(tmp_path, capsys):
    logger = build_logger("engine", str(tmp_path / "run.log"))
    logger.error("broken")
    line = rf"- engine - ERROR - {re.escape(__file__)} - test_errors_have_the_file_the_function_and_the_line - \d+ - broken\n"
    assert re.search(line, capsys.readouterr().out)
    assert re.search(line, (tmp_path / "run.log").read_text())


def test_a_log_file_is_written_in_parts_with_the_handler_of_the_config(tmp_path):
    path = tmp_path / "run.log"
    cfg = dict(type="RotatingFileHandler", maxBytes=120, backupCount=2)
    logger = build_logger("engine", str(path), file_handler_cfg=cfg)
    for i in range(5):
        logger.info("line %d, of fifty characters or so with the time", i)
    parts = [[line[-40:-38] for line in part.read_text().splitlines()] for part in (path, tmp_path / "run.log.1")]
    assert [len(part) for part in parts] == [1, 1]
    assert "line 4" in path.read_text()
    assert "line 3" in (tmp_path / "run.log.1").read_text()


@pytest.mark.parametrize(
    ("cfg", "error", "words"),
    [
        (dict(type="RotatingHandler"), ConfigError, ["RotatingFileHandler"]),
        (dict(type="RotatingFileHandler", max_bytes=1), TypeError, ["max_bytes"]),
    ],
)
def test_wrong_file_handlers_are_refused(tmp_path, cfg, error, words):
    check_refusal(lambda: build_logger("engine", str(tmp_path / "run.log"), file_handler_cfg=cfg), error, *words)


def test_log_lines_and_a_progress_bar_share_the_terminal(tty):
    logger = build_logger("engine")
    with Progress(console=console.terminal, auto_refresh=False) as progress:
        progress.add_task("epoch", total=2)
        progress.refresh()
        logger.info("a line")
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line) for line in tty.getvalue().splitlines()]
    assert any(re.fullmatch(r"\d\d:\d\d:\d\d a line", line) for line in lines)  # on its own line, not inside the bar


def test_log_file_is_appended_to(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("before\n")
    build_logger("engine", str(path)).info("after")
    assert path.read_text().startswith("before\n")
    assert path.read_text().endswith("after\n")


def test_the_log_file_has_all_levels_and_the_terminal_those_of_the_config(tmp_path, capsys):
    path = tmp_path / "run.log"
    logger = build_logger("engine", str(path), level="WARNING")
    logger.debug("details")
    logger.warning("careful")
    assert path.read_text().count("\n") == 2
    assert "engine - DEBUG - details" in path.read_text()
    assert capsys.readouterr().out.endswith("engine - WARNING - careful\n")


def test_a_deleted_log_file_can_be_opened_again(tmp_path):
    path = tmp_path / "logs" / "run.log"
    logger = build_logger("engine", str(path))
    logger.info("before")
    path.unlink()
    path.parent.rmdir()
    open_log_file(logger, str(path))
    logger.info("after")
    assert path.read_text().endswith("after\n")
    assert path.read_text().count("\n") == 1


def test_building_twice_prints_once_and_switches_to_the_new_file(tmp_path, capsys):
    build_logger("engine", str(tmp_path / "1.log"))
    logger = build_logger("engine", str(tmp_path / "2.log"))
    logger.info("hello")
    assert capsys.readouterr().out.count("hello") == 1
    assert (tmp_path / "1.log").read_text() == ""
    assert (tmp_path / "2.log").read_text().count("hello") == 1


def test_handlers_of_the_user_are_kept(tmp_path):
    handler = logging.NullHandler()
    logging.getLogger("engine").addHandler(handler)
    assert handler in build_logger("engine").handlers


def test_records_do_not_propagate_to_the_root_logger(caplog, capsys):
    build_logger("engine").error("only here")
    assert capsys.readouterr().out.count("only here") == 1
    assert caplog.records == []


def test_child_loggers_log_through_the_run_logger(capsys):
    build_logger("engine")
    logging.getLogger("engine.hooks").info("from a module")
    assert "- engine.hooks - INFO - from a module" in capsys.readouterr().out


def test_repeated_warnings_are_printed_once(tmp_path, capsys):
    path = tmp_path / "run.log"
    logger = build_logger("engine", str(path))
    for _ in range(3):
        logger.warning("careful %d", 1)
        logger.info("again")
    logger.warning("careful %d", 2)
    for text in (capsys.readouterr().out, path.read_text()):
        assert (text.count("careful 1"), text.count("careful 2"), text.count("again")) == (1, 1, 3)


def test_number_of_remembered_warnings_is_bounded():
    warning_filter = console._RecordFilter()
    for number in range(2500):
        record = logging.LogRecord("x", logging.WARNING, "", 0, f"at {number}", None, None)
        assert warning_filter.filter(record)
    assert len(warning_filter._seen) <= 1000


def test_processes_other_than_the_first_print_only_errors(monkeypatch, capsys):
    monkeypatch.setattr(console, "_process_index", lambda: 1)
    logger = build_logger("engine")
    logger.info("quiet")
    logger.warning("quiet")
    logger.error("loud")
    out = capsys.readouterr().out
    assert "quiet" not in out
    assert "loud" in out


def test_level_can_be_a_name_or_a_number(capsys):
    build_logger("engine", level="warning").info("no")
    build_logger("engine", level=logging.DEBUG).debug("yes")
    assert capsys.readouterr().out.endswith("engine - DEBUG - yes\n")
    with pytest.raises(ValueError, match="INFOO"):
        build_logger("engine", level="INFOO")


def test_current_logger_is_the_one_built_last():
    assert current_logger() is logging.getLogger("jengine")
    first, second = build_logger("first"), build_logger("second")
    assert current_logger() is second
    assert build_logger("first") is first
    assert current_logger() is first
