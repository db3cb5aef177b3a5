"""MMEngine's call for the log."""

import logging

from jengine.logging.console import current_logger, write_line


def print_log(
    msg: object, logger: logging.Logger | str | None = None, level: int = logging.INFO
) -> None:
    """Print or log a message.

    Args:
      logger: None prints to the terminal, 'silent' does nothing, 'current' uses the logger built
        last; otherwise a logger, or the name of one that exists.
      level: the level of the record; not used without a logger.
    """
    if logger is None:
        write_line(str(msg))
    elif isinstance(logger, logging.Logger):
        logger.log(level, msg)
    elif logger == "current":
        current_logger().log(level, msg)
    elif logger != "silent":
        if logger not in logging.root.manager.loggerDict:
            raise ValueError(f"no logger called {logger!r} was built")
        logging.getLogger(logger).log(level, msg)
