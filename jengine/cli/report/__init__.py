"""`jengine report`: one HTML page about one or several runs."""

from jengine.cli.report.command import run as run
