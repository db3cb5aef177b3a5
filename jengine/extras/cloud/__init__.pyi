# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.cloud.local_checkpoint import LocalCheckpointHook as LocalCheckpointHook
