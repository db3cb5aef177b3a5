import logging
import re

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
