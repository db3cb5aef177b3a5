"""Command line, as `python -m jengine`."""

import sys

from jengine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
