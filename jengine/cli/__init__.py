"""Run the engine from the command line."""

from jengine.cli.main import main as main
