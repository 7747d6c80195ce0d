"""Raise between two instructions of the client's code, as a signal's handler may, but at a chosen one."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import kvoffloadd.client
import kvoffloadd.protocol

PACKAGES = (*(str(Path(module.__path__[0])) for module in (kvoffloadd.client, kvoffloadd.protocol)), socket.__file__)
LINE = tuple(str(Path(PACKAGES[0], name)) for name in ("callline.py", "polling.py", "blocking.py"))
"""Where calls wait for each other, and begin and end."""


class Interrupted(BaseException):
    """Resembles KeyboardInterrupt, which is no error."""


def interrupt(work: Callable[[], Any], at: int, where: tuple[str, ...] = PACKAGES) -> bool:
    """Do `work`, and raise before instruction number `at` of code in `where`; whether it got there."""
    left = at

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if event == "call":
            if not frame.f_code.co_filename.startswith(where):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            if left == 0:
                sys.settrace(None)
                raise Interrupted
            left -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def everywhere(
    work: Callable[[], Any], where: tuple[str, ...] = PACKAGES, *, first: int = 0, step: int = 1
) -> Iterator[int]:
    """Interrupt `work` at each `step`-th instruction in turn, and yield after each, until it gets to its end."""
    for at in itertools.count(first, step):
        if not interrupt(work, at, where):
            return
        yield at
