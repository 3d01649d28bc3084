"""Run the console script as `python -m evorl`."""

import sys

from evorl.cli import main

if __name__ == "__main__":
    sys.exit(main())
