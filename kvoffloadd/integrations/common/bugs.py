"""Logs bugs of this project that must not reach an engine's threads: they cost hits."""

from __future__ import annotations

import logging

_logged: set[tuple[str, type[Exception]]] = set()


def log_bug(logger: logging.Logger, where: str, error: Exception, *, repeated: bool = False) -> None:
    """Logs a bug with its stack. `where`: a method, or a thread's name. `repeated`: also if one of its kind was logged
    from there.
    """
    if repeated or (where, type(error)) not in _logged:
        _logged.add((where, type(error)))
        logger.error("kvoffloadd: a bug in %s, please report it", where, exc_info=error)
