"""Run `jengine report`: write or serve one HTML page about one or several runs."""

from jengine.cli.report.command import add_parser as add_parser
