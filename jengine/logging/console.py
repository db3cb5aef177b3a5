"""Logger of a run: formats for the terminal and the log file, and a terminal shared with
progress bars.
"""

import functools
import logging
import logging.handlers
import os
import pathlib
import re
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

import jax
from rich.console import Console
from rich.text import Text

from jengine.config.errors import ConfigError

terminal = Console(highlight=False)
"""The only console of the process: otherwise progress bars and log lines overwrite each other."""

_LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
_MAX_SEEN_WARNINGS = 1000
_LOGGED = "_jengine_log_file"  # attribute of a logged error
# ASCII's, those of Latin-1, separators of lines, overrides of the writing direction, and halves of
# surrogate pairs
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# tables of `format_table`, their bars, and a base rate that equals the rate after it
_TABLE = re.compile(r"^(\+-[-+]*\+)\n(\|.+)\n\1\n((?:\|.+\n)*)\1$", re.MULTILINE)
_SIDES = re.compile(r"^\| | \|$", re.MULTILINE)
_BAR = re.compile(r"(?<!\S)\|(?!\S)")
_RULES = str.maketrans("-+", "─┼")
_SAME_RATE = re.compile(r"base_lr: (\S+) (?=lr: \1 )")
_FILE_HANDLERS: dict[str, type[logging.FileHandler]] = {
    "FileHandler": logging.FileHandler,
    "RotatingFileHandler": logging.handlers.RotatingFileHandler,
    "TimedRotatingFileHandler": logging.handlers.TimedRotatingFileHandler,
    "WatchedFileHandler": logging.handlers.WatchedFileHandler,
}

_loggers: dict[str, logging.Logger] = {}


def build_logger(
    name: str = "jengine",
    log_file: str | None = None,
    level: int | str = "INFO",
    file_handler_cfg: Mapping[str, Any] | None = None,
) -> logging.Logger:
    """Set up and return `logging.getLogger(name)` as the run logger.

    It writes `MM/DD HH:MM:SS - name - LEVEL - text` to the terminal (a TTY gets `HH:MM:SS text`,
    with the level if it is not INFO) and, preceded by the year and at every level, to `log_file`;
    errors have the file, the function and the line before the text.
    A record with the attribute `on_terminal`, of `extra=`, has that text there, and is left out
    above the level DEBUG if it is "". Records do not propagate to the root logger, where handlers
    of other libraries would print them again. Identical warnings are printed once. Processes other
    than the first only print errors.

    Building a logger again replaces the handlers: a second run in the same process writes to
    another file.

    Args:
      name: the logger name; it also prints the records of child loggers, such as 'name.child'.
      log_file: see `open_log_file`. None writes to the terminal only.
      file_handler_cfg: see `set_file_handler`.
      level: the lowest level to print on the terminal: 'DEBUG', 'INFO', 'WARNING', 'ERROR',
        'CRITICAL' or a number.
    """
    logger = logging.getLogger(name)
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, _Formatter):  # those of the user stay
            logger.removeHandler(handler)
            handler.close()
    terminal_handler = _TerminalHandler(level.upper() if isinstance(level, str) else level)
    terminal_handler.setFormatter(_TerminalFormatter("%m/%d %H:%M:%S"))
    terminal_handler.addFilter(_RecordFilter())
    logger.addHandler(terminal_handler)
    logger.setLevel(terminal_handler.level)
    logger.propagate = False
    if log_file is not None:
        open_log_file(logger, log_file, file_handler_cfg)
    _loggers.pop(name, None)  # the newest logger is the last entry
    _loggers[name] = logger
    return logger


