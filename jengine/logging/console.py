"""Set up the run's logger: one format on the terminal, one in the log file; progress bars share the terminal."""

import functools
import logging
import pathlib
from typing import IO, Any

import jax
from rich.console import Console
from rich.text import Text

from jengine.errors import closest

terminal = Console(highlight=False)
"""Share the only console of the process, so that a progress bar and log lines do not overwrite each other."""

_LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
_REMEMBERED_WARNINGS = 1000
_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"

_built: dict[str, logging.Logger] = {}


def build_logger(name: str = "jengine", log_file: str | None = None, level: int | str = "INFO") -> logging.Logger:
    """Set up the logger of a run.

    It writes `MM/DD HH:MM:SS - name - LEVEL - text` to the terminal and, with the year in front, to `log_file`. Its
    records do not reach the root logger, so that other libraries' handlers do not print them again. A warning that
    repeats word for word is printed once. Processes other than the first print errors only.

    Building a name again replaces the earlier setup: a second run in the same process writes to its own file.

    Args:
      name: the logger's name. It also prints the records of 'name.something'.
      log_file: a file to append to; its directory is made. None writes to the terminal alone.
      level: the lowest level that is printed: 'DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL' or a number.

    Returns:
      The logger, the same as `logging.getLogger(name)`.

    Raises:
      ValueError: a level that does not exist.
    """
    number = level_number(level)
    logger = logging.getLogger(name)
    for handler in list(logger.handlers):
        if isinstance(handler, _TerminalHandler | _RunFileHandler):
            logger.removeHandler(handler)
            handler.close()
    handlers: list[logging.Handler] = [_TerminalHandler()]
    handlers[0].setFormatter(_Formatter(_FORMAT, "%m/%d %H:%M:%S"))
    if log_file is not None:
        pathlib.Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_RunFileHandler(log_file, mode="a", encoding="utf-8", delay=_process_index() != 0))
        handlers[1].setFormatter(_Formatter(_FORMAT, "%Y/%m/%d %H:%M:%S"))
    for handler in handlers:
        handler.addFilter(_first_process_or_error)
        handler.addFilter(_RepeatedWarnings())
        logger.addHandler(handler)
    logger.setLevel(number)
    logger.propagate = False
    _built.pop(name, None)
    _built[name] = logger
    return logger


def current_logger() -> logging.Logger:
    """Return the logger that `build_logger` set up last; `logging.getLogger('jengine')` if there is none."""
    return next(reversed(_built.values())) if _built else logging.getLogger("jengine")


def print_log(msg: Any, logger: logging.Logger | str | None = None, level: int = logging.INFO) -> None:
    """Print or log a message.

    Args:
      msg: the message.
      logger: None prints on the terminal, 'silent' does nothing, 'current' takes the logger built last; else a logger
        or the name of one that was built.
      level: the level of the record, unused without a logger.

    Raises:
      ValueError: no logger of that name was built. TypeError: `logger` of another type.
    """
    if logger is None:
        write_line(str(msg))
    elif isinstance(logger, logging.Logger):
        logger.log(level, msg)
    elif logger == "current":
        current_logger().log(level, msg)
    elif isinstance(logger, str) and logger in _built:
        _built[logger].log(level, msg)
    elif isinstance(logger, str) and logger != "silent":
        raise ValueError(f"no logger called {logger!r} was built{closest(logger, ['current', 'silent', *_built])}")
    elif not isinstance(logger, str):
        found = type(logger).__name__
        raise TypeError(f"`logger` must be a logger, its name, 'silent', 'current' or None, got {found}")


def write_line(line: str, level: str = "INFO") -> None:
    """Write a line to the terminal unchanged: never wrapped, its brackets no markup, coloured only on a TTY.

    Args:
      line: the text; its first occurrence of ` - level - ` gets the colour of the level.
      level: the name of the level.
    """
    file = terminal.file
    if not _is_terminal(file):
        print(line, file=file, flush=True)
        return
    text = Text(line)
    start = line.find(f" - {level} - ")
    if start >= 0 and level in _LEVEL_STYLES:
        text.stylize(_LEVEL_STYLES[level], start + 3, start + 3 + len(level))
    terminal.print(text, soft_wrap=True)


@functools.lru_cache(maxsize=1)
def _is_terminal(file: IO[str]) -> bool:
    """Return whether `file` is a TTY; cached, because the call costs as much as writing a line."""
    return terminal.is_terminal


class _Formatter(logging.Formatter):
    """Format records, and the time once a second."""

    _second = -1
    _text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the time of the record."""
        second = int(record.created)
        if second != self._second:
            self._text, self._second = super().formatTime(record, datefmt), second
        return self._text


class _TerminalHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record), record.levelname)
        except Exception:  # the rule of the logging library: a record that cannot be written does not end the run
            self.handleError(record)


class _RunFileHandler(logging.FileHandler):
    """Mark a file handler that `build_logger` made, and may replace."""


class _RepeatedWarnings(logging.Filter):
    """Let a warning through the first time that its text comes."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for a warning whose text is new, and for all other records."""
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        if text in self._seen:
            return False
        if len(self._seen) >= _REMEMBERED_WARNINGS:  # texts that carry a number are all different
            self._seen.clear()
        self._seen.add(text)
        return True


def _first_process_or_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or _process_index() == 0


def _process_index() -> int:
    # asking jax starts its backends, which must not happen before the processes have been joined
    return jax.process_index() if jax.distributed.is_initialized() else 0


def level_number(level: int | str) -> int:
    """Return the number of a log level, given by its name in any case or by the number.

    Raises:
      ValueError: there is no such level.
    """
    if isinstance(level, int):
        return level
    names = logging.getLevelNamesMapping()
    if str(level).upper() not in names:
        raise ValueError(f"no log level is called {level!r}{closest(str(level), names)}")
    return names[str(level).upper()]
