"""Command line of a sweep's run, `python -m jengine.extras.sweeps`, which ends with the sweep."""

import sys

from jengine.cli import main
from jengine.extras.sweeps.launchers import end_with_sweep

if __name__ == "__main__":
    end_with_sweep()
    sys.exit(main())
