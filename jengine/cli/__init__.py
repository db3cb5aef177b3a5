"""The command `jengine`; extras add further commands."""

from jengine.cli.main import main as main
