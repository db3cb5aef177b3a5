"""Command line, as `python -m jengine`."""

import sys

from jengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
