"""Runs the command line: `python -m kvoffloadd`."""

from __future__ import annotations

import sys

from kvoffloadd.cli import main

if __name__ == "__main__":
    sys.exit(main())
