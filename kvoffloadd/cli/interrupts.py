"""Decides what SIGINT (Ctrl-C) and SIGTERM do to a command: end it at once, or interrupt it so that it cleans up.

Python's own handler raises KeyboardInterrupt wherever the process is: in the middle of an import, in a finalizer, at
the interpreter's end. There, nobody can handle it, and the user sees a traceback.
"""

from __future__ import annotations

import signal

_signals: list[int] = []
"""Those that have come since `interrupt_command`."""


def end_silently() -> None:
    """Lets SIGINT and SIGTERM end this process from now on, as they end a program without a handler: shells report
    status 130 and 143. A SIGINT that the shell has made ignored, as of a job in the background, stays ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def interrupt_command() -> None:
    """Lets SIGINT and SIGTERM raise KeyboardInterrupt from now on: the command has something to clean up. A command
    that runs until then also calls `raise_if_interrupted` in its loop.
    """
    _signals.clear()  # of another command in this process
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt if a signal has: Python drops an exception that a handler raises within a finalizer."""
    if _signals:
        raise KeyboardInterrupt


def _interrupt(number: int, _frame: object) -> None:
    _signals.append(number)
    raise KeyboardInterrupt
