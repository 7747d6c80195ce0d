"""Runs a command, from its words to its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvoffloadd import errors
from kvoffloadd.cli.arguments import make_parser
from kvoffloadd.cli.exits import (
    EXIT_BAD_NEWS,
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    complain,
)
from kvoffloadd.linux.standarderror import open_standard_streams


def run(argv: Sequence[str] | None) -> int:
    """Returns the exit code. `argv`: None for the process's own words. Raises SystemExit for words that the parser
    refuses, or answers itself.
    """
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
    return code
