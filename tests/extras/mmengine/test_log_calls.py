import logging
import re

import pytest

from jengine.logging import build_logger, print_log


def test_print_log_writes_to_each_target(capsys):
    logger = build_logger("engine")
    print_log("plain [x]")
    assert capsys.readouterr().out == "plain [x]\n"
    for target in (logger, "engine", "current"):
        print_log(
            "text", logger=target, level=logging.WARNING if target == "engine" else logging.INFO
        )
        assert re.search(r"engine - (INFO|WARNING) - text\n$", capsys.readouterr().out)
    print_log("nothing", logger="silent")
    assert capsys.readouterr().out == ""


def test_print_log_rejects_unknown_targets():
    build_logger("engine")
    with pytest.raises(ValueError, match="no logger called 'engin' was built"):
        print_log("x", logger="engin")
