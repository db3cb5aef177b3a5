"""The command line."""

from jengine.cli.main import main as main
