"""Command line of the engine."""

from jengine.cli.main import main as main
