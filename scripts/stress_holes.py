"""`python -m scripts.holes`, by path and from any directory."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from scripts.holes.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
