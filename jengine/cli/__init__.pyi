# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.cli.main import main as main