def open_log_file(
    logger: logging.Logger, log_file: str, file_handler_cfg: Mapping[str, Any] | None = None
) -> None:
    """Append the records from now on to a file as well, instead of an earlier one of the logger.

    Args:
      logger: a logger of `build_logger`.
      log_file: the file, which is created with its directory, also again after it was deleted.
      file_handler_cfg: see `set_file_handler`; None keeps the handler of a file that is open.
    """
    path = pathlib.Path(os.path.abspath(log_file))
    open_files = _file_handlers(logger)
    if file_handler_cfg is not None or [file.baseFilename for file in open_files] != [str(path)]:
        options = dict(file_handler_cfg or {})
        kind = options.pop("type", "FileHandler")
        if kind not in _FILE_HANDLERS:
            raise ConfigError(
                f"`file_handler_cfg.type` must be one of {', '.join(_FILE_HANDLERS)}, got {kind!r}"
            )
        file = _FILE_HANDLERS[kind](path, encoding="utf-8", delay=True, **options)
        file.setFormatter(_Formatter("%Y/%m/%d %H:%M:%S"))
        file.addFilter(_RecordFilter())
        logger.addHandler(file)
        # The file gets every level; the terminal's handler has a level of its own.
        logger.setLevel(min(logger.level, logging.DEBUG))
        for old in open_files:
            logger.removeHandler(old)
    for old in open_files:
        old.close()  # the next record opens it again
    path.parent.mkdir(parents=True, exist_ok=True)
    if _process_index() == 0:
        path.touch()


def set_file_handler(logger: logging.Logger, cfg: Mapping[str, Any]) -> None:
    """Write the log file of a run from now on with another handler, for example in parts.

    Args:
      logger: a logger of `build_logger`.
      cfg: `type` is one of the file handlers in Python's `logging` ('FileHandler',
        'RotatingFileHandler', 'TimedRotatingFileHandler', 'WatchedFileHandler'), the rest are its
        arguments: `dict(type='RotatingFileHandler', maxBytes=10**7, backupCount=5)`.

    Raises:
      ConfigError: an unknown type. TypeError: arguments that it does not accept.
    """
    for file in _file_handlers(logger):
        open_log_file(logger, file.baseFilename, cfg)


def _file_handlers(logger: logging.Logger) -> list[logging.FileHandler]:
    """Return the handler of the log file of a run, if there is one."""
    files = (handler for handler in logger.handlers if isinstance(handler, logging.FileHandler))
    return [file for file in files if isinstance(file.formatter, _Formatter)]


def log_error(error: BaseException) -> str | None:
    """Write a traceback to the log file of the newest logger, once.

    Return the file path, None without a file.
    """
    logger = current_logger()
    files = [file.baseFilename for file in _file_handlers(logger)]
    # The error is marked with the file: it passes the Runner and then the command line, and both
    # log it.
    if files and getattr(error, _LOGGED, None) != files[0]:
        setattr(error, _LOGGED, files[0])
        logger.debug("%s ended the run.", type(error).__name__, exc_info=error)
    return files[0] if files else None


def terminal_handlers(logger: logging.Logger) -> list[logging.Handler]:
    """Return the handlers that write to the terminal, to add a filter to them."""
    return [handler for handler in logger.handlers if isinstance(handler, _TerminalHandler)]


def current_logger() -> logging.Logger:
    """Return the logger built last; `logging.getLogger('jengine')` if none was built."""
    return next(reversed(_loggers.values())) if _loggers else logging.getLogger("jengine")


def write_line(line: str, level: str = "INFO") -> None:
    """Write a line to the terminal verbatim, without wrapping or markup.

    A TTY gets the level in color, and tables of `format_table` with drawn rules.
    """
    file = terminal.file
    if not _is_tty(file):
        # Without rich, and in one piece: `print` writes the newline separately, after another
        # thread's line
        file.write(f"{line}\n")
        file.flush()
        return
    text = Text()
    end = 0
    for table in _TABLE.finditer(line):
        rule, heading, rows = table.groups()
        text.append(line[end : table.start()])
        text.append(_draw_cells(heading), "bold")
        text.append(f"\n{rule[2:-2].translate(_RULES)}\n", "dim")
        text.append(_draw_cells(rows))
        end = table.end()
    text.append(line[end:])
    start = line.find(f" {level} ")
    if start >= 0 and level in _LEVEL_STYLES:
        text.stylize(_LEVEL_STYLES[level], start + 1, start + 1 + len(level))
    # Otherwise rich breaks lines at the width of the terminal, and a copied path has a newline in
    # it.
    terminal.print(text, soft_wrap=True)


