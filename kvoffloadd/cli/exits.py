"""The exit codes of commands, and the errors that come with them. `kvoffloadd.cli` describes them."""

from __future__ import annotations

import sys

EXIT_OK, EXIT_BAD_NEWS, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_REFUSED = 0, 1, 2, 3, 4
EXIT_TRY_AGAIN = 75  # sysexits.h calls it EX_TEMPFAIL


def complain(message: str, code: int) -> int:
    """Reports an error; returns the exit code."""
    sys.stderr.write(f"kvoffloadd: {message}\n")
    return code
