"""The command line: `kvoffloadd serve`, commands for a running daemon, and `plan` before there is one.

Exit codes: 0 done; 1 the answer is bad news (findings, a drain that missed its deadline, namespaces that a clear could
not reach, or a model without a plan); 2 usage or config; 3 no daemon can be reached; 4 the daemon refused or did not
answer in time, or a disk root can't be checked. `serve` also returns 75, try again: the process that had the daemon's
place is ending; docs/BEHAVIOR.md describes its other ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvoffloadd import errors
from kvoffloadd.cli.arguments import make_parser
from kvoffloadd.cli.commands import (
    EXIT_BAD_NEWS,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    complain,
)
from kvoffloadd.linux.standarderror import open_standard_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (module docstring). Never raises for an operator's mistakes."""
    open_standard_streams()
    arguments = make_parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
    except errors.NoPlanError as error:
        return complain(f"no plan: {error}", EXIT_BAD_NEWS)
    except errors.ConfigError as error:
        return complain(str(error), EXIT_USAGE)
    except errors.TryAgainError as error:
        return complain(str(error), EXIT_TRY_AGAIN)
    except errors.DaemonUnreachableError as error:
        return complain(str(error), EXIT_UNREACHABLE)
    except errors.ConnectionLostError as error:
        return complain(f"the daemon went away before it answered: {error}", EXIT_UNREACHABLE)
    except errors.DeadlineError as error:
        return complain(f"the daemon did not answer in time: {error}", EXIT_REFUSED)
    except errors.KvOffloadError as error:
        return complain(f"refused: {error}", EXIT_REFUSED)
    except BrokenPipeError:
        # The reader of the output has closed it; a second error at interpreter exit helps no one.
        sys.stderr.close()
        return EXIT_BAD_NEWS
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code
