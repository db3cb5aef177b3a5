# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.sweeps.pruning import OptunaPruningHook as OptunaPruningHook
from jengine.extras.sweeps.run import sweep as sweep
