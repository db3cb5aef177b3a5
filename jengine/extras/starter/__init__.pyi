# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.config.plugins import lazy_names as lazy_names
