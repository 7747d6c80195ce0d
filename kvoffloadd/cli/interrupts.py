"""Decides what SIGINT (Ctrl-C) and SIGTERM do to a command: end it at once, or interrupt it so that it cleans up.

Python's own handler raises KeyboardInterrupt wherever the process is: in the middle of an import, in a finalizer, at
the interpreter's end. There, nobody can handle it, and the user sees a traceback.
"""

from __future__ import annotations

import signal


def end_silently() -> None:
    """Lets SIGINT and SIGTERM end this process from now on, as they end a program without a handler: shells report
    status 130 and 143. A SIGINT that the shell has made ignored, as of a job in the background, stays ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def interrupt_command() -> None:
    """Lets SIGINT and SIGTERM raise KeyboardInterrupt from now on: the command has something to clean up."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