def _draw_cells(rows: str) -> str:
    return _BAR.sub("│", _SIDES.sub("", rows))


def _shorten(line: str, record: logging.LogRecord) -> str:
    """Return a line without its date and logger, and without its level if that is INFO; scalars
    that are wider than the terminal are continued below the first one.
    """
    level = "" if record.levelno == logging.INFO else f"{record.levelname} "
    line = line[6:].replace(f" - {record.name} - {record.levelname} - ", f" {level}", 1)
    if len(line) <= terminal.width or "\n" in line:
        return line
    first, *fields = _SAME_RATE.sub("", line).split("  ")
    rows = [first]
    for field in fields:
        if len(rows[-1]) + 2 + len(field) > terminal.width:
            rows.append(f"{'':9}{field}")
        else:
            rows[-1] += f"  {field}"
    return "\n".join(rows)


@functools.lru_cache(maxsize=1)  # the check costs as much as writing a line
def _is_tty(file: IO[str]) -> bool:
    return terminal.is_terminal


def escape_control(text: str) -> str:
    """Escape control characters except tabs and newlines: they could clear the terminal or hide a
    line.

    Examples:
      >>> print(escape_control("x\\x1b[2J größe"))
      x\\x1b[2J größe
    """
    if text.isprintable():  # nearly always, and much faster
        return text
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@functools.lru_cache(maxsize=1000)
def escape_name(name: str) -> str:
    """Escape control characters and newlines in a name, so that it cannot add lines to a log."""
    return name if name.isprintable() else escape_control(name).replace("\n", "\\n")


class _Formatter(logging.Formatter):
    """Formatter that escapes control characters, and says for errors where they were logged."""

    def __init__(self, datefmt: str) -> None:
        super().__init__("%(asctime)s - %(name)s - %(levelname)s - %(place)s%(message)s", datefmt)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of the record."""
        is_error = record.levelno >= logging.ERROR
        place = f"{record.pathname} - {record.funcName} - {record.lineno} - " if is_error else ""
        record.__dict__["place"] = place
        return escape_control(super().format(record))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the time of the record."""
        return _format_second(int(record.created), datefmt or "")


@functools.lru_cache(maxsize=2)  # one for each handler
def _format_second(second: int, datefmt: str) -> str:
    return time.strftime(datefmt, time.localtime(second))


class _TerminalFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the text of the record, or its shorter `on_terminal`."""
        text = record.__dict__.get("on_terminal")
        if not text:
            return super().format(record)
        start = self.formatTime(record, self.datefmt)
        return escape_control(f"{start} - {record.name} - {record.levelname} - {text}")


class _TerminalHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.__dict__.get("on_terminal") == "" and self.level > logging.DEBUG:
            return
        try:
            line = self.format(record)
            write_line(_shorten(line, record) if _is_tty(terminal.file) else line, record.levelname)
        except Exception:
            # as in all logging handlers: a record that cannot be written does not end the run
            self.handleError(record)


class _RecordFilter(logging.Filter):
    """Filter against warnings whose text was logged before, and against all but errors of
    processes after the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a handler should write the record."""
        if record.levelno < logging.ERROR and _process_index() != 0:
            return False
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        if text in self._seen:
            return False
        if len(self._seen) >= _MAX_SEEN_WARNINGS:  # texts with a counter are all different
            self._seen.clear()
        self._seen.add(text)
        return True


def _process_index() -> int:
    # jax.process_index initializes the backends, which must not happen before
    # jax.distributed.initialize
    return jax.process_index() if jax.distributed.is_initialized() else 0


def in_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter, Colab or an editor, whose front end draws
    HTML.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
