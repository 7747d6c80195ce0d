"""The command line: `kvoffloadd serve`, commands for a running daemon, and `plan` before there is one.

Exit codes: 0 done; 1 the answer is bad news (findings, a drain that missed its deadline, namespaces that a clear could
not reach, or a model without a plan); 2 usage or config; 3 no daemon can be reached; 4 the daemon refused or did not
answer in time, or a disk root can't be checked; 130 interrupted. `serve` and a live `top` return 0 when they are
interrupted, because nothing else ends them. `serve` also returns 75, try again: the process that had the daemon's place
is ending; docs/BEHAVIOR.md describes its other ends.

Importing this package loads nothing but itself: `main` decides first what Ctrl-C does, and each command then loads what
it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (module docstring). Never raises for an operator's mistakes.

    `argv`: None for those of this process, which then is the command alone: Ctrl-C ends it without a traceback.
    """
    try:
        from kvoffloadd.cli.interrupts import end_silently

        if argv is None:
            end_silently()
        from kvoffloadd.cli.run import run

        try:
            return run(argv)
        finally:
            if argv is None:
                end_silently()  # the command may have changed it
    except KeyboardInterrupt:
        return INTERRUPTED
