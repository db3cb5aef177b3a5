"""Whether a part runs with tiny sizes."""

import sys


def is_tiny() -> bool:
    """Return whether the part was started with `--tiny`."""
    return "--tiny" in sys.argv
